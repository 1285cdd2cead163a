"""One job of the campaign ``jobs``: submitted, disturbed, watched to its end."""

import dataclasses
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.circumstances import ROOT
from tests.faults import job_program
from tests.faults.job_program import Fault
from tests.faults.private_cluster import FINAL_STATES, Job, PrivateCluster, ranks_left, until
from training.checkpoint import folders
from training.checkpoint.format.reader import FileReader
from training.checkpoint.rng import PREFIX as GENERATORS

SCRIPT = ROOT / "slurm/pretrain.sbatch"
LIMIT_S = 150.0
"""Whatever takes longer hangs."""
STATE_INTERVAL_S = 2.0
"""Between two questions to SLURM whether the job has ended."""
STEP_TIMEOUT_S, START_TIMEOUT_S = 8.0, 45.0
ITERATIONS, SAVE_INTERVAL = 12, 4
FLAGS = (
    "--device", "cpu", "--model.num_layers", "2", "--model.hidden_size", "32", "--model.ffn_hidden_size", "88",
    "--model.seq_length", "16", "--train.global_batch_size", "4", "--train.train_iters", str(ITERATIONS),
    "--checkpoint.save_interval", str(SAVE_INTERVAL), "--checkpoint.keep", "4", "--train.eval_interval", "4",
    "--train.eval_iters", "2", "--log.tensorboard", "False", "--fault.step_timeout_s", str(STEP_TIMEOUT_S),
    "--fault.start_timeout_s", str(START_TIMEOUT_S),
    "--fault.watch_interval", "3", "--fault.replica_check_interval", "2",
)  # fmt: skip
"""A run on two ranks, DP 2, whose iterations and checkpoints take milliseconds."""

NO_FAULT = Fault()
Digests = Mapping[str, str]


class JobCaseFailed(Exception):
    """What was seen is not what had to be seen."""


