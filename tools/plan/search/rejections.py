"""Why there is no layout, or not this one: in numbers, with what would help."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from models.costs.candidate import Candidate
from models.costs.predict import SAFE_HOST_SHARE, SAFE_SHARE
from program.errors import UserError
from tools.plan.cost.hardware import precisions
from tools.plan.search.enumeration import candidates
from tools.plan.search.gpu_counts import LARGEST, fits, gpu_counts
from tools.plan.search.pricing import PricedLayout
from tools.plan.search.recipe import problems
from tools.plan.search.request import AXES, SWITCHES, PlanRequest

MORE = 64
"""Times the GPUs that were asked for, up to which more are looked for."""
WORDS = ("recompute", "precision")
TRUTH = {"true": "1", "false": "0"}


def constraint(text: str) -> dict[str, int | str]:
    """``"TP=8,PP=4,recompute=full"`` as axes. Raises UserError for other names and for what is not a number."""
    found: dict[str, int | str] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, equals, value = part.partition("=")
        name = name.lower()
        if not equals or name not in AXES:
            raise UserError(
                f'"{part}" is not one of {", ".join(axis.upper() for axis in AXES)} and a value: TP=8,PP=4.'
            )
        if name in SWITCHES:
            value = TRUTH.get(value.lower(), value)
        if name not in WORDS and not value.isdecimal():
            raise UserError(f'"{part}": expected a number, found "{value}".')
        found[name] = value if name in WORDS else int(value)
    return found


def no_layout(question: PlanRequest) -> UserError:
    """The error for a question without any legal layout."""
    free = question.without()
    if not candidates(free):
        return UserError(_no_division(free))
    blamed = _conflict(question)
    named = " and ".join(f"{name.upper()} {question.fixed[name]}" for name in blamed)
    if len(blamed) == 1:
        return UserError(f"{named} is impossible here: {_why_not(question, blamed[0])}")
    return UserError(f"{named} conflict: each has layouts, together they have none. {_why_together(question, blamed)}")


def _conflict(question: PlanRequest) -> tuple[str, ...]:
    """The fewest constraints that leave nothing."""
    for count in range(1, len(question.fixed) + 1):
        for names in itertools.combinations(question.fixed, count):
            if not candidates(question.without(*names)):
                return names
    return tuple(question.fixed)


def _why_not(question: PlanRequest, name: str) -> str:
    """One axis whose value nothing has: the program's own words where it has some, and the values that exist."""
    layouts = candidates(question.without())
    others = sorted({getattr(layout, name) for layout in layouts})
    stages = {"pp": _interleaved(question, layouts)} if name == "vpp" else {}
    own = dataclasses.replace(question, fixed={name: question.fixed[name], **stages})
    how = " (in equal chunks, or by layout strings; not all of these are tried)" if name == "vpp" else ""
    return f"{_own_words(own)}Possible: {', '.join(map(str, others))}{how}."


def _interleaved(question: PlanRequest, layouts: Sequence[Candidate]) -> int | str:
    """Stages to speak of: those asked for, else the fewest that can be interleaved."""
    least = min((layout.pp for layout in layouts if layout.pp > 1), default=1)
    return question.fixed.get("pp", least)


def _why_together(question: PlanRequest, names: tuple[str, ...]) -> str:
    first, rest = names[0], names[1:]
    others = sorted({getattr(layout, first) for layout in candidates(question.without(*rest))})
    kept = " and ".join(f"{name.upper()} {question.fixed[name]}" for name in rest)
    own = _own_words(question.without(*names))
    return f"{own}With {kept}, {first.upper()} can be {', '.join(map(str, others))}."


def _own_words(question: PlanRequest) -> str:
    found = refusals(question)
    return f"{found[0]} " if found else ""


def refusals(question: PlanRequest) -> list[str]:
    """What pretrain_gpt.py says of the fixed axes, the others at 1."""
    others = (*WORDS, *SWITCHES, "dp")
    sizes = {name: int(value) for name, value in question.fixed.items() if name not in others}
    if "copies" in sizes:
        sizes.setdefault("zero", 3)
    whole = math.prod(sizes.get(name, 1) for name in ("tp", "cp", "pp"))
    dp = question.num_gpus // whole
    if question.num_gpus % whole or not dp:
        return [f"TP x CP x PP = {whole} does not divide {question.num_gpus} GPUs."]
    if question.fixed.get("dp", dp) != dp:
        return [f"TP x CP x PP = {whole} on {question.num_gpus} GPUs leaves DP {dp}, not {question.fixed['dp']}."]
    pieces = question.splits_sequences(sizes.get("tp", 1))
    precision = str(question.fixed.get("precision", precisions(question.cluster)[0]))
    layout = Candidate(dp=dp, sequence_parallel=pieces, precision=precision, **sizes)  # type: ignore[arg-type]
    return problems(question, layout)


