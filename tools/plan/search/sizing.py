"""Which cluster, and how much of it: the smallest that holds a model, and what the same money buys."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from program.errors import UserError
from program.printing import columns
from tools import clusters
from tools.clusters import Cluster
from tools.plan.search.gpu_counts import LARGEST, TRIED, fewest
from tools.plan.search.pricing import PricedLayout
from tools.plan.search.request import PlanRequest
from tools.plan.search.selection import best
from tools.plan.search.switches import in_pieces, kept_on_the_host
from training.config.run_config import RunConfig
from training.config.train_config import LOSS_CHUNK_TOKENS

UNKNOWN_PRICE = "not known"
"""How the source of a price begins that has not been filled in (tools/plan/calibrate/cluster_file.py)."""
SAVING = (
    "the fewest GPUs with the optimizer's state on the host and logits in pieces (explain prices both): "
    f"--optimizer.optimizer_cpu_offload True --train.cross_entropy_chunk_tokens {LOSS_CHUNK_TOKENS}"
)
NEAR = 3
"""Sizes below the budget of which the fastest is taken: the batch may divide badly over the largest."""


def smallest(question: PlanRequest, base: RunConfig | None = None) -> list[str]:
    """The fewest GPUs of every cluster on which some layout fits, and how fast that is.

    base: a recipe whose rest the layout has to go with.
    """
    rows = [("cluster", "GPUs", "layout", "step s", "tok/s/GPU", "GiB of", "saving")]
    for cluster in _clusters(question):
        own = dataclasses.replace(question, cluster=cluster)
        count = fewest(own)
        saving = _count(fewest(in_pieces(kept_on_the_host(own))))
        plan = best(dataclasses.replace(own, num_gpus=count), base) if count is not None else None
        if plan is None:
            forbidden = f"the recipe forbids every layout that fits on {count:,} GPUs" if count else ""
            rows.append((cluster.name, "-", forbidden or f"nothing up to {LARGEST:,} GPUs", "", "", "", saving))
            continue
        held = f"{plan.total_bytes / 2**30:.0f} of {plan.memory_bytes / 2**30:.0f}"
        rows.append((
            cluster.name, f"{count:,}", str(plan.layout), f"{plan.step_s:.3g}", f"{plan.tokens_per_s_per_gpu:,.0f}",
            held, saving,
        ))  # fmt: skip
    head = "the fewest GPUs that hold the model and this batch, below 80 % of the card:"
    return [head, *columns(rows, left=(0, 2)), f"  tried: {TRIED}", f"  saving: {SAVING}"]


def _count(gpus: int | None) -> str:
    return "-" if gpus is None else f"{gpus:,}"


def sizing(question: PlanRequest, base: RunConfig | None = None) -> list[str]:
    """The question as it was asked, and the same batch on every other cluster for no more money per hour.

    base: a recipe whose rest the layouts have to go with. Raises UserError where nothing fits anywhere.
    """
    asked = f"{question.num_gpus:,} GPUs of {question.cluster.name}"
    budget = _hourly(question.cluster, question.num_gpus)
    offers = [_fastest(question, question.cluster, [question.num_gpus], base)]
    offers += [_fastest(question, each, list(_affordable(each, budget)), base) for each in _clusters(question)[1:]]
    rows = sorted((_row(offer) for offer in offers if offer.plan is not None), key=lambda row: -float(row[4]))
    if not rows:
        raise UserError(
            f"{question.model.shape} fits on nothing that {budget:,.4g} USD an hour, the price of {asked}, buys. Ask "
            "for more GPUs (size --show smallest says how many hold it), or lift constraints."
        )
    head = (
        f"what {budget:,.4g} USD an hour, the price of {asked}, buys, most tokens per dollar first; of other clusters "
        "whole nodes for no more than that:"
    )
    names = ("cluster", "GPUs", "USD/hour", "step s", "M tokens per USD", "layout")
    return [head, *columns([names, *rows], left=(0, 5)), *_remarks(offers)]


class Offer(NamedTuple):
    """What one cluster has for the money."""

    cluster: Cluster
    num_gpus: int
    """0: even one node costs more."""
    plan: PricedLayout | None


def _fastest(question: PlanRequest, cluster: Cluster, counts: Sequence[int], base: RunConfig | None) -> Offer:
    """Of the largest of these numbers of GPUs; without a plan where nothing fits."""
    offers = [
        Offer(cluster, count, best(dataclasses.replace(question, cluster=cluster, num_gpus=count), base))
        for count in counts[-NEAR:]
    ]
    nothing = Offer(cluster, max(counts, default=0), None)
    return min(offers, key=lambda offer: offer.plan.step_s if offer.plan else math.inf, default=nothing)


def _remarks(offers: Sequence[Offer]) -> Iterator[str]:
    """offers: first what was asked."""
    asked = offers[0]
    if asked.plan is None:
        yield f"nothing fits on what was asked for, {asked.num_gpus:,} GPUs of {asked.cluster.name}"
    if full := [offer.cluster.name for offer in offers[1:] if offer.plan is None and offer.num_gpus]:
        yield f"nothing fits for that money: {', '.join(full)}"
    if dear := [offer.cluster for offer in offers if not offer.num_gpus]:
        costs = (f"{each.name} {_hourly(each, each.node.gpus_per_node):,.4g} USD" for each in dear)
        yield f"one node costs more: {', '.join(costs)}"
    if asked.cluster.price.source.startswith(UNKNOWN_PRICE):
        yield f"{asked.cluster.name}: its price is not known, and what it was compared by is made up: write [price]"


def _row(offer: Offer) -> tuple[str, ...]:
    cluster, count, plan = offer
    assert plan is not None
    rate = plan.tokens_per_s_per_gpu * 3600 / _hourly(cluster, 1) / 1e6
    hourly = f"{_hourly(cluster, count):,.4g}"
    return cluster.name, f"{count:,}", hourly, f"{plan.step_s:.3g}", f"{rate:.3g}", str(plan.layout)


def _clusters(question: PlanRequest) -> list[Cluster]:
    """The one that was asked about, then all others that are known."""
    names = [name for name in clusters.known_clusters() if name != question.cluster.name]
    return [question.cluster, *map(clusters.load, names)]


def _affordable(cluster: Cluster, budget: float) -> Iterator[int]:
    """GPUs in numbers of nodes over which batches divide well: powers of two, and three between each and the next."""
    node = cluster.node.gpus_per_node
    small = (1, 2, 3)
    for nodes in chain(small, (quarters * 2**power for power in range(20) for quarters in (4, 5, 6, 7))):
        count = nodes * node
        if count > LARGEST or _hourly(cluster, count) > budget * (1 + 1e-9):
            return
        yield count


def _hourly(cluster: Cluster, gpus: int) -> float:
    return cluster.price.usd_per_gpu_hour * gpus
