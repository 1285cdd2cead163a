"""One rank's whole run, part by part: the table of contents of Triplane."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data.prepared import Prepared
from models import gpt
from models.init import initialise
from models.kernels import described, fusions_on, kernel_problems
from models.layers import cross_entropy, mixers, packed, restarting_rope
from models.layers.fine_grained_offload import FineGrainedOffload
from models.layers.fp8 import resolve_recipe
from models.layers.spec import has_transformer_engine, provider
from models.layers.userbuffers import userbuffers
from models.resolve import resolve
from models.shapes import GPTShape
from parallel import ddp, groups, metrics
from parallel.config import PrecisionConfig
from parallel.ddp import Chunks
from parallel.errors import SharedMistake
from parallel.groups import Ranks
from parallel.launch import Identity
from parallel.local_ranks import STOPPED
from parallel.precision import params_dtype
from training import loop, optimizer
from training.attention_backend import AttentionBackend
from training.batches import Stream
from training.checkpoint.save_interval import SaveClock, SaveInterval
from training.config.divisibility import fp8_problems
from training.config.incompatible import param_gather_problems
from training.config.lr_schedule import Schedule
from training.config.run_config import RunConfig, kernel_setting, learning_schedule
from training.config.train_config import TrainConfig
from training.custom.callbacks import build_callbacks
from training.custom.loss import load_loss
from training.determinism import set_debugging
from training.evaluation.tasks import PreparedTasks
from training.generation.samples import SampleCallback
from training.health.health import build_health
from training.loss_weights import layout_dependent
from training.manual_gc import ManualGC
from training.memory.host_room import check_host_room
from training.memory.measured import MemoryReport, modules_of
from training.memory.out_of_memory import explain_out_of_memory
from training.memory.recompute_plan import described_plans, recompute_plans
from training.metrics.compilation import CompilationMeter
from training.metrics.log_disk import LogDisk
from training.parts import (
    TrainingRun,
    build_profile,
    build_recorder,
    build_samples,
    build_saves,
    build_shadow,
    build_stats,
    build_stream,
    build_tasks,
    build_updates,
    build_validation,
)
from training.profile.memory_snapshot import memory_history
from training.progress import Progress
from training.run_dir import fingerprint, run_files
from training.run_dir.data_watch import DataWatch
from training.run_dir.history import noted_by
from training.run_dir.history_callback import EvaluationNotes, HistoryCallback
from training.run_dir.kept_schedule import RECIPE
from training.run_dir.shared_check import check_shared
from training.run_lock.lock import RunLock
from training.step import StepRequests, StepResult, UpdateDecision, UpdatePolicy, skip_overflows, train_step
from training.watchdog.callbacks import HeartbeatCallback, StopCallback
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.stop_signal import StopSignal


def train(
    config: RunConfig,
    prepared: Prepared,
    identity: Identity,
    device: Literal["cpu", "cuda"],
    run_dir: Path,
    console_fd: int | None,
    lock: RunLock | None = None,
    stop: StopSignal | None = None,
    heartbeat: Heartbeat | None = None,
    tasks: PreparedTasks | None = None,
) -> int:
    """Build the parts on this rank, train, and leave a sample of what the model learned: the exit code.

    stop: hears the signals that ask to stop; None: no signals are handled. heartbeat: tells the watchdog of progress;
    None without one. tasks: those of eval.tasks, on rank 0.
    """
    stop, heartbeat = stop or StopSignal(), heartbeat or Heartbeat()
    set_debugging(config.train)
    shape = resolve(config.model, prepared.tokenizer.vocab_size)
    start = groups.start(
        config.layout(identity.world_size),
        identity,
        device=device,
        seed=config.train.seed,
        meeting=groups.Meeting(
            timeout_minutes=config.fault.after_watchdog(config.parallel.distributed_timeout_minutes),
            # before the watchdog ends a rank that does not start, without knowing why
            resolve_s=min(60 * config.parallel.distributed_timeout_minutes, 0.8 * config.fault.start_timeout_s),
            facts=fingerprint.facts(config, prepared.fingerprints),
        ),
        parallel=config.parallel,
        graphs=config.kernels.graphs,
        console_fd=console_fd,
    )
    with (
        start as ranks,
        explain_out_of_memory(config, shape, ranks, run_dir / RECIPE),
        memory_history(config.profile, run_dir, ranks),
        metrics.collecting(ranks.device) as collector,
        contextlib.ExitStack() as buffers,
    ):
        config = with_recipe(config, shape, ranks)
        run = TrainingRun(
            config=config, prepared=prepared, shape=shape, ranks=ranks, run_dir=run_dir, stop=stop,
            heartbeat=heartbeat, lock=lock, tasks=tasks,
            note=noted_by(run_dir, ranks.rank, lock.attempt if lock else ""),
        )  # fmt: skip
        announce(run)
        check_shared(run_dir, ranks)
        check_host_room(config, shape, ranks)
        heartbeat.enter("load")
        buffers.enter_context(overlap_of_tp(config, shape, ranks))
        chunks, optim = build_parts(config, shape, ranks)
        begun = run_files.restore(config, prepared, run_dir, chunks, optim, ranks)
        run_files.write_run_files(config, run_dir, begun.progress, ranks)
        stream = build_stream(run, begun)
        health = build_health(config.fault, chunks, optim, ranks, run_dir, begun.entries, run.note)
        updates = build_updates(run, optim, begun)
        saves = build_saves(run, chunks, optim, health, stream, begun, updates)
        stats = build_stats(run, chunks, optim)
        timelines, traces = build_profile(run, chunks)
        history = HistoryCallback(run_dir, run.note, lambda: heartbeat.spent_s["evaluation"], ranks)
        compilation = [CompilationMeter(ranks, run.note)] if config.train.compile else []
        recorder = build_recorder(
            run, chunks, stream, begun.progress, [collector, *stats, *timelines, *compilation, history]
        )
        callbacks = [
            HeartbeatCallback(heartbeat),
            *timelines,
            *health.callbacks,
            *build_shadow(run, chunks, optim, stream),
            *stats,
            *compilation,
            *build_callbacks(run, chunks, optim),
            recorder,
            *traces,
            MemoryReport(config, shape, chunks, optim, ranks, run.note),
            LogDisk(run_dir / "logs", config.log.log_interval, ranks),
            DataWatch(prepared, ranks),
            history,
            build_validation(run, chunks, recorder),
            samples := build_samples(run, chunks),
            *build_tasks(run, chunks, recorder),
            EvaluationNotes(run.note, lambda: heartbeat.spent_s["evaluation"]),
            updates,
            SaveClock(config.checkpoint.save_interval_minutes, ranks.rank),
            saves,
            SaveInterval(config.fault, identity.world_size, lambda: saves.stalled_s, ranks.say),
            StopCallback(stop, ranks.say),
        ]
        if has_transformer_engine(ranks.device) and not config.data.by_document:
            callbacks.append(AttentionBackend(ranks.say))
        if config.train.manual_gc_interval:
            callbacks.append(ManualGC(config.train.manual_gc_interval))

        def before_update() -> None:
            for callback in callbacks:
                callback.before_update()

        step = partial(
            one_step, config, chunks, optim, stream, ranks,
            before_update=before_update, policy=health.policy, schedule=begun.schedule,
        )  # fmt: skip
        progress, reason = loop.run(
            config.train, config.checkpoint, begun.progress, step, heartbeat.within("save", saves), callbacks
        )
        stream.close()
        finish(run, samples, progress, reason)
        recorder.close()
    return STOPPED if reason == "requested" else 0


def with_recipe(config: RunConfig, shape: GPTShape, ranks: Ranks) -> RunConfig:
    """config with this card's fp8 recipe where it says "auto", as config.toml and checkpoints then name it.

    Raises SharedMistake where the card cannot, or where that recipe multiplies none of the model's sizes.
    """
    if ranks.device.type == "cpu":
        return config
    precision = resolve_recipe(config.precision, ranks.device)
    problems = fp8_problems(config.model, shape, config.parallel, precision, config.train.micro_batch_size)
    problems += param_gather_problems(config.parallel, precision)
    if problems:
        raise SharedMistake(problems[0])
    return replace(config, precision=precision)


def overlap_of_tp(config: RunConfig, shape: GPTShape, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """The buffers of kernels.tp_comm_overlap, for as long as the model lives; enter it before ``build_parts``."""
    if not config.kernels.tp_comm_overlap:
        return contextlib.nullcontext()
    tokens = config.train.micro_batch_size * config.model.seq_length // ranks.layout.cp
    return userbuffers(ranks, config.precision, tokens, shape.hidden_size)


def build_parts(config: RunConfig, shape: GPTShape, ranks: Ranks) -> tuple[Chunks, optimizer.MegatronOptimizer]:
    """This rank's model chunks, ready for data parallelism, and their optimizer."""
    recompute = recomputed(config, shape, ranks)
    # A CPU has no weights in fp8; of mxfp8's, Megatron would leave the gathering to code that a step here has not.
    on_cpu = ranks.device.type == "cpu"
    precision = replace(config.precision, fp8_param_gather=False) if on_cpu else config.precision
    restarts = config.data.restarts_alone and shape.position_embedding_type == "rope"
    backend = provider(ranks.device, documents=config.data.reset_attention_mask or restarts)
    model = gpt.build(
        config.model, shape, config.parallel, precision, recompute, ranks, config.train.seed, backend,
        fusions(config, shape, ranks), config.kernels.attention_backend, load_loss(config.train.loss),
        config.train.deterministic_mode, config.train.cross_entropy_chunk_tokens,
        config.train.cpu_offloading_num_layers, config.train.compile, fine_grained(config.train),
    )  # fmt: skip
    if restarts:
        restarting_rope.install(model)
    fill = partial(initialise, shape=shape, seed=config.train.seed)
    chunks = ddp.wrap(model, config.parallel, precision, ranks, fill, config.optimizer.optimizer_cpu_offload)
    tokens = config.train.micro_batch_size * config.model.seq_length // ranks.layout.cp
    return chunks, optimizer.build(chunks, config.optimizer, config.parallel, precision, ranks, tokens)


