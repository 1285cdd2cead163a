"""What each switch of a layout is worth: the same layout with that one the other way."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from models.costs.candidate import Candidate, chunks
from models.costs.predict import SAFE_SHARE, of_stages
from models.costs.recompute_plan import recompute_plans
from program.errors import UserError
from tools.plan.cost.hardware import computable, on_cpu
from tools.plan.search.enumeration import copies_of_shards
from tools.plan.search.pricing import HELD, SPENT, PricedLayout, price
from tools.plan.search.recipe import configuration, problems
from tools.plan.search.request import PlanRequest
from training.config.activation_offload import offloadable
from training.config.incompatible import compile_problems, offload_problems
from training.config.run_config import RunConfig
from training.config.train_config import LOSS_CHUNK_TOKENS
from training.memory.planned import as_case, planned_modules


def switched(
    question: PlanRequest, plan: PricedLayout, base: RunConfig | None = None
) -> list[tuple[str, PricedLayout, bool]]:
    """Words, the plan with that switch the other way, and whether pretrain_gpt.py would accept it, with the rest of a
    recipe; the fastest first."""
    found = []
    others = [(words, question, layout) for words, layout in _others(question, plan.layout)]
    others += [(words, asked, plan.layout) for words, asked in _kept_otherwise(question, plan.layout, base)]
    for words, asked, layout in others:
        (other,) = price(asked, [layout])
        found.append((words, other, not problems(asked, layout, base)))
    found += _what_pays(question, plan.layout, base)
    with_graphs = dataclasses.replace(question, cuda_graphs=True)
    (graphed,) = price(with_graphs, [plan.layout])
    # layers of experts stay as they are, whose launches this price takes away, too
    if graphed.step_s < plan.step_s and not question.shape.num_moe_experts:
        found.append(("with CUDA graphs", graphed, not problems(with_graphs, plan.layout, base)))
    return sorted(found, key=lambda each: each[1].step_s)


def kept_on_the_host(question: PlanRequest) -> PlanRequest:
    """All of the optimizer's state."""
    return dataclasses.replace(question, optimizer=question.optimizer.on_the_host())


def in_pieces(question: PlanRequest) -> PlanRequest:
    """Logits of so many tokens at a time that products still fill a GPU."""
    return dataclasses.replace(question, cross_entropy_chunk_tokens=LOSS_CHUNK_TOKENS)


def activations_on_the_host(question: PlanRequest, layout: Candidate) -> PlanRequest:
    """Those of every block."""
    blocks = max(chunks(question.shape.num_layers, layout))
    return dataclasses.replace(question, cpu_offloading_num_layers=blocks, offload_modules=())


def modules_on_the_host(question: PlanRequest, layout: Candidate, base: RunConfig | None = None) -> PlanRequest:
    """Inputs of every module that may be named for this model, whatever else forbids it."""
    config = configuration(question, layout, base)
    modules = offloadable(question.shape, config.precision, config.kernels, config.train)
    return dataclasses.replace(question, offload_modules=modules, cpu_offloading_num_layers=0)


def within_budget(question: PlanRequest, layout: Candidate, base: RunConfig | None = None) -> RunConfig:
    """A recipe that recomputes what pays until a rank holds what is safe (train.recompute "auto")."""
    config = configuration(question, dataclasses.replace(layout, recompute="none"), base)
    gib = int(SAFE_SHARE * question.cluster.gpu.memory_gib * 10) / 10
    return dataclasses.replace(config, train=dataclasses.replace(config.train, recompute=f"auto:{gib:g}GiB"))


def _what_pays(
    question: PlanRequest, layout: Candidate, base: RunConfig | None
) -> Iterator[tuple[str, PricedLayout, bool]]:
    """``within_budget``, where a layout that recomputes nothing does not fit. Of the seconds that full recomputation
    adds, it costs a share: of the FLOPs that a stage may compute again, those that it does, on the stage of the largest
    share."""
    if on_cpu(question.cluster):
        return
    kept, again = price(question, [dataclasses.replace(layout, recompute=name) for name in ("none", "full")])
    config = within_budget(question, layout, base)
    if kept.fits or config.problems(question.num_gpus):
        return
    case = as_case(config, question.num_gpus, question.shape, planned_modules(config))
    try:
        plans = recompute_plans(case, question.shape)
    except UserError:  # does not fit although everything is computed again
        return
    share = max((plan.flops / plan.most_flops for plan in plans if plan.flops), default=0.0)
    spent = {name: (1 - share) * kept.spent_s[name] + share * again.spent_s[name] for name in SPENT}
    stages = of_stages(case, question.shape, range(layout.pp))
    held = max(stages, key=lambda stage: stage.total)
    speed = kept.step_s / sum(spent.values())
    found = dataclasses.replace(
        kept, step_s=kept.step_s / speed, spent_s=spent, held_bytes={name: getattr(held, name) for name in HELD},
        fullest_stage=held.stage, host_bytes=max(stage.host for stage in stages),
        tokens_per_s_per_gpu=kept.tokens_per_s_per_gpu * speed, mfu=kept.mfu * speed,
    )  # fmt: skip
    yield f"recompute {config.train.recompute}", found, True


