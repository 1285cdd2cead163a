"""Damaged checkpoints, loaded by ranks that were started once: is the damage named, and do all ranks decide alike?"""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.launch import Identity
from program.errors import UserError
from tests.faults.injection import Injection, fresh_copy, inject
from tests.faults.results import CaseResult, Store
from tests.faults.trainer import TINY, FaultTrainer, configuration, on_ranks, own_digest, started
from training import checkpoint
from training.checkpoint.format.manifest import MANIFEST
from training.config.checkpoint_config import CheckpointConfig

CAMPAIGN = "damages"
TITLE = "Damaged files"
TEXT = """Of two checkpoints in a folder the newer one is damaged, in any of its files, and loaded by 1 or 2 ranks: with
`--checkpoint.verify hashes`, the default, and with `sizes`. Every changed file must be named, with what was expected
and found, and the tensor where the byte lies in one; the older checkpoint is taken and said to be; all ranks decide
alike; and they hold afterwards exactly what was saved. Where both are damaged nothing may be loaded, and no parameter
touched. A file that is not of the checkpoint is ignored, with a warning. `sizes` does not verify tensors, of which it
is to find what cannot be (NaN, a negative second moment) once they are read, and everything else. The time is that of
the load with hashes."""
WORLD_SIZES = (1, 2)
LIMIT_S = 60
"""A rank that takes longer for one damage hangs: it is killed, and the damage counts as a hang."""

CHANGES = ("bit flip", "zeroed 4 KiB", "truncation", "truncated JSON", "swapped files", "every checkpoint damaged")
"""Kinds of damage to a file that is there: expected and found must be named."""

Depth = Literal["hashes", "sizes"]


def cases(count: int) -> list[str]:
    """``count`` damages, shared out over the world sizes."""
    return [f"{WORLD_SIZES[number % 2]} rank(s), damage {number // 2}" for number in range(count)]


def run(todo: Sequence[str], store: Store, scratch: Path, printed: Callable[[], None]) -> None:
    """Do the cases, each world size in one world; a world that dies is named and started again behind that case."""
    for world_size in WORLD_SIZES:
        left = [case for case in todo if case.startswith(f"{world_size} ")]
        while left:
            folder = scratch / f"{world_size}-{len(left)}"
            serve = Serve(left, store, folder, printed)
            failure = on_ranks(world_size, folder / "logs", serve)
            left = store.left(CAMPAIGN, left)
            if failure is None and not left:
                break
            dead = left.pop(0)
            problem = f"the ranks hung or died: {failure}"
            store.add(
                CaseResult(campaign=CAMPAIGN, case=dead, kind="?", outcome="died", seconds=LIMIT_S, problem=problem)
            )


@dataclasses.dataclass(frozen=True)
class Serve:
    """What every rank of a world does."""

    todo: Sequence[str]
    store: Store
    folder: Path
    printed: Callable[[], None]
    """Called on rank 0 behind each case."""

    def __call__(self, identity: Identity) -> None:
        console = os.memfd_create("console")
        heard = Heard(console)
        fd = console if identity.rank == 0 else None
        parallel = ParallelConfig(tensor_model_parallel_size=identity.world_size)
        with started(configuration(parallel, **TINY), identity, fd) as trainer:
            world = DamageScene(trainer, heard, self.folder / "whole", self.folder / "damaged")
            for case in self.todo:
                signal.alarm(LIMIT_S)
                result = one(world, case, self.store.seed)
                signal.alarm(0)
                if result is not None:
                    self.store.add(result)
                    self.printed()


@dataclasses.dataclass
class Heard:
    """What a rank has said since it was last asked."""

    console: int
    position: int = 0

    def __call__(self) -> str:
        text = os.pread(self.console, 1 << 20, self.position).decode()
        self.position += len(text.encode())
        return text


class DamageScene:
    """Ranks with two checkpoints that are whole, and what they hold when they have loaded each."""

    def __init__(self, trainer: FaultTrainer, heard: Heard, whole: Path, damaged: Path) -> None:
        self.trainer, self.heard, self.whole, self.damaged = trainer, heard, whole, damaged
        self.as_damaged = damaged.with_name(f"{damaged.name} kept")
        self.digests: dict[str, str] = {}
        for iteration in (1, 2):
            trainer.train(iteration)
            path = trainer.save(whole, checkpoint.Contents(keep=2, texts={"config.toml": f"iteration = {iteration}\n"}))
            self.digests[path.name] = own_digest(trainer)
        self.older, self.newest = sorted(self.digests)

    def load(self, depth: Depth) -> dict[str, Any]:
        """On every rank: what came of loading the damaged folder, and whether it holds what was saved.

        The folder is left as it was: a load sets aside what it finds damaged.
        """
        trainer = self.trainer
        if trainer.ranks.rank == 0:
            fresh_copy(self.damaged, self.as_damaged)
        dist.barrier()
        before, began = own_digest(trainer), time.monotonic()
        path, error = None, None
        try:
            restored = checkpoint.restore(
                self.damaged, CheckpointConfig(verify=depth), trainer.chunks, trainer.optimizer, trainer.ranks
            )
            path = None if restored is None else restored.path.name
        except UserError as mistake:
            error = str(mistake)
        seconds, after = time.monotonic() - began, own_digest(trainer)
        same = after == (self.digests[path] if path else before)
        own = {"path": path, "error": error, "as_saved": same, "seconds": seconds, "said": self.heard()}
        everybody: list[Any] = [None] * trainer.ranks.identity.world_size
        dist.all_gather_object(everybody, own)
        if trainer.ranks.rank == 0:
            fresh_copy(self.as_damaged, self.damaged)
        alike = all((rank["path"], rank["error"]) == (own["path"], own["error"]) for rank in everybody)
        as_saved = all(rank["as_saved"] for rank in everybody)
        slowest = max(rank["seconds"] for rank in everybody)
        return own | {"alike": alike, "as_saved": as_saved, "seconds": slowest}


