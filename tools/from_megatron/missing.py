"""What a script takes from outside and was not given: all of it at once, with the command that gives it."""

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence

from program.errors import UserError
from tools.from_megatron.arguments import MAY_STAY_OPEN, Arguments, parse
from tools.from_megatron.flags import known
from tools.from_megatron.flags_translated import EXPERT_FIELDS, EXPERT_SWITCHES, LATENT_FIELDS, PREDICTION_FIELDS
from tools.from_megatron.shell.others import OtherAnswer
from tools.from_megatron.unknown import OpenText, ScriptWord, Unknown

_ONLY_WITH: dict[str, Iterable[str]] = {
    "num-experts": (*EXPERT_FIELDS, *EXPERT_SWITCHES, "moe-router-load-balancing-type", "moe-aux-loss-coeff"),
    "multi-latent-attention": LATENT_FIELDS,
    "mtp-num-layers": PREDICTION_FIELDS,
    "group-query-attention": ("num-query-groups",),
}
"""Flags that mean nothing without another one."""


def refuse_missing(
    arguments: Arguments, typed: Sequence[str], further: Mapping[Unknown, Sequence[str]] | None = None
) -> None:
    """Raises UserError where values that the training depends on are not known.

    typed: the words behind ``python -m tools.from_megatron``. further: what else is not known, and the flags that
    depend on it.
    """
    needed, rest = dict[Unknown, list[str]](), dict[Unknown, list[str]]()
    needed |= {unknown: [] for unknown in arguments.unknown_flags if unknown.assumed is None}
    idle = {flag for needs, flags in _ONLY_WITH.items() if needs not in arguments.given for flag in flags}
    depends = [(unknown, flag) for flag, words in arguments.given.items() for unknown in _unknowns(words)]
    depends += [(unknown, flag) for unknown, flags in (further or {}).items() for flag in flags]
    for unknown, flag in depends:
        if flag in MAY_STAY_OPEN:
            rest.setdefault(unknown, []).append(flag)
        elif flag not in idle and _must_be_known(flag):
            needed.setdefault(unknown, []).append(flag)
    if not needed:
        return
    rest = {unknown: flags for unknown, flags in rest.items() if unknown not in needed}
    lines = [f"{_count(len(needed), 'value is', 'values are')} not known on which the training depends:"]
    lines += [_line(unknown, flags) + _given_as(unknown, typed) for unknown, flags in needed.items()]
    if rest:
        lines += [f"and {_count(len(rest), 'value', 'values')} that may stay open:"]
        lines += [_line(unknown, flags) for unknown, flags in rest.items()]
    raise UserError("\n".join([*lines, *how_to_give([*needed, *rest], typed)]))


def choices(arguments: Arguments, others: Iterable[OtherAnswer]) -> dict[Unknown, list[str]]:
    """What decides between commands that a script may start, and the flags that differ."""
    found: dict[Unknown, list[str]] = {}
    for other in others:
        given = parse(other.launch.flags).given
        names = [name for name in {**arguments.given, **given} if arguments.given.get(name) != given.get(name)]
        asked = other.question
        found.setdefault(Unknown(asked.written, asked.line, asked.because, by_branch=True), []).extend(names)
    return found


def _unknowns(words: Sequence[ScriptWord]) -> list[Unknown]:
    return [unknown for word in words if isinstance(word, OpenText) for unknown in word.unknowns]


def _must_be_known(name: str) -> bool:
    """Whether a recipe depends on a flag's value: it is translated, or harmless with one value only."""
    flag = known()[name]
    return flag.fate == "translated" or flag.harmless is not None


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _line(unknown: Unknown, flags: Sequence[str]) -> str:
    where = f" (line {unknown.line})" if unknown.line else ""
    by = f", which depends on {', '.join(f'${name}' for name in unknown.sets)}" if unknown.by_branch else ""
    what = ", ".join(f"--{flag}" for flag in dict.fromkeys(flags)) or "further flags, whatever they are"
    return f"  {unknown.written}{where}{by}: {what}"


def _given_as(unknown: Unknown, typed: Sequence[str]) -> str:
    """Which --set has it as its value, where bash takes a word for a variable's name, as in $((X * 8))."""
    pairs = [word.partition("=") for before, word in itertools.pairwise(typed) if before == "--set"]
    return "".join(f" ({value} is what --set {name} gives)" for name, _, value in pairs if value in unknown.sets)


def how_to_give(unknowns: Iterable[Unknown], typed: Sequence[str]) -> list[str]:
    """Lines that say how to make unknown values known."""
    unknowns = list(unknowns)
    lines, names = list[str](), dict.fromkeys(name for unknown in unknowns for name in unknown.sets)
    if names:
        lines += ["Give them at once:" if len(names) > 1 else "Give it:", f"  {command(typed, names)}"]
    if fixed := list(dict.fromkeys(unknown.written for unknown in unknowns if not unknown.sets)):
        lines.append(f"What no --set can give, write into the script in its place: {', '.join(fixed)}")
    return lines


def command(typed: Sequence[str], names: Iterable[str]) -> str:
    """The command with --set for each name, to be typed."""
    ordered = sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0))
    words = [*typed, *(word for name in ordered for word in ("--set", f"{name}=VALUE"))]
    return f"python -m tools.from_megatron {shlex.join(words)} > recipe.toml"


def typed_words(source: str, given: Mapping[str, str]) -> list[str]:
    """What a user typed, as far as it can be shown on a line."""
    shown = source if "\n" not in source and len(source) < 200 else "SCRIPT"
    return [shown, *(word for name, value in given.items() for word in ("--set", f"{name}={value}"))]
