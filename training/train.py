"""One rank's whole run, part by part: the table of contents of Triplane."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data.loader import Packing, Samples, build_source
from data.prepared import Prepared
from data.split import SplitName
from models import gpt
from models.flops import flops_per_token, hardware_flops_per_token, peak_flops
from models.layers import packed
from models.layers.spec import provider
from models.resolve import resolve
from models.shapes import GPTShape
from parallel import groups, metrics, replicas
from parallel.groups import Ranks
from parallel.launch import Identity
from parallel.local_ranks import STOPPED
from parallel.precision import params_dtype
from parallel.replicas import Chunks
from parallel.stages import layers_per_chunk
from training import loop, optimizer
from training.batches import BatchStream, Stream
from training.checkpoint import stream_position
from training.checkpoint.callback import SaveCallback
from training.checkpoint.folders import checkpoints
from training.checkpoint.save_clock import SaveClock
from training.checkpoint.save_interval import SaveInterval
from training.checkpoint.state import JSON
from training.config.run_config import RunConfig, batch_schedule, learning_schedule
from training.evaluation import Evaluation
from training.generate import continuation
from training.health.health import Health, watch
from training.memory.measured import MemoryReport
from training.memory.out_of_memory import explained
from training.metrics.log_disk import LogDisk
from training.metrics.meters import model_meters
from training.metrics.rates import Rates
from training.metrics.recorder import Recorder
from training.metrics.sinks import open_sinks
from training.progress import Progress
from training.run_dir import contents, fingerprint
from training.run_dir.data_changes import data_changes, data_entry
from training.run_dir.shared_check import check_shared
from training.run_lock.lock import RunLock
from training.step import StepRequests, StepResult, UpdateDecision, UpdatePolicy, skip_overflows, train_step
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.heartbeat_callback import HeartbeatCallback
from training.watchdog.stop_callback import StopCallback
from training.watchdog.stop_signal import StopSignal

PROMPT = "def read(self, path):\n"


def train(
    config: RunConfig,
    prepared: Prepared,
    identity: Identity,
    device: Literal["cpu", "cuda"],
    run_dir: Path,
    console_fd: int | None,
    lock: RunLock | None = None,
    request: StopSignal | None = None,
    heartbeat: Heartbeat | None = None,
) -> int:
    """Build the parts on this rank, train, and leave a sample of what the model learned: the exit code.

    lock: on rank 0, the right to write into ``run_dir``; None where no other run can. request: hears the
    signals that ask to stop; None: no signals are handled. heartbeat: tells the watchdog of progress; None without one.
    """
    request, heartbeat = request or StopSignal(), heartbeat or Heartbeat()
    layout = config.layout(identity.world_size)
    shape = resolve(config.model, prepared.tokenizer.vocab_size)
    start = groups.start(
        layout,
        identity,
        device=device,
        seed=config.train.seed,
        timeout_minutes=config.fault.after_watchdog(config.parallel.distributed_timeout_minutes),
        # before the watchdog ends a rank that does not start, without knowing why
        resolve_s=min(60 * config.parallel.distributed_timeout_minutes, 0.8 * config.fault.start_timeout_s),
        facts=fingerprint.facts(config, prepared.fingerprint),
        console_fd=console_fd,
    )
    with start as ranks, explained(config, shape, ranks), metrics.collecting(ranks.device) as collector:
        announce(config, shape, ranks)
        check_shared(run_dir, ranks)
        heartbeat.enter("load")
        chunks, optim = build_parts(config, shape, ranks)
        begun = contents.restore(config, prepared, run_dir, chunks, optim, ranks)
        progress, entries = begun.progress, begun.entries
        contents.write_run_files(config, run_dir, progress, ranks)
        stream = build_stream(config, prepared, ranks, progress, entries)
        health = watch(config.fault, chunks, optim, ranks, run_dir, entries)
        saves = build_saves(config, prepared, chunks, optim, ranks, run_dir, lock, heartbeat, health, stream, begun)
        step = partial(
            one_step, config, chunks, optim, stream, ranks, before_update=saves.before_update, policy=health.policy
        )
        recorder = build_recorder(config, shape, chunks, ranks, run_dir, progress, stream, heartbeat, collector)
        callbacks = [
            HeartbeatCallback(heartbeat),
            *health.callbacks,
            recorder,
            MemoryReport(config, shape, chunks, optim, ranks),
            LogDisk(run_dir / "logs", config.log.log_interval, ranks),
            build_evaluation(config, prepared, chunks, ranks, recorder, heartbeat, request),
            SaveClock(config.checkpoint.save_interval_minutes, ranks.rank),
            saves,
            SaveInterval(config.fault, identity.world_size, lambda: saves.stalled_s, ranks.say),
            StopCallback(request, ranks.say),
        ]
        progress, reason = loop.run(
            config.train, config.checkpoint, progress, step, heartbeat.within("save", saves), callbacks
        )
        stream.close()
        finish(config, prepared, shape, chunks, ranks, run_dir, progress, reason)
    return STOPPED if reason == "requested" else 0


def build_parts(config: RunConfig, shape: GPTShape, ranks: Ranks) -> tuple[Chunks, optimizer.MegatronOptimizer]:
    """This rank's model chunks, ready for data parallelism, and their optimizer."""
    recompute = gpt.Recompute(
        granularity=config.train.recompute_granularity,
        method=config.train.recompute_method,
        num_layers=config.train.recompute_num_layers,
        modules=config.train.recompute_modules,
    )
    backend = provider(ranks.device, documents=config.data.reset_attention_mask)
    model = gpt.build(
        config.model, shape, config.parallel, config.precision, recompute, ranks, config.train.seed, backend
    )
    chunks = replicas.wrap(model, config.parallel, config.precision, ranks)
    tokens = config.train.micro_batch_size * config.model.seq_length // ranks.layout.cp
    return chunks, optimizer.build(chunks, config.optimizer, config.parallel, config.precision, ranks, tokens)


