"""The same configuration in Megatron-LM's pretrain_gpt.py and in ours, both on the emulated device."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu_path import flight
from tests.gpu_path.emulator import ROOT, Emulation, process_environment
from tests.gpu_path.megatron_lm.cases import Case
from tests.gpu_path.trainings import EXTENSION, WarmDevice, warm_device
from tools.from_megatron.__main__ import main as from_megatron
from training.metrics.jsonl import read_jsonl

HOOK = "tests.gpu_path.megatron_lm.triplane_hook"
PROGRAM = "tests.gpu_path.megatron_lm.program"
MEGATRON_ONLY = ["--eval-interval", "1000", "--eval-iters", "0"]
OURS_ONLY = ["--log.tensorboard", "False", "--data.order", "megatron"]

Log = dict[str, Any]
"""What step_log writes of one rank."""


@dataclass(frozen=True, slots=True)
class Translated:
    """A recipe that tools.from_megatron makes of Megatron-LM's flags."""

    flags: Sequence[str]
    ranks: int

    def write_recipe(self, path: Path) -> int:
        """The number of ranks. AssertionError: a flag has no field."""
        path.parent.mkdir(parents=True, exist_ok=True)
        script = path.with_suffix(".sh")
        script.write_text(f"torchrun --nproc-per-node {self.ranks} pretrain_gpt.py {' '.join(self.flags)}\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = from_megatron([str(script)])
        assert code == 0, printed.getvalue()
        path.write_text(printed.getvalue())
        return self.ranks


@dataclass(frozen=True, slots=True)
class Programs:
    """Both, and where they write."""

    checkout: Path
    folder: Path
    device: WarmDevice
    te_device: WarmDevice

    def ours(self, case: Case, name: str, given: Sequence[str], flags: Sequence[str] = ()) -> list[Log]:
        """By rank. Raises TrainingError."""
        run_dir = self.folder / name
        log = made(run_dir / "log")
        settings = {"EMULATED_CUDA_LOG": str(log), **flight.ROOM}
        device = self.te_device if case.transformer_engine else self.device
        recipe = Translated(given, case.ranks)
        device.train(recipe, run_dir, Emulation(hooks=(HOOK,), settings=settings), [*OURS_ONLY, *flags])
        logs = read(log)
        losses = [line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]
        return [one | {"losses": losses} for one in logs]

    def megatrons(self, case: Case, name: str, given: Sequence[str], flags: Sequence[str] = ()) -> list[Log]:
        """By rank; losses only of ranks that have them. Raises CalledProcessError."""
        log = made(self.folder / name / "log")
        settings = {"EMULATED_CUDA_LOG": str(log), **flight.ROOM, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        hooks = (EXTENSION,) if case.transformer_engine else ()
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        program = ["-m", PROGRAM, str(self.checkout), *given, *MEGATRON_ONLY, *flags]
        with Emulation(hooks=hooks, settings=settings).variables() as variables:
            done = subprocess.run(
                [sys.executable, *launcher, *program], cwd=ROOT, env=process_environment() | variables,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        (self.folder / name / "output.txt").write_text(done.stdout)
        assert done.returncode == 0 and "computes nothing" not in done.stdout, done.stdout[-5000:]
        return read(log)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def read(folder: Path) -> list[Log]:
    """By rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@contextmanager
def programs(checkout: Path, folder: Path) -> Iterator[Programs]:
    """Ready to train. Data indices of Megatron-LM's go to the data's folder."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warm_device() as device, warm_device(EXTENSION) as te_device:
        yield Programs(checkout.resolve(), folder, device, te_device)


def write_data(folder: Path) -> str:
    """The bytes of this project's licence as tokens; the prefix of one .bin and .idx."""
    text = folder / "text.jsonl"
    text.write_text(json.dumps({"text": (ROOT / "LICENSE").read_text()}) + "\n")
    arguments = [str(text), "--output", str(folder / "tokens"), "--tokenizer", "byte", "--merge", "--workers", "1"]
    subprocess.run([sys.executable, "-m", "tools.preprocess", *arguments], cwd=ROOT, check=True, capture_output=True)
    return str(folder / "tokens_text_document")