@dataclass(kw_only=True, slots=True, frozen=True)
class JobObservation:
    """What came of a fault: a row of the table."""

    printed: str
    verdict_s: float | None = None
    """Seconds from the injection until it was printed."""
    again_s: float | None = None
    """Seconds from when SLURM said that the job runs again to the first new iteration."""
    lost: int | None = None
    """Iterations that were trained twice."""
    weights: str = ""
    """Final weights and moments against those of the undisturbed run."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Undisturbed:
    """What the undisturbed run ends with."""

    digests: Digests
    losses: Mapping[int, float]


@dataclass(kw_only=True)
class Scene:
    """A job's folder, the cluster it runs on, and what it must end with."""

    cluster: PrivateCluster
    folder: Path
    cache_dir: Path
    undisturbed: Undisturbed
    job: int = 0
    injected_s: float = 0.0
    flags: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def submit(self, fault: Fault = NO_FAULT, *, hold: bool = False) -> int:
        """``sbatch slurm/pretrain.sbatch``, with the fault in the program; two nodes, one rank each."""
        self.make_checkout()
        fault.write(self.folder)
        for name in ("waits", "go"):
            (self.folder / name).unlink(missing_ok=True)
        sbatch = ("--nodes", "2", "--ntasks-per-node", "1", "--gpus-per-node", "0", "--output", f"{self.folder}/out")
        hold_flag = ("--hold",) if hold else ()
        own = ("--data.cache_dir", str(self.cache_dir), "--run_dir", "run")
        arguments = (str(ROOT / "slurm/recipes/debug.toml"), *FLAGS, *own, *self.flags)
        environ = {"PYTHONPATH": str(ROOT), "DOCTOR": "0", **self.variables}
        self.job = self.cluster.submit(
            *sbatch, *hold_flag, *self.sbatch, str(SCRIPT), *arguments, cwd=self.folder, variables=environ
        )
        return self.job

    def make_checkout(self) -> None:
        """A folder to submit from: the program with a fault in pretrain_gpt.py's place."""
        self.folder.mkdir(parents=True, exist_ok=True)
        program = (
            f"from pathlib import Path\nfrom tests.faults import job_program\njob_program.main(Path({str(ROOT)!r}))\n"
        )
        (self.folder / "pretrain_gpt.py").write_text(program)
        python = self.folder / ".venv/bin/python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def output(self) -> str:
        """What the job has printed so far."""
        path = self.folder / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def iterations(self) -> list[int]:
        """Of the whole lines in metrics.jsonl, in their order; those that were trained again come twice."""
        return [line["iteration"] for line in self._lines()]

    def _lines(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [line for line in map(json.loads, whole) if "loss" in line]

    def until(self, condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> float:
        """Wait for it: seconds since the injection. Raises Wrong, with what was printed, once in vain."""
        began = asked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now - asked > STATE_INTERVAL_S or now - began > limit_s:
                asked = now
                if (self._state() in FINAL_STATES or now - began > limit_s) and not condition():
                    raise JobCaseFailed(self._in_vain(what, now - began))
            time.sleep(0.1)
        return time.monotonic() - self.injected_s

    def _in_vain(self, what: str, seconds: float) -> str:
        shown = self.cluster.show(self.job)
        state = f"the job is {shown.get('JobState')} ({shown.get('Reason')})"
        return f"{what}: waited {seconds:.0f} s for it in vain; {state}; printed: {self.output()[-1500:]}"

    def until_waiting(self) -> int:
        """A rank is where the fault is to hit it: its pid."""
        self.until(lambda: job_program.waiting(self.folder), "a rank at its place")
        return job_program.waiting(self.folder) or 0

    def let_go(self) -> None:
        """The rank that waits goes on."""
        (self.folder / "go").touch()

    def until_iteration(self, number: int) -> None:
        """Trained and logged."""
        self.until(lambda: number in self.iterations(), f"iteration {number}")

    def inject(self, act: Callable[[], object]) -> None:
        """Now."""
        self.injected_s = time.monotonic()
        act()

    def heard(self, pattern: str, limit_s: float = LIMIT_S) -> tuple[str, float]:
        """The first line that matches the regular expression, and seconds since the injection."""
        seconds = self.until(lambda: re.search(pattern, self.output()), f"{pattern!r} printed", limit_s)
        line = next(line for line in self.output().splitlines() if re.search(pattern, line))
        return self.shown(line), seconds

    def losses(self) -> dict[int, float]:
        """By iteration; of one that was trained twice, the later."""
        return {line["iteration"]: line["loss"] for line in self._lines()}

    def shown(self, line: str) -> str:
        """A line of output without the names of this machine and this moment."""
        text = line.replace(str(self.folder), "…").replace(str(ROOT), "…").replace("|", "/")
        return " ".join(text.split())[:300]

    def again(self) -> float:
        """Wait until the job runs once more, and trains: seconds between the two."""
        self.until(lambda: self._restarts() >= 1 and self._state() == "RUNNING", "running again")
        running_s, before = time.monotonic(), len(self.iterations())
        self.until(lambda: len(self.iterations()) > before, "training again")
        return time.monotonic() - running_s

    def end(self, state: str = "COMPLETED", restarts: int | None = None) -> Job:
        """Wait for the end. Raises Wrong for another state, another number of restarts, or processes left behind."""
        try:
            ended = self.cluster.wait(self.job, LIMIT_S)
        except TimeoutError as error:
            raise JobCaseFailed(str(error)) from None
        if ended.state != state or restarts not in (None, ended.restarts):
            raise JobCaseFailed(f"{ended.state} after {ended.restarts} restarts; printed: {ended.output[-1500:]}")
        try:
            until(lambda: not ranks_left(self.cluster, self.job), 30.0)
        except TimeoutError:
            raise JobCaseFailed(f"still running: {ranks_left(self.cluster, self.job)}") from None
        return ended

    def lost(self) -> int:
        """Iterations that were trained more than once."""
        found = self.iterations()
        return len(found) - len(set(found))

    def weights(self) -> str:
        """Whether the last checkpoint has the bits of the undisturbed run's. Raises Wrong where there is none."""
        newest = folders.latest(folders.checkpoints(self.run_dir))
        if newest is None or folders.iteration_of(newest) != ITERATIONS:
            raise JobCaseFailed(f"the newest checkpoint is {newest}; printed: {self.output()[-1500:]}")
        found = digests(newest)
        other = [key for key, digest in self.undisturbed.digests.items() if found.get(key) != digest]
        return f"{len(other)} of {len(found)} tensors differ" if other else "equal"

    def resumed(self, printed: str, verdict_s: float | None) -> JobObservation:
        """After a word was printed: the job starts again by itself, trains, and ends with the same bits."""
        again_s = self.again()
        self.end(restarts=1)
        if (weights := self.weights()) != "equal":
            raise JobCaseFailed(f"final weights: {weights}")
        return JobObservation(printed=printed, verdict_s=verdict_s, again_s=again_s, lost=self.lost(), weights=weights)

    def unharmed(self, printed: str, seconds: float | None, weights: str = "equal") -> JobObservation:
        """The job goes on to its end without a restart."""
        self.end(restarts=0)
        if self.weights() != weights:
            raise JobCaseFailed(f"final weights: {self.weights()}")
        return JobObservation(printed=printed, verdict_s=seconds, lost=self.lost(), weights=weights)

    def _state(self) -> str:
        return self.cluster.show(self.job)["JobState"]

    def _restarts(self) -> int:
        return int(self.cluster.show(self.job)["Restarts"])


def digests(folder: Path) -> Digests:
    """Of every tensor of a checkpoint, weights and moments, but not the generators."""
    with FileReader(folder) as reader:
        keys = sorted(key for key in reader.tensors if not key.startswith(GENERATORS))
        return {key: hashlib.sha256(reader.whole(key).tobytes()).hexdigest() for key in keys}


def facts(seen: JobObservation) -> dict[str, str]:
    """For the table: names of columns and what stands in them."""
    values = dataclasses.asdict(seen)
    return {name: _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