def open_source(prepared: Prepared, config: RunConfig, split: SplitName) -> Samples:
    """Samples of a split, in the order that train.seed gives."""
    return build_source(prepared, config.data, config.model.seq_length, config.train.seed, split)


def build_stream(
    config: RunConfig, prepared: Prepared, ranks: Ranks, progress: Progress, entries: Mapping[str, JSON]
) -> BatchStream:
    """This rank's batches of the train split, from where ``progress`` is. entries: of the checkpoint it continues."""
    micro_batch_size, cursors = config.train.micro_batch_size, dict[int, str]()
    if prepared.streams is not None:
        same = not data_changes(entries.get("data"), data_entry(config, prepared))
        cursors = stream_position.found(entries, same, prepared.streams.count, progress, ranks)
        stream_position.say_repeated_reading(prepared.streams.count, micro_batch_size, ranks)
    return BatchStream(
        lambda: stream_position.resumed(open_source(prepared, config, "train"), cursors),
        ranks,
        batch_schedule(config.train),
        micro_batch_size,
        progress.consumed_samples,
        Packing.of(config.data, prepared.tokenizer.eod),
    )


def build_evaluation(
    config: RunConfig,
    prepared: Prepared,
    chunks: Chunks,
    ranks: Ranks,
    recorder: Recorder,
    heartbeat: Heartbeat,
    request: StopSignal,
) -> Evaluation:
    """The validation split's loss, logged by ``recorder``; ended early by a stop signal."""
    return Evaluation(
        config.train,
        chunks,
        ranks,
        config.model.seq_length,
        partial(open_source, prepared, config, "validation"),
        recorder.validation,
        Packing.of(config.data, prepared.tokenizer.eod),
        heartbeat,
        lambda: request.number is not None,
    )


def build_saves(
    config: RunConfig,
    prepared: Prepared,
    chunks: Chunks,
    optim: optimizer.MegatronOptimizer,
    ranks: Ranks,
    run_dir: Path,
    lock: RunLock | None,
    heartbeat: Heartbeat,
    health: Health,
    stream: BatchStream,
    begun: contents.Begun,
) -> SaveCallback:
    """What the loop calls for a checkpoint. begun: where this start begins."""

    def before_save(progress: Progress) -> Mapping[str, JSON]:
        own = {} if prepared.streams is None else stream_position.noted(stream, progress, ranks)
        return {**health.before_save(progress), **own}

    return SaveCallback(
        checkpoints(run_dir),
        dataclasses.replace(
            contents.contents(config, prepared, begun.entries), parent=begun.parent, loaded=begun.loaded
        ),
        chunks,
        optim,
        ranks,
        background=config.checkpoint.async_save,
        timeout_s=60 * config.parallel.distributed_timeout_minutes,
        lock=lock,
        beat=heartbeat.beat,
        before_save=before_save,
    )


