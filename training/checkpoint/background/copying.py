"""Tensors into shared memory by a thread, while forward and backward passes run."""

import contextlib
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy(threading.Thread):
    """Copies (target, source) pairs of uint8 tensors. Sources must stay as they are until ``finish``.

    On a GPU the copies go through a stream of their own, behind what this thread's creator has asked for so far.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(name="checkpoint-copy", daemon=True)
        self.pairs = pairs
        self.error: Exception | None = None
        self.device = next((source.device for _, source in pairs if source.is_cuda), None)
        self.stream = None
        if self.device is not None:
            self.stream = torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def run(self) -> None:
        """The thread. torch lets go of Python's lock while it copies."""
        try:
            if self.stream is None:
                self._copy()
            else:
                with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                    self._copy()
                self.stream.synchronize()
        except Exception as error:
            self.error = error

    @torch.no_grad()
    def _copy(self) -> None:
        for target, source in self.pairs:
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait for the end. Raises what went wrong."""
        self.join()
        if self.error is not None:
            raise self.error


def flat_bytes(data: Tensor) -> Tensor:
    """uint8 [bytes]: the memory of a contiguous tensor."""
    return data.detach().contiguous().reshape(-1).view(torch.uint8)


def pin(memory: Tensor) -> bool:
    """Let a GPU copy into this memory directly; whether it may (cudaHostRegister). Copies are slower without.

    A refusal also stays CUDA's last error, which the next kernel's launch would raise: one is launched to take it.
    """
    runtime = torch.cuda.cudart()
    if runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == runtime.cudaError.success:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: Tensor) -> None:
    """Before memory that was pinned is given back."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
