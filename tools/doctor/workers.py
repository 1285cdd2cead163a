"""The parent's side of tools/doctor/worker.py: start ranks, ask them, end them."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from program.untrusted import parse_json

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(Exception):
    """A worker ended, or did not answer in time."""


@dataclass
class Worker:
    """A running one."""

    process: subprocess.Popen[str]
    answers: "queue.Queue[str]"
    errors: IO[str]

    def tell(self, question: Mapping[str, Any]) -> None:
        """Raises WorkerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkerError(self._last_words()) from None

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Its next answer. Raises WorkerError."""
        try:
            line = self.answers.get(timeout=limit_s)
        except queue.Empty:
            raise WorkerError(f"no answer within {limit_s:.0f} s") from None
        if not line:
            raise WorkerError(self._last_words())
        return dict(parse_json(line))

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        return f"ended with exit code {self.process.returncode}: {lines[-1] if lines else 'no message'}"

    def end(self) -> None:
        """It has nothing to lose."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def start(count: int, device: str, environ: Mapping[str, str], gemm: bool) -> list[Worker]:
    """One worker per GPU, or ``count`` of them on the CPU; they begin with the GEMM by themselves."""
    return [_start(rank, device, environ, gemm) for rank in range(count)]


def _start(local_rank: int, device: str, environ: Mapping[str, str], gemm: bool) -> Worker:
    reported = json.dumps({"device": device, "local_rank": local_rank, "gemm": gemm})
    # They meet by our store, not by the launcher's variables.
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONSAFEPATH"}
    variables = {name: value for name, value in environ.items() if name not in own}
    path = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH", ""))))
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (Worker.end closes it)
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.doctor.worker", reported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env={**variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    answers: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_pump, args=(process, answers), daemon=True).start()
    return Worker(process, answers, errors)


def _pump(process: "subprocess.Popen[str]", answers: "queue.Queue[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put("")


def gemms(workers: Sequence[Worker], limit_s: float) -> list[dict[str, Any]]:
    """Each worker's GEMM (tools/doctor/worker.py), or {"error": why}. Takes no longer than ``limit_s``."""
    return _answers(workers, limit_s, "gemm")


def listen(worker: Worker, address: str, limit_s: float) -> int:
    """The port of a new store that rank 0 keeps. Raises WorkerError."""
    worker.tell({"do": "listen", "address": address})
    return int(worker.answer(limit_s)["port"])


def measure(workers: Sequence[Worker], question: Mapping[str, Any], first: int, limit_s: float) -> list[dict[str, Any]]:
    """Each worker's bandwidths. ``question`` has address, port, world_size, local_world_size; ``first`` their first
    rank."""
    found = []
    for rank, worker in enumerate(workers, first):
        try:
            worker.tell({**question, "do": "measure", "rank": rank})
        except WorkerError as error:
            return [{"rank": rank, "error": str(error)}]
    found = _answers(workers, limit_s, None)
    return [{"rank": rank, **one} for rank, one in enumerate(found, first)]


def _answers(workers: Sequence[Worker], limit_s: float, key: str | None) -> list[dict[str, Any]]:
    end = time.monotonic() + limit_s
    found: list[dict[str, Any]] = []
    for worker in workers:
        try:
            answer = worker.answer(max(0.1, end - time.monotonic()))
            found.append(answer if key is None else answer[key] or {})
        except WorkerError as error:
            found.append({"error": str(error)})
    return found
