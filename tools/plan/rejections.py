"""Why there is no layout, or not this one: in numbers, with the way out. No torch here."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from parallel.errors import UserError
from tools.plan.enumeration import candidates
from tools.plan.pricing import Plan, price
from tools.plan.question import AXES, Question
from tools.plan.recipe import problems
from training.memory.layouts import Candidate

WORDS = ("recompute", "precision")


def constraint(text: str) -> dict[str, int | str]:
    """``"TP=8,PP=4,recompute=full"`` as axes. Raises UserError for other names and for what is no number."""
    found: dict[str, int | str] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, equals, value = part.partition("=")
        name = name.lower()
        if not equals or name not in AXES:
            raise UserError(
                f'"{part}" is not one of {", ".join(axis.upper() for axis in AXES)} and a value: TP=8,PP=4.'
            )
        if name not in WORDS and not value.isdecimal():
            raise UserError(f'"{part}": expected a number, found "{value}".')
        found[name] = value if name in WORDS else int(value)
    return found


def no_layout(question: Question) -> UserError:
    """The error for a question without any legal layout."""
    free = question.without()
    if not candidates(free):
        return UserError(_no_division(free))
    blamed = _conflict(question)
    named = " and ".join(f"{name.upper()} {question.fixed[name]}" for name in blamed)
    if len(blamed) == 1:
        return UserError(f"{named} is impossible here: {_why_not(question, blamed[0])}")
    return UserError(f"{named} conflict: each has layouts, together they have none. {_why_together(question, blamed)}")


def _conflict(question: Question) -> tuple[str, ...]:
    """The fewest constraints that leave nothing."""
    for count in range(1, len(question.fixed) + 1):
        for names in itertools.combinations(question.fixed, count):
            if not candidates(question.without(*names)):
                return names
    return tuple(question.fixed)


def _why_not(question: Question, name: str) -> str:
    """One axis whose value nothing has: the program's own words where it has some, and the values that exist."""
    layouts = candidates(question.without())
    others = sorted({getattr(layout, name) for layout in layouts})
    stages = {"pp": _interleaved(question, layouts)} if name == "vpp" else {}
    own = dataclasses.replace(question, fixed={name: question.fixed[name], **stages})
    return f"{_own_words(own)}Possible: {', '.join(map(str, others))}."


def _interleaved(question: Question, layouts: Sequence[Candidate]) -> int | str:
    """Stages to speak of: those asked for, else the fewest that can be interleaved."""
    least = min((layout.pp for layout in layouts if layout.pp > 1), default=1)
    return question.fixed.get("pp", least)


def _why_together(question: Question, names: tuple[str, ...]) -> str:
    first, rest = names[0], names[1:]
    others = sorted({getattr(layout, first) for layout in candidates(question.without(*rest))})
    kept = " and ".join(f"{name.upper()} {question.fixed[name]}" for name in rest)
    own = _own_words(question.without(*names))
    return f"{own}With {kept}, {first.upper()} can be {', '.join(map(str, others))}."


def _own_words(question: Question) -> str:
    found = refusals(question)
    return f"{found[0]} " if found else ""


def refusals(question: Question) -> list[str]:
    """What pretrain_gpt.py says of the fixed axes, the others at 1."""
    sizes = {name: int(value) for name, value in question.fixed.items() if name not in (*WORDS, "dp", "zero")}
    whole = math.prod(sizes.get(name, 1) for name in ("tp", "cp", "pp"))
    dp = question.num_gpus // whole
    if question.num_gpus % whole or not dp:
        return [f"TP x CP x PP = {whole} does not divide {question.num_gpus} GPUs."]
    if question.fixed.get("dp", dp) != dp:
        return [f"TP x CP x PP = {whole} on {question.num_gpus} GPUs leaves DP {dp}, not {question.fixed['dp']}."]
    layout = Candidate(dp=dp, sequence_parallel=sizes.get("tp", 1) > 1, **sizes)  # type: ignore[arg-type]
    return problems(question, layout)


def _no_division(question: Question) -> str:
    """Nothing divides, whatever is chosen: nearly always the batch."""
    batch, world = question.global_batch_size, question.num_gpus
    replicas = _replica_counts(question)
    if not replicas:
        return (
            f"{question.model.shape} at seq_length {question.seq_length} cannot be divided over {world} GPUs: "
            f"{' '.join(refusals(question)) or 'no TP x CP x PP of it divides them.'} Use another number of GPUs."
        )
    near = sorted(
        {multiple for dp in replicas for multiple in (batch // dp * dp, -(-batch // dp) * dp) if multiple > 0},
        key=lambda size: abs(size - batch),
    )[:2]
    return (
        f"train.global_batch_size {batch} cannot be divided over {world} GPUs: the number of replicas of the model "
        f"must divide it, and can be {', '.join(map(str, replicas[:8]))}{', ...' if len(replicas) > 8 else ''} here. "
        f"Use {' or '.join(map(str, sorted(near)))} samples, or another number of GPUs."
    )


def _replica_counts(question: Question) -> list[int]:
    """DP sizes that some layout has, were the batch of any size: a product of all numbers up to the world's divides."""
    anything = dataclasses.replace(question, global_batch_size=question.num_gpus * 8 * 9 * 5 * 7)
    return sorted({layout.dp for layout in candidates(anything)})


def nothing_fits(question: Question, plans: list[Plan]) -> UserError:
    """The error for a question whose layouts all need too much memory: how many GPUs would do."""
    least = min(plans, key=lambda plan: plan.total_bytes)
    enough = gpus_that_fit(question)
    way = f"About {enough:,} GPUs would do." if enough else "No number of GPUs up to 64 times as many would do."
    return UserError(
        f"{question.model.shape} fits nowhere on {question.num_gpus:,} x {question.cluster.gpu.name}: the leanest "
        f"layout ({least.layout}) needs {least.total_bytes / 2**30:.0f} GiB of {least.memory_bytes / 2**30:.0f} GiB, "
        f"of which 80 % are safe. {way} A card with more memory, or fewer constraints, may also help."
    )


def gpus_that_fit(question: Question) -> int | None:
    """The smallest number of GPUs, doubling from the question's, on which some layout that runs today fits.

    The batch grows with them where it must.
    """
    free = question.without(*(name for name in question.fixed if name in ("precision", "recompute", "zero")))
    for power in range(1, 7):
        world = question.num_gpus * 2**power
        batch = max(question.global_batch_size, world)
        larger = dataclasses.replace(free, num_gpus=world, global_batch_size=-(-batch // world) * world)
        plans = price(larger, candidates(larger), keep=1)
        if any(plan.fits and plan.runs_today for plan in plans):
            return world
    return None