def _kept_otherwise(
    question: PlanRequest, layout: Candidate, base: RunConfig | None
) -> Iterator[tuple[str, PlanRequest]]:
    """What holds less, or launches otherwise, and is no matter of the layout; only what a GPU has."""
    if on_cpu(question.cluster):
        return
    optimizer = question.optimizer
    if layout.zero == 1 and layout.precision != "fp32" and not optimizer.optimizer_cpu_offload:
        aware = dataclasses.replace(optimizer, use_precision_aware_optimizer=True)
        if not optimizer.use_precision_aware_optimizer:
            yield "fp32 weights as 16 bits more", dataclasses.replace(question, optimizer=aware)
        if (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) == ("fp32", "fp32"):
            small = dataclasses.replace(aware, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
            yield "fp32 weights as 16 bits more, moments in bf16", dataclasses.replace(question, optimizer=small)
        yield "the optimizer on the host", kept_on_the_host(question)
    if layout.zero > 1 and not optimizer.optimizer_cpu_offload:
        yield "shards on the host", kept_on_the_host(question)
    if (question.cross_entropy_chunk_tokens or math.inf) > LOSS_CHUNK_TOKENS < layout.mbs * question.seq_length:
        yield f"logits of {LOSS_CHUNK_TOKENS:,} tokens at a time", in_pieces(question)
    away = activations_on_the_host(question, layout)
    more = away.cpu_offloading_num_layers > question.cpu_offloading_num_layers
    if more and layout.recompute != "full" and not _offload_problems(configuration(away, layout, base)):
        yield "activations on the host", away
    modules = modules_on_the_host(question, layout, base)
    if len(modules.offload_modules) > len(question.offload_modules) and layout.recompute != "full":
        yield "modules on the host", modules
    other = dataclasses.replace(question, compile=not question.compile)
    config = configuration(other, layout, base)
    if question.compile or not compile_problems(config.precision, config.kernels.graphs):
        yield f"{'without' if question.compile else 'with'} compiled blocks", other


def _offload_problems(config: RunConfig) -> list[str]:
    return offload_problems(config.train.cpu_offloading_num_layers, config.precision, config.kernels.graphs)


def _others(question: PlanRequest, layout: Candidate) -> Iterator[tuple[str, Candidate]]:
    ranks = layout.dp * layout.cp
    if layout.tp > 1:
        yield _without("sequence parallelism", layout, "sequence_parallel")
    if ranks > 1:
        if layout.zero <= 1:  # shards always overlap
            yield _without("overlap of reductions and gathers", layout, "overlap")
        for zero in (0, 1, 2, 3):
            other = dataclasses.replace(layout, zero=zero, copies=layout.copies if zero > 1 else 1)
            if zero != layout.zero and (zero <= 1 or question.can_shard(other)):
                yield f"ZeRO-{zero}", other
        if layout.zero > 1:
            for copies in copies_of_shards(question.without(), layout):
                if copies != layout.copies:
                    yield (
                        f"{copies} copies of the shards" if copies > 1 else "one copy of the shards",
                        (dataclasses.replace(layout, copies=copies)),
                    )
    for again in ("none", "full"):
        if again != layout.recompute:
            yield f"recompute {again}", dataclasses.replace(layout, recompute=again)
    for precision in ("bf16", "fp8"):
        if precision in computable(question.cluster) and precision != layout.precision:
            yield precision, dataclasses.replace(layout, precision=precision)


def _without(words: str, layout: Candidate, name: str) -> tuple[str, Candidate]:
    on: bool = getattr(layout, name)
    changes: dict[str, Any] = {name: not on}
    return f"{'without' if on else 'with'} {words}", dataclasses.replace(layout, **changes)
