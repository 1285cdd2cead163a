"""Every metric of a run: its unit, how values become one, and what it means. docs/metrics.md is generated from it.

A name with a ``*`` stands for several: of a data source, a block, a task. Tools and documents read it, too.

Beside them Megatron-LM's names and units of curves (``log.names = "megatron"``), for dashboards that were made for it:
those of megatron/training/training.py (``training_log``, ``evaluate_and_print_results``), and megatron-core's for
losses of MTP. Its second axis, "... vs samples", is left out: TensorBoard could not tell which of its points a resumed
run draws again.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from training.metrics.values import Number, Values, curves

Reduction = Literal["last", "mean", "sum", "max", "min"]
Counter = Literal["", "total", "increments"]
"""Since the run began; or since the line before."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Metric:
    """One key of metrics.jsonl."""

    name: str
    """``*`` stands for one part of a name."""
    unit: str
    """Empty for a ratio or a count."""
    reduce: Reduction
    """How the values of ranks, and of the iterations since the last line, become one. last: the same on every rank."""
    meaning: str
    megatron: str = ""
    """Megatron-LM's name of the same curve in TensorBoard, for ``log.names``; empty where it has none; with name's ``*``."""
    megatron_scale: float = 1.0
    """A value times this is in Megatron-LM's unit."""
    opentelemetry: str = ""
    """Its name for the same, with attributes: ``system.network.io{network.io.direction=receive}``; empty where its
    semantic conventions have none."""
    counter: Counter = ""
    """Whether Prometheus gets a counter, and what a line has of it. Empty: a gauge."""


def _metric(
    name: str,
    unit: str,
    reduce: Reduction,
    meaning: str,
    megatron: str = "",
    scale: float = 1.0,
    *,
    otel: str = "",
    counter: Counter = "",
) -> tuple[str, Metric]:
    return name, Metric(
        name=name, unit=unit, reduce=reduce, meaning=meaning, megatron=megatron, megatron_scale=scale,
        opentelemetry=otel, counter=counter,
    )  # fmt: skip


LOSS, GIB = "nats per token", 2**30

