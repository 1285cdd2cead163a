"""Choices that are known to be bad: a run accepts them, at a cost.

Each sentence says what it costs, with the numbers, and which field changes it. Laptop-sized runs are let be.
"""

import ipaddress
import math
from collections.abc import Iterator
from dataclasses import fields

from models.costs.flops import flops_per_token
from models.costs.parameters import num_parameters
from models.costs.predict import Predicted, fullest
from models.costs.stage_parameters import checkpoint_bytes
from models.shapes import GPTShape
from parallel.layout import Layout, bubble
from program import host_memory
from training.config.checkpoint_config import CheckpointConfig
from training.config.log_config import LogConfig
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig
from training.memory.planned import as_case, bytes_on_cpus, planned_modules, too_little

GPUS_PER_NODE = 8
H100_BYTES = 80e9
ASSUMED_FLOPS = 400e12
"""A GPU's sustained FLOPS where time is guessed: 40% of an H100's dense bf16 peak."""

SMALL, LARGE = 10**8, 10**9
"""Parameters below which speed, or memory, is no concern."""


def warnings(config: RunConfig, shape: GPTShape, layout: Layout) -> list[str]:
    """What an experienced operator would object to; of small models and CPU runs, idle stages and vain fields."""
    size = num_parameters(shape)
    found = [*_pipeline(config.train, layout), *_schedule(config), *_without_effect(config), *_exposed(config.log)]
    found += _mup(config, shape)
    if config.device == "cpu":
        return [*found, *_host_memory(config, shape, layout)]
    if size < SMALL:
        return found
    found += [*_data(config), *_precision(config), *_tensor_parallel(config, layout), *_batch(config, layout)]
    found += _experts(config, shape, layout)
    found += _learning_rate(config.optimizer, config.checkpoint)
    if size >= LARGE:
        case = as_case(config, layout.world_size, shape, planned_modules(config))
        (held,) = fullest([case], shape)
        found += [*_memory(config, shape, held), *_activations(config, held)]
        found += _saving(config, shape, layout)
    return found


def _pipeline(train: TrainConfig, layout: Layout) -> Iterator[str]:
    microbatches = train.global_batch_size // (train.micro_batch_size * layout.dp)
    if microbatches < layout.pp:
        share = bubble(layout, microbatches)
        yield (
            f"{microbatches} microbatches cannot fill {layout.pp} pipeline stages: ranks idle "
            f"{share / (1 + share):.0%} of the time. Raise train.global_batch_size, or lower "
            "parallel.pipeline_model_parallel_size or DP."
        )


def _host_memory(config: RunConfig, shape: GPTShape, layout: Layout) -> Iterator[str]:
    """Of ranks that this machine would start."""
    if config.world_size not in (None, config.nproc):
        return
    needed, there = bytes_on_cpus(config, layout.world_size, shape), host_memory.total_bytes()
    if needed > there:
        yield too_little("this machine", needed, there)


def _data(config: RunConfig) -> Iterator[str]:
    given = config.data.paths or config.data.blend or config.data.blend_file or config.data.streamed
    if not given:
        yield "data.paths is empty: the built-in corpus is a few million tokens, for trying things out."
    if config.data.tokenizer == "builtin":
        own, pieces = config.model.vocab_size, config.data.builtin_vocab_size
        gets = "gets that vocabulary"
        if own is not None and own > pieces:
            gets = f"has a vocabulary of {own:,} (model.vocab_size), the rest of which is never trained"
        yield (
            f"data.tokenizer is the built-in one of {pieces:,} pieces, trained on Python "
            f"sources; the model {gets}. Name a SentencePiece model."
        )


def _precision(config: RunConfig) -> Iterator[str]:
    if config.precision.dtype == "fp32":
        yield (
            'precision.dtype = "fp32": tensor cores compute bf16 several times faster than fp32 or TF32, '
            'with half the bytes of activations. Use "bf16".'
        )


