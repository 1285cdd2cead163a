"""Trainings of a small model on a layout, and how far two of them are from each other."""

from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.circumstances import ROOT
from tools.inspect_checkpoint.compare import Comparison, compare, pairs
from tools.inspect_checkpoint.contents import parameters
from tools.parity.layouts import shrink, with_layout
from tools.shared.held_checkpoint import find
from training.checkpoint.format.reader import FileReader
from training.cli import parse
from training.config.recipe import dump
from training.metrics.jsonl import read_jsonl

DEBUG = ROOT / "slurm/recipes/debug.toml"


@dataclass(kw_only=True, slots=True, frozen=True)
class Training:
    """A model on a layout, as tools.parity writes them; the rest is the debug recipe's."""

    layout: str = ""
    shape: str = "debug"

    def write_recipe(self, path: Path) -> int:
        """The number of ranks."""
        config = shrink(parse.parse_config([str(DEBUG), "--model.shape", self.shape]))
        config, world_size = with_layout(config, self.layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(config))
        return world_size


def losses(run_dir: Path) -> list[float]:
    """Training losses, iteration by iteration."""
    return [line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]


def loss_difference(run_dir: Path, reference: Path) -> float:
    """Largest relative difference of two runs' losses."""
    found, expected = losses(run_dir), losses(reference)
    assert len(found) == len(expected) > 0, (len(found), len(expected))
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def checkpoint_differences(run_dir: Path, reference: Path, generators: bool = False) -> list[Comparison]:
    """The newest checkpoints of two runs, tensor by tensor. generators: random ones, too, which each device has of its
    own."""
    paths = [find(folder) for folder in (run_dir, reference)]
    with FileReader(paths[0]) as one, FileReader(paths[1]) as other:
        found = pairs(parameters(one.tensors), parameters(other.tensors))
        return compare([pair for pair in found if generators or pair[1] != "generators"], one, other, lambda _: None)