def fine_grained(train: TrainConfig) -> FineGrainedOffload | None:
    """What waits on the host, by module; None: no module's input."""
    if not train.fine_grained_activation_offloading:
        return None
    return FineGrainedOffload(
        modules=train.offload_modules,
        min_tensor_size=train.min_offloaded_tensor_size,
        fraction=train.activation_offload_fraction,
        delta_bytes_across_pp_ranks=train.delta_offload_bytes_across_pp_ranks,
    )


def recomputed(config: RunConfig, shape: GPTShape, ranks: Ranks) -> gpt.Recompute:
    """What this rank computes again. Raises SharedMistake where train.recompute's budget is too small for it."""
    train = config.train
    if train.recompute is None:
        return gpt.Recompute(
            granularity=train.recompute_granularity,
            method=train.recompute_method,
            num_layers=train.recompute_num_layers,
            modules=train.recompute_modules,
        )
    plan = recompute_plans(config, ranks.layout.world_size, shape, modules_of(ranks))[ranks.at.pp]
    if plan.whole_blocks:
        return gpt.Recompute(granularity="full", method="uniform", num_layers=1)
    return gpt.Recompute(sublayers=plan.numbers(ranks.layout.vpp))


def fusions(
    config: RunConfig, shape: GPTShape, ranks: Ranks, say: Callable[[str], None] = lambda _: None
) -> frozenset[str]:
    """Fused kernels that are on. Collective, where Transformer Engine's cross entropy could run: it is compared with
    the plain one. Raises SharedMistake for one that is asked for where it cannot run. say: why one is off."""
    has = has_transformer_engine(ranks.device)
    setting = kernel_setting(config, shape, cuda=ranks.device.type == "cuda", transformer_engine=has)
    if problems := kernel_problems(config.kernels, setting):
        raise SharedMistake("\n".join(problems))
    on = fusions_on(config.kernels, setting)
    name, columns = "cross_entropy_loss_fusion", shape.padded_vocab_size // ranks.layout.tp
    if name in on and (why := cross_entropy.disproof(ranks.pgs.tp, columns, ranks.device)):
        if config.kernels.cross_entropy_loss_fusion == "on":
            raise SharedMistake(f'kernels.{name} = "on" cannot run: {why}. Use "auto".')
        say(f"cross entropy is not fused: {why}")
        on -= {name}
    return on


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
    schedule: Schedule | None = None,
) -> tuple[Progress, StepResult]:
    """The iteration after ``progress``: its batch, its learning rate, its update. policy: None: as mcore does.
    schedule: None: this configuration's, as of a run that begins."""
    schedule = schedule or learning_schedule(config.optimizer, config.train)
    microbatches = stream.next(config.model.seq_length)
    run_step = partial(
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
    result = run_step(policy.decide if policy else skip_overflows)
    if policy and result.decision is UpdateDecision.REPLAY:
        metrics.discard_step()
        result = policy.replay(run_step, result, microbatches)
    return Progress(iteration=progress.iteration + 1, consumed_samples=stream.consumed_samples), result


def announce(run: TrainingRun) -> None:
    """Say what runs."""
    config, shape, ranks = run.config, run.shape, run.ranks
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    ranks.say(
        f"{ranks.identity.world_size} ranks ({ranks.identity.launcher}, {ranks.device.type}): "
        f"{ranks.layout}; {computed_in(config.precision, ranks.device, shape.mtp_num_layers > 0)}"
    )
    ranks.say(
        f"model {config.model.title}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"vocabulary {shape.vocab_size} (padded {shape.padded_vocab_size}); "
        f"batch {batch} samples x {config.model.seq_length} tokens "
        f"= {batch // (micro * ranks.layout.dp)} microbatches of {micro} on each of {ranks.layout.dp} replicas"
    )
    if config.import_paths:
        ranks.say(f"by import path: {', '.join(config.import_paths)}")
    if fused := described(fusions(config, shape, ranks, ranks.say)):
        ranks.say(f"fused kernels: {fused}")
    if config.train.recompute is not None:
        plans = recompute_plans(config, ranks.layout.world_size, shape, modules_of(ranks))
        ranks.say(f'recomputed for train.recompute = "{config.train.recompute}": {described_plans(plans)}')
    for line in mixers.described(shape, ranks.device):
        ranks.say(line)
    if by_definition := layout_dependent(shape):
        ranks.say(by_definition)
    if config.data.reset_attention_mask and shape.has_attention:
        how = packed.how(shape, ranks.device, params_dtype(config.precision), ranks.layout)
        ranks.say(f"documents are kept apart by attention {how}")


def computed_in(precision: PrecisionConfig, device: torch.device, mtp: bool) -> str:
    """bf16, or: bf16, products in fp8 hybrid (tensorwise). mtp: the model has multi-token prediction."""
    name = precision.products
    if name is None:
        return precision.dtype
    if device.type == "cpu":
        return f"{precision.dtype} (precision.{name} is off: it needs a GPU)"
    text = f"{precision.dtype}, products in {name} {getattr(precision, name)} ({precision.recipe})"
    if precision.first_last_layers_bf16:
        start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
        text += f", but in bf16 in the first {start} and last {end} layers"
    if name == "fp4" and mtp:  # megatron-core 0.19.2 enters fp8's context alone there, multi_token_prediction.py:1181
        text += ", and in bf16 in depths of multi-token prediction"
    return text + (", weights kept in fp8" if precision.fp8_param_gather else "")


def finish(run: TrainingRun, samples: SampleCallback, progress: Progress, reason: loop.Reason) -> None:
    """The marker ``done`` or ``requeue``, samples of what the model writes, and where everything lies."""
    ranks, run_dir = run.ranks, run.run_dir
    run_files.mark(run_dir, progress, reason, ranks)
    if reason == "requested":
        ranks.say(f"stopped on request at iteration {progress.iteration}, saved; the same command continues {run_dir}")
        return
    samples.sample_at_end(progress)
    log = run.config.log
    written = ["report.html"] * log.report + ["checkpoints/", "metrics.jsonl"] + ["events/"] * log.tensorboard
    ranks.say(f"{reason} at iteration {progress.iteration}; in {run_dir}: {', '.join(written)}, logs/, config.toml")