def _tensor_parallel(config: RunConfig, layout: Layout) -> Iterator[str]:
    crosses = layout.tp > GPUS_PER_NODE or (layout.world_size > GPUS_PER_NODE and GPUS_PER_NODE % layout.tp)
    if crosses:
        yield (
            f"TP {layout.tp} leaves the node (taken to have {GPUS_PER_NODE} GPUs): every layer waits for the "
            "network four times. Use a TP that divides the node, and more PP (arXiv:2104.04473, section 3.2)."
        )
    if layout.tp > 1 and not config.parallel.sequence_parallel:
        yield (
            "parallel.sequence_parallel is off: norms and dropout keep their activations "
            f"{layout.tp} times over, for no less communication (arXiv:2205.05198)."
        )


def _experts(config: RunConfig, shape: GPTShape, layout: Layout) -> Iterator[str]:
    """Both from what each choice sends: every rank all tokens of EP ranks, or a token to its experts' ranks only."""
    experts, topk = shape.num_moe_experts, shape.moe_router_topk
    if not experts:
        return
    if config.parallel.moe_token_dispatcher_type == "allgather" and layout.ep > topk:
        yield (
            f'parallel.moe_token_dispatcher_type = "allgather" sends every token to all of EP {layout.ep} ranks, of '
            f'which it needs at most {topk} (model.moe_router_topk). Use "alltoall".'
        )
    if layout.etp > 1 and experts % (layout.ep * layout.etp) == 0:
        yield (
            f"parallel.expert_tensor_parallel_size {layout.etp} cuts the matrices of experts, which are small already, "
            f"and adds two collectives to each layer. Use 1, with parallel.expert_model_parallel_size "
            f"{layout.ep * layout.etp}: a rank then holds as much."
        )


def _batch(config: RunConfig, layout: Layout) -> Iterator[str]:
    tokens = config.train.global_batch_size * config.model.seq_length // layout.dp
    if layout.dp > 1 and layout.world_size >= 2 * GPUS_PER_NODE and tokens < 4096:
        yield (
            f"tiny batch: each replica computes {tokens:,} tokens between two reductions of all gradients, "
            "which take longer than that. Raise train.global_batch_size, or use fewer GPUs."
        )
    if (
        layout.dp > 1
        and layout.world_size > GPUS_PER_NODE
        and not (config.parallel.overlap_grad_reduce or config.parallel.fully_sharded)
    ):
        yield "parallel.overlap_grad_reduce is off: every rank waits while gradients cross the network."


