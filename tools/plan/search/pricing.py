"""Candidates into priced plans: seconds, bytes, and what follows from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from models.costs.candidate import Candidate, Zero
from models.costs.cases import Column, PeakBytes
from models.costs.flops import flops_per_token
from models.costs.predict import SAFE_HOST_SHARE, SAFE_SHARE, memory, of_share
from models.costs.program import OURS, Software, encoded, sharded
from models.costs.sizes import ATTENTION_AND_MLP, ModelSizes, sizes
from program.errors import UserError
from tools.clusters import Cluster
from tools.plan.cost.cases import PricedCase, PricedColumns
from tools.plan.cost.constants import Constants, Interval, fitted, interval
from tools.plan.cost.hardware import card_age, host_share, machine, on_cpu
from tools.plan.cost.step import StepTimes, step_times
from tools.plan.search.request import PlanRequest
from training.memory.planned import LOGIT_BYTES, kept_state

SPENT = StepTimes.__slots__
HELD = ("weights", "gradients", "optimizer", "activations", "workspace")


@dataclass(kw_only=True, slots=True, frozen=True)
class PricedLayout:
    """One priced layout."""

    layout: Candidate
    step_s: float
    spent_s: dict[str, float]
    """Seconds of the step by what takes them; their sum is step_s."""
    held_bytes: dict[str, float]
    """On the fullest rank, by category."""
    fullest_stage: int
    tokens_per_s_per_gpu: float
    mfu: float
    interval: Interval
    memory_bytes: float
    """Of the card."""
    host_bytes: float
    """Of a rank in its node's memory: what is offloaded."""
    host_memory_bytes: float
    """A rank's share of that memory."""

    @property
    def total_bytes(self) -> float:
        return sum(self.held_bytes.values())

    @property
    def fits_card(self) -> bool:
        """Below the share of the card that no published run failed at."""
        return self.total_bytes <= SAFE_SHARE * self.memory_bytes

    @property
    def fits_host(self) -> bool:
        """Below the safe share of the node's memory."""
        return self.host_bytes <= SAFE_HOST_SHARE * self.host_memory_bytes

    @property
    def fits(self) -> bool:
        """The card and the host."""
        return self.fits_card and self.fits_host

    @property
    def bubble(self) -> float:
        return self.spent_s["bubble"] / self.step_s

    @property
    def limit(self) -> str:
        """What the step is spent on most, in words."""
        names = {
            "products": "matrix products", "attention": "attention", "traffic": "memory bandwidth (norms, activations)",
            "recompute": "recomputation", "offload": "activations to the host and back",
            "head": "the output layer on the last stage", "tp": "TP communication", "cp": "CP communication",
            "ep": "EP communication", "p2p": "sends between stages", "bubble": "the pipeline bubble",
            "dp": "DP communication", "optimizer": "the optimizer", "host": "launches on the host", "other": "overhead",
        }  # fmt: skip
        return names[max(self.spent_s, key=lambda name: self.spent_s[name])]


def price(question: PlanRequest, layouts: Sequence[Candidate], keep: int | None = None) -> list[PricedLayout]:
    """All layouts at once: well below a millisecond each.

    keep: of those that fit, no more than the fastest so many; and, unless --zero decides it, with ZeRO-2 those that do
    not fit with ZeRO-1, which is hardly ever slower. None: all, in the order given.
    """
    if keep is not None:
        layouts = holdable(question, layouts)
    if not layouts:
        return []
    cases = planned_cases(question, layouts)
    times = _times(cases, constants(question.cluster))
    chosen, leaner = (list(range(len(cases))), []) if keep is None else _fastest(question, cases, times.total, keep)
    split = price(question, leaner, keep)
    if not chosen:
        return split
    held = _memory(question, [cases[number] for number in chosen])
    flops = flops_per_token(question.shape, question.seq_length)
    plans = [_plan(question, cases[number], times, number, held, place, flops) for place, number in enumerate(chosen)]
    if not split:
        return plans
    return sorted(plans + split, key=lambda plan: plan.step_s)[:keep]