METRICS: dict[str, Metric] = dict([
    _metric("iteration", "", "last", "the iteration that has just ended; after a resume, the later line of an iteration counts"),
    _metric("time_s", "s", "last", "when the line was written, in seconds since 1970; not a curve"),
    _metric("loss", LOSS, "mean", "over the unmasked tokens of the global batch of this iteration", "lm loss"),
    _metric("validation_loss", LOSS, "mean", "on the validation split, every `train.eval_interval` iterations; a line of its own; exp of it is the perplexity", "lm loss validation"),
    _metric("validation_loss/*", LOSS, "mean", "the same on each of `eval.validation_sets` and of each source of a blend, in the same line"),
    _metric("eval/*/*", "", "last", "score of a task of `eval.tasks`, such as `eval/hellaswag/acc_norm`, every `eval.interval` iterations; a line of their own"),
    _metric("grad_norm", "", "last", "L2 norm of the whole model's gradient before clipping; absent where fp16 gradients overflowed", "grad-norm"),
    _metric("learning_rate", "", "last", "of this iteration", "learning-rate"),
    _metric("decoupled_learning_rate", "", "last", "of word embeddings and output layer, with `optimizer.decoupled_lr`"),
    _metric("max_attention_logit", "", "max", "largest of all heads in this iteration's global batch, before `optimizer.qk_clip` scaled; absent where the update was skipped", "max_attention_logit"),
    _metric("batch_size", "samples", "last", "of this iteration's global batch", "batch-size"),
    _metric("loss_scale", "", "last", "of fp16; absent where it is 1", "loss-scale"),
    _metric("skipped", "updates", "sum", "updates since the last line that did not happen: overflow, NaN or Inf, a spike", counter="increments"),
    _metric("consumed_samples", "samples", "last", "since the run began, over all starts", counter="total"),
    _metric("consumed_tokens", "tokens", "last", "consumed_samples x seq_length, in each stage", counter="total"),
    _metric("samples_skipped", "samples", "last", "in `data.samples_to_skip`, since the run began; `consumed_samples` and these are the position in the order of samples"),
    _metric("iterations_skipped", "", "last", "in `train.iterations_to_skip`, since the run began"),
    _metric("stage", "", "last", "number of the [[stage]] table that holds, from 1; of a run with stages"),
    _metric("epoch", "", "last", "how often the data has been read"),
    _metric("epoch/*", "", "last", "the same of each source, where there are several"),
    _metric("tokens/*", "tokens", "last", "consumed_tokens of each source, where there are several, skipped samples included", counter="total"),
    _metric("masked", "", "last", "share of the global batch's positions without a loss: padding of `data.packing`, what `data.eod_mask_loss` leaves out; absent where it is 0"),
    _metric("fim_documents", "documents", "sum", "documents of samples, or fragments of one, that `data.fim_rate` permuted since the last line", counter="increments"),
    _metric("fim_samples", "samples", "sum", "samples in which there was one", counter="increments"),
    _metric("transformed_samples", "samples", "sum", "samples that `data.transform` changed since the last line", counter="increments"),
    _metric("iteration_s", "s", "mean", "duration of the iterations since the last line, without evaluation and saving", "iteration-time"),
    _metric("tokens_per_s", "tokens/s", "mean", "unmasked tokens over time; the first 2 iterations of a start do not count"),
    _metric("tokens_per_s_per_gpu", "tokens/s", "mean", "the same, divided by the world size"),
    _metric("tflops_per_gpu", "TFLOP/s", "mean", "model FLOPs (causal attention, no recomputation) over time, per GPU", "throughput"),
    _metric("mfu", "", "mean", "model FLOPs over the card's dense peak; only where the peak is known"),
    _metric("hfu", "", "mean", "the same with the FLOPs of recomputed activations"),
    _metric("eta_s", "s", "last", "median of recent iterations x the iterations that remain"),
    _metric("restarts", "", "last", "launches of this run after the first, failed ones included"),
    _metric("goodput", "", "last", "share of the wall time since the first launch in iterations that count: not in starting, saving, evaluating, or in work that was lost"),
    _metric("memory_gib", "GiB", "max", "largest peak of torch's allocator over all ranks; GPUs only", "mem-max-allocated-bytes", GIB),
    _metric("memory_rank", "", "last", "the rank that holds it"),
    _metric("host_memory_gib", "GiB", "max", "resident memory of the largest rank's process, what forked ranks share included", otel="process.memory.usage"),
    _metric("host_memory_available_gib", "GiB", "min", "memory that the fullest node can still give (MemAvailable, or its cgroup's limit)", otel="system.memory.linux.available"),
    _metric("data_wait_s", "s", "max", "how long the slowest rank waited for data since the last line"),
    _metric("checkpoint_stall_s", "s", "sum", "how long training stood still for saves since the last line", counter="increments"),
    _metric("bucket_age_s", "s", "max", "since a checkpoint came whole into `checkpoint.bucket`, or, before the first one, since this start began"),
    _metric("bucket_sent_gib", "GiB", "sum", "sent into it by all nodes since the last line", counter="increments"),
    _metric("exposed_communication", "", "mean", "share of a step in collectives that nothing overlaps, of the ranks whose timeline is measured, every `profile.timeline_interval` iterations"),
    _metric("pipeline_bubble", "", "mean", "share of the time from a step's first pass to its last in which a pipeline's ranks are in none; measured as the former"),
    _metric("param_norm", "", "last", "L2 norm of all weights, in fp32, before the update; with `log.log_params_norm`", "params-norm"),
    _metric("zeros_in_grad", "", "last", "how many elements of the gradient are 0; with `log.log_num_zeros_in_grad`", "num-zeros"),
    _metric("layer_param_norm", "", "last", "L2 norm of each block's weights, every `log.layer_stats_interval` iterations: a table"),
    _metric("layer_grad_norm", "", "last", "the same of each block's gradient, before clipping"),
    _metric("layer_output_rms", "", "mean", "root mean square of the residual stream after each block, with them"),
    _metric("layer_output_max", "", "max", "largest absolute value of the same"),
    _metric("gpu_utilization", "", "mean", "share of the time in which a kernel ran, by NVML, over all GPUs", otel="hw.gpu.utilization{hw.type=gpu}"),
    _metric("gpu_sm_clock_mhz", "MHz", "min", "clock of the slowest GPU"),
    _metric("gpu_throttled", "", "mean", "share of GPUs that heat or a power brake slows down when the line is written"),
    _metric("gpu_power_capped", "", "mean", "share of GPUs at their power limit, as dense matrix products lead to"),
    _metric("gpu_power_w", "W", "mean", "power that a GPU draws", "power/gpu", otel="hw.power{hw.type=gpu}"),
    _metric("gpu_energy_j", "J", "mean", "energy that a GPU has used since the last line", otel="hw.energy{hw.type=gpu}", counter="increments"),
    _metric("gpu_temperature_c", "°C", "max", "of the hottest GPU", otel="hw.temperature{hw.type=gpu}"),
    _metric("gpu_temperature_rank", "", "last", "the rank that it belongs to"),
    _metric("network_sent_gib", "GiB", "sum", "sent by all nodes since the last line: InfiniBand ports, else interfaces other than loopback", otel="system.network.io{network.io.direction=transmit}", counter="increments"),
    _metric("network_received_gib", "GiB", "sum", "received by them", otel="system.network.io{network.io.direction=receive}", counter="increments"),
    _metric("network_errors", "", "sum", "errors that ports or interfaces counted since the last line", otel="system.network.errors", counter="increments"),
    _metric("mtp_loss", LOSS, "mean", "for each depth of multi-token prediction, unweighted: a list"),
    _metric("expert_load", "", "mean", "for each block with experts, each expert's share of the assignments: a table of lists"),
    _metric("expert_load_max", "", "max", "the fullest expert of all blocks; 1 is an even share"),
    _metric("dead_experts", "", "sum", "experts, of all blocks, that no token was assigned to since the last line"),
    _metric("dropped_tokens", "", "mean", "share of assignments that found their expert full"),
    _metric("load_balancing_loss", "", "mean", "over routers and microbatches, without its coefficient", "load_balancing_loss"),
    _metric("z_loss", "", "mean", "the same for the router's z-loss", "z_loss"),
    _metric("recompilations", "", "sum", "of functions within blocks since the last line, over all ranks, with `train.compile`; those of a start's first step do not count", counter="increments"),
    _metric("recompiled", "", "sum", "which functions those were, with the guard of torch.compile that failed, and how often: a table, where there are any; not a curve"),
    _metric("fp8/shadow_loss_difference", "", "max", "of fp8, or fp4, from bf16, relative; the worst rank, with `precision.fp8_shadow`"),
    _metric("fp8/shadow_grad_norm_difference", "", "max", "the same for the gradient norm of the worst layer"),
])  # fmt: skip
"""By name, in the order of the documentation."""