def one(world: DamageScene, case: str, seed: int) -> CaseResult | None:
    """Damage a copy, and load it by all ranks with both depths: on rank 0, what was seen."""
    ranks = world.trainer.ranks
    injection = None
    if ranks.rank == 0:
        fresh_copy(world.whole, world.damaged)
        number = int(case.rpartition(" ")[2])
        newest, older = world.damaged / world.newest, world.damaged / world.older
        injection = inject(number, newest, older, f"{seed} {case}")
    dist.barrier()
    seen: dict[Depth, dict[str, Any]] = {"hashes": world.load("hashes"), "sizes": world.load("sizes")}
    if injection is None:
        return None
    problems = [f"{depth}: {text}" for depth, found in seen.items() for text in wrong(injection, depth, found, world)]
    return CaseResult(
        campaign=CAMPAIGN,
        case=case,
        kind=injection.kind,
        outcome=outcome(injection, seen, world),
        seconds=seen["hashes"]["seconds"],
        problem="; ".join([f"{injection.text}: " + "; ".join(problems)] if problems else []),
    )


def wrong(injection: Injection, depth: Depth, found: dict[str, Any], world: DamageScene) -> list[str]:
    """What a load did that it must not, or did not and must."""
    unseen = depth == "sizes" and injection.content_only and not is_impossible(found)
    problems = [] if found["alike"] else ["ranks decided differently"]
    expected = expected_path(injection, unseen, world)
    if depth == "sizes" and is_impossible(found) and found["path"]:
        expected = world.older  # whose own damage, if it has any, is possible
    if found["path"] != expected:
        problems.append(f"expected {expected} to be loaded, found {found['path']} ({found['error']})")
    if unseen and found["path"] == world.newest:
        return problems
    read_before_refused = is_impossible(found) and found["path"] is None  # and the process ends
    if not found["as_saved"] and not read_before_refused:
        problems.append("the ranks do not hold what was saved")
    text = everything_said(found)
    damaged = world.damaged / world.newest
    problems += [f"no warning of {name} in {text!r}" for name in injection.warned if name not in text]
    for name in injection.named:
        if f"{damaged / name}:" not in text:
            problems.append(f"{name} is not named in {text!r}")
    if depth == "hashes":
        shown = injection.tensors[:3] if len(injection.named) == 1 else ()
        problems += [f"tensor {key} is not named in {text!r}" for key in shown if key not in text]
        if injection.kind in CHANGES and not ("expected" in text or MANIFEST in injection.named):
            problems.append(f"what was expected is not said in {text!r}")
    manifest_is_gone = injection.named == (MANIFEST,) and "not found" in text
    if (
        injection.named
        and injection.spares_older
        and not manifest_is_gone
        and f"falling back to {world.damaged / world.older}" not in text
    ):
        problems.append(f"the fall back is not said in {text!r}")
    return problems


def everything_said(found: dict[str, Any]) -> str:
    """Warnings, and the error that ended the load."""
    return found["said"] + (found["error"] or "")


def is_impossible(found: dict[str, Any]) -> bool:
    """Whether a number was read that no run can have: ``sizes`` meets it where a changed byte made one."""
    text = everything_said(found)
    return "expected a finite number" in text or "expected 0 or more" in text


def expected_path(injection: Injection, unseen: bool, world: DamageScene) -> str | None:
    """Which checkpoint must be loaded; None: none may be."""
    if not injection.named or unseen:
        return world.newest
    return world.older if injection.spares_older else None


def outcome(injection: Injection, seen: dict[Depth, dict[str, Any]], world: DamageScene) -> str:
    """In a few words."""
    words = []
    for depth, found in seen.items():
        if found["path"] == world.newest:
            came = "loaded" if injection.named else "newest loaded"
        elif found["path"] == world.older:
            came = "named, older one loaded"
        else:
            came = "named, refused"
        words.append(f"{depth}: {came}")
    return "; ".join(words)
