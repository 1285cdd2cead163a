"""Validation loss every ``eval_interval`` iterations, on the same held-out batches each time."""

from collections.abc import Callable

from data.loader import Packing, Samples
from parallel.groups import Ranks
from training.batch_size import BatchSchedule
from training.batches import BatchStream
from training.checkpoint import settled
from training.checkpoint.progress import Progress
from training.config import TrainConfig
from training.loop import Attachment
from training.step import Chunks, StepResult, evaluate


class Evaluation(Attachment):
    """Measures after every ``eval_interval``-th iteration and after the last one, and tells ``record``.

    It starts at the split's first sample every time, so that two figures differ by the weights alone.
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
    ) -> None:
        self.train, self.chunks, self.ranks, self.seq_length = train, chunks, ranks, seq_length
        self.open_source, self.record, self.packing = open_source, record, packing

    def after_step(self, progress: Progress, result: StepResult) -> None:
        interval = self.train.eval_interval
        if interval is None or (progress.iteration % interval and progress.iteration < self.train.train_iters):
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
        with settled(self.chunks):
            loss = evaluate(
                self.chunks, lambda: batches.next(self.seq_length), self.train.eval_iters, self.ranks,
                seq_length=self.seq_length, micro_batch_size=self.train.micro_batch_size,
            )  # fmt: skip
        batches.close()
        self.record(progress.iteration, loss)
