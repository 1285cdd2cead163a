"""Programs that a campaign starts on loopback and ends again: Prometheus, node_exporter, MLflow's server, the run."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.shard_writer import ShardWriter
from tests.monitoring import queries

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "127.0.0.1"
MIXTURE = """
    --nproc 2 --train.global_batch_size 4 --train.micro_batch_size 2 --model.num_moe_experts 4 --model.moe_router_topk 2
    --model.moe_ffn_hidden_size 64 --model.moe_router_load_balancing_type aux_loss --model.moe_aux_loss_coeff 0.05
    --model.mtp_num_layers 2 --log.tensorboard False --checkpoint.save_interval 50
""".split()
"""Of runs: experts and depths, so that every kind of metric is there."""


def free_port() -> int:
    """One that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def wait_for[T](what: str, look: Callable[[], T], within_s: float = 60.0) -> T:
    """What ``look`` finds, once it finds something. Raises TimeoutError."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            if found := look():
                return found
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {within_s:.0f} s")


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own; what still runs of it at the end is killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **(environ or {})},
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def training(run_dir: Path, *flags: str) -> list[str]:
    """The command of a run in ``run_dir``, on two sources of random bytes beside it."""
    folder = run_dir.parent
    for seed, name in enumerate(("wiki", "code")):
        if not (folder / f"{name}.idx").exists():
            draw = np.random.default_rng(seed)
            with ShardWriter(folder / name, 257) as writer:
                for _ in range(200):
                    writer.add(draw.integers(0, 256, 200))
                    writer.end_document()
    blend = ["--data.blend", str(folder / "wiki"), "0.7", str(folder / "code"), "0.3"]
    fixed = ["slurm/recipes/debug.toml", "--run_dir", str(run_dir), "--data.cache_dir", str(folder / "cache")]
    return [sys.executable, "pretrain_gpt.py", *fixed, *blend, *MIXTURE, *flags]


def fetch(url: str, data: bytes | None = None) -> bytes:
    """A URL's content."""
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as answer:
        return bytes(answer.read())


class Prometheus:
    """A server that scrapes once a second, with the rules of slurm/monitoring, and its HTTP API."""

    def __init__(self, folder: Path, jobs: Mapping[str, int]) -> None:
        """``jobs``: name -> port on loopback."""
        self.url, self.folder = f"http://{LOOPBACK}:{free_port()}", folder
        folder.mkdir()
        scraped = [
            {"job_name": name, "static_configs": [{"targets": [f"{LOOPBACK}:{port}"]}]} for name, port in jobs.items()
        ]
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        configuration = {"global": every, "rule_files": [str(queries.ALERTS)], "scrape_configs": scraped}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))

    def command(self) -> list[str]:
        """What starts it."""
        return [
            "prometheus", f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]  # fmt: skip

    def ask(self, what: str, **parameters: str) -> Any:
        """The API's answer. Raises ValueError with Prometheus' words where it is an error."""
        try:
            answer = fetch(f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting, and says so without JSON
                raise
            raise ValueError(json.loads(error.read())["error"]) from None
        return json.loads(answer)["data"]

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """Series now."""
        return list(self.ask("query", query=expr)["result"])

    def over(self, expr: str, seconds: int) -> list[dict[str, Any]]:
        """Series over the last ``seconds``, as a panel asks."""
        now = time.time()
        found = self.ask("query_range", query=expr, start=str(now - seconds), end=str(now), step="5")
        return list(found["result"])