def _learning_rate(optimizer: OptimizerConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    warmup = optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction
    if not warmup and checkpoint.load is None:
        yield (
            f"no warm-up: the first iterations use the full learning rate {optimizer.lr:g}, before AdamW's "
            "second moment means anything. Set optimizer.lr_warmup_iters."
        )


def _schedule(config: RunConfig) -> Iterator[str]:
    schedule = config.schedule
    end = schedule.warmup_samples
    if schedule.lr_decay_style == "WSD" and schedule.decay_samples - schedule.wsd_decay_samples < end:
        yield (
            f"WSD's final decay begins within the warm-up: the learning rate drops from {schedule.lr:g} to "
            f"{schedule.learning_rate(math.floor(end) + 1):.3g} at once. Lower "
            "optimizer.lr_wsd_decay_iters or _samples."
        )


def _mup(config: RunConfig, shape: GPTShape) -> Iterator[str]:
    mode = config.optimizer.muon_scale_mode
    if shape.width_mult != 1 and config.optimizer.optimizer == "muon" and mode != "unit_rms_norm":
        yield (
            f'model.use_mup with optimizer.muon_scale_mode "{mode}": updates of matrices grow with width, and a '
            'learning rate found at another width is not right here. Use "unit_rms_norm".'
        )
    if shape.use_mup and not shape.mup_base_hidden_size:
        yield (
            "model.use_mup without model.mup_base_hidden_size: this width is the base, at which attention's scores "
            "alone are changed. Set the width at which the learning rate was found."
        )
    of_mup = [one for one in fields(shape) if one.name.startswith("mup_") and getattr(shape, one.name) != one.default]
    if of_mup and not shape.use_mup:
        yield f"{', '.join(f'model.{one.name}' for one in of_mup)}: no effect without model.use_mup."


def _memory(config: RunConfig, shape: GPTShape, held: Predicted) -> Iterator[str]:
    states = held.weights + held.gradients + held.optimizer
    if states > H100_BYTES:
        split = "" if config.parallel.fully_sharded else ", or parallel.data_parallel_sharding_strategy"
        yield (
            f"weights, gradients and optimizer take {states / 2**30:.0f} GiB on a rank, before activations; "
            f"an H100 has 80 GB. Raise parallel.tensor_model_parallel_size or .pipeline_model_parallel_size{split}"
            + (", or parallel.expert_model_parallel_size." if shape.num_moe_experts else ".")
        )


def _activations(config: RunConfig, held: Predicted) -> Iterator[str]:
    if config.model.seq_length < 8192 or config.train.recomputes:
        return
    yield (
        f"no recomputation at seq_length {config.model.seq_length}: about {held.activations / 2**30:.0f} GiB of "
        f"activations on a rank of stage {held.stage}, {held.total / 2**30:.0f} GiB in all. If that does not fit, set "
        "train.recompute, or raise parallel.context_parallel_size."
    )


def _saving(config: RunConfig, shape: GPTShape, layout: Layout) -> Iterator[str]:
    save, train, seq_length = config.checkpoint, config.train, config.model.seq_length
    flops = flops_per_token(shape, seq_length) * seq_length * train.global_batch_size
    iteration_s = flops / layout.world_size / ASSUMED_FLOPS
    hours = config.iterations * iteration_s / 3600
    if save.save_interval is None and save.save_interval_minutes is None:
        if hours > 1:
            yield f"nothing is saved before the end, {hours:,.0f} hours away. Set checkpoint.save_interval."
        return
    every_s = min(
        (save.save_interval or config.iterations) * iteration_s,
        (save.save_interval_minutes or math.inf) * 60,
    )
    if every_s < 300:
        size = checkpoint_bytes(num_parameters(shape, padded_vocab=True), config.precision)
        yield (
            f"saving too often: {size / 1e9:,.0f} GB about every {every_s:,.0f} s (at {ASSUMED_FLOPS / 1e12:.0f} "
            "TFLOPS per GPU). Raise checkpoint.save_interval."
        )


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Fields that are set and that nothing reads."""
    own, profile, train_iters = config.eval, config.profile, config.train.train_iters
    if (own.validation_sets or own.full_pass) and not config.train.evaluates:
        yield "eval.validation_sets and eval.full_pass have no effect without train.eval_interval: no evaluation."
    if own.by_source and (
        own.full_pass or not (config.data.blend or config.data.blend_file or config.data.stream_blend)
    ):
        yield "eval.by_source has no effect without a blend, nor with eval.full_pass, which measures each source whole."
    if not own.tasks and (own.interval is not None or own.limit is not None or own.num_fewshot is not None):
        yield "eval.interval, limit and num_fewshot have no effect without eval.tasks."
    if profile.traces and profile.step_start >= train_iters:
        yield f"profile.step_start {profile.step_start} comes after train.train_iters {train_iters}: there is no trace."
    if profile.timeline_interval is not None and profile.timeline_interval > train_iters:
        yield f"profile.timeline_interval {profile.timeline_interval} is more than train.train_iters {train_iters}."


def _exposed(log: LogConfig) -> Iterator[str]:
    """What others on the network can read."""
    if (endpoint := log.endpoint) is not None and not ipaddress.ip_address(endpoint.address).is_loopback:
        yield (
            f'log.prometheus "{endpoint}": whoever reaches port {endpoint.port} of this host can read the metrics; the '
            "endpoint asks for no password."
        )
