"""Values that no run can have, with hashes that fit: named by file and tensor, and the older checkpoint is taken."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from campaign import some
from data.prepared import Prepared
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from ranks import run_ranks
from rewritten import change_number, change_state
from runs import configuration, train_or_fail
from runs import train as train_run
from tests.faults.damages import Heard
from training import checkpoint
from training.parts.model import build_parts

FLAGS = (
    "--train.exit_interval", "4", "--checkpoint.save_interval", "2", "--train.eval_interval", "None",
    "--log.report", "False", "--train.rampup_batch_size", "4", "4", "8",
)  # fmt: skip
STEP, MASTER = "optimizer.state.exp_avg_sq.", "optimizer.state.param."
WORD = "embedding.word_embeddings.weight"


def state(*path: str, value: object, everywhere: bool = False) -> Callable[[Path], object]:
    """Set an entry of state.json; everywhere: and what the manifest says of it."""

    def change(found: dict[str, Any]) -> None:
        for name in path[:-1]:
            found = found[name]
        found[path[-1]] = value

    def about(said: dict[str, Any]) -> None:
        name = "optimizer_step" if path[-1] == "step" else path[-1]
        if everywhere and name in said:
            said[name] = value

    return partial(change_state, change=change, about=about)


def number(key: str, value: float, element: int = 5) -> Callable[[Path], object]:
    return lambda folder: change_number(folder, key, value, element)


def without_account(folder: Path) -> None:
    """As an older version wrote it, whose optimizer has moments and no updates."""

    def change(found: dict[str, Any]) -> None:
        found["optimizer"]["step"] = 0
        del found["entries"]["account"]

    change_state(folder, change, lambda said: said.pop("optimizer_step"))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "samples": (
        state("progress", "consumed_samples", value=25),
        "progress.consumed_samples: expected 24, as the manifest says, found 25",
    ),
    "samples, said twice": (
        state("progress", "consumed_samples", value=32, everywhere=True),
        "progress.consumed_samples: expected 24 after iteration 4, found 32",
    ),
    "no updates": (state("optimizer", "step", value=0, everywhere=True), "optimizer.step: expected 4, the updates"),
    "more updates": (state("optimizer", "step", value=5), "optimizer.step: expected 4, as the manifest says, found 5"),
    "no updates, of an older version": (without_account, "optimizer.step: expected 1 or more, since optimizer.state."),
    "learning rate": (
        state("optimizer", "param_groups", value=[{"lr": -1.0}]), "param_groups.0.lr: expected 0 or more, found -1.0"
    ),
    "schedule": (state("entries", "schedule", "min_lr", value=1.0), "entries.schedule.lr: expected above 0, and at"),
    "schedule's end": (state("entries", "schedule", "decay_samples", value=0), "entries.schedule.optimizer.lr_warmup"),
    "schedule's form": (state("entries", "schedule", value=[7]), "entries.schedule.expected"),
    "loss scale": (state("optimizer", "grad_scaler", value={"scale": 0.0}), "grad_scaler.scale: expected a finite"),
    "account": (state("entries", "account", value={"iteration": -1}), "entries.account.iteration: expected"),
    "nan weight": (number(MASTER + WORD, float("nan")), f"{MASTER}{WORD}[0, 5]: expected a finite number, found nan"),
    "infinite moment": (
        number(f"optimizer.state.exp_avg.{WORD}", float("inf")),
        f"exp_avg.{WORD}[0, 5]: expected a finite number, found inf",
    ),
    "negative square": (number(STEP + WORD, -0.5), f"{STEP}{WORD}[0, 5]: expected 0 or more, found -0.5"),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ramp of batches, on two data ranks: 4 samples at first, 8 from the third iteration on."""
    folder = tmp_path_factory.mktemp("plausible") / "run"
    train_run(prepared, configuration(folder, *FLAGS), 2)
    return folder


def load_each(identity: Identity, run: Path, scratch: Path, world: int) -> None:
    """Every damage on a copy, all ranks alike; in a layout that did not write it."""
    console, scratch = os.memfd_create("console"), scratch / str(world)
    config = configuration(run, *FLAGS, "--parallel.tensor_model_parallel_size", str(world))
    with groups.start(
        config.layout(world), identity, device="cpu", seed=1, parallel=config.parallel,
        console_fd=console if identity.rank == 0 else None,
    ) as ranks:  # fmt: skip
        parts = build_parts(config, resolve(config.model, 257), ranks)
        heard = Heard(console)
        for name, (damage, words) in {"none": (lambda _: None, ""), **DAMAGES}.items():
            root = scratch / name
            if identity.rank == 0:
                shutil.copytree(run / "checkpoints", root)
                damage(root / "iter_0000004")
            dist.barrier()
            restored = checkpoint.restore(root, config.checkpoint, parts.chunks, parts.optimizer, ranks)
            assert restored is not None
            assert restored.path.name == ("iter_0000002" if words else "iter_0000004"), name
            if identity.rank == 0:
                said = heard()
                assert words in said, said
                assert not words or (root / "iter_0000004.damaged").is_dir()
                if name in ("nan weight", "infinite moment", "negative square"):
                    assert f"{root}/iter_0000004/rank_0000" in said, said
            dist.barrier()


@pytest.mark.parametrize("world", some((1, 2), (2,)))
@pytest.mark.campaign
def test_the_older_checkpoint_is_taken(run: Path, tmp_path: Path, world: int) -> None:
    run_ranks(world, load_each, run, tmp_path, world)


def test_a_run_says_it_and_trains_from_the_older_one(
    run: Path, prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    state("optimizer", "step", value=0)(tmp_path / "run/checkpoints/iter_0000004")
    train_run(prepared, configuration(tmp_path / "run", *FLAGS), 1)
    out = capfd.readouterr().out
    assert "iter_0000004/state.json: optimizer.step: expected 4, as the manifest says, found 0" in out
    assert "at           iteration 2, 8 samples" in out


def test_where_all_are_impossible_each_is_named(run: Path, prepared: Prepared, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for name in ("iter_0000002", "iter_0000004"):
        number(MASTER + WORD, float("inf"))(tmp_path / "run/checkpoints" / name)
    code, failure = train_or_fail(prepared, configuration(tmp_path / "run", *FLAGS), 1)
    assert code == 2 and failure is not None
    assert failure.text.count("expected a finite number, found inf") == 2
    assert "no good checkpoint is left" in failure.text
