"""Run a layout and one rank, and compare what they observed."""

import math
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.prepared import Prepared
from parallel.local_ranks import fork_logged
from tools.parity.layouts import with_layout
from tools.parity.probe import ProbedPart, ProbeTask, run
from training.cli import parse
from training.config.run_config import RunConfig

TOLERANCE = 1e-5
STEPS = 3
SAVED_AT = 1


@dataclass(kw_only=True)
class Observed:
    """What a run of some layout showed."""

    loss: list[float]
    grad_norm: list[float]
    order: list[list[str]]
    """Digests of every iteration's samples, in the order of the global batch."""
    gradients: dict[str, list[ProbedPart]]
    folder: Path


@dataclass(kw_only=True)
class LayoutDifference:
    """How far a layout is from one rank; ``problems`` is empty when it agrees within ``TOLERANCE``."""

    layout: str
    world_size: int
    loss: float = math.nan
    grad_norm: float = math.nan
    gradient: float = math.nan
    worst: str = ""
    resume: float = math.nan
    problems: list[str] = field(default_factory=list)


def observe(
    config: RunConfig, prepared: Prepared, layout: str, folder: Path, *, until: int = STEPS, gradients: bool = True
) -> Observed:
    """Train ``layout`` on forked ranks. ``folder`` keeps its checkpoint of ``SAVED_AT``, or holds one to resume.

    Raises UserError for an impossible layout and RuntimeError, with the first failing rank's traceback, otherwise.
    """
    changed, world_size = with_layout(config, layout)
    parse.check(changed, world_size)
    with tempfile.TemporaryDirectory(prefix="triplane-parity-") as notes:
        task = ProbeTask(
            config=changed, prepared=prepared, folder=folder, notes=Path(notes), gradients=gradients, save_at=SAVED_AT
        )
        failure = fork_logged(world_size, partial(run, task=task, until=until), folder / "logs")
        if failure is not None:
            raise RuntimeError(f"rank {failure.rank} of {world_size} failed:\n{failure.text}")
        ranks = [torch.load(Path(notes) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return assemble(ranks, changed, world_size, folder)


def assemble(ranks: list[dict[str, Any]], config: RunConfig, world_size: int, folder: Path) -> Observed:
    """The ranks' notes as one run's. Data ranks' samples are put back into the order of the global batch."""
    layout = config.layout(world_size)
    readers = [note for note in ranks if note["at"][1] == 0 and note["at"][2] == 0 and note["at"][3] == 0]  # pp, cp, tp
    readers.sort(key=lambda note: note["at"][0])
    micro = config.train.micro_batch_size
    order = []
    for step in range(len(readers[0]["observed"]["order"])):
        rows = [reader["observed"]["order"][step] for reader in readers]
        count = len(rows[0]) // micro
        order.append([digest for m in range(count) for row in rows for digest in row[m * micro : (m + 1) * micro]])
    gradients: dict[str, list[ProbedPart]] = {}
    for note in ranks:
        for name, pieces in note["gradients"].items():
            gradients.setdefault(name, []).extend(pieces)
    first = ranks[0]["observed"]
    assert layout.world_size == world_size
    return Observed(loss=first["loss"], grad_norm=first["grad_norm"], order=order, gradients=gradients, folder=folder)


def compare(config: RunConfig, prepared: Prepared, layout: str, reference: Observed, folder: Path) -> LayoutDifference:
    """Train ``layout``, resume its checkpoint on one rank, and compare both with ``reference`` (one rank, straight)."""
    _, world_size = with_layout(config, layout)
    verdict = LayoutDifference(layout=layout, world_size=world_size)
    seen = observe(config, prepared, layout, folder)
    verdict.loss = furthest(seen.loss, reference.loss)
    verdict.grad_norm = furthest(seen.grad_norm, reference.grad_norm)
    verdict.gradient, verdict.worst, missing = worst_gradient(seen.gradients, reference.gradients)
    resumed = observe(config, prepared, "tp1", folder, gradients=False)
    verdict.resume = furthest(resumed.loss, reference.loss[SAVED_AT:])
    sliced = with_layout(config, layout)[0].parallel.context_parallel_size > 1  # a rank sees slices of samples then
    if not sliced and seen.order != reference.order:
        verdict.problems.append("the samples, or their order, differ")
    if resumed.order != reference.order[SAVED_AT:]:
        verdict.problems.append("the samples after a resume differ")
    verdict.problems += missing
    for what, value in (
        ("loss", verdict.loss),
        ("gradient norm", verdict.grad_norm),
        ("loss after a resume on one rank", verdict.resume),
    ):
        if not value <= TOLERANCE:
            verdict.problems.append(f"{what} differs by {value:.1e} relative")
    if not verdict.gradient <= TOLERANCE:
        verdict.problems.append(f"gradient of {verdict.worst} differs by {verdict.gradient:.1e} relative")
    return verdict


def furthest(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference; infinite where the lengths differ or a number is not finite."""
    if len(ours) != len(theirs) or not all(map(math.isfinite, ours + theirs)):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)), default=math.inf)


def worst_gradient(
    ours: dict[str, list[ProbedPart]], reference: dict[str, list[ProbedPart]]
) -> tuple[float, str, list[str]]:
    """Largest difference of any piece, replicas included, relative to the whole tensor's largest gradient.

    Also says which tensors are not covered exactly once by main replicas.
    """
    worst, name_of_worst, problems = 0.0, "", []
    wholes = {name: whole_tensor(pieces) for name, pieces in reference.items()}
    for name in sorted(wholes.keys() ^ ours.keys()):
        problems.append(f"{name} exists in only one of the two")
    for name in wholes.keys() & ours.keys():
        whole = wholes[name]
        if not covered_once(ours[name]):
            problems.append(f"{name} is not covered exactly once")
        for piece in ours[name]:
            difference = ((piece.data - whole[box(piece)]).abs().max() / whole.abs().max().clamp_min(1e-12)).item()
            if not math.isfinite(difference):  # of a gradient, or of a hole in the reference
                difference = math.inf
            if difference > worst:
                worst, name_of_worst = difference, name
    return worst, name_of_worst, problems


def box(piece: ProbedPart) -> tuple[slice, ...]:
    """Where a piece lies in its tensor."""
    return tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.data.shape, strict=True))


def covered_once(pieces: list[ProbedPart]) -> bool:
    """Whether each element of the tensor is in one main piece."""
    counts = torch.zeros(pieces[0].global_shape, dtype=torch.int32)
    for piece in pieces:
        if piece.main:
            counts[box(piece)] += 1
    return bool((counts == 1).all())


def whole_tensor(pieces: list[ProbedPart]) -> torch.Tensor:
    """A global tensor from its main pieces."""
    whole = torch.full(pieces[0].global_shape, math.nan)
    for piece in pieces:
        if piece.main:
            whole[box(piece)] = piece.data
    return whole
