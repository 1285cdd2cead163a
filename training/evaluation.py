"""Validation loss every ``eval_interval`` iterations, on the same held-out batches each time."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from data.loader import Batch, Packing, Samples
from models.layers.cuda_graphs import kernel_by_kernel
from parallel.ddp import Chunks
from parallel.groups import Ranks
from training.batches import BatchStream
from training.checkpoint import fp8_state, settled
from training.config.batch_schedule import BatchSchedule
from training.config.run_config import TrainConfig
from training.forward_backward import run_schedule
from training.loop import Callback
from training.progress import Progress
from training.step import StepResult, counted
from training.watchdog.heartbeat import Heartbeat


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


class Evaluation(Callback):
    """Measures after every ``eval_interval``-th iteration and after the last one, and tells ``record``.

    It starts at the split's first sample every time, so that two figures differ by the weights alone. One that is
    broken off by a request to stop has no figure; training then ends with the iteration after it.
    """

    def __init__(
        self,
        train: TrainConfig,
        chunks: Chunks,
        ranks: Ranks,
        seq_length: int,
        open_source: Callable[[], Samples],
        record: Callable[[int, float], None],
        packing: Packing | None = None,
        heartbeat: Heartbeat | None = None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.heartbeat, self.asked = heartbeat or Heartbeat(), asked
        self.train, self.chunks, self.ranks, self.seq_length = train, chunks, ranks, seq_length
        self.open_source, self.record, self.packing = open_source, record, packing

    def after_step(self, progress: Progress, result: StepResult) -> None:
        interval = self.train.eval_interval
        is_last = progress.iteration >= self.train.train_iters or result.requests.finish
        if interval is None or (progress.iteration % interval and not is_last):
            return
        schedule = BatchSchedule(global_batch_size=self.train.global_batch_size)
        batches = BatchStream(
            self.open_source,
            self.ranks,
            schedule,
            self.train.micro_batch_size,
            consumed_samples=0,
            packing=self.packing,
        )
        measure = self.heartbeat.within("evaluation", self._measure)
        loss = measure(progress, batches)
        batches.close()
        if loss is None:
            self.ranks.say(f"asked to stop: the evaluation after iteration {progress.iteration} is broken off")
        else:
            self.record(progress.iteration, loss)

    def _measure(self, progress: Progress, batches: BatchStream) -> float | None:
        """Nats per token, the same on every rank; None where it was broken off."""
        asked = Asked(self.asked, self.ranks)

        def next_batch() -> Sequence[Batch | None]:
            self.heartbeat.beat()
            if asked():
                raise BrokenOff
            return batches.next(self.seq_length)

        try:
            with settled(self.chunks):
                return evaluate(
                    self.chunks, next_batch, self.train.eval_iters, self.ranks,
                    seq_length=self.seq_length, micro_batch_size=self.train.micro_batch_size,
                )  # fmt: skip
        except BrokenOff:
            for chunk in self.chunks:
                chunk.train()
            return None
        finally:
            asked.last()


@torch.no_grad()
def evaluate(
    chunks: Chunks,
    batches: Callable[[], Sequence[Batch | None]],
    eval_iters: int,
    ranks: Ranks,
    *,
    seq_length: int,
    micro_batch_size: int,
) -> float:
    """Mean loss in nats per token over ``eval_iters`` global batches, dropout off."""
    for chunk in chunks:
        chunk.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    with kernel_by_kernel(chunks), fp8_state.kept(chunks):
        for _ in range(eval_iters):
            sums += run_schedule(chunks, batches(), ranks, seq_length, micro_batch_size, forward_only=True)
    for chunk in chunks:
        chunk.train()
    counts = counted(sums, ranks)
    dist.all_reduce(counts)
    loss, tokens = counts.tolist()
    return loss / max(tokens, 1.0)
