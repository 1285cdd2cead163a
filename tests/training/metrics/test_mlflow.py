"""The MLflow sink: servers that hang, refuse or lose a run; names that it forbids; secrets."""

import shutil
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from program.errors import UserError
from training.cli import parse
from training.config.log_config import LogConfig, mlflow_problems
from training.config.run_config import RunConfig
from training.metrics.background import BackgroundSink
from training.metrics.jsonl import read_jsonl
from training.metrics.sinks import RunFacts, open_sinks
from training.metrics.trackers import MlflowSink, allowed

CANARY = "canary0123456789abcdef0123456789abcdef01"
CONFIG = {
    "train": {"seed": 7, "exit_interval": None},
    "hub_token": CANARY,
    "list": ["https://me:" + CANARY + "@host/x"],
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sink sets for the process, and no retries."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", CANARY)


def opener(folder: Path, where: str, said: list[str], resumed_iteration: int = 0) -> Any:
    return partial(MlflowSink, folder, where, "triplane", CONFIG, "triplane", 10, resumed_iteration, said.append)


def client(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient((folder / "mlflow").as_uri())


def run_id(folder: Path) -> str:
    return (folder / "mlflow_run_id").read_text().strip()


def test_a_resumed_run_is_the_same_and_repeats_no_point(tmp_path: Path) -> None:
    """The first start stops early, the second one starts before it and is done."""
    first = opener(tmp_path, "offline", said := [])()
    for iteration in (4, 5):
        first.write(iteration, {"loss": 1.0 * iteration})
    first.write(5, {"validation_loss": 50.0})
    first.close()
    before = run_id(tmp_path)
    assert client(tmp_path).get_run(before).info.status == "KILLED"
    second = opener(tmp_path, "offline", said, 3)()
    assert client(tmp_path).get_run(before).info.status == "RUNNING"
    for iteration in (4, 5, 10):
        second.write(iteration, {"loss": 100.0 * iteration})
    second.write(5, {"validation_loss": 51.0})
    second.close()
    assert run_id(tmp_path) == before and client(tmp_path).get_run(before).info.status == "FINISHED"
    history = partial(client(tmp_path).get_metric_history, before)
    assert [(one.step, one.value) for one in history("loss")] == [(4, 4.0), (5, 5.0), (10, 1000.0)]
    assert [(one.step, one.value) for one in history("validation_loss")] == [(5, 50.0)]


@pytest.mark.parametrize("lost", ["deleted", "gone", "garbage"])
def test_a_run_that_is_not_there_any_more_is_made_new(tmp_path: Path, lost: str) -> None:
    sink = opener(tmp_path, "offline", [])()
    sink.write(4, {"loss": 1.0})
    before = run_id(tmp_path)
    if lost == "deleted":
        client(tmp_path).delete_run(before)
    elif lost == "gone":
        (folder,) = tmp_path.glob(f"mlflow/*/{before}")
        shutil.rmtree(folder)
    else:
        (tmp_path / "mlflow_run_id").write_text("../../etc/passwd\n")
    sink = opener(tmp_path, "offline", [])()
    sink.write(4, {"loss": 2.0})
    assert run_id(tmp_path) != before
    assert [one.value for one in client(tmp_path).get_metric_history(run_id(tmp_path), "loss")] == [2.0]


def test_parameters_are_the_configuration_without_secrets(tmp_path: Path) -> None:
    opener(tmp_path, "offline", said := [])()
    found = client(tmp_path).get_run(run_id(tmp_path)).data.params
    assert found == {"train.seed": "7", "hub_token": "[redacted]", "list": "['https://[redacted]@host/x']"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert CANARY not in "".join(said)


def test_names_that_mlflow_forbids_are_changed_and_none_ends_it(tmp_path: Path) -> None:
    sink = opener(tmp_path, "offline", [])()
    odd = ["epoch//data/../x y", "a" * 300, "ü+?", ".", "/", "expert_load_max"]
    sink.write(1, {**dict.fromkeys(odd, 1.0), "expert_load": {"3": [0.5, 0.5]}})
    found = client(tmp_path).get_run(run_id(tmp_path)).data.metrics
    assert found == dict.fromkeys(map(allowed, [*odd, "expert_load_max/block_3"]), 1.0)
    assert {"epoch_each/data/_/x y", "expert_load_max", "expert_load_max_each/block_3"} <= found.keys()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        accepted: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    accepted.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for one in accepted:
        one.close()


def test_a_server_that_never_answers_delays_nothing(tmp_path: Path, silent_port: int) -> None:
    said: list[str] = []
    sink = BackgroundSink(
        "MLflow", opener(tmp_path, f"http://127.0.0.1:{silent_port}", said), said.append, close_timeout_s=0.1
    )
    sink.write(1, {"loss": 1.0})
    sink.close()
    assert said == ["MLflow did not finish within 0 s and was left behind; metrics.jsonl has every number."]


@pytest.mark.parametrize("dies", ["before", "while it runs"])
def test_a_server_that_is_gone_ends_only_this_sink(tmp_path: Path, dies: str) -> None:
    """No server; and a store whose folder is gone in the middle of a run."""
    said: list[str] = []
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
    log = LogConfig(tensorboard=False, prometheus="off", mlflow=uri if dies == "before" else "offline")
    sinks = open_sinks(tmp_path, log, RunFacts(train_iters=4), said.append)
    sinks.write(1, {"loss": 1.0})
    if dies != "before":
        while not (list(tmp_path.glob("mlflow/*/*/metrics/loss"))):
            assert not [line for line in said if "off" in line]
        shutil.rmtree(tmp_path / "mlflow")
        (tmp_path / "mlflow").write_text("no folder")
    for iteration in (2, 3, 4):
        sinks.write(iteration, {"loss": 1.0})
    sinks.close()
    assert [line["iteration"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    off = [line for line in said if line.startswith("MLflow is off for the rest of this run")]
    assert len(off) == 1 and off[0].endswith("Training goes on; metrics.jsonl has every number.")
    assert CANARY not in "".join(said)


def test_mlflow_reports_nothing_to_its_makers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    opener(tmp_path, "offline", [])()
    from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

    assert MLFLOW_DISABLE_TELEMETRY.get() is True


def test_a_missing_package_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert mlflow_problems("offline") == ["log.mlflow needs mlflow: pip install mlflow-skinny, or set it to off."]
    assert mlflow_problems("off") == []


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (f"http://me:{CANARY}@127.0.0.1:5000", "Write http://127.0.0.1:5000 and set MLFLOW_TRACKING_USERNAME"),
        (f"https://{CANARY}@host/path", "Write https://host/path and set"),
        (f"postgresql://me:{CANARY}@host/db", "Write postgresql://host/db and set"),
        (f"http://host:5000/?token={CANARY}", "Write http://host:5000/ and set"),
        ("127.0.0.1:5000", '"off", "offline" or a tracking URI such as http://host:5000, found "127.0.0.1:5000"'),
    ],
)
def test_an_address_that_holds_a_secret_is_refused_without_repeating_it(value: str, advice: str) -> None:
    with pytest.raises(UserError) as refused:
        parse.check(RunConfig(log=LogConfig(mlflow=value)), 1)
    assert "log.mlflow" in str(refused.value) and advice in str(refused.value)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (LogConfig(prometheus=text), f'an IP address and a port, such as "127.0.0.1:9464", found "{text}"')
        for text in ("localhost:9464", "127.0.0.1:65536", "127.0.0.1:-1", "::1:9464", "9464", "on", "")
    ],
)
def test_an_endpoint_that_cannot_be(log: LogConfig, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse.check(RunConfig(log=log), 1)
