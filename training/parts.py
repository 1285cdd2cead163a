"""The parts of one rank's run, but for model and optimizer: data, evaluation, checkpoints, metrics."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.loader import Packing, Samples, build_source
from data.prepared import Prepared
from data.split import SplitName
from models.costs.flops import flops_per_token, peak_flops
from models.shapes import GPTShape
from parallel.ddp import Chunks
from parallel.groups import Ranks
from training import optimizer
from training.batches import BatchStream
from training.checkpoint import optimizer_state, stream_position
from training.checkpoint.account import UpdateCount
from training.checkpoint.callback import SaveCallback
from training.checkpoint.folders import checkpoints
from training.checkpoint.state import JSON, step_of
from training.config.executed_flops import executed_flops_per_token
from training.config.run_config import RunConfig, batch_schedule
from training.evaluation.batching import row_shape
from training.evaluation.harness_tokens import HarnessTokenizer
from training.evaluation.task_callback import TaskCallback
from training.evaluation.tasks import PreparedTasks
from training.evaluation.validation import Validation
from training.evaluation.validation_sets import validation_sets
from training.generation.samples import SampleCallback
from training.health.fp8_shadow import ShadowWindow
from training.health.health import Health
from training.memory.measured import modules_of
from training.memory.recompute_plan import recomputed_flops
from training.metrics.meters import Meter, model_meters
from training.metrics.parameter_stats import BlockOutputs, Due, ParameterStats
from training.metrics.rates import Rates
from training.metrics.recorder import Recorder, is_logged
from training.metrics.sinks import RunFacts, open_sinks
from training.profile.callback import ProfileCallback
from training.profile.ranges import StepRanges
from training.profile.timeline import TimelineCallback
from training.progress import Progress
from training.run_dir import run_files
from training.run_dir.data_changes import data_changes, data_entry
from training.run_dir.history import Note
from training.run_lock.lock import RunLock
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.stop_signal import StopSignal


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingRun:
    """What the parts of one rank's run are built from."""

    config: RunConfig
    prepared: Prepared
    shape: GPTShape
    ranks: Ranks
    run_dir: Path
    stop: StopSignal
    heartbeat: Heartbeat
    lock: RunLock | None
    """On rank 0, the right to write into ``run_dir``; None where no other run can."""
    note: Note
    """Keeps an event in ``run_dir``'s history, on rank 0."""
    tasks: PreparedTasks | None = None
    """Those of ``eval.tasks``, on rank 0."""


def open_source(prepared: Prepared, config: RunConfig, split: SplitName) -> Samples:
    """Samples of a split, in the order that train.seed gives."""
    return build_source(prepared, config.data, config.model.seq_length, config.train.seed, split)


def build_stream(run: TrainingRun, begun: run_files.Begun) -> BatchStream:
    """This rank's batches of the train split, from where this start begins."""
    config, prepared, ranks, progress = run.config, run.prepared, run.ranks, begun.progress
    micro_batch_size, cursors = config.train.micro_batch_size, dict[int, str]()
    if prepared.streams is not None:
        same = not data_changes(begun.entries.get("data"), data_entry(config, prepared))
        cursors = stream_position.found(begun.entries, same, prepared.streams.count, progress, ranks)
        stream_position.say_repeated_reading(prepared.streams.count, micro_batch_size, ranks)
    return BatchStream(
        lambda: stream_position.resumed(open_source(prepared, config, "train"), cursors),
        ranks,
        batch_schedule(config.train),
        micro_batch_size,
        progress.consumed_samples,
        Packing.from_config(config.data, prepared.tokenizer.eod),
    )


