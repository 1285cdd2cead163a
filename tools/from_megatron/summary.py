"""What a user should know beside the recipe: blocks of a heading and lines."""

import difflib
import shlex
from collections.abc import Mapping, Sequence

from program.errors import UserError
from tools.from_megatron.arguments import parse
from tools.from_megatron.draft import Draft
from tools.from_megatron.missing import how_to_give
from tools.from_megatron.script import ScriptReading
from tools.from_megatron.shell.others import OtherAnswer
from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.unknown import ScriptWord, joined

MOST_CHANGES = 6
"""Flags that a line names."""
NOT_UNDERSTOOD = "Not understood, and may change the model, the data or the schedule"


def blocks(draft: Draft, problems: Sequence[str], typed: Sequence[str]) -> list[list[str]]:
    """Headings with their lines; empty ones are left out. typed: the words of the command, for the one to type next."""
    further = "\n".join(how_to_give(draft.wanted, typed)).replace(":\n  ", ": ").splitlines()
    found = [
        ["A run of this recipe would be refused:", *problems],
        ["Another model or another training without these, which are left out (--allow_partial):", *draft.other_model],
        [f"{NOT_UNDERSTOOD}, and left out (--allow_partial):", *draft.not_understood],
        ["Not known to Megatron-LM 0.19.2, and left out:", *draft.arguments.strays],
        ["Not supported, and left out; model, data and the schedule of --lr are the same:", *draft.unsupported],
        ["Left open:", *draft.open, *further],
        ["Worth knowing:", *draft.notes],
        ["Changes nothing here:", *_by_reason(draft.irrelevant)],
    ]
    return [block for block in found if len(block) > 1]


def refusal(other_model: Sequence[str], not_understood: Sequence[str], typed: Sequence[str]) -> str:
    """Why there is no recipe though everything could be read, and what to do. typed: as for ``blocks``."""
    lines = ["no recipe: it would not train what the script trains."]
    if other_model:
        lines += ["Another model or another training without these:", *_items(other_model)]
    if not_understood:
        lines += [
            f"{NOT_UNDERSTOOD}:", *_items(not_understood),
            "Say each by flags of Megatron-LM 0.19.2, or take it out where it changes nothing that is trained.",
        ]  # fmt: skip
    partial = f"  python -m tools.from_megatron {shlex.join([*typed, '--allow_partial'])} > recipe.toml"
    return "\n".join([*lines, "To write the recipe without all of these, and to add by hand what it lacks:", partial])


def _items(lines: Sequence[str]) -> list[str]:
    return [f"  - {line}" for line in lines]


def _by_reason(lines: Sequence[str]) -> list[str]:
    """Flags that share a reason share a line."""
    found: dict[str, list[str]] = {}
    for line in lines:
        flag, _, reason = line.partition(": ")
        found.setdefault(reason, []).append(flag)
    return [f"{', '.join(flags)}: {reason}." for reason, flags in found.items()]


def note_answers(draft: Draft, answers: Sequence[OtherAnswer], launch: Launch) -> None:
    """Say which branches were guessed, and what the other way would change."""
    for answer in answers:
        question = answer.question
        changes = _changes(launch.flags, answer.launch.flags)
        taken = "taken to hold" if question.taken else "taken not to hold"
        if question.because:
            names = ", ".join(f"${name}" for name in question.because)
            are = "is" if len(question.because) == 1 else "are"
            draft.notes.append(
                f"line {question.line}: {names} {are} not set, and {question.written} was {taken}. --set "
                f"{question.because[0]}=VALUE may change that, which would {changes}."
            )
        else:
            draft.open.append(
                f"line {question.line}: {question.written} depends on files or on what a program answers, and was "
                f"{taken}. The other way would {changes}: write true or false in its place to decide it."
            )


def _changes(here: Sequence[ScriptWord], there: Sequence[ScriptWord]) -> str:
    """``add --a 1; leave out --b; change --c 1 to 2``."""
    try:
        one, other = parse(here), parse(there)
    except UserError:
        return "change the flags"
    changes = [f"add {_written(name, values)}" for name, values in other.given.items() if name not in one.given]
    changes += [f"leave out --{name}" for name in one.given if name not in other.given]
    changes += [
        f"change --{name} from {joined(one.given[name]) or 'nothing'} to {joined(values) or 'nothing'}"
        for name, values in other.given.items()
        if one.given.get(name, values) != values
    ]
    changes += ["change flags that are not understood"] * (one.not_understood != other.not_understood and not changes)
    rest = len(changes) - MOST_CHANGES
    return "; ".join(changes[:MOST_CHANGES]) + (f"; and {rest} more" if rest > 0 else "") or "change nothing else"


def _written(name: str, values: Sequence[ScriptWord]) -> str:
    return joined([f"--{name}", *values])


def note_overwritten(draft: Draft, overwritten: Mapping[str, int]) -> None:
    """Say which --set has no effect."""
    for name, line in overwritten.items():
        draft.notes.append(f"--set {name} has no effect: line {line} of the script sets {name} itself.")


def note_not_read(draft: Draft, script: ScriptReading) -> None:
    """Say which --set is of a name that the script does not read."""
    for name in script.not_read:
        near = difflib.get_close_matches(name, script.names - {name}, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]}?" if near else ""
        read = f"${name}" if name.isidentifier() or name.isdigit() else name
        draft.notes.append(f"--set {name} has no effect: the script does not read {read}.{hint}")
