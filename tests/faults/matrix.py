"""Saved in one layout, loaded in every other: every weight and moment, and the losses that follow."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel.config import ParallelConfig
from parallel.launch import Identity
from tests.faults.results import CaseResult, Store
from tests.faults.trainer import DENSE, EXPERTS, FaultTrainer, configuration, global_digests, on_ranks, started
from training import checkpoint
from training.config.checkpoint_config import CheckpointConfig
from training.config.run_config import RunConfig

CAMPAIGN = "matrix"
TITLE = "Saved in one layout, loaded in every other"
TEXT = """A model of 4 layers of width 64 trains 2 iterations, saves, and trains 3 more. Every other layout loads its
checkpoint: each weight, its fp32 original and both moments, or Muon's momentum, put together from all ranks as global
tensors, must have the same hash as where they were saved; copies on different ranks must agree; and the next 3 losses
must be within 1e-5 (relative) of those of the run that was not interrupted. `dense` is a Llama; in `experts` each MLP
is 4 experts, 2 of them for a token. The time is that of the load, the hashes and the 3 iterations."""

MODELS = ("dense", "experts", "dense with Muon", "experts with Muon")
SAVED_AT, UNTIL = 2, 5
TOLERANCE = 1e-5


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """A layout and its number of ranks."""

    world_size: int
    sizes: Mapping[str, Any]

    def config(self, model: str) -> RunConfig:
        """Of one of ``MODELS`` in this layout."""
        config = configuration(ParallelConfig(**self.sizes), **DENSE, **(EXPERTS if "experts" in model else {}))
        muon: dict[str, Any] = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"} if "Muon" in model else {}
        return replace(config, optimizer=replace(config.optimizer, **muon))


def _place(world_size: int, tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1) -> Place:
    sizes = {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "expert_model_parallel_size": ep,
    }
    return Place(world_size=world_size, sizes=sizes)


PLACES: dict[str, Place] = {
    "TP2 PP2 DP2": _place(8, tp=2, pp=2),
    "TP4": _place(4, tp=4),
    "PP4": _place(4, pp=4),
    "DP4": _place(4),
    "PP2 VPP2": _place(2, pp=2, vpp=2),
    "TP2 EP2": _place(4, tp=2, ep=2),
    "one rank": _place(1),
}
NO_SOURCE = ("one rank",)
ONLY_EXPERTS = ("TP2 EP2",)


def cases(count: int) -> list[str]:
    """``MODEL: SOURCE -> TARGET``, at most ``count``, spread over all of them."""
    every = [
        f"{model}: {source} -> {target}"
        for model in MODELS
        for source in places(model)
        for target in places(model)
        if source != target and source not in NO_SOURCE
    ]
    return every[:: max(1, len(every) // count)][:count]


def places(model: str) -> list[str]:
    """Layouts that this model can have."""
    return [name for name in PLACES if "experts" in model or name not in ONLY_EXPERTS]


def run(todo: Sequence[str], store: Store, scratch: Path, printed: Callable[[], None]) -> None:
    """Save in each source that is needed, then load all of them in each target, in one world for each."""
    for model in MODELS:
        mine = [_parts(case) for case in todo if case.startswith(f"{model}:")]
        folder = scratch / model
        for source in dict.fromkeys(source for _, source, _ in mine):
            failure = on_ranks(
                PLACES[source].world_size, folder / "logs", Save(PLACES[source].config(model), folder / source)
            )
            if failure:
                raise RuntimeError(f"saving {model} in {source}: {failure}")
        for target in dict.fromkeys(target for _, _, target in mine):
            sources = [source for _, source, to in mine if to == target]
            load = Load(model, PLACES[target].config(model), target, sources, folder, store, printed)
            failure = on_ranks(PLACES[target].world_size, folder / "logs", load)
            for case in store.left(CAMPAIGN, [f"{model}: {source} -> {target}" for source in sources]):
                store.add(
                    CaseResult(
                        campaign=CAMPAIGN,
                        case=case,
                        kind=f"{model}, into {target}",
                        outcome="died",
                        seconds=0.0,
                        problem=failure or "no result",
                    )
                )


def _parts(case: str) -> tuple[str, str, str]:
    model, _, way = case.partition(": ")
    source, _, target = way.partition(" -> ")
    return model, source, target


@dataclass(frozen=True)
class Save:
    """On every rank of the source: a checkpoint, what is in it, and the losses of the run that goes on."""

    config: RunConfig
    folder: Path

    def __call__(self, identity: Identity) -> None:
        with started(self.config, identity) as trainer:
            trainer.train(SAVED_AT)
            trainer.save(self.folder, checkpoint.Contents(keep=1))
            digests = global_digests(trainer)
            losses = trainer.train(UNTIL)
            if identity.rank == 0:
                (self.folder / "expected.json").write_text(json.dumps({"digests": digests, "losses": losses}))


@dataclass(frozen=True)
class Load:
    """On every rank of the target: each source's checkpoint, compared."""

    model: str
    config: RunConfig
    target: str
    sources: Sequence[str]
    folder: Path
    store: Store
    printed: Callable[[], None]

    def __call__(self, identity: Identity) -> None:
        with started(self.config, identity) as trainer:
            for source in self.sources:
                began = time.monotonic()
                outcome, problem = compare(trainer, self.folder / source)
                if identity.rank == 0:
                    self.store.add(
                        CaseResult(
                            campaign=CAMPAIGN,
                            case=f"{self.model}: {source} -> {self.target}",
                            kind=f"{self.model}, into {self.target}",
                            outcome=outcome,
                            seconds=time.monotonic() - began,
                            problem=problem,
                        )
                    )
                    self.printed()


def compare(trainer: FaultTrainer, folder: Path) -> tuple[str, str]:
    """Load, and what was seen; on rank 0 also what is wrong. Collective."""
    expected = json.loads((folder / "expected.json").read_text())
    restored = checkpoint.restore(folder, CheckpointConfig(), trainer.chunks, trainer.optimizer, trainer.ranks)
    assert restored is not None
    trainer.progress = restored.progress
    digests = global_digests(trainer)
    losses = trainer.train(UNTIL)
    if trainer.ranks.rank:
        return "", ""
    problems = differing(digests, expected["digests"])
    worst = furthest(losses, expected["losses"])
    if not worst <= TOLERANCE:
        problems.append(f"the losses differ by {worst:.1e}: {losses}, expected {expected['losses']}")
    same = sum(digests.get(name) == value for name, value in expected["digests"].items())
    return f"{same} of {len(expected['digests'])} tensors the same, losses within 1e-5", "; ".join(problems)


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Tensors that are not the same, or only on one side."""
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return [f"{len(names)} tensors differ, first {names[0]}"] if names else []


def furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference; infinite where one is not finite."""
    if not all(map(math.isfinite, [*ours, *theirs])):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
