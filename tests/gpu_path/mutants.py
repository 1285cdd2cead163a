"""A hook: faults that the harness must find, EMULATED_CUDA_MUTANT names one: a wait taken away, or waste."""

import os
import threading
from typing import Any

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
    from training.checkpoint.background import saver

    class Unawaited(saver.HostCopy):
        def run(self) -> None:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                self._copy()

    saver.HostCopy = Unawaited  # type: ignore[misc]


def waste() -> None:
    """What a step and a run need not do; the results stay right."""
    from training import train

    step = train.one_step
    kept: list[torch.Tensor] = []
    registered = torch.empty(4096, dtype=torch.uint8)

    def wasteful(*args: Any, **kwargs: Any) -> Any:
        extra = torch.ones(1, device="cuda")
        torch.distributed.all_reduce(extra)
        extra.item()
        kept.append(torch.empty(32 << 20, device="cuda"))
        if len(kept) == 1:
            torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), registered.nbytes, 0)
            thread = threading.Thread(target=lambda: kept.append(torch.empty(1, device="cuda")))
            thread.start()
            thread.join()
        return step(*args, **kwargs)

    train.one_step = wasteful


def small_activations_offloaded() -> None:
    """No fault: those of tiny models wait on the host, too."""
    from models.layers import offload

    offload.LEAST_BYTES = 1


def offload_not_awaited_on_the_way_back() -> None:
    """Activations are used before they have come back from the host."""
    from models.layers import offload

    small_activations_offloaded()
    offload._unpack = _without("wait_event", offload._unpack)


def offload_not_awaited_on_the_way_out() -> None:
    """Activations are copied to the host before they are computed."""
    from models.layers import offload

    small_activations_offloaded()
    offload._Layer._copied = _without("wait_stream", offload._Layer._copied)  # type: ignore[method-assign]


def offloaded_copies_not_ordered() -> None:
    """megatron-core's fine-grained offloading as it is: a tensor comes back before it has left."""
    from models.layers.fine_grained_offload import OrderedCopies

    del OrderedCopies.tensor_pop


def offloaded_chunk_ends_early() -> None:
    """As it is: a microbatch whose first groups stay on the GPU is taken for finished."""
    from models.layers.fine_grained_offload import OrderedCopies

    del OrderedCopies.finish_all_groups


def offloaded_memory_freed() -> None:
    """As it is: the memory of values is freed, and what else lies in it."""
    from models.layers.fine_grained_offload import OrderedCopies

    del OrderedCopies.bulk_offload


def _without(wait: str, call: Any) -> Any:
    """``call`` with one of a stream's methods doing nothing."""

    def unawaited(*args: Any) -> Any:
        real = getattr(torch.cuda.Stream, wait)
        setattr(torch.cuda.Stream, wait, lambda *_: None)
        try:
            return call(*args)
        finally:
            setattr(torch.cuda.Stream, wait, real)

    return unawaited


def graph_input_not_copied() -> None:
    """A layer's graph computes on what its input held when it was captured."""
    from megatron.core.transformer.cuda_graphs import _CudagraphReplayNode as Node

    forward = Node.forward

    def uncopied(ctx: Any, runner: Any, first: bool, _hidden_states: Any, *inputs: Any) -> Any:
        return forward(ctx, runner, first, runner.fwd_graph_input_surface[0], *inputs)

    Node.forward = staticmethod(uncopied)


def graph_not_launched() -> None:
    """One of seven."""
    replay, calls = torch.cuda.CUDAGraph.replay, [0]

    def replay_mostly(self: torch.cuda.CUDAGraph) -> None:
        calls[0] += 1
        if calls[0] % 7:
            replay(self)

    torch.cuda.CUDAGraph.replay = replay_mostly  # type: ignore[method-assign]


def capture_draws() -> None:
    """Random numbers go on where the passes that warm a capture up have left them."""
    from models.layers import cuda_graphs

    cuda_graphs._without_drawing = lambda capture: capture


FAULTS = (overlap_not_awaited, collectives_not_awaited, checkpoint_copy_not_awaited, waste)
GRAPH_FAULTS = (graph_input_not_copied, graph_not_launched, capture_draws)
OFFLOADED = (
    small_activations_offloaded, offload_not_awaited_on_the_way_back, offload_not_awaited_on_the_way_out,
    offloaded_copies_not_ordered, offloaded_chunk_ends_early, offloaded_memory_freed,
)  # fmt: skip
MUTANTS = {mutant.__name__: mutant for mutant in (*FAULTS, *GRAPH_FAULTS, *OFFLOADED)}
MUTANTS[os.environ["EMULATED_CUDA_MUTANT"]]()
