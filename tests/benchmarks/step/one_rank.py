"""Triplane's training step against plain PyTorch's: same shape, same weights, same tokens.

Each side lives in a forked process of its own with one thread. They step in turn, so that what slows the
machine down slows both sides down.
"""

import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from data.loader import Batch, to_batch
from models.config import ModelConfig
from models.resolve import resolve
from parallel import groups
from parallel.config import PrecisionConfig
from parallel.launch import Identity
from tests.benchmarks.step import reference
from training import train
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

GOAL = 1.10
WARMUP_STEPS = 2

Step = Callable[[], float]
"""One training step; returns its loss."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Timing:
    """One training step of one side."""

    wall_s: float
    cpu_s: float
    """User and system time of the process."""
    loss: float


def configuration(
    num_layers: int = 8,
    hidden_size: int = 512,
    heads: int = 8,
    ffn_hidden_size: int = 1408,
    vocab_size: int = 8192,
    seq_length: int = 1024,
) -> RunConfig:
    """A Llama-like model with as many key-value heads as query heads, in fp32, one sample per update."""
    model = ModelConfig(
        shape="debug",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        seq_length=seq_length,
    )
    return RunConfig(
        device="cpu",
        model=model,
        precision=PrecisionConfig(dtype="fp32"),
        train=TrainConfig(global_batch_size=1, micro_batch_size=1),
        optimizer=OptimizerConfig(lr_decay_style="constant"),
    )


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    """Medians of ``steps`` steps of both sides, their ratios, and both sides' losses."""
    timings = alternate([ours, plain], config, steps)
    wall = [statistics.median(timing.wall_s for timing in side) for side in timings]
    cpu = [statistics.median(timing.cpu_s for timing in side) for side in timings]
    return {
        "steps": steps,
        "triplane_wall_s": wall[0], "plain_wall_s": wall[1], "ratio_wall": wall[0] / wall[1],
        "triplane_cpu_s": cpu[0], "plain_cpu_s": cpu[1], "ratio_cpu": cpu[0] / cpu[1],
        "goal": GOAL,
        "losses": [[timing.loss for timing in side] for side in timings],
    }  # fmt: skip


def alternate(sides: list[Callable[[RunConfig], Iterator[Step]]], config: RunConfig, steps: int) -> list[list[Timing]]:
    """Warm both sides up, then let them step in turn; returns each side's timings.

    Raises RuntimeError with the traceback of a side that failed.
    """
    channels = start(sides, config)
    timings: list[list[Timing]] = [[] for _ in sides]
    for number in range(WARMUP_STEPS + steps):
        # Who goes first alternates too: the second of a pair finds warmer or colder caches.
        for index in range(len(sides)) if number % 2 else reversed(range(len(sides))):
            channels[index].send("step")
            answer = channels[index].recv()
            if isinstance(answer, str):
                raise RuntimeError(answer)
            if number >= WARMUP_STEPS:
                timings[index].append(answer)
    for channel in channels:
        channel.close()
    return timings


def start(sides: list[Callable[[RunConfig], Iterator[Step]]], config: RunConfig) -> list[Connection]:
    """Fork a process for each side; each ends when its channel is closed, or with this process."""
    context = multiprocessing.get_context("fork")  # this process has imported and never computed
    channels: list[Connection] = []
    for side in sides:
        here, there = context.Pipe()
        channels.append(here)
        context.Process(target=serve, args=(side, config, there, list(channels)), daemon=True).start()
        there.close()
    return channels


def serve(
    side: Callable[[RunConfig], Iterator[Step]],
    config: RunConfig,
    channel: Connection,
    inherited: list[Connection],
) -> None:
    """A side's process: one timed step for each message, or the traceback of what failed."""
    for parents_end in inherited:  # else no channel would close when the parent ends
        parents_end.close()
    torch.set_num_threads(1)
    try:
        for step in side(config):
            while channel.recv():
                began, began_cpu = time.perf_counter(), cpu_seconds()
                loss = step()
                channel.send(Timing(wall_s=time.perf_counter() - began, cpu_s=cpu_seconds() - began_cpu, loss=loss))
    except EOFError:
        return
    except Exception:
        channel.send(traceback.format_exc())


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ours(config: RunConfig) -> Iterator[Step]:
    """Triplane's step, as ``training/train.py`` runs it, on one rank."""
    shape = resolve(config.model, None)
    layout, seed = config.layout(1), config.train.seed
    with groups.start(layout, Identity(), device="cpu", seed=seed) as ranks:
        parts = build_parts(config, shape, ranks)
        stream = RandomTokens(config, shape.vocab_size)
        progress = Progress()

        def step() -> float:
            nonlocal progress
            progress, result = train.one_step(parts, stream, progress, StepRequests())
            return result.loss

        yield step


def plain(config: RunConfig) -> Iterator[Step]:
    """The reference's step."""
    shape, rates = resolve(config.model, None), config.optimizer
    model = reference.PlainGPT(shape, config.model.seq_length, config.train.seed)
    optimizer = reference.build_optimizer(
        model, rates.lr, (rates.adam_beta1, rates.adam_beta2), rates.adam_eps, rates.weight_decay
    )
    stream = RandomTokens(config, shape.vocab_size)

    def step() -> float:
        batch = stream.next(config.model.seq_length)[0]
        assert batch is not None
        return reference.train_step(model, optimizer, batch.tokens, batch.labels, rates.clip_grad)

    yield step


class RandomTokens:
    """Stands for a ``BatchStream``: each data rank's microbatches of uniformly random ids below ``limit``.

    With ``limit`` below the vocabulary a model has something to learn: which ids occur.
    """

    def __init__(
        self,
        config: RunConfig,
        limit: int,
        *,
        dp: int = 1,
        dp_rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        train = config.train
        self.limit, self.device = limit, device or torch.device("cpu")
        self.samples = train.global_batch_size // dp
        self.micro_batch_size, self.global_batch_size = train.micro_batch_size, train.global_batch_size
        self.consumed_samples = 0
        self.generator = torch.Generator().manual_seed(1 + dp_rank)

    def next(self, seq_length: int) -> list[Batch | None]:
        """The microbatches of the next iteration. Batch tensors are [b, s]."""
        self.consumed_samples += self.global_batch_size
        size = (self.samples, seq_length + 1)
        windows = torch.randint(self.limit, size, dtype=torch.int32, generator=self.generator)
        return [to_batch(window, self.device) for window in windows.split(self.micro_batch_size)]
