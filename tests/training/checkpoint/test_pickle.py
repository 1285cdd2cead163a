"""No pickle from a checkpoint is ever executed: not by hashes, not by sizes, not with an attacker's manifest."""

import ast
import contextlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from parallel.config import ParallelConfig
from parallel.launch import Identity
from program.errors import UserError
from ranks import run_ranks
from tests.faults.trainer import TINY, FaultTrainer, configuration, own_digest, started
from training import checkpoint
from training.checkpoint.format.manifest import MANIFEST, DamagedError, read_manifest, write_manifest
from training.checkpoint.format.verify import Depth, damages
from training.checkpoint.format.writer import DATA
from training.config.checkpoint_config import CheckpointConfig

FOUND: list[tuple[str, str]] = []
"""What an unpickler has looked up in this process since hooks were set; audit hooks cannot be taken off again."""


class Bomb:
    """Makes the folder ``EXPLODED`` names when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def bomb(folder: Path) -> bytes:
    return pickle.dumps(Bomb(folder / "exploded"))


def extra(newest: Path, data: bytes, as_torch: bytes) -> None:
    for name, content in ((".metadata", data), ("common.pt", as_torch), ("__0_0.distcp", as_torch)):
        (newest / name).write_bytes(content)


def replaced(name: str) -> Callable[[Path, bytes, bytes], None]:
    return lambda newest, data, as_torch: (newest / name).write_bytes(data) and None


def tensors(newest: Path, data: bytes, as_torch: bytes) -> None:
    """The file of tensors begins as torch.save's do, at its old size."""
    path = newest / "rank_00000.bin"
    size = path.stat().st_size
    path.write_bytes((as_torch + bytes(size))[:size])


def latest(newest: Path, data: bytes, as_torch: bytes) -> None:
    (newest.parent / "latest").write_bytes(data)


ATTACKS: dict[str, Callable[[Path, bytes, bytes], None]] = {
    "files that torch would unpickle": extra,
    "state.json": replaced("state.json"),
    "index.json": replaced("index.json"),
    "pieces.jsonl": replaced("pieces.jsonl"),
    "config.toml": replaced("config.toml"),
    "manifest.json": replaced(MANIFEST),
    "tensors": tensors,
    "latest": latest,
}


def sign(newest: Path) -> None:
    """What an attacker who knows the format does: a manifest that fits what is there now."""
    with contextlib.suppress(DamagedError):
        manifest = read_manifest(newest)
        tensors = {name: facts for name, facts in manifest.files.items() if name.endswith(DATA)}
        write_manifest(newest, tensors, manifest.about)


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        FOUND.append((str(arguments[0]), str(arguments[1])))


def poisoned(*_: Any, **__: Any) -> Any:
    raise AssertionError("something of a checkpoint was unpickled")


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """torch's ways to unpickle raise. (Ranks exchange Python objects through an unpickler too: hence the audit.)"""
    patch = pytest.MonkeyPatch()
    for owner, name in (
        (torch, "load"),
        (torch.serialization, "load"),
        (pickle, "load"),
        (FileSystemReader, "read_metadata"),
        (FileSystemReader, "read_data"),
        (DefaultLoadPlanner, "load_bytes"),
        (DefaultLoadPlanner, "set_up_planner"),
    ):
        patch.setattr(owner, name, poisoned)
    yield
    patch.undo()


def attack(trainer: FaultTrainer, folder: Path, name: str, depth: Depth, signed: bool) -> None:
    """Load what the attacker left; whatever comes of it, nothing is looked up by an unpickler but what ranks send."""
    root = folder / f"{name} {depth} {signed}"
    shutil.copytree(folder / "whole", root)
    data, as_torch = bomb(folder), (folder / "torch.pt").read_bytes()
    ATTACKS[name](root / "iter_0000002", data, as_torch)
    if signed:
        sign(root / "iter_0000002")
        passes = name not in ("manifest.json", "index.json", "pieces.jsonl", *(["tensors"] * (depth == "hashes")))
        assert passes == (damages(root / "iter_0000002", depth) == []), f"{name}, {depth}: not what is to be tried"
    FOUND.clear()
    with contextlib.suppress(UserError, DamagedError, ValueError, KeyError):
        checkpoint.restore(
            root,
            CheckpointConfig(verify=depth),
            trainer.chunks,
            trainer.optimizer,
            trainer.ranks,
        )
    dangerous = [found for found in FOUND if found[0] in ("posix", "os", "builtins", "nt")]
    assert dangerous == [], f"{name}, {depth}: an unpickler looked up {dangerous}"
    assert not (folder / "exploded").exists()


def all_attacks(identity: Identity, folder: Path) -> None:
    sys.addaudithook(watch)
    with started(configuration(ParallelConfig(), **TINY), identity) as trainer:
        for iteration in (1, 2):
            trainer.train(iteration)
            trainer.save(folder / "whole", checkpoint.Contents(keep=2, texts={"config.toml": "x = 1\n"}))
        saved = own_digest(trainer)
        torch.save({"bomb": Bomb(folder / "exploded")}, folder / "torch.pt")
        with poison():
            for name in ATTACKS:
                for signed in (False, True):
                    attack(trainer, folder, name, "hashes", signed)
                    attack(trainer, folder, name, "sizes", signed)
            restored = checkpoint.restore(
                folder / "whole", CheckpointConfig(), trainer.chunks, trainer.optimizer, trainer.ranks
            )
        assert restored is not None
        assert own_digest(trainer) == saved


def test_nothing_in_a_checkpoint_is_ever_executed(tmp_path: Path) -> None:
    run_ranks(1, all_attacks, tmp_path)


def test_the_bomb_would_go_off(tmp_path: Path) -> None:
    """What the attacks write does what it is to do where somebody unpickles it, and the audit sees it."""
    sys.addaudithook(watch)
    pickle.loads(bomb(tmp_path))
    assert (tmp_path / "exploded").is_dir()
    assert ("posix", "mkdir") in FOUND
    with poison(), pytest.raises(AssertionError, match="was unpickled"):
        torch.load(tmp_path / "x.pt")


def test_no_module_that_reads_checkpoints_can_unpickle() -> None:
    for path in Path(checkpoint.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "dill"} & set(names), path
            assert ast.unparse(node) != "torch.load" if isinstance(node, ast.Attribute) else True, path
