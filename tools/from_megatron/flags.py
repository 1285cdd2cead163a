"""Every flag of Megatron-LM, and those of its forks that are known: how many values, and what becomes of it.

Tables write a flag as ``name``, ``name=1`` (values: a number, ``+`` one or more, ``*`` any) or ``name=1|word``: the
one value with which it changes nothing, while any other is not supported.
"""

import difflib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tools.from_megatron import flags_forks as forks
from tools.from_megatron import flags_translated as translated
from tools.from_megatron.flags_irrelevant import IRRELEVANT
from tools.from_megatron.flags_unsupported import OTHER_MODEL, UNSUPPORTED

type Fate = Literal["translated", "irrelevant", "unsupported"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, named without its dashes."""

    name: str
    arity: str
    """"0", "1", "3", "+" or "*"."""
    fate: Fate
    reason: str = ""
    """Why it is irrelevant; or what it does and what to use instead."""
    harmless: str | None = None
    """The one value with which it changes nothing."""
    other_model: bool = False
    """Whether it is another model, or another training, without it."""
    fork: bool = False
    """Whether it is a fork's, or an older version's."""


@functools.cache
def known() -> dict[str, Flag]:
    """All flags by name, not to be changed. Raises ValueError where a flag stands in the tables twice."""
    found: dict[str, Flag] = {}
    for flag in _all():
        if flag.name in found:
            raise ValueError(f"--{flag.name} is {found[flag.name].fate} and {flag.fate}.")
        found[flag.name] = flag
    return found


def nearest(name: str, flags: dict[str, Flag]) -> str:
    """``" Did you mean --x?"``, or nothing where no flag is near."""
    own = [each.name for each in flags.values() if not each.fork]
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
    return f" Did you mean --{near[0]}?" if near else ""


def _all() -> Iterator[Flag]:
    one = (
        translated.FIELDS,
        translated.EXPERT_FIELDS,
        translated.LATENT_FIELDS,
        translated.PREDICTION_FIELDS,
        translated.MAMBA_FIELDS,
        translated.LINEAR_FIELDS,
        translated.MUON_FIELDS,
        translated.MUP_FIELDS,
        translated.QK_CLIP_FIELDS,
        translated.FIM_FIELDS,
    )
    for name in (name for table in one for name in table):
        yield Flag(name, "1", "translated")
    for name in (*translated.SWITCHES, *translated.EXPERT_SWITCHES, *translated.KERNELS_OFF, *translated.KERNELS_ON):
        yield Flag(name, "0", "translated")
    for entry in (*itertools.chain(*translated.MEGATRON_FIELDS.values()), *translated.RULES.split()):
        yield _flag(entry, "translated", "")
    for name in forks.RENAMED:
        yield Flag(name, "1", "translated", fork=True)
    for name in forks.FIELDS_OF_FORKS:
        yield Flag(name, "1", "translated", fork=True)
    own = (*forks.RESPELLED, *forks.RULES_OF_FORKS.split())
    yield from (_flag(entry, "translated", "", fork=True) for entry in own)
    yield from _entries(IRRELEVANT, "irrelevant")
    yield from _entries(UNSUPPORTED, "unsupported")
    yield from _entries(OTHER_MODEL, "unsupported", other_model=True)
    yield from _entries(forks.IRRELEVANT_OF_FORKS, "irrelevant", fork=True)
    yield from _entries(forks.UNSUPPORTED_OF_FORKS, "unsupported", fork=True)
    yield from _entries(forks.OTHER_MODEL_OF_FORKS, "unsupported", other_model=True, fork=True)


def _entries(table: dict[str, str], fate: Fate, other_model: bool = False, fork: bool = False) -> Iterator[Flag]:
    for reason, entries in table.items():
        yield from (_flag(entry, fate, reason, other_model, fork) for entry in entries.split())


def _flag(entry: str, fate: Fate, reason: str, other_model: bool = False, fork: bool = False) -> Flag:
    written, _, harmless = entry.partition("|")
    name, _, arity = written.partition("=")
    return Flag(name, arity or "0", fate, reason, harmless or None, other_model, fork)
