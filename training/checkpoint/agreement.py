"""What one rank finds out and all must act on alike."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parallel.errors import SharedMistake, UserError
from parallel.groups import Ranks


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
