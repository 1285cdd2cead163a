"""Plans as text."""

from collections.abc import Sequence

from models.costs.predict import SAFE_HOST_SHARE
from models.costs.sizes import ATTENTION_AND_MLP
from program.printing import columns
from tools.plan.search.pricing import SPENT, PricedLayout
from tools.plan.search.request import PlanRequest

EXPOSED = ("tp", "dp", "cp", "ep", "p2p")
MEANING = {
    "products": "matrix products of the blocks",
    "attention": "attention's scores and values",
    "traffic": "norms, activations, residuals, casts (memory bandwidth)",
    "recompute": "forward passes computed again",
    "offload": "activations to the host and back, exposed",
    "head": "output layer and loss, beyond what the other stages do",
    "tp": "tensor-parallel collectives, exposed",
    "cp": "context-parallel ring, exposed",
    "ep": "all-to-all of tokens to experts",
    "p2p": "sends between pipeline stages, exposed",
    "bubble": "pipeline bubble",
    "dp": "gradients and weights over data parallelism, exposed",
    "optimizer": "the optimizer's update",
    "host": "GPUs wait for the host to launch kernels",
    "other": "per-step overhead, and waiting for the slowest of many GPUs",
}


def heading(question: PlanRequest, priced: int, seconds: float) -> list[str]:
    """What was asked, and how many layouts were tried."""
    shape, cluster = question.shape, question.cluster
    assumed = "a hybrid: its scans are priced at an assumed share of peak, and its range is assumed, not 4 of 5 runs"
    return [
        f"{question.model.shape} on {question.num_gpus:,} x {cluster.gpu.name} ({cluster.name}): "
        f"{question.global_batch_size:,} samples x {question.seq_length:,} tokens a step, {shape.num_layers} layers",
        f"{priced:,} layouts priced in {seconds:.1f} s; shown are the fastest that fit into 80 % of "
        f"{cluster.gpu.memory_gib:g} GiB",
        *([] if ATTENTION_AND_MLP.issuperset(shape.blocks) else [assumed]),
    ]


def table(plans: Sequence[PricedLayout]) -> list[str]:
    """One line a plan, the best first."""
    head = ("", "layout", "step s", "4 of 5 runs", "tok/s/GPU", "MFU", "GiB", "bubble", *EXPOSED, "limited by")
    rows = [tuple(name.upper() if name in EXPOSED else name for name in head)]
    for number, plan in enumerate(plans, start=1):
        rows.append((
            f"{number}", f"{plan.layout}", f"{plan.step_s:.3g}", _span(plan),
            f"{plan.tokens_per_s_per_gpu:,.0f}", f"{plan.mfu:.1%}", f"{plan.total_bytes / 2**30:.0f}",
            f"{plan.bubble:.1%}", *(f"{plan.spent_s[name] / plan.step_s:.1%}" for name in EXPOSED), plan.limit,
        ))  # fmt: skip
    return columns(rows, left=(1, len(head) - 1))


def _span(plan: PricedLayout) -> str:
    low, high = plan.step_s * plan.interval.low, plan.step_s * plan.interval.high
    return f"{low:.3g}-{high:.3g}"


def details(plan: PricedLayout) -> list[str]:
    """Where one layout's time and memory go."""
    lines = [f"{plan.layout}: {plan.step_s:.4g} s a step, of which"]
    spent = sorted(SPENT, key=lambda name: -plan.spent_s[name])
    rows = [
        (f"{plan.spent_s[name]:.4g} s", f"{plan.spent_s[name] / plan.step_s:.1%}", name, MEANING[name])
        for name in spent
        if plan.spent_s[name] > 0
    ]
    lines += columns(rows, left=(2, 3))
    lines.append(
        f"memory of the fullest rank (stage {plan.fullest_stage}): {plan.total_bytes / 2**30:.1f} GiB of "
        f"{plan.memory_bytes / 2**30:.0f}, of which"
    )
    lines += columns([(f"{size / 2**30:.1f} GiB", name) for name, size in plan.held_bytes.items()], left=(1,))
    if plan.host_bytes:
        share = plan.host_memory_bytes / 2**30
        lines.append(f"in the host's memory: {plan.host_bytes / 2**30:.1f} GiB of each rank's share of {share:.0f}")
    return lines


def against(plan: PricedLayout, best: PricedLayout) -> list[str]:
    """What a layout loses against the best one, category by category."""
    if plan.layout == best.layout:
        return ["This is the layout that is offered first."]
    slower = plan.step_s / best.step_s - 1
    lost = sorted(SPENT, key=lambda name: best.spent_s[name] - plan.spent_s[name])
    named = [
        f"{MEANING[name]} {plan.spent_s[name] - best.spent_s[name]:+.3g} s"
        for name in lost
        if abs(plan.spent_s[name] - best.spent_s[name]) > 0.005 * best.step_s
    ]
    word = f"{slower:.1%} slower than" if slower >= 0 else f"{-slower:.1%} faster than"
    return [f"{word} {best.layout} ({best.step_s:.4g} s): {'; '.join(named[:5]) or 'no part differs much'}."]


def switches(plan: PricedLayout, others: Sequence[tuple[str, PricedLayout, bool]]) -> list[str]:
    """The same layout with one switch the other way: seconds, and GiB of the fullest rank."""
    rows = []
    for words, other, accepted in others:
        share, size = other.step_s / plan.step_s - 1, other.total_bytes / 2**30
        found = [] if other.fits else ["does not fit" if other.fits_host else "does not fit the host"]
        found += [] if accepted else ["refused"]
        rows.append((words, f"{other.step_s:.4g} s", f"{share:+.1%}", f"{size:.1f} GiB", ", ".join(found)))
    return ["the same with one switch the other way:", *columns(rows, left=(0, 4))]


def verdict(plan: PricedLayout) -> list[str]:
    """Whether it can be run at all."""
    found = []
    if not plan.fits_host:
        found.append(
            f"rejected: {plan.host_bytes / 2**30:.1f} GiB of a rank in the host's memory are more than "
            f"{SAFE_HOST_SHARE:.0%} of its share of a node, {plan.host_memory_bytes / 2**30:.0f} GiB; torch rounds "
            "pinned tensors up to powers of two, and processes, data and checkpoints need the rest. Offload less."
        )
    if not plan.fits_card:
        found.append(
            f"rejected: {plan.total_bytes / 2**30:.1f} GiB are more than 80 % of the card's "
            f"{plan.memory_bytes / 2**30:.0f} GiB; above that published runs ran out of memory."
        )
    return found
