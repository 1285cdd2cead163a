"""Whether an evaluation is to be broken off: the same answer on all ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel.groups import Ranks


class BrokenOff(Exception):
    """A stop was requested while evaluating; raised on all ranks before the same batch."""


class Asked:
    """Whether a rank was asked to stop, the same answer on all ranks, one call late.

    An evaluation reduces nothing until its end, so this is a reduction of its own, of one number: it runs while the
    next batch is computed, and by the next call is done but for the slowest rank's delay. A rank may be one batch ahead
    of the others, no more.
    """

    def __init__(self, asked: Callable[[], bool], ranks: Ranks) -> None:
        self._asked, self._ranks = asked, ranks
        self._work: dist.Work | None = None

    def __call__(self) -> bool:
        before = self.last()
        self._flag = torch.tensor([float(self._asked())], device=self._ranks.device)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return before

    def last(self) -> bool:
        """The answer of the call before; nothing is under way afterwards."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._flag)
