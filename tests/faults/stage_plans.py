"""Recipes with ``[[stage]]`` tables drawn from a seed: lengths, data, curves, batches, layouts, skipped ranges."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

SEQ_LENGTHS = (16, 24, 32)
"""Which two context ranks with two slices each divide."""
SHAPES: dict[str, tuple[int, int, int]] = {
    "DP 2": (1, 1, 1), "TP 2": (2, 1, 1), "PP 2": (1, 2, 1), "CP 2": (1, 1, 2),
}  # fmt: skip
"""Sizes of AXES on two ranks."""
AXES = ("tensor_model", "pipeline_model", "context")
CURVES: Sequence[dict[str, Any]] = (
    {"lr_decay_style": "linear"},
    {"lr_decay_style": "constant", "weight_decay": 0.05},
    {"lr": 2e-3, "min_lr": 1e-4},
    {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 1, "lr_decay_style": "cosine"},
    {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2, "lr_wsd_decay_style": "linear"},
)
BASE = """
device = "cpu"
[model]
shape = "debug"
num_layers = 2
hidden_size = 32
ffn_hidden_size = 88
seq_length = 16
[precision]
dtype = "fp32"
[optimizer]
lr = 3e-3
min_lr = 1e-4
lr_warmup_iters = 2
[log]
log_interval = 1
tensorboard = false
report = false
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class StagePlan:
    """A recipe, and who may run it."""

    recipe: Path
    kind: str
    """In words."""
    own_layouts: bool
    """Stages have theirs, all on two ranks; else a start may choose."""
    skipped: frozenset[int]
    """Positions of samples that are not to be taken."""


def write_texts(folder: Path) -> None:
    """Three corpora of random words, so that no sample is like another; the last is read several times."""
    for name, documents in (("a", 120), ("b", 90), ("c", 6)):
        draw = Random(name)
        words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(documents * 30)]
        lines = [json.dumps({"text": " ".join(words[n * 30 : n * 30 + 30])}) for n in range(documents)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def drawn(seed: str, texts: str, folder: Path, most: int = 4, lengths: tuple[int, int] = (3, 5)) -> StagePlan:
    """A plan of at most so many stages, its recipe in ``folder``.

    texts: where corpus a, b or c is, with {} for its letter; text may be streamed. lengths: iterations of a stage, from
    and to.
    """
    draw = Random(seed)
    streams = draw.random() < 0.3 and texts.endswith(".jsonl")
    own_layouts, ramp = draw.random() < 0.25, draw.random() < 0.2
    size = 8 if ramp else draw.choice((4, 8))
    train: dict[str, Any] = {"global_batch_size": size, "seed": draw.randrange(1000)}
    if ramp:
        train["rampup_batch_size"] = [4, 4, 20]
    at, tables = Reached(size=size), list[dict[str, Any]]()
    for number in range(draw.randint(2, most)):
        changes = _changes(draw, texts, streams, keeps_batch=ramp) if number else {}
        at.size = changes.get("train.global_batch_size", at.size)
        at.seq_length = changes.get("model.seq_length", at.seq_length)
        at.go_on(draw.randint(*lengths))
        own = _layout(draw) if own_layouts else {}
        tables.append({"name": f"stage {number}", **changes, **own, **_until(draw, at, ramp)})
    if draw.random() < 0.5:
        train["iterations_to_skip"] = [draw.randint(1, at.iterations), f"{at.iterations}-{at.iterations + 3}"]
    begins = [draw.randrange(at.samples) for _ in range(draw.randrange(4))]
    gaps = [range(begin, begin + 1 + draw.randrange(12)) for begin in begins]
    data: dict[str, Any] = {"samples_to_skip": [f"{gap[0]}-{gap[-1]}" for gap in gaps], "split": "1,0,0"}
    data |= {"tokenizer": "byte", "cache_dir": str(folder / "cache"), "stream_count": 4, **_texts(draw, texts, streams)}
    checkpoint = {"save_interval": draw.randint(1, 3), "async_save": draw.random() < 0.5, "keep": 2}
    sections = {"train": train, "data": data, "checkpoint": checkpoint}
    recipe = folder / "staged.toml"
    parts = [f"[{name}]\n{_lines(section)}" for name, section in sections.items()]
    recipe.write_text("\n".join([BASE, *parts, *(f"[[stage]]\n{_lines(table)}" for table in tables)]))
    kinds = [f"{len(tables)} stages", "streams" if streams else "shards", *["own layouts"] * own_layouts]
    return StagePlan(recipe=recipe, kind=", ".join(kinds), own_layouts=own_layouts, skipped=frozenset(chain(*gaps)))


@dataclass(kw_only=True, slots=True)
class Reached:
    """How far stages come, a ramp of the batch aside."""

    size: int
    seq_length: int = SEQ_LENGTHS[0]
    iterations: int = 0
    samples: int = 0
    tokens: int = 0

    def go_on(self, iterations: int) -> None:
        """By so many, of now."""
        self.iterations += iterations
        self.samples += iterations * self.size
        self.tokens += iterations * self.size * self.seq_length


def _until(draw: Random, at: Reached, ramp: bool) -> dict[str, Any]:
    """Where a stage ends, in one of the units. ramp: iterations would be other ones."""
    unit = draw.choice(("samples", "tokens") if ramp else ("iterations", "samples", "tokens"))
    early = draw.randrange(at.size) * {"iterations": 0, "samples": 1, "tokens": at.seq_length}[unit]
    return {f"until_{unit}": getattr(at, unit) - early}


def _changes(draw: Random, texts: str, streams: bool, keeps_batch: bool) -> dict[str, Any]:
    """Some of what a stage may change; one thing at least."""
    found: dict[str, Any] = {"model.rotary_base": draw.choice((10_000, 500_000))}
    if draw.random() < 0.5 and not keeps_batch:
        found |= {"train.global_batch_size": draw.choice((4, 8)), "train.micro_batch_size": draw.choice((1, 2))}
    if draw.random() < 0.5:
        found["model.seq_length"] = draw.choice(SEQ_LENGTHS)
    if draw.random() < 0.6:
        found |= {f"data.{name}": value for name, value in _texts(draw, texts, streams).items()}
    if draw.random() < 0.6:
        found |= {f"optimizer.{name}": value for name, value in draw.choice(CURVES).items()}
    return found


def _texts(draw: Random, texts: str, streams: bool) -> dict[str, Any]:
    """A source or several, with weights where they have some."""
    names = [texts.format(name) for name in draw.sample("abc", draw.randint(1, 3))]
    if streams:
        return {"stream": sorted(names)}
    return {"blend": {name: draw.randint(1, 5) for name in names}} if draw.random() < 0.7 else {"paths": names}


def _layout(draw: Random) -> dict[str, Any]:
    sizes = draw.choice([*SHAPES.values()])
    return {f"parallel.{axis}_parallel_size": size for axis, size in zip(AXES, sizes, strict=True)}


def flags_of(layout: str) -> list[str]:
    """Of a start, for one of SHAPES."""
    sizes = zip(AXES, SHAPES[layout], strict=True)
    return [word for axis, size in sizes for word in (f"--parallel.{axis}_parallel_size", str(size))]


def _lines(table: dict[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in table.items())


def _value(value: Any) -> str:
    """As TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)
