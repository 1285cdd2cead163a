"""Cost and days, the smallest cluster, cards against cards, memory by number format, checkpoints. No torch here."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, cast

from models.parameters import block_parameters, num_parameters
from parallel.config import PrecisionConfig
from parallel.errors import UserError
from tools import clusters
from tools.clusters import Cluster
from tools.plan.aligned import aligned
from tools.plan.enumeration import candidates
from tools.plan.machine import precisions
from tools.plan.pricing import Plan, price
from tools.plan.question import Question
from tools.plan.ranking import ranked
from training.footprint import FP8_COPIES, checkpoint_bytes
from training.memory.peak import SAFE_SHARE

LARGEST = 65536
"""GPUs beyond which nobody is offered a cluster."""
HOURS_BETWEEN_FAILURES = 50_000.0
"""Of one GPU and its share of a node: 419 interruptions in 54 days of 16,384 (arXiv:2407.21783, section 3.3.4)."""
DISK_BYTES_PER_S = 2e9
"""That one node writes to a parallel file system, assumed; --async_save hides all but a copy to host memory."""


def cost(question: Question, plan: Plan, tokens: float) -> list[str]:
    """Days and money to train on so many tokens, at the step time predicted and at both ends of its interval."""
    if tokens <= 0:
        raise UserError(f"--tokens must be above 0, found {tokens:g}.")
    steps = math.ceil(tokens / (question.global_batch_size * question.seq_length))
    days = steps * plan.step_s / 86400
    low, high = plan.interval.low, plan.interval.high
    lines = [f"{tokens:.3g} tokens: {steps:,} steps, {days:.3g} days ({days * low:.3g} to {days * high:.3g})"]
    hourly = question.cluster.price.usd_per_gpu_hour
    money = days * 24 * question.num_gpus * hourly
    lines[0] += (
        f", {_dollars(money)} ({_dollars(money * low)} to {_dollars(money * high)}) at {hourly:g} USD per GPU and hour"
    )
    return [*lines, *checkpoints(question, plan.step_s)]


def _dollars(amount: float) -> str:
    return f"{amount:,.0f} USD" if amount < 1e6 else f"{amount / 1e6:,.3g} M USD"


def checkpoints(question: Question, step_s: float) -> list[str]:
    """Their size, and the interval that loses least to writing and to failures (Young's formula)."""
    precision = PrecisionConfig(dtype=_dtype(question.cluster))
    size = checkpoint_bytes(num_parameters(question.shape, padded_vocab=True), precision)
    nodes = max(1, question.num_gpus // question.cluster.node.gpus_per_node)
    writing_s = size / (nodes * DISK_BYTES_PER_S)
    failure_s = HOURS_BETWEEN_FAILURES * 3600 / question.num_gpus
    every_s = math.sqrt(2 * writing_s * failure_s)
    steps = max(1, round(every_s / step_s))
    return [
        f"checkpoints: {size / 1e9:,.0f} GB each, about {writing_s:,.0f} s to write from {nodes:,} nodes; with a "
        f"failure every {failure_s / 3600:,.0f} hours (arXiv:2407.21783) the best interval is "
        f"{every_s / 60:,.0f} minutes, checkpoint.save_interval = {steps:,}"
        " (Young 1974: sqrt(2 x writing x time between failures))"
    ]


def _dtype(cluster: Cluster) -> Literal["fp32", "fp16", "bf16"]:
    return cast(Literal["fp32", "fp16", "bf16"], precisions(cluster)[0])


def memory_table(question: Question) -> list[str]:
    """GiB of weights, gradients and optimizer per GPU, by number format and by what is sharded over all GPUs.

    Without TP, PP or EP, and so without activations: what arXiv:1910.02054, figure 1, shows.
    """
    parameters, n = num_parameters(question.shape, padded_vocab=True), question.num_gpus
    rows: list[tuple[str, ...]] = [("", "ZeRO-0", "ZeRO-1 (today's)", "ZeRO-2", "ZeRO-3")]
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
            weights + copies + (gradients + optimizer) / n,
            (weights + gradients + optimizer) / n,  # sharded weights are cast as they are gathered
        )
        rows.append((name, *(f"{parameters * size / 2**30:,.1f}" for size in sizes)))
    head = (
        f"{question.model.shape}, {parameters / 1e9:,.1f} B parameters on {n:,} GPUs without {_axes(question)}: "
        "GiB per GPU of weights, gradients and optimizer."
    )
    return [head, _divided(question), *aligned(rows, left=(0,)), *checkpoint_sizes(parameters)]


def _axes(question: Question) -> str:
    return "TP, PP or EP" if question.shape.num_moe_experts else "TP or PP"


def _divided(question: Question) -> str:
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


def smallest(question: Question) -> list[str]:
    """The fewest GPUs of every cluster on which some layout that runs today fits, and how fast that is."""
    rows = [("cluster", "GPUs", "layout", "step s", "tok/s/GPU", "GiB of")]
    for name in dict.fromkeys([question.cluster.name, *clusters.known_clusters()]):
        cluster = question.cluster if name == question.cluster.name else clusters.load(name)
        plan, world = _smallest(dataclasses.replace(question, cluster=cluster))
        if plan is None:
            rows.append((name, "-", f"nothing up to {LARGEST:,} GPUs", "", "", ""))
            continue
        held = f"{plan.total_bytes / 2**30:.0f} of {plan.memory_bytes / 2**30:.0f}"
        rows.append((
            name, f"{world:,}", str(plan.layout), f"{plan.step_s:.3g}", f"{plan.tokens_per_s_per_gpu:,.0f}", held,
        ))  # fmt: skip
    return ["the fewest GPUs that hold the model and this batch, below 80 % of the card:", *aligned(rows, left=(0, 2))]


def _smallest(question: Question) -> tuple[Plan | None, int]:
    """Doubles from one GPU: a world that is no power of two is rarely free."""
    world = 1
    while world <= LARGEST:
        plan = best(dataclasses.replace(question, num_gpus=world))
        if plan is not None:
            return plan, world
        world *= 2
    return None, 0


def best(question: Question) -> Plan | None:
    """The plan that is offered first among those that fit and that today's program runs."""
    plans = [plan for plan in price(question, candidates(question), keep=20) if plan.fits and plan.runs_today]
    return ranked(plans)[0] if plans else None


def sizing(question: Question) -> list[str]:
    """The same batch on every cluster, at sizes that cost the same per hour as what was asked for."""
    budget = _hourly(question.cluster, question.num_gpus)
    rows = [("cluster", "GPUs", "USD/hour", "step s", "M tokens per USD", "layout")]
    found = sorted(_sized(question, budget), key=lambda row: -float(row[4]))
    head = (
        f"what {budget:,.0f} USD an hour ({question.num_gpus:,} GPUs of {question.cluster.name}) buys elsewhere, "
        "most tokens per dollar first:"
    )
    return [head, *aligned([*rows, *found], left=(0, 5))]


def _sized(question: Question, budget: float) -> Iterator[tuple[str, ...]]:
    for name in clusters.known_clusters():
        cluster = clusters.load(name)
        one = _hourly(cluster, 1)
        node = cluster.node.gpus_per_node
        world = 2 ** round(math.log2(max(node, budget / one)))
        plan = best(dataclasses.replace(question, cluster=cluster, num_gpus=world))
        if plan is not None:
            rate = plan.tokens_per_s_per_gpu * 3600 / one / 1e6
            hourly = f"{world * one:,.0f}"
            yield name, f"{world:,}", hourly, f"{plan.step_s:.3g}", f"{rate:.3g}", str(plan.layout)


def _hourly(cluster: Cluster, gpus: int) -> float:
    return cluster.price.usd_per_gpu_hour * gpus


def safe_gib(cluster: Cluster) -> float:
    """Of a card."""
    return SAFE_SHARE * cluster.gpu.memory_gib
