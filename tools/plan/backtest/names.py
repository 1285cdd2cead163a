"""Models' names as tables spell them, found among those that are known.

"meta-llama/Llama-3.1-405B-Instruct", "llama3.1 405b" and "llama31_405b" are one model: organizations, separators and
capitals do not count, nor what follows the longest known name. What follows must stand apart from it ("Llama-3-8B" in
"Llama-3-8B-v0.1", but not "GPT-2" in "GPT-2.7B"), and a size that is given must be about the model's.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from models.families import ALIASES, SHAPES
from models.parameters import active_parameters, num_parameters
from models.shapes import GPTShape
from tools.plan.backtest.benchmarked import BENCHMARKED
from tools.plan.backtest.dimensions import dimensions

OTHER_NAMES = {
    **ALIASES,
    "llama33_70b": "llama31_70b", "llama_8b": "llama31_8b", "llama_405b": "llama31_405b",
    "llama4_17b_16e": "llama4_scout", "llama4_17b_128e": "llama4_maverick",
    "deepseek_r1": "deepseek_v3", "deepseek_v3_1": "deepseek_v3", "deepseek_v3_2": "deepseek_v3",
    "deepseek_v2_5": "deepseek_v2", "gpt_3": "gpt3_175b", "gpt2_1_5b": "gpt2_xl", "bloom": "bloom_176b",
    "mt_nlg": "mt_nlg_530b", "megatron_turing_nlg": "mt_nlg_530b", "nemotron_15b": "nemotron4_15b",
    "nemotron_340b": "nemotron4_340b", "qwen3_vl_235b_a22b": "qwen3_235b_a22b",
    "qwen3_vl_30b_a3b": "qwen3_30b_a3b",
}  # fmt: skip
"""Releases of the same dimensions (a VL's text model), and short names of what comes in one size only."""
ABOUT = 0.3
"""Share by which a given size may differ: "8x7B" is 46.7 billion parameters, "Nemotron 3 Nano 30B" here 35."""


def spelled(text: str) -> str:
    """As names of presets are spelled: llama3_70b."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


@cache
def known() -> Mapping[str, GPTShape]:
    """Every model whose dimensions are known.

    Depths of multi-token prediction are part of a recipe, not of the name: benchmarks leave them out.
    """
    presets = {name: _without_depths(shape) for name, shape in SHAPES.items()}
    return {**dimensions(), **presets, **BENCHMARKED}


def known_as(text: str) -> str | None:
    """The key of ``known`` for a model's name; None where the name is of none of them."""
    exact = spelled(text)
    if found := next((name for name in (exact, OTHER_NAMES.get(exact, "")) if name in known()), None):
        return found
    return _begins(_clean(text))


def billions(text: str) -> float | None:
    """The size that a name tells, in billions of parameters: 70 of "Llama3-70B", 0.125 of "MPT-125m"."""
    found = re.search(r"(?<![\d.])(?:(\d+)x)?(\d+(?:\.\d+)?)\s*([mbt])(?![a-z0-9])", _clean(text))
    if found is None:
        return None
    return float(found[1] or 1) * float(found[2]) * {"m": 1e-3, "b": 1.0, "t": 1e3}[found[3]]


@cache
def _begins(text: str) -> str | None:
    stated = billions(text)
    found = ""
    name = None
    for letters, target in _letters().items():
        longer = len(letters) > len(found) and _prefix(letters, text)
        if longer and (stated is None or _is_size(known()[target], stated)):
            found, name = letters, target
    return name


@cache
def _letters() -> dict[str, str]:
    """Known names without their separators; mixtures without their active size, too: qwen3235b."""
    names = {name: name for name in known()} | OTHER_NAMES
    short = {re.sub(r"_a\d+b$", "", name): target for name, target in names.items()}
    return {name.replace("_", ""): target for name, target in (short | names).items()}


def _prefix(letters: str, text: str) -> bool:
    """Whether a name begins with these letters, and then ends, or has a separator that is no decimal point."""
    place = 0
    for letter in letters:
        while place < len(text) and not text[place].isalnum():
            place += 1
        if place == len(text) or text[place] != letter:
            return False
        place += 1
    rest = text[place:]
    return not rest or not (rest[0].isalnum() or (text[place - 1].isdigit() and re.match(r"\.\d", rest)))


def _clean(text: str) -> str:
    """Without the organization before it and words that make no difference."""
    name = text.strip().rsplit("/", 1)[-1].lower().replace("×", "x")
    name = re.sub(r"(?<![a-z0-9])(meta|moe)(?![a-z0-9])", "", name)
    return re.sub(r"\.0+(?=[mbt]\b)", "", name).strip(" -_")


def _is_size(shape: GPTShape, stated: float) -> bool:
    """All parameters, or those that a token meets."""
    sizes = (num_parameters(shape) / 1e9, active_parameters(shape) / 1e9)
    return any(abs(stated / size - 1) < ABOUT for size in sizes)


def _without_depths(shape: GPTShape) -> GPTShape:
    return replace(shape, mtp_num_layers=0)
