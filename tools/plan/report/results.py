"""Cost and days, memory by number format, checkpoints."""

import math
from typing import Literal, cast

from models.costs.parameters import block_parameters, num_parameters
from models.costs.stage_parameters import FP8_COPIES, checkpoint_bytes
from parallel.config import PrecisionConfig
from program.printing import columns
from tools.clusters import Cluster
from tools.plan.cost.hardware import precisions
from tools.plan.search.pricing import PricedLayout
from tools.plan.search.request import PlanRequest
from training.checkpoint.young_daly import advised_interval_s, mtbf_s
from training.config.small_sections import FAILURES_PER_GPU_HOUR

DISK_BYTES_PER_S = 2e9
"""That one node writes to a parallel file system, assumed; --async_save hides all but a copy to host memory."""
LONGEST_S, MOST_WRITING = 3600.0, 0.01
"""Between checkpoints, where writing takes no more than that share of the time: an hour's work is enough to lose."""


def cost(question: PlanRequest, plan: PricedLayout, tokens: float) -> list[str]:
    """Days and money to train on so many tokens, at the step time predicted and at both ends of its interval."""
    steps = iterations(question, tokens)
    days = steps * plan.step_s / 86400
    low, high = plan.interval.low, plan.interval.high
    lines = [f"{tokens:.3g} tokens: {steps:,} steps, {days:.3g} days ({days * low:.3g} to {days * high:.3g})"]
    hourly = question.cluster.price.usd_per_gpu_hour
    money = days * 24 * question.num_gpus * hourly
    lines[0] += (
        f", {dollars(money)} ({dollars(money * low)} to {dollars(money * high)}) at {hourly:g} USD per GPU and hour"
    )
    return [*lines, *checkpoints(question, plan.step_s)]


def iterations(question: PlanRequest, tokens: float) -> int:
    """That see so many tokens."""
    return math.ceil(tokens / (question.global_batch_size * question.seq_length))


def dollars(amount: float) -> str:
    return f"{amount:,.0f} USD" if amount < 1e6 else f"{amount / 1e6:,.3g} M USD"


def checkpoints(question: PlanRequest, step_s: float) -> list[str]:
    """Their size, how often to save, and why."""
    nodes = "one node" if (count := _nodes(question)) == 1 else f"{count:,} nodes"
    return [
        f"checkpoints: {_checkpoint_bytes(question) / 1e9:,.0f} GB each, about {_writing_s(question):,.0f} s to write "
        f"from {nodes}; checkpoint.save_interval = {save_interval(question, step_s):,} is {why_so_often(question)}"
    ]


def why_so_often(question: PlanRequest) -> str:
    """Minutes between checkpoints, and what they follow from."""
    best_s, between_s = advised_interval_s(_writing_s(question), _failure_s(question)), _between_s(question)
    said = f"{between_s / 60:,.0f} minutes"
    rate = f"a failure of the hardware every {_failure_s(question) / 3600:,.0f} hours (arXiv:2407.21783)"
    law = "(Young 1974, Daly 2006: about sqrt(2 x writing x time between failures))"
    if between_s == best_s:
        return f"{said}, which loses least to writing and to {rate} {law}"
    return (
        f"{said}; {best_s / 60:,.0f} would lose least to {rate} {law}, but other things end runs too, and saving more "
        f"often costs {_writing_s(question) / between_s:.1%} of the time at most"
    )


def save_interval(question: PlanRequest, step_s: float) -> int:
    """Iterations between checkpoints."""
    return max(1, round(_between_s(question) / step_s))


def _between_s(question: PlanRequest) -> float:
    writing_s = _writing_s(question)
    longest_s = max(LONGEST_S, writing_s / MOST_WRITING)
    return min(advised_interval_s(writing_s, _failure_s(question)), longest_s)


def _writing_s(question: PlanRequest) -> float:
    return _checkpoint_bytes(question) / (_nodes(question) * DISK_BYTES_PER_S)


def _failure_s(question: PlanRequest) -> float:
    return mtbf_s(question.num_gpus, FAILURES_PER_GPU_HOUR)


def _nodes(question: PlanRequest) -> int:
    return max(1, question.num_gpus // question.cluster.node.gpus_per_node)


def _checkpoint_bytes(question: PlanRequest) -> float:
    precision = PrecisionConfig(dtype=_dtype(question.cluster))
    return checkpoint_bytes(num_parameters(question.shape, padded_vocab=True), precision)


def _dtype(cluster: Cluster) -> Literal["fp32", "fp16", "bf16"]:
    return cast(Literal["fp32", "fp16", "bf16"], precisions(cluster)[0])


SHARDED = 16
"""Bytes of a parameter in shards, whatever it is gathered in: itself, its gradient and two moments, all in fp32."""


def memory_table(question: PlanRequest) -> list[str]:
    """GiB of weights, gradients and optimizer per GPU, by number format and by what is sharded over all GPUs.

    Without TP, PP or EP, and so without activations: what arXiv:1910.02054, figure 1, shows.
    """
    parameters, n = num_parameters(question.shape, padded_vocab=True), question.num_gpus
    rows: list[tuple[str, ...]] = [("", "ZeRO-0", "ZeRO-1 (the default)", "ZeRO-2", "ZeRO-3")]
    formats = {
        "bf16 or fp16, fp32 gradients": (2, 0, 4, 12),
        "fp8 products, bf16 weights, fp32 gradients": (2, FP8_COPIES, 4, 12),
        "bf16, bf16 gradients": (2, 0, 2, 16),
        "fp32": (4, 0, 4, 8),
    }
    for name, (weights, copies, gradients, optimizer) in formats.items():
        if copies and "fp8" not in precisions(question.cluster):
            continue
        sizes = (
            weights + copies + gradients + optimizer,
            weights + copies + gradients + optimizer / n,
            weights + SHARDED / n,
            SHARDED / n,
        )
        rows.append((name, *(f"{parameters * size / 2**30:,.1f}" for size in sizes)))
    head = (
        f"{question.model.shape}, {parameters / 1e9:,.1f} B parameters on {n:,} GPUs without {_axes(question)}: "
        "GiB per GPU of weights, gradients and optimizer."
    )
    return [head, _divided(question), *columns(rows, left=(0,)), *checkpoint_sizes(parameters)]


def _axes(question: PlanRequest) -> str:
    return "TP, PP or EP" if question.shape.num_moe_experts else "TP or PP"


def _divided(question: PlanRequest) -> str:
    """What the axes of parallelism make of the table; what ZeRO shards is a share of all GPUs already."""
    whole = "TP x PP divides what is not sharded"
    shape = question.shape
    if not shape.num_moe_experts:
        return f"{whole}."
    blocks = [parameter for number in range(shape.num_layers) for parameter in block_parameters(shape, number)]
    experts = sum(parameter.size for parameter in blocks if parameter.of_experts)
    return f"{whole}; of the experts' {experts / 1e9:,.1f} B parameters, EP x ETP x PP does."


def checkpoint_sizes(parameters: int) -> list[str]:
    """With optimizer state, and of the weights alone."""
    whole = checkpoint_bytes(parameters, PrecisionConfig(dtype="bf16"))
    return [f"checkpoint: {whole / 1e9:,.0f} GB with optimizer state, {2 * parameters / 1e9:,.0f} GB of bf16 weights"]
