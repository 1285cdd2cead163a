"""Validation losses every ``train.eval_interval`` iterations, on the same held-out batches each time."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Packing
from parallel.ddp import Chunk, Chunks
from parallel.groups import Ranks
from training.config.train_config import TrainConfig
from training.evaluation.asked import Asked, BrokenOff
from training.evaluation.scoring import forward_only
from training.evaluation.set_batches import SetBatch, SetBatches
from training.evaluation.validation_sets import OpenSet, ValidationSet
from training.forward_backward import forward, read_outputs
from training.loop import Callback
from training.progress import Progress
from training.step import StepResult, counted
from training.watchdog.heartbeat import Heartbeat


class Validation(Callback):
    """Measures after every ``eval_interval``-th iteration and after the last one, and tells ``record``.

    It starts at each set's first sample every time, so that two figures differ by the weights alone. A set that is
    broken off by a request to stop has no figure; training then ends with the iteration after it.
    """

    def __init__(
        self,
        train: TrainConfig,
        chunks: Chunks,
        ranks: Ranks,
        sets: Sequence[ValidationSet],
        record: Callable[[int, Mapping[str, float]], None],
        packing: Packing | None = None,
        heartbeat: Heartbeat | None = None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.heartbeat, self.asked = heartbeat or Heartbeat(), asked
        self.train, self.chunks, self.ranks = train, chunks, ranks
        self.sets, self.record, self.packing = sets, record, packing

    def after_step(self, progress: Progress, result: StepResult) -> None:
        interval = self.train.eval_interval
        if interval is None or not self.train.evaluates:
            return
        is_last = progress.iteration >= self.train.train_iters or result.requests.finish
        if progress.iteration % interval and not is_last:
            return
        losses, whole = self.heartbeat.within("evaluation", self._measure)(progress)
        if losses:
            self.record(progress.iteration, losses)
        if not whole:
            self.ranks.say(f"asked to stop: the evaluation after iteration {progress.iteration} is broken off")

    def _measure(self, progress: Progress) -> tuple[dict[str, float], bool]:
        """Nats per token by metric, the same on every rank; and whether all sets were measured."""
        sums: dict[str, Tensor] = {}
        whole = True
        asked = Asked(self.asked, self.ranks)
        try:
            with forward_only(self.chunks):
                for one in self.sets:
                    measured = OpenSet.of(one)
                    sums |= zip(measured.metrics, self._sums(measured, asked), strict=True)
        except BrokenOff:
            whole = False
        finally:
            asked.last()
        return means(sums, self.ranks), whole

    def _sums(self, measured: OpenSet, asked: Asked) -> Tensor:
        """This rank's sum of losses and number of tokens for each metric of a set: fp64 [metrics, 2]."""
        batches = SetBatches(measured, self.train, self.ranks, self.packing)
        try:
            return add_up(self.chunks, self._heeded(batches, asked), self.ranks, measured, self.train.micro_batch_size)
        finally:
            batches.close()

    def _heeded(self, batches: SetBatches, asked: Asked) -> Iterator[list[SetBatch]]:
        """The batches, until this run is asked to stop. Raises BrokenOff, on all ranks before the same one."""
        waiting = iter(batches)
        for _ in batches.waiting:
            self.heartbeat.beat()
            if asked():
                raise BrokenOff
            yield next(waiting)


@torch.no_grad()
def add_up(
    chunks: Chunks, batches: Iterator[list[SetBatch]], ranks: Ranks, measured: OpenSet, micro_batch_size: int
) -> Tensor:
    """Losses and tokens of all batches as this rank has them, fp64 [metrics, 2]: zero but on the last stage."""
    sums = torch.zeros(len(measured.metrics), 2, dtype=torch.float64, device=ranks.device)
    for microbatches in batches:
        found = read_outputs(
            chunks, microbatches, ranks, measured.samples.seq_length, micro_batch_size, _losses, _per_sample
        )
        for one, batch in zip(found, microbatches, strict=False):  # nothing is found but on the last stage
            sums[0] += one.sum(0)
            if measured.by_source:
                sums.index_add_(0, batch.rows, one)
    return sums


def means(sums: Mapping[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """Nats per token over all ranks, by metric; without those that had no token. One reduction for all."""
    if not sums:
        return {}
    totals = counted(torch.stack(list(sums.values())), ranks)
    dist.all_reduce(totals)
    return {metric: loss / tokens for metric, (loss, tokens) in zip(sums, totals.tolist(), strict=True) if tokens}


def _losses(microbatch: SetBatch, chunk: Chunk) -> Tensor:
    return forward(microbatch.batch, chunk)


def _per_sample(microbatch: SetBatch, losses: Tensor) -> Tensor:
    """Loss and tokens of each sample: losses [b, s/cp] -> fp64 [b, 2]. Cross entropy, whatever train.loss is."""
    assert microbatch.batch is not None
    mask = microbatch.batch.loss_mask
    losses = losses[0] if losses.dim() == 3 else losses  # with train.loss log Z comes along
    return torch.stack([(losses.float() * mask).sum(1), mask.sum(1)], dim=1).double()
