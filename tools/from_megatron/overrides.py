"""What is kept of a configuration of Megatron-Bridge's that changes a recipe, whose model is named with --shape."""

import re
from collections.abc import Iterable

from tools.from_megatron import flags_translated as table
from tools.from_megatron.draft import Draft
from tools.from_megatron.sources import SourceReading
from tools.from_megatron.unknown import ScriptWord, joined

_FLAG = re.compile(r"--[a-z][\w-]*")
_FROM_BASE = ("no --", "data.", "model.vocab_size")
"""How lines begin that miss what the recipe says which is changed."""


_READ_WITH = {
    "--group-query-attention": "--num-query-groups",
    "--tokenizer-type": "--tokenizer-model",
    "--manual-gc": "--manual-gc-interval",
    "--use-megatron-fsdp": "--data-parallel-sharding-strategy",
}
"""Flags that no field names as its source: another one's does."""


def keep_changes(draft: Draft, reading: SourceReading) -> None:
    """Of a recipe that changes a named shape, only what is given: what else the other recipe says is not known.

    What is given and neither becomes a field nor has a line of its own is said to be not understood.
    """
    given = _given(reading.launch.flags, reading.filled_in)
    kept = {}
    for name, value in draft.values.items():
        source = draft.sources[name]
        flags = set(_FLAG.findall(source))
        if source.startswith("no --") and source.removeprefix("no --") in reading.off:
            kept[name], draft.sources[name] = value, f"false there ({source.removeprefix('no ')})"
        elif source.startswith("--") and flags <= given.keys():
            kept[name] = value
    draft.values = kept
    for flag in sorted(reading.off & table.KERNELS_ON.keys()):
        draft.add("kernels.off", table.KERNELS_ON[flag], f"false there (--{flag})")
    draft.put("model.shape", reading.shape, "--shape")
    _forget(draft, reading.filled_in - given.keys())
    said = " ".join([*(draft.sources[name] for name in kept), *draft.irrelevant, *draft.unsupported, *draft.other_model,
                     *draft.not_understood, *draft.open, *draft.notes])  # fmt: skip
    mentioned = set(_FLAG.findall(said))
    mentioned |= {flag for flag, other in _READ_WITH.items() if other in mentioned}
    for flag, words in given.items():
        if flag not in mentioned:
            draft.not_understood.append(
                f"{joined([flag, *words])}: what it changes depends on the recipe that this changes. Give the whole "
                "configuration (run_config.yaml), or set the field yourself."
            )
    _say_what_is_missing(draft)


def _given(words: Iterable[ScriptWord], filled_in: frozenset[str]) -> dict[str, list[ScriptWord]]:
    """The source's own flags with their values."""
    found: dict[str, list[ScriptWord]] = {}
    values: list[ScriptWord] = []
    for word in words:
        if str(word).startswith("--"):
            values = []
            if str(word) not in filled_in:
                found[str(word)] = values
        else:
            values.append(word)
    return found


def _forget(draft: Draft, filled_in: frozenset[str]) -> None:
    """Lines about flags that are not the source's, and about what the other recipe says."""
    for lines in (draft.irrelevant, draft.unsupported, draft.other_model, draft.not_understood):
        lines[:] = [
            line
            for line in lines
            if not line.startswith(_FROM_BASE) and (_FLAG.match(line) or [""])[0] not in filled_in
        ]


def _say_what_is_missing(draft: Draft) -> None:
    for name, flag in (("data.paths", "--data-path"), ("data.tokenizer", "--tokenizer-type")):
        missing = [
            line for line in [*draft.notes, *draft.open] if line.startswith((f"no {flag}:", f"{name}: no {flag}"))
        ]
        if missing:
            draft.notes = [line for line in draft.notes if line not in missing]
            draft.open = [line for line in draft.open if line not in missing]
            draft.open.append(f"{name}: this file does not say it; the recipe that it changes does.")
    draft.notes.append(
        "what this file does not say is Triplane's default, and not that of the recipe which it changes: compare the "
        "learning rate, the batch and the schedule with it."
    )