def _with_split_gradients(question: PlanRequest, layouts: Sequence[Candidate]) -> list[Candidate]:
    """The same with ZeRO-2, of those with ZeRO-1 that can be sharded."""
    if "zero" in question.fixed or question.fixed.get("copies", 1) != 1:
        return []
    return [replace(layout, zero=2) for layout in layouts if layout.zero == 1 and question.can_shard(layout)]


def planned_cases(question: PlanRequest, layouts: Sequence[Candidate]) -> list[PricedCase]:
    """On the question's cluster, under pretrain_gpt.py as the question's recipe has it."""
    model = sizes(question.shape, question.seq_length)
    machines = {name: machine(question.cluster, name) for name in {layout.precision for layout in layouts}}
    programs = {(name, zero): asked_program(question, name, zero) for name in machines for zero in ZEROS}
    return [
        PricedCase(model=model, layout=own, machine=machines[own.precision], software=programs[own.precision, own.zero])
        for own in layouts
    ]


HOLDS = attrgetter("tp", "pp", "ep", "etp", "dp", "cp", "copies", "precision")
"""What decides how many parameters a rank has, near enough, and what it holds of them."""


def holdable(question: PlanRequest, layouts: Sequence[Candidate]) -> list[Candidate]:
    """Without those whose weights, gradients and optimizer do not fit: no need to know what else they hold.

    A stage is taken to hold nine tenths of its share, as the fullest of uneven ones may not be among those computed.
    Where they do not fit with ZeRO-1, and do with ZeRO-2, that takes their place.
    """
    share_of = of_share(question.shape)
    room = SAFE_SHARE * question.cluster.gpu.memory_gib * 2**30
    host_room = SAFE_HOST_SHARE * host_share(question.cluster)
    fits: dict[tuple[object, ...], bool] = {}
    own = {zero: asked_program(question, "bf16", zero) for zero in ZEROS}

    def fit(layout: Candidate, zero: Zero) -> bool:
        key = HOLDS(layout), zero
        if key not in fits:
            held = share_of(replace(layout, zero=zero), own[zero])
            fits[key] = 0.9 * held.total <= room and 0.9 * held.host <= host_room
        return fits[key]

    found, leaner = [], []
    for layout in layouts:
        if fit(layout, layout.zero):
            found.append(layout)
        elif layout.zero == 1 and fit(layout, 2):
            leaner.append(layout)
    return found + _with_split_gradients(question, leaner)


def _memory(question: PlanRequest, cases: Sequence[PricedCase]) -> PeakBytes:
    return memory(PricedColumns(cases), [question.shape] * len(cases), [case.layout for case in cases])


ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)
LIBRARIES_OF = 2026.6
"""Year of the kernels that a run is predicted with: those of the newest published runs, of August 2026."""


def program(cluster: Cluster, *, grad_reduce_in_fp32: bool = True, cuda_graphs: bool = False) -> Software:
    """pretrain_gpt.py as it runs there: on CPUs with this project's own modules, which fuse little.

    Gradients of 16-bit weights that are not reduced in fp32 are neither held nor added up in it.
    """
    own = OURS if grad_reduce_in_fp32 else replace(OURS, gradient_bytes=2, main_gradient_bytes=2, accumulate_bytes=2.0)
    if on_cpu(cluster):
        return replace(own, cuda=False, transformer_engine=False, fused=False)
    return replace(own, card_age=card_age(cluster.gpu.name, LIBRARIES_OF), graphed=cuda_graphs)


