"""What one rank finds out and all must act on alike."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist

from parallel.groups import Ranks
from program.errors import SharedMistake, UserError


def on_first_rank[T](action: Callable[[], T], ranks: Ranks) -> T:
    """Rank 0 does it; every rank gets what came of it, or raises the same SharedMistake or OSError.

    Ranks go on only when it is done, so this is a barrier too. What comes of it must be small; it travels
    pickled.
    """
    outcome: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            outcome[0] = action()
        except UserError as error:
            outcome[1] = SharedMistake(str(error))
        except OSError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, device=ranks.device)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_every_rank[T](action: Callable[[], T], ranks: Ranks) -> T:
    """Each rank does it; if one fails with an OSError, every rank raises that rank's.

    Ranks go on only when all are done. One number is reduced; more travels only after a failure.
    """
    result, own = None, None
    try:
        result = action()
    except OSError as error:
        own = error
    failed = torch.tensor([0 if own is None else ranks.rank + 1], device=ranks.device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if rank := int(failed):
        raise OSError(from_rank(f"rank {ranks.rank} of {ranks.identity.world_size}: {own}", rank - 1, ranks))
    return result  # type: ignore[return-value]


def on_every_rank_for_long[T](action: Callable[[], T], ranks: Ranks, beat: Callable[[], None]) -> T:
    """``on_every_rank`` for what takes minutes: in a thread, while the ranks tell each other every second that they
    live, so that none waits for another longer than a collective's timeout. beat: called then."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        while True:
            wait([future], timeout=1.0)
            busy = torch.tensor([int(not future.done())], device=ranks.device)
            dist.all_reduce(busy)
            beat()
            if not int(busy):
                return on_every_rank(future.result, ranks)


def from_rank[T](value: T, rank: int, ranks: Ranks) -> T:
    """One rank's value, on every rank. Collective; it travels pickled."""
    sent: list[Any] = [value if rank == ranks.rank else None]
    dist.broadcast_object_list(sent, src=rank, device=ranks.device)
    return sent[0]


def gathered[T](own: list[T], ranks: Ranks) -> list[T]:
    """The ranks' lists as one, the same on every rank. Where all are empty, as a rule, one number is reduced."""
    count = torch.tensor([len(own)], device=ranks.device)
    dist.all_reduce(count)
    if not int(count):
        return []
    lists: list[Any] = [None] * ranks.identity.world_size
    dist.all_gather_object(lists, own)
    return [item for found in lists for item in found]


def gathered_rows(own: Sequence[float], ranks: Ranks) -> list[list[float]]:
    """Every rank's numbers, fp64, in order of rank."""
    mine = torch.tensor(own, dtype=torch.float64, device=ranks.device)
    table = torch.empty(ranks.identity.world_size * len(own), dtype=torch.float64, device=ranks.device)
    dist.all_gather_into_tensor(table, mine)
    return table.view(-1, len(own)).tolist()