def one_step(
    config: RunConfig,
    chunks: Chunks,
    optim: optimizer.MegatronOptimizer,
    stream: Stream,
    ranks: Ranks,
    progress: Progress,
    requests: StepRequests,
    before_update: Callable[[], None] = lambda: None,
    policy: UpdatePolicy | None = None,
) -> tuple[Progress, StepResult]:
    """The iteration after ``progress``: its batch, its learning rate, its update. policy: None: as mcore does."""
    schedule = learning_schedule(config.optimizer, config.train)
    microbatches = stream.next(config.model.seq_length)
    step = partial(
        train_step,
        chunks,
        optim,
        microbatches,
        ranks,
        seq_length=config.model.seq_length,
        micro_batch_size=config.train.micro_batch_size,
        learning_rate=schedule.learning_rate(progress.consumed_samples),
        weight_decay=schedule.weight_decay(progress.consumed_samples),
        requests=requests,
        before_update=before_update,
    )
    metrics.begin_step()
    result = step(policy.decide if policy else skip_overflows)
    if policy and result.decision is UpdateDecision.REPLAY:
        metrics.discard_step()
        result = policy.replay(step, result, microbatches)
    return Progress(iteration=progress.iteration + 1, consumed_samples=stream.consumed_samples), result


def build_recorder(
    config: RunConfig,
    shape: GPTShape,
    chunks: Chunks,
    ranks: Ranks,
    run_dir: Path,
    progress: Progress,
    stream: BatchStream,
    heartbeat: Heartbeat,
    collector: metrics.MetricCollector,
) -> Recorder:
    """Metrics: rates on every rank, sinks on rank 0. FLOP rates only where the device's peak is known."""
    seq_length, cuda = config.model.seq_length, ranks.device.type == "cuda"
    dtype = "fp8" if config.precision.fp8 else config.precision.dtype
    rates = Rates(
        world_size=ranks.layout.world_size,
        flops_per_token=flops_per_token(shape, seq_length),
        hardware_flops_per_token=hardware_flops_per_token(
            shape,
            seq_length,
            recompute_granularity=config.train.recompute_granularity,
            recompute_method=config.train.recompute_method,
            recompute_num_layers=config.train.recompute_num_layers,
            recompute_modules=config.train.recompute_modules,
            layers_per_chunk=layers_per_chunk(config.parallel, shape.num_layers),
        ),
        peak_flops_per_gpu=peak_flops(torch.cuda.get_device_name(ranks.device), dtype) if cuda else None,
    )
    sinks = None
    if ranks.rank == 0:
        values, iterations = dataclasses.asdict(config), config.train.train_iters
        sinks = open_sinks(run_dir, config.log, values, iterations, progress.iteration, ranks.say, heartbeat.beat)
    return Recorder(
        ranks,
        config.log.log_interval,
        config.train.train_iters,
        seq_length,
        rates,
        sinks,
        lambda: stream.data_wait_s,
        [collector, *model_meters(shape, chunks, ranks)],
        stream.epochs,
    )


def announce(config: RunConfig, shape: GPTShape, ranks: Ranks) -> None:
    """Say what runs."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    ranks.say(
        f"{ranks.identity.world_size} ranks ({ranks.identity.launcher}, {ranks.device.type}): "
        f"{ranks.layout}; {config.precision.dtype}"
    )
    ranks.say(
        f"model {config.model.shape}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"vocabulary {shape.vocab_size} (padded {shape.padded_vocab_size}); "
        f"batch {batch} samples x {config.model.seq_length} tokens "
        f"= {batch // (micro * ranks.layout.dp)} microbatches of {micro} on each of {ranks.layout.dp} replicas"
    )
    if config.data.reset_attention_mask:
        how = packed.how(shape, ranks.device, params_dtype(config.precision), ranks.layout)
        ranks.say(f"documents are kept apart by attention {how}")


def finish(
    config: RunConfig,
    prepared: Prepared,
    shape: GPTShape,
    chunks: Chunks,
    ranks: Ranks,
    run_dir: Path,
    progress: Progress,
    reason: loop.Reason,
) -> None:
    """The marker ``done`` or ``requeue``, a sample of what the model writes, and where everything lies."""
    contents.mark(run_dir, progress, reason, ranks)
    if reason == "requested":
        ranks.say(f"stopped on request at iteration {progress.iteration}, saved; the same command continues {run_dir}")
        return
    if config.train.generate_tokens and ranks.layout.cp == 1:
        text = continuation(
            chunks,
            prepared.tokenizer,
            PROMPT,
            config.train.generate_tokens,
            ranks,
            seq_length=config.model.seq_length,
            padded_vocab_size=shape.padded_vocab_size,
        )
        ranks.say(
            "\na sample continuation of "
            + repr(PROMPT)
            + ":\n"
            + "\n".join("    " + line for line in text.splitlines())
            + "\n"
        )
    ranks.say(
        f"{reason} at iteration {progress.iteration}; in {run_dir}: "
        "checkpoints/, metrics.jsonl, events/, logs/, config.toml"
    )