def build_shadow(
    run: TrainingRun, chunks: Chunks, optim: optimizer.MegatronOptimizer, stream: BatchStream
) -> list[ShadowWindow]:
    """The comparison of fp8 or fp4 with bf16; none where it is not asked for, or on a CPU, where both are off."""
    config = run.config
    if config.precision.fp8_shadow_interval is None or run.ranks.device.type == "cpu":
        return []
    window = ShadowWindow(
        config.precision,
        chunks,
        optim,
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


def build_validation(run: TrainingRun, chunks: Chunks, recorder: Recorder) -> Validation:
    """Validation losses, logged by ``recorder``; ended early by a stop signal."""
    config, prepared = run.config, run.prepared
    return Validation(
        config.train,
        chunks,
        run.ranks,
        validation_sets(prepared, config),
        recorder.evaluation,
        Packing.from_config(config.data, prepared.tokenizer.eod),
        run.heartbeat,
        lambda: run.stop.number is not None,
    )


def build_samples(run: TrainingRun, chunks: Chunks) -> SampleCallback:
    """What the model makes of fixed prompts; ended early by a stop signal."""
    return SampleCallback(
        run.config.train,
        chunks,
        run.prepared.tokenizer,
        run.ranks,
        run.config.model.seq_length,
        run.run_dir,
        run.heartbeat,
        lambda: run.stop.number is not None,
    )


def build_tasks(run: TrainingRun, chunks: Chunks, recorder: Recorder) -> list[TaskCallback]:
    """The evaluation on ``eval.tasks``; none where there are none."""
    config, ranks = run.config, run.ranks
    if not config.eval.tasks:
        return []
    shape = row_shape(
        config.model.seq_length,
        config.train.micro_batch_size,
        ranks.layout,
        sequence_parallel=config.parallel.sequence_parallel,
        few_bits=config.precision.products is not None,
        fixed=config.kernels.tp_comm_overlap,
    )
    tasks = TaskCallback(
        config.eval, config.train.train_iters, run.tasks, HarnessTokenizer(run.prepared.tokenizer), chunks, ranks,
        shape, recorder.evaluation, run.run_dir, run.heartbeat, lambda: run.stop.number is not None,
    )  # fmt: skip
    return [tasks]


def build_updates(run: TrainingRun, optim: optimizer.MegatronOptimizer, begun: run_files.Begun) -> UpdateCount:
    """What counts updates beside the optimizer, from what that has restored. Collective."""
    done = step_of(optimizer_state.numbers(optim, run.ranks)) if optimizer_state.is_adam(optim) else None
    return UpdateCount(begun.progress, batch_schedule(run.config.train), done)


def build_saves(
    run: TrainingRun,
    chunks: Chunks,
    optim: optimizer.MegatronOptimizer,
    health: Health,
    stream: BatchStream,
    begun: run_files.Begun,
    updates: UpdateCount,
) -> SaveCallback:
    """What the loop calls for a checkpoint."""
    config, prepared, ranks = run.config, run.prepared, run.ranks

    def before_save(progress: Progress) -> Mapping[str, JSON]:
        own = {} if prepared.streams is None else stream_position.noted(stream, progress, ranks)
        return {**health.before_save(progress), **own, **updates.entry()}

    return SaveCallback(
        checkpoints(run.run_dir),
        dataclasses.replace(
            run_files.checkpoint_contents(config, prepared, begun.schedule, begun.entries),
            parent=begun.parent,
            loaded=begun.loaded,
        ),
        chunks,
        optim,
        ranks,
        background=config.checkpoint.async_save,
        timeout_s=60 * config.parallel.distributed_timeout_minutes,
        lock=run.lock,
        beat=run.heartbeat.beat,
        before_save=before_save,
        note=run.note,
    )


def build_stats(
    run: TrainingRun, chunks: Chunks, optim: optimizer.MegatronOptimizer
) -> list[ParameterStats | BlockOutputs]:
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
                run.shape, chunks, optim, run.ranks, wanted,
                params_norm=log.log_params_norm, num_zeros=log.log_num_zeros_in_grad,
            )
        )  # fmt: skip
    if every is not None:
        found.append(BlockOutputs(run.shape, chunks, run.ranks, blocks_due))
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
    again = recomputed_flops(config, ranks.layout.world_size, shape, modules_of(ranks))
    rates = Rates(
        world_size=ranks.layout.world_size,
        flops_per_token=flops_per_token(shape, seq_length),
        hardware_flops_per_token=executed_flops_per_token(config, shape) + again,
        peak_flops_per_gpu=peak_flops(torch.cuda.get_device_name(ranks.device), dtype) if cuda else None,
    )
    sinks = None
    if ranks.rank == 0:
        facts = RunFacts(
            train_iters=config.train.train_iters,
            resumed_iteration=progress.iteration,
            world_size=ranks.layout.world_size,
            config=dataclasses.asdict(config),
        )
        sinks = open_sinks(run.run_dir, config.log, facts, ranks.say, run.heartbeat.beat)
    return Recorder(
        ranks,
        config.log.log_interval,
        config.train.train_iters,
        seq_length,
        rates,
        sinks,
        lambda: stream.data_wait_s,
        [*meters, *model_meters(shape, chunks, ranks)],
        stream.sources,
    )
