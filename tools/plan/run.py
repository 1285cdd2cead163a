"""From flags to answers, a function for each subcommand. trace and calibrate import torch themselves."""

import dataclasses
import difflib
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from models.config import ModelConfig
from models.families import named
from parallel.config import ParallelConfig
from program.errors import UserError
from tools import clusters
from tools.plan.calibrate.one_rank import made_up_links
from tools.plan.cost.hardware import computable, on_cpu
from tools.plan.flags import (
    BacktestFlags,
    CalibrateFlags,
    CompareFlags,
    ExplainFlags,
    RequestFlags,
    SearchFlags,
    SizeFlags,
    TraceFlags,
)
from tools.plan.report import results
from tools.plan.report import table as report
from tools.plan.search import recipe, rejections, sizing
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import PricedLayout, price
from tools.plan.search.ranking import distinct
from tools.plan.search.request import AXES, SWITCHES, PlanRequest
from tools.plan.search.selection import fitting
from tools.plan.search.switches import switched
from tools.shared.written import check_file, check_new, write_file
from training.config.activation_offload import offloaded_share
from training.config.divisibility import sequence_problems
from training.config.optimizer_config import OptimizerConfig
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.config.stages import stages
from training.memory.planned import kept_averages

RECOMPUTATIONS = ("none", "mlp", "moe", "full")


def search(flags: SearchFlags) -> None:
    """The table of layouts, and what is made of the best. Raises UserError for what cannot be answered."""
    base, question = _request(flags)
    _writable(flags.report, flags.write)
    plans, rows = planned(question, flags.top, base)
    chosen = plans[0]
    print("\n".join(report.details(chosen)))
    _finish(flags, question, question, plans, rows, chosen, base)


def explain(flags: ExplainFlags) -> None:
    """The same of one layout. Raises UserError where nothing allows it."""
    rejections.constraint(flags.layout)  # before anything is printed
    base, question = _request(flags)
    _writable(flags.report, flags.write)
    narrowed = _narrowed(question, flags.layout)
    plans, rows = planned(question, flags.top, base)
    chosen = explained(flags.layout, narrowed, plans, base)
    _finish(flags, question, narrowed, plans, rows, chosen, base)


def size(flags: SizeFlags) -> None:
    """What is answered without the layouts of the question."""
    base, question = _request(flags)
    for name in flags.show:
        lines = {
            "memory": lambda: results.memory_table(question),
            "smallest": lambda: sizing.smallest(question, base),
            "clusters": lambda: sizing.sizing(question, base),
        }[name]()
        print("\n".join(lines))


def trace(flags: TraceFlags) -> None:
    """The best layouts, run with tensors without values."""
    from tools.plan.trace import command

    base, question = _request(flags)
    plans, _ = planned(question, flags.layouts, base)
    whole = [plan for plan in distinct(plans) if plan.layout.zero <= 1]
    if not whole:
        raise UserError(
            "trace runs layouts of ZeRO-0 and ZeRO-1 alone, and all of these are of ZeRO-2 and -3. Use --zero 1."
        )
    command.trace(question, whole[: flags.layouts], base)


def compare(flags: CompareFlags) -> None:
    """Predicted against measured steps on this machine."""
    from tools.plan.calibrate import compare as calibrated

    refuse(flags)
    base = load(flags.recipe) if flags.recipe is not None else None
    calibrated.compare(asked(calibrated.filled(flags), base), base)


def backtest(flags: BacktestFlags) -> None:
    """The planner against a table of runs, which tests/planner of this checkout reads."""
    _in_a_folder(flags.output)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # an installation has no tests
    importlib.import_module("tests.planner.command").backtest(flags)


def calibrate(flags: CalibrateFlags) -> None:
    """This machine as a cluster file."""
    from tools.plan.calibrate import command

    command.calibrate(flags.output)


def refuse(flags: RequestFlags) -> None:
    """Raises UserError for values that no flag has."""
    if found := list(flags.problems()):
        raise UserError("\n".join(found))