def find(name: str) -> Metric | None:
    """The metric of a curve or a key: ``epoch/wiki`` is one of ``epoch/*``. None: of the user's own."""
    if name in METRICS:
        return METRICS[name]
    return next((one for pattern, one in _patterns() if pattern.fullmatch(name)), None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    starred = (one for one in METRICS.values() if "*" in one.name)
    return [(re.compile(re.escape(one.name).replace(r"\*", ".+")), one) for one in starred]


def unknown(names: Iterable[str]) -> set[str]:
    """Those that are not in the registry."""
    return {name for name in names if find(name) is None}


Names = Literal["triplane", "megatron"]
DEPTH = re.compile(r"mtp_loss/depth_(\d+)")
LARGEST_EXPONENT = 20
"""Megatron-LM's largest logarithm of a perplexity."""


def named_curves(values: Values, max_experts: int, names: Names) -> Iterator[tuple[str, Number]]:
    """``values.curves`` with the names that ``log.names`` asks for."""
    drawn = curves(values, max_experts)
    return renamed(drawn) if names == "megatron" else drawn


def renamed(drawn: Iterable[tuple[str, Number]]) -> Iterator[tuple[str, Number]]:
    """Curves by Megatron-LM's names and in its units; those that it does not have keep ours."""
    for name, value in drawn:
        theirs, scale = megatron_name(name)
        yield theirs, value * scale if scale != 1 else value
        if name.startswith("validation_loss"):
            yield f"{theirs} ppl", math.exp(min(value, LARGEST_EXPONENT))


def megatron_name(name: str) -> tuple[str, float]:
    """Of one curve, and what its values are multiplied by. A ``*`` stands for the same part of both names."""
    if depth := DEPTH.fullmatch(name):
        return f"mtp_{int(depth[1]) + 1} loss", 1.0
    metric = find(name)
    if metric is None or not metric.megatron:
        return name, 1.0
    before, _, after = metric.name.partition("*")
    part = name[len(before) : len(name) - len(after)]
    return metric.megatron.replace("*", part), metric.megatron_scale
