"""What is measured of a run's steps, weights and activations, and what writes it."""

import dataclasses
from collections.abc import Sequence

import torch

from models.costs.flops import flops_per_token, peak_flops
from models.costs.recompute_plan import recomputed_flops
from parallel.ddp import Chunks
from training.batches import BatchStream
from training.config.executed_flops import executed_flops_per_token
from training.health.fp8_shadow import ShadowWindow
from training.memory.measured import own_case
from training.metrics.meters import Meter, StageMeter, model_meters
from training.metrics.parameter_stats import BlockOutputs, Due, ParameterStats
from training.metrics.rates import Rates
from training.metrics.recorder import Recorder, is_logged
from training.metrics.sinks import RunFacts, open_sinks
from training.parts.run import TrainingRun
from training.profile.callback import ProfileCallback
from training.profile.ranges import StepRanges
from training.profile.timeline import TimelineCallback
from training.progress import Progress
from training.step import RankParts


def build_shadow(run: TrainingRun, parts: RankParts, stream: BatchStream) -> list[ShadowWindow]:
    """The comparison of fp8 or fp4 with bf16; none where it is not asked for, or on a CPU, where both are off."""
    config = run.config
    if config.precision.shadow is None or run.ranks.device.type == "cpu":
        return []
    window = ShadowWindow(
        config.precision,
        parts.chunks,
        parts.optimizer,
        run.ranks,
        lambda: stream.newest,
        seq_length=config.model.seq_length,
        micro_batch_size=config.train.micro_batch_size,
    )
    return [window]


def build_profile(run: TrainingRun, chunks: Chunks) -> tuple[list[TimelineCallback], list[ProfileCallback]]:
    """What measures steps, and what traces them; neither where it is not asked for."""
    profile, steps = run.config.profile, StepRanges(chunks)
    timelines, traces = list[TimelineCallback](), list[ProfileCallback]()
    if profile.timeline_interval is not None:
        timelines.append(TimelineCallback(profile.timeline_interval, run.run_dir, steps, run.ranks))
    if profile.traces:
        traces.append(ProfileCallback(profile, run.run_dir, steps, run.ranks, run.heartbeat.beat))
    return timelines, traces


def build_stats(run: TrainingRun, parts: RankParts) -> list[ParameterStats | BlockOutputs]:
    """What ``log`` asks to be measured of weights, gradients and activations; none where it asks for nothing."""
    log, train_iters = run.config.log, run.config.train.train_iters
    totals, every = log.log_params_norm or log.log_num_zeros_in_grad, log.layer_stats_interval

    def blocks_due(iteration: int) -> bool:
        return every is not None and iteration % every == 0

    def wanted(iteration: int) -> Due:
        total = totals and is_logged(iteration, log.log_interval, train_iters)
        return Due(total=total, blocks=blocks_due(iteration))

    found: list[ParameterStats | BlockOutputs] = []
    if totals or every is not None:
        found.append(
            ParameterStats(
                run.shape, parts.chunks, parts.optimizer, run.ranks, wanted,
                params_norm=log.log_params_norm, num_zeros=log.log_num_zeros_in_grad,
            )
        )  # fmt: skip
    if every is not None:
        found.append(BlockOutputs(run.shape, parts.chunks, run.ranks, blocks_due))
    return found


def build_recorder(
    run: TrainingRun, chunks: Chunks, stream: BatchStream, progress: Progress, meters: Sequence[Meter]
) -> Recorder:
    """Metrics: rates on every rank, sinks on rank 0. FLOP rates only where the device's peak is known.

    meters: beside those of the model.
    """
    config, shape, ranks = run.config, run.shape, run.ranks
    seq_length, cuda = config.model.seq_length, ranks.device.type == "cuda"
    dtype = config.precision.products or config.precision.dtype
    again = recomputed_flops(own_case(config, shape, ranks), shape)
    rates = Rates(
        world_size=ranks.layout.world_size,
        flops_per_token=flops_per_token(shape, seq_length),
        hardware_flops_per_token=executed_flops_per_token(config, shape) + again,
        peak_flops_per_gpu=peak_flops(torch.cuda.get_device_name(ranks.device), dtype) if cuda else None,
    )
    stage = [StageMeter(len(config.begin.begun))] if config.begin is not None else []
    sinks = None
    if ranks.rank == 0:
        facts = RunFacts(
            train_iters=config.train.train_iters,
            resumed_iteration=progress.iteration,
            world_size=ranks.layout.world_size,
            config=dataclasses.asdict(run.recipe or config),
        )
        sinks = open_sinks(run.run_dir, config.log, facts, ranks.say, run.heartbeat.beat)
    return Recorder(
        ranks,
        config.log.log_interval,
        config.train.train_iters,
        config.tokens_of,
        rates,
        sinks,
        stream,
        [*meters, *model_meters(shape, chunks, ranks), *stage],
    )
