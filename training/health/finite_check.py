"""Whether a state may be saved: every weight and moment that the optimizer holds is a number."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from parallel.ddp import Chunks
from parallel.groups import Ranks
from parallel.launch import node_name
from program.errors import SharedFault
from training.checkpoint.agreement import from_rank
from training.checkpoint.optimizer_state import allocate, held_slices
from training.health.names import host_of, parameter_names
from training.progress import Progress


def check_finite(progress: Progress, chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> None:
    """Raises SharedFault on every rank where any holds a NaN or Inf, and names it.

    The policy lets no such gradient through; this is for what went wrong in memory since. Costs a pass over the
    optimizer's state, which is about to be copied as a whole, and one reduction of a number.
    """
    allocate(optimizer)
    sums = [tensor.sum(dtype=torch.float32).to(ranks.device) for _, _, tensor in _states(optimizer)]
    bad = ~torch.stack(sums).isfinite().all() if sums else torch.zeros((), dtype=torch.bool, device=ranks.device)
    worst = (bad * (ranks.rank + 1)).to(torch.int64).reshape(1)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if not (rank := int(worst)):
        return
    said = from_rank(_describe(chunks, optimizer, ranks) if rank - 1 == ranks.rank else "", rank - 1, ranks)
    raise SharedFault(
        f"after iteration {progress.iteration}: {said}. This state is not saved; started again, the run continues "
        "from its newest checkpoint.",
        rank=rank - 1,
        host=host_of(rank - 1, ranks),
    )


def _states(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    for param, held in held_slices(optimizer):
        for name, tensor in held.tensors.items():
            yield param, name, tensor


def _describe(chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> str:
    names = parameter_names(chunks)
    for param, state, tensor in _states(optimizer):
        if not bool(tensor.sum(dtype=torch.float32).isfinite()):
            what = "the weight" if state == "param" else f"the optimizer's {state} of the weight"
            return f"{what} {names[param]} on rank {ranks.rank} ({node_name(os.environ)}) is not finite"
    raise AssertionError("what was not finite is now")
