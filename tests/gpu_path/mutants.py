"""A hook: faults that the harness must find: an order that a GPU needs, taken away. EMULATED_CUDA_MUTANT names it."""

import os

import torch
import torch.distributed.distributed_c10d as c10d


def overlap_not_awaited() -> None:
    """DDP's bucketed reduce-scatters and all-gathers: gradients and weights are used before they are there."""
    c10d._CoalescingManager.wait = lambda self: None  # type: ignore[method-assign]


def collectives_not_awaited() -> None:
    """Any asynchronous collective or message."""
    torch._C._distributed_c10d.Work.wait = lambda self, *args: True  # type: ignore[method-assign]


def checkpoint_copy_not_awaited() -> None:
    """A checkpoint is written while its bytes are still on their way: the losses stay right."""
    from training.checkpoint.background import copying, saver

    class Unawaited(copying.HostCopy):
        def run(self) -> None:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                self._copy()

    saver.HostCopy = Unawaited  # type: ignore[misc]


MUTANTS = {
    mutant.__name__: mutant for mutant in (overlap_not_awaited, collectives_not_awaited, checkpoint_copy_not_awaited)
}
MUTANTS[os.environ["EMULATED_CUDA_MUTANT"]]()