def _no_division(question: PlanRequest) -> str:
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


def _replica_counts(question: PlanRequest) -> list[int]:
    """DP sizes that some layout has, were the batch of any size: a product of all numbers up to the world's divides."""
    anything = dataclasses.replace(question, global_batch_size=question.num_gpus * 8 * 9 * 5 * 7)
    return sorted({layout.dp for layout in candidates(anything)})


def nothing_fits(question: PlanRequest, plans: list[PricedLayout]) -> UserError:
    """The error for a question whose layouts all need too much memory: how many GPUs would do, or what to lift."""
    least = min(plans, key=lambda plan: plan.total_bytes)
    asked = f"{question.model.shape} fits nowhere on {question.num_gpus:,} x {question.cluster.gpu.name}"
    if least.fits_card:
        least = min((plan for plan in plans if plan.fits_card), key=lambda plan: plan.host_bytes)
        share = f"{least.host_memory_bytes / 2**30:.0f} GiB, a GPU's share of its node, {SAFE_HOST_SHARE:.0%} are safe"
        return UserError(
            f"{asked}: of those that fit the card, the leanest layout ({least.layout}) leaves "
            f"{least.host_bytes / 2**30:.0f} GiB of each rank to the host's memory; of {share}. {_fix(question)}"
        )
    return UserError(
        f"{asked}: the leanest layout ({least.layout}) needs {least.total_bytes / 2**30:.0f} GiB of "
        f"{least.memory_bytes / 2**30:.0f} GiB, of which {SAFE_SHARE:.0%} are safe. {_fix(question)}"
    )


def _fix(question: PlanRequest) -> str:
    kept = f" with {_named(question, tuple(question.fixed))}" if question.fixed else ""
    enough = gpus_that_fit(question)
    if enough is not None:
        return f"{_so_many(question, enough)} would do{kept}. A card with more memory may also help."
    most = f"No number of GPUs up to {_most(question):,} would do{kept}."
    lifted, without = constraints_to_lift(question)
    if without is None:
        return f"{most} Use a card with more memory, or a smaller model."
    ways = " or ".join(" and ".join(f"--{name}" for name in names) for names in lifted)
    here = without.num_gpus == question.num_gpus
    return f"{most} Lift {ways}: then {'something fits here' if here else f'{_so_many(question, without)} would do'}."


def _so_many(question: PlanRequest, enough: PlanRequest) -> str:
    batch = enough.global_batch_size
    grown = f" and --global_batch_size {batch}" if batch != question.global_batch_size else ""
    return f"{enough.num_gpus:,} GPUs{grown}"


def _named(question: PlanRequest, names: tuple[str, ...]) -> str:
    words = [f"--{name} {question.fixed[name]}" for name in names]
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def gpus_that_fit(question: PlanRequest) -> PlanRequest | None:
    """The question on the fewest GPUs, above its own, on which some layout fits; None: on none.

    With a larger batch only where no number of GPUs would do for this one.
    """
    counts = [count for count in gpu_counts(question.cluster) if question.num_gpus < count <= _most(question)]
    same = [dataclasses.replace(question, num_gpus=count) for count in counts]
    return next((each for each in (*same, *map(_with_more_samples, same)) if fits(each)), None)


def _most(question: PlanRequest) -> int:
    return max(question.num_gpus, min(question.num_gpus * MORE, LARGEST))


def _with_more_samples(question: PlanRequest) -> PlanRequest:
    """A batch that any number of replicas divides."""
    world = question.num_gpus
    batch = -(-question.global_batch_size // world) * world
    return dataclasses.replace(question, global_batch_size=batch)


def constraints_to_lift(question: PlanRequest) -> tuple[list[tuple[str, ...]], PlanRequest | None]:
    """The fewest constraints without which something fits, all choices of them, and one of those questions.

    One or two on the question's GPUs, doubled and doubled again; else all of them, on whatever number would do.
    """
    counts = [question.num_gpus * 2**power for power in range(MORE.bit_length())]
    for few in (1, 2):
        for count in (count for count in counts if count <= _most(question)):
            without = {
                names: dataclasses.replace(_lifted(question, names), num_gpus=count)
                for names in itertools.combinations(question.fixed, few)
            }
            if found := [names for names, each in without.items() if fits(each)]:
                return found, without[found[0]]
    return [tuple(question.fixed)], gpus_that_fit(question.without()) if question.fixed else None


def _lifted(question: PlanRequest, names: tuple[str, ...]) -> PlanRequest:
    return question.without(*(name for name in question.fixed if name not in names))
