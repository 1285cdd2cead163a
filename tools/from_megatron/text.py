"""A draft as TOML: a head of comments that says what was left behind, then each value with its source."""

import json
import textwrap
from collections.abc import Sequence

import tomli_w

from tools.from_megatron.draft import Draft
from training.config.recipe import sections

_WIDTH = 110


def toml(draft: Draft, origin: str, problems: Sequence[str]) -> str:
    """The recipe that ``training.config.recipe.load`` reads.

    origin: a sentence on where it comes from. problems: what a run of it would refuse.
    """
    parts = [_comment([f"Made by tools.from_megatron: {origin}"]), *map(_comment_block, summary(draft, problems))]
    parts.append(_table(draft, ""))
    for section in sections():
        if any(name.startswith(f"{section}.") for name in draft.values):
            parts.append(f"\n[{section}]\n{_table(draft, f'{section}.')}")
    return "".join(parts)


def summary(draft: Draft, problems: Sequence[str]) -> list[list[str]]:
    """What the user should know: blocks of a heading and lines; empty ones are left out."""
    blocks = [
        ["A run of this recipe would be refused:", *problems],
        ["Not known to Megatron-LM 0.19.2, and left out:", *draft.arguments.strays],
        ["Not supported, and left out:", *draft.unsupported],
        ["Left open:", *draft.open],
        ["Worth knowing:", *draft.notes],
        ["Changes nothing here:", *_by_reason(draft.irrelevant)],
    ]
    return [block for block in blocks if len(block) > 1]


def _by_reason(lines: Sequence[str]) -> list[str]:
    """Flags that share a reason share a line."""
    found: dict[str, list[str]] = {}
    for line in lines:
        flag, _, reason = line.partition(": ")
        found.setdefault(reason, []).append(flag)
    return [f"{', '.join(flags)}: {reason}." for reason, flags in found.items()]


def _comment_block(lines: Sequence[str]) -> str:
    return "#\n" + _comment([lines[0], *(f"- {line}" for line in lines[1:])])


def _comment(lines: Sequence[str]) -> str:
    wrapped = (
        textwrap.wrap(line, _WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
    return "".join(f"# {line}\n" for lines_ in wrapped for line in lines_)


def _table(draft: Draft, prefix: str) -> str:
    """The values of one section, or with an empty prefix those of none, each with a comment."""
    written = []
    for name, value in draft.values.items():
        key = name.removeprefix(prefix)
        if name.startswith(prefix) and "." not in key:
            written.append(f"{key} = {_value(value)}  # {draft.sources[name]}\n")
    return "".join(written)


def _value(value: object) -> str:
    """On one line. Words and lists of words and numbers are written by JSON as by TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value) if isinstance(value, list) else tomli_w.dumps({"x": value}).strip().removeprefix("x = ")
