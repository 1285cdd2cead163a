"""Triplane's step, as ``training/train.py`` runs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.gpu.sides.job import Job
from training.config.lr_schedule import ScheduledRates
from training.parts.model import build_parts, overlap_of_tp
from training.step import StepRequests, train_step


@contextmanager
def steps(job: Job) -> Iterator[Callable[[], float]]:
    """One update; its loss, the mean over all ranks."""
    config = job.config
    rates = ScheduledRates(config.optimizer.lr, config.optimizer.weight_decay)
    with overlap_of_tp(config, job.shape, job.ranks):
        parts = build_parts(config, job.shape, job.ranks)

        def step() -> float:
            return train_step(parts, job.microbatches, rates, StepRequests()).loss

        yield step