def asked_program(question: PlanRequest, precision: str, zero: Zero) -> Software:
    """``program`` as the question's recipe has it. fp32 weights have fp32 gradients, whatever it says of others; the
    optimizer's state is kept otherwise with ZeRO-1, and on the host with ZeRO-2 and -3."""
    own = program(
        question.cluster,
        grad_reduce_in_fp32=question.grad_reduce_in_fp32 or precision == "fp32",
        cuda_graphs=question.cuda_graphs,
    )
    kept = kept_state(question.optimizer) if zero >= 1 or question.optimizer.optimizer == "muon" else {}
    pieces = question.cross_entropy_chunk_tokens or math.inf
    away = 0 if on_cpu(question.cluster) else question.cpu_offloading_num_layers
    modules = 0 if on_cpu(question.cluster) else encoded(question.offload_modules)
    share = question.activation_offload_fraction
    if pieces == math.inf and precision not in ("fp16", "fp32") and not on_cpu(question.cluster):
        own = replace(own, loss_bytes=LOGIT_BYTES)  # cross_entropy_loss_fusion is on by default
    own = replace(own, offloaded_blocks=away, offloaded_modules=modules, offloaded_module_share=share)
    return sharded(replace(own, loss_chunk_tokens=pieces, compiled=question.compile, **kept, **question.averages), zero)


def constants(cluster: Cluster) -> Constants:
    """The fitted ones, but for those that were measured on this very cluster. Raises UserError for unknown names."""
    own, names = cluster.measured.get("constants", {}), [each.name for each in fields(Constants)]
    if unknown := sorted(own.keys() - set(names)):
        raise UserError(
            f"cluster {cluster.name}: measured.constants.{unknown[0]}: no constant of the planner. Known: "
            f"{', '.join(names)}. Take it out, or run calibrate again."
        )
    begun = {"collective_s": 0.0} if cluster.measured.get("collectives") else {}  # in the measured hops
    return replace(fitted(), **begun | own)


BLOCK = 8192
"""Cases that are priced together: columns that stay in a processor's cache take two thirds of the time."""


def _times(cases: Sequence[PricedCase], constants: Constants) -> StepTimes:
    blocks = [
        step_times(PricedColumns(cases[start : start + BLOCK]), constants) for start in range(0, len(cases), BLOCK)
    ]
    return StepTimes(*(np.concatenate([getattr(block, name) for block in blocks]) for name in SPENT))


def _fastest(
    question: PlanRequest, cases: Sequence[PricedCase], total_s: Column, keep: int
) -> tuple[list[int], list[Candidate]]:
    """Those that fit; and of as fast ones those that would with gradients split. Memory is worked out for the fastest
    first, until enough of them fit: it takes as long as time does."""
    order, fitting, leaner = np.argsort(total_s), [], []
    for start in range(0, len(order), BLOCK):
        block = [int(number) for number in order[start : start + BLOCK]]
        held = _memory(question, [cases[number] for number in block])
        for number, size, gradients, host in zip(block, held.total, held.gradients, held.host, strict=True):
            room = SAFE_SHARE * cases[number].machine.memory_bytes
            if host > SAFE_HOST_SHARE * cases[number].machine.host_bytes:
                continue
            if size > room:
                leaner += [cases[number].layout] if size - gradients <= room else []
                continue
            fitting.append(number)
        if len(fitting) >= keep:
            break
    return sorted(fitting[:keep]), _with_split_gradients(question, leaner)


def _plan(
    question: PlanRequest, case: PricedCase, times: StepTimes, number: int, held: PeakBytes, place: int, flops: float
) -> PricedLayout:
    """number, place: of the case among the times, and among what is held."""
    spent = {name: float(getattr(times, name)[number]) for name in SPENT}
    step_s = sum(spent.values())
    rate = question.global_batch_size * question.seq_length / step_s / question.num_gpus
    return PricedLayout(
        layout=case.layout,
        step_s=step_s,
        spent_s=spent,
        held_bytes={name: float(getattr(held, name)[place]) for name in HELD},
        fullest_stage=int(held.stage[place]),
        tokens_per_s_per_gpu=rate,
        mfu=rate * flops / case.machine.peak_flops,
        interval=interval(_kind(case.model)),
        memory_bytes=case.machine.memory_bytes,
        host_bytes=float(held.host[place]),
        host_memory_bytes=case.machine.host_bytes,
    )


def _kind(model: ModelSizes) -> str:
    """Of models, by which intervals differ."""
    if not ATTENTION_AND_MLP.issuperset(model.kinds):
        return "hybrids"
    return "experts" if model.experts else "dense"