def _request(flags: RequestFlags) -> tuple[RunConfig | None, PlanRequest]:
    """The recipe, if one was named, and the question; warns of links that were never measured."""
    refuse(flags)
    base = _first_stage(load(flags.recipe), flags.recipe) if flags.recipe is not None else None
    question = asked(flags, base)
    if question.num_gpus > 1 and (warning := made_up_links(question.cluster)):
        print(warning, file=sys.stderr)
    return base, question


def _first_stage(recipe: RunConfig, path: Path) -> RunConfig:
    """What a question about one recipe is asked of."""
    if not recipe.stage:
        return recipe
    print(
        f'{path} has [[stage]] tables: this plans the first, "{recipe.stage[0].name}", alone. All of them: python -m '
        f"tools.plan stages --recipe {path}",
        file=sys.stderr,
    )
    return stages(recipe)[0]


def _writable(page: Path | None, recipe: Path | None) -> None:
    _in_a_folder(page, recipe)
    if page is not None:
        from tools.plan.report.page import PLACE

        check_file(page, *PLACE)
    if recipe is not None:
        check_new(recipe)


def _in_a_folder(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UserError(f"{path}: cannot be written: {what}. Name a file in a folder that is there.")


def _finish(
    flags: SearchFlags,
    question: PlanRequest,
    narrowed: PlanRequest,
    plans: list[PricedLayout],
    rows: list[PricedLayout],
    chosen: PricedLayout,
    base: RunConfig | None,
) -> None:
    """What is made of the chosen layout. narrowed: with the sizes decided that were asked about."""
    if flags.tokens is not None:
        print("\n".join(results.cost(question, chosen, flags.tokens)))
    if flags.write is not None:
        length = None if flags.tokens is None else _length(question, chosen, flags.tokens)
        print(f"written: {flags.write}\n{recipe.write(flags.write, question, chosen, base, length, flags.full)}")
        if not chosen.fits:
            print("written as it was asked for, though it does not fit: see above.", file=sys.stderr)
    if flags.report is not None:
        from tools.plan.report.page import PLACE, render

        write_file(flags.report, render(narrowed, plans, rows, chosen, base).encode(), *PLACE)
        print(f"written: {flags.report}")


def _length(question: PlanRequest, chosen: PricedLayout, tokens: float) -> recipe.Length:
    """What ``results`` has printed."""
    return recipe.Length(
        train_iters=results.iterations(question, tokens), save_interval=results.save_interval(question, chosen.step_s),
        why_so_often=results.why_so_often(question),
    )  # fmt: skip


def asked(flags: RequestFlags, base: RunConfig | None) -> PlanRequest:
    """The question, every part of it checked. Raises UserError."""
    if flags.num_gpus is None or (flags.model is None and base is None):
        raise UserError("--num_gpus and --model (or --recipe) are needed, such as --model llama3_70b --num_gpus 64.")
    batch = flags.global_batch_size or (base.train.global_batch_size if base else None)
    if batch is None:
        raise UserError("--global_batch_size is needed: samples of an optimizer update, over all GPUs.")
    for name, size in (("num_gpus", flags.num_gpus), ("global_batch_size", batch), ("seq_length", flags.seq_length)):
        if size is not None and size < 1:
            raise UserError(f"--{name} must be 1 or more, found {size}.")
    cluster = clusters.load(flags.cluster)
    question = PlanRequest(
        model=_model(flags, base),
        cluster=cluster,
        num_gpus=flags.num_gpus,
        global_batch_size=batch,
        fixed={name: getattr(flags, name) for name in AXES if getattr(flags, name) is not None},
        grad_reduce_in_fp32=base is None or base.precision.grad_reduce_in_fp32,
        optimizer=OptimizerConfig() if base is None else base.optimizer,
        averages={} if base is None else kept_averages(base, not on_cpu(cluster)),
        cross_entropy_chunk_tokens=None if base is None else base.train.cross_entropy_chunk_tokens,
        cpu_offloading_num_layers=0 if base is None else base.train.cpu_offloading_num_layers,
        offload_modules=() if base is None else base.train.offload_modules,
        activation_offload_fraction=1.0 if base is None else offloaded_share(base.model.megatron),
        compile=base is not None and base.train.compile,
    )
    _check(question)
    return question


def _model(flags: RequestFlags, base: RunConfig | None) -> ModelConfig:
    if flags.model is not None:
        named(flags.model)  # raises with the nearest names
    model = base.model if base is not None else _unrecorded(flags.model or "")
    if flags.model is not None:
        model = dataclasses.replace(model, shape=flags.model)
    return model if flags.seq_length is None else dataclasses.replace(model, seq_length=flags.seq_length)


def _unrecorded(name: str) -> ModelConfig:
    """A model without a recipe: 4,096 tokens a sample, or as many as it has learned positions for."""
    shape = named(name)
    learned = shape.position_embedding_type == "learned_absolute"
    return ModelConfig(shape=name, seq_length=min(4096, shape.max_position_embeddings) if learned else 4096)


def _check(question: PlanRequest) -> None:
    """Constraints that no question has: a number format that the card lacks, words that are none."""
    problems = question.model.problems()
    if not problems:  # of the longest sample, whatever the layout
        problems += sequence_problems(question.model, question.shape, ParallelConfig())
    formats, cluster = computable(question.cluster), question.cluster
    precision, again = question.fixed.get("precision"), question.fixed.get("recompute")
    if precision is not None and precision not in formats:
        known = ", ".join(formats)
        problems.append(f"--precision {precision}: {cluster.gpu.name} computes in {known} here. Use one of these.")
    if again is not None and again not in RECOMPUTATIONS:
        near = difflib.get_close_matches(str(again), RECOMPUTATIONS, n=1)
        problems.append(f"--recompute {again}: expected {', '.join(RECOMPUTATIONS)}{_meant(near)}.")
    if question.fixed.get("zero", 1) not in (0, 1, 2, 3):
        problems.append(f"--zero {question.fixed['zero']}: expected 0, 1, 2 or 3.")
    problems += [
        f"{name.upper()}={question.fixed[name]}: expected 0 or 1, False or True."
        for name in SWITCHES
        if question.fixed.get(name, 0) not in (0, 1)
    ]
    problems += [
        f"--{name} must be 1 or more, found {value}."
        for name, value in question.fixed.items()
        if isinstance(value, int) and name not in ("zero", *SWITCHES) and value < 1
    ]
    if problems:
        raise UserError("\n".join(problems))


def _meant(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""


def planned(
    question: PlanRequest, top: int, base: RunConfig | None = None
) -> tuple[list[PricedLayout], list[PricedLayout]]:
    """Prices everything, prints the table, returns the plans that fit, the best first, and those in the table."""
    start = time.perf_counter()
    layouts = candidates(question)
    if not layouts:
        raise rejections.no_layout(question)
    plans = fitting(question, layouts, base)
    seconds = time.perf_counter() - start
    if not plans:
        raise rejections.nothing_fits(question, price(question, layouts))
    print("\n".join(report.heading(question, len(layouts), seconds)))
    rows = distinct(plans)[:top]
    print("\n".join(report.table(rows)))
    return plans, rows


def _narrowed(question: PlanRequest, sizes: str) -> PlanRequest:
    """With the sizes decided that are asked about. Raises UserError for what no question has."""
    narrowed = dataclasses.replace(question, fixed=question.fixed | rejections.constraint(sizes))
    _check(narrowed)
    return narrowed


def explained(
    sizes: str, narrowed: PlanRequest, plans: Sequence[PricedLayout], base: RunConfig | None = None
) -> PricedLayout:
    """The best layout of these sizes against the best of all, or what forbids them."""
    layouts = candidates(narrowed)
    if not layouts:
        refused = rejections.refusals(narrowed)
        raise UserError(
            "\n".join([f"{sizes} is not possible:", *refused] if refused else [str(rejections.no_layout(narrowed))])
        )
    fit = fitting(narrowed, layouts, base)
    chosen = fit[0] if fit else min(price(narrowed, layouts), key=lambda plan: plan.total_bytes)
    lines = [f"{sizes}: {len(layouts):,} layouts; the best of them, {chosen.layout}:", *report.verdict(chosen)]
    lines += [*report.against(chosen, plans[0]), *report.details(chosen)]
    print("\n".join([*lines, *report.switches(chosen, switched(narrowed, chosen, base))]))
    return chosen
