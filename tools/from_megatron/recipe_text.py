"""A draft as TOML: a head of comments that says what was left behind, then each value with its source."""

import textwrap
from collections.abc import Sequence

import tomli_w

from tools.from_megatron.draft import DEFAULT, Draft
from training.config.recipe import names, sections
from training.config.run_config import RunConfig

_WIDTH = 110


def toml(draft: Draft, origin: str, blocks: Sequence[Sequence[str]]) -> str:
    """The recipe that ``training.config.recipe.load`` reads.

    origin: a sentence on where it comes from. blocks: headings with their lines, for its head.
    """
    parts = [_comment([f"Made by tools.from_megatron: {origin}"]), *map(_comment_block, blocks)]
    shown = _shown(draft)
    top = _table(draft, "", shown)
    parts += ["\n" + top] if top else []
    for section in sections():
        if any(name.startswith(f"{section}.") for name in shown):
            parts.append(f"\n[{section}]\n{_table(draft, f'{section}.', shown)}")
    return "".join(parts)


def _shown(draft: Draft) -> list[str]:
    """Fields in the configuration's own order. What Megatron-LM and Triplane have by default alike is left out, but for
    the model, which would be that of model.shape."""
    defaults = RunConfig()
    order = [name for name in names() if name in draft.values]

    def differs(name: str) -> bool:
        section, _, key = name.rpartition(".")
        default = getattr(getattr(defaults, section) if section else defaults, key)
        value = list(default) if isinstance(default, tuple) else default
        return bool(value != draft.values[name] or type(value) is not type(draft.values[name]))

    by_default = [name for name in order if draft.sources[name] == DEFAULT or draft.sources[name].startswith("no --")]
    return [name for name in order if name.startswith("model.") or name not in by_default or differs(name)]


def _comment_block(lines: Sequence[str]) -> str:
    return "#\n" + _comment([lines[0], *(f"- {line}" for line in lines[1:])])


def _comment(lines: Sequence[str]) -> str:
    wrapped = (
        textwrap.wrap(part, _WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
        for part in line.splitlines()
    )
    return "".join(f"# {line}\n" for lines_ in wrapped for line in lines_)


def _table(draft: Draft, prefix: str, shown: Sequence[str]) -> str:
    """The values of one section, or with an empty prefix those of none, each with a comment."""
    written = []
    for name in shown:
        key = name.removeprefix(prefix)
        if name.startswith(prefix) and "." not in key:
            written.append(f"{key} = {_value(draft.values[name])}  # {draft.sources[name]}\n")
    return "".join(written)


def _value(value: object) -> str:
    """On one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_value(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"x": value}).strip().removeprefix("x = ")
