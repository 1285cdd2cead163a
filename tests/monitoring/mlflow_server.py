"""Runs whose MLflow server is real, dies, or hangs."""

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.monitoring.servers import LOOPBACK, fetch, free_port, running, training, wait_for
from training.metrics.jsonl import read_jsonl

IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""Else mlflow tries a server that is gone for minutes, in the background."""


def hung_server(folder: Path) -> Iterator[tuple[str, str]]:
    """A whole run beside a server that takes connections and never answers."""
    folder.mkdir()
    with socket.socket() as server:
        server.bind((LOOPBACK, 0))
        server.listen()
        uri = f"http://{LOOPBACK}:{server.getsockname()[1]}"
        done, said = _trained(folder, "run", "--train.train_iters", "10", "--log.mlflow", uri)
    yield "a hung MLflow server: the run ends with code 0", "" if done == 0 else f"found {done}"
    line = "MLflow did not finish within 45 s and was left behind; metrics.jsonl has every number."
    yield "a hung MLflow server: said once", "" if said.count("MLflow") == 1 and line in said else said
    lines = [one["iteration"] for one in read_jsonl(folder / "run/metrics.jsonl") if "loss" in one]
    yield "a hung MLflow server: metrics.jsonl is whole", "" if lines == [*range(1, 11)] else str(lines)


def real_server(folder: Path, mlflow: Path) -> Iterator[tuple[str, str]]:
    """A resumed run has one chart there, without a point twice; and a server that is killed ends no run."""
    folder.mkdir()
    port = free_port()
    uri = f"http://{LOOPBACK}:{port}"
    store = f"sqlite:///{folder}/store.db"
    command = [str(mlflow), "server", "--backend-store-uri", store, "--host", LOOPBACK, "--port", str(port)]
    flags = ("--log.mlflow", uri, "--train.train_iters", "8", "--checkpoint.save_interval", "4")
    with ExitStack() as programs:
        server = programs.enter_context(running(command, folder / "server.log", {"MLFLOW_DISABLE_TELEMETRY": "true"}))
        wait_for("MLflow's server", lambda: fetch(f"{uri}/health"), within_s=120)
        code, said = _trained(folder, "run", *flags, "--train.exit_interval", "6")
        shutil.rmtree(folder / "run/checkpoints/iter_0000006")
        again, more = _trained(folder, "run", *flags)
        yield "a real MLflow server: both starts end with code 0", "" if (code, again) == (0, 0) else said + more
        yield "a real MLflow server: one run, each point once", _compare(uri, folder / "run")
        long = ("--log.mlflow", uri, "--train.train_iters", "60", "--log.log_interval", "1")
        with running(training(folder / "killed", *long), folder / "killed.log", IMPATIENT) as run:
            wait_for("ten iterations", lambda: len(read_jsonl(folder / "killed/metrics.jsonl")) > 10)
            os.killpg(server.pid, signal.SIGKILL)  # and its workers
            run.wait(timeout=240)
        said = (folder / "killed.log").read_text()
        yield "an MLflow server that is killed: the run ends with code 0", "" if run.returncode == 0 else said
        off = [line for line in said.splitlines() if "MLflow is off for the rest of this run" in line]
        yield "an MLflow server that is killed: said once", "" if len(off) == 1 else said


def _trained(folder: Path, name: str, *flags: str) -> tuple[int, str]:
    """Exit code of a run, and what it printed on the console."""
    log = folder / f"{name}.log"
    with running(training(folder / name, *flags), log) as run:
        try:
            code = run.wait(timeout=240)
        except subprocess.TimeoutExpired:
            return -1, f"still running after 240 s: {log.read_text()}"
    return code, log.read_text()


def _compare(uri: str, run_dir: Path) -> str:
    """What differs between the server's loss and the earliest lines of metrics.jsonl."""
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    asked = urllib.parse.urlencode({"run_id": run_id, "metric_key": "loss"})
    answer: dict[str, Any] = json.loads(fetch(f"{uri}/api/2.0/mlflow/metrics/get-history?{asked}"))
    found = [(int(one["step"]), one["value"]) for one in answer["metrics"]]
    wanted: dict[int, float] = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:
            wanted.setdefault(line["iteration"], line["loss"])
    return "" if found == sorted(wanted.items()) and len(found) == 8 else f"found {found}, expected {wanted}"
