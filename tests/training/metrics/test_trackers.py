"""TensorBoard and Weights & Biases: curves over a resume, and what a service that fails does to a run. MLflow's are in
test_mlflow.py."""

import os
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest

from training.config.log_config import LogConfig
from training.metrics.jsonl import read_jsonl
from training.metrics.sinks import RunFacts, open_sinks
from training.metrics.trackers import DrawnCurves, stable_id

REPO = Path(__file__).parents[3]
Log = partial(LogConfig, tensorboard=False, prometheus="off")


# How far a chart has come


def test_points_that_a_chart_has_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "drawn.json"
    first = DrawnCurves(path, "chart")
    assert first.fresh(5, [("loss", 1.0)]) == {"loss": 1.0} and first.fresh(5, [("ppl", 2.0)]) == {"ppl": 2.0}
    again = DrawnCurves(path, "chart")
    assert again.fresh(5, [("loss", 3.0), ("ppl", 3.0), ("new", 3.0)]) == {"new": 3.0}
    assert again.fresh(6, [("loss", 4.0)]) == {"loss": 4.0}
    assert DrawnCurves(path, "another chart").fresh(5, [("loss", 5.0)]) == {"loss": 5.0}


@pytest.mark.parametrize("text", ["", "{", '{"chart": 3}', '{"chart": {"loss": "x"}}'])
def test_a_file_of_a_chart_that_cannot_be_read_is_no_chart(tmp_path: Path, text: str) -> None:
    path = tmp_path / "drawn.json"
    path.write_text(text)
    assert DrawnCurves(path, "chart").fresh(1, [("loss", 1.0)]) == {"loss": 1.0}


# Weights & Biases


def run_with_wandb(folder: Path, program: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a process of its own: wandb keeps a service and settings for a process' life.

    All that wandb writes goes below ``folder``, and the only key that it can find is in ``variables``.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    folders = {f"WANDB_{kind}": str(folder) for kind in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR")}
    environment = {**kept, **folders, "NETRC": str(folder / "none"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, check=False)


def test_wandb_that_fails_does_not_stop_the_other_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise RuntimeError("server says no")

    fake = types.SimpleNamespace(init=init, Settings=dict, setup=lambda _: None, login=lambda **_: True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said: list[str] = []
    sinks = open_sinks(tmp_path, Log(wandb="online"), RunFacts(train_iters=3), said.append)
    for iteration in (1, 2, 3):
        sinks.write(iteration, {"loss": 1.0})
    sinks.close()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    assert [line for line in said if "wandb" in line] == [
        "wandb is off for the rest of this run (RuntimeError: server says no). "
        "Training goes on; metrics.jsonl has every number."
    ]


KEYLESS = """
import sys
from pathlib import Path
from training.metrics.trackers import WandbSink
WandbSink(Path(sys.argv[1]), "online", "triplane", None, {}, "triplane", print)
"""


def test_wandb_online_without_a_key_does_not_ask_for_one(tmp_path: Path) -> None:
    done = run_with_wandb(tmp_path, KEYLESS, str(tmp_path))
    assert "RuntimeError: no API key: set WANDB_API_KEY" in done.stderr


# TensorBoard


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


@pytest.mark.parametrize("resumed_iteration", [2, 0])
def test_tensorboard_curve_does_not_double_after_a_resume(tmp_path: Path, resumed_iteration: int) -> None:
    attempts = ((0, [1, 2, 3, 4], 8.0), (resumed_iteration, list(range(resumed_iteration + 1, 6)), 16.0))
    for restored, iterations, loss in attempts:
        sinks = open_sinks(tmp_path, Log(tensorboard=True), RunFacts(train_iters=5, resumed_iteration=restored), print)
        for iteration in iterations:
            sinks.write(iteration, {"loss": loss})
        sinks.close()
    kept = [(iteration, 8.0) for iteration in range(1, resumed_iteration + 1)]
    again = [(iteration, 16.0) for iteration in range(resumed_iteration + 1, 6)]
    assert curve(tmp_path / "events", "loss") == kept + again


def test_wandb_id_survives_and_a_broken_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "wandb_id"
    first = stable_id(path)
    assert stable_id(path) == first
    path.write_text("")
    assert stable_id(path) not in ("", first)
