"""What a run says of Muon at its start: which parameters are whose, and which are split into matrices."""

import re
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from parallel.groups import Ranks
from parallel.regions import HeldTensor
from program.printing import columns
from training.muon.matrices import MatrixParameter, is_matrix


def say(muons: Sequence[MatrixParameter], held: Iterable[HeldTensor], ranks: Ranks) -> None:
    """A table of all stages' parameters on the console, those that differ in numbers in one row. Collective."""
    own = {_kind(one.name): _row(one) for one in muons}
    others = {_kind(one.regions[0].key) for one in held if one.tensor.requires_grad and not is_matrix(one.tensor)}
    stages: list[tuple[dict[str, tuple[str, str]], set[str]]] = [({}, set())] * ranks.layout.pp
    dist.all_gather_object(stages, (own, others), group=ranks.pgs.pp)
    rows = {name: row for found, _ in stages for name, row in found.items()}
    adam = sorted({name for _, names in stages for name in names})
    heads = ("", "elements", "matrices, each orthogonalized whole")
    ranks.say("Muon updates, a layer each:")
    for line in columns([heads, *((name, *rows[name]) for name in sorted(rows))], left=(0, 2)):
        ranks.say(line)
    ranks.say(f"AdamW updates: {', '.join(adam)}")


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _row(one: MatrixParameter) -> tuple[str, str]:
    matrices = [f"{height * one.groups} x {one.columns}" for height in one.heights]
    return f"{one.rows} x {one.columns}", " + ".join(matrices)
