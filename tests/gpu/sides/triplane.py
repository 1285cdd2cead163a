"""Triplane's step, as ``training/train.py`` runs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.gpu.sides.job import Job
from training.step import StepRequests, train_step
from training.train import build_parts, overlap_of_tp


@contextmanager
def steps(job: Job) -> Iterator[Callable[[], float]]:
    """One update; its loss, the mean over all ranks."""
    config, rates = job.config, job.config.optimizer
    with overlap_of_tp(config, job.shape, job.ranks):
        chunks, optim = build_parts(config, job.shape, job.ranks)

        def step() -> float:
            return train_step(
                chunks, optim, job.microbatches, job.ranks, seq_length=config.model.seq_length,
                micro_batch_size=config.train.micro_batch_size, learning_rate=rates.lr,
                weight_decay=rates.weight_decay, requests=StepRequests(),
            ).loss  # fmt: skip

        yield step
