"""Sinks of a real run: every metric read back from each by its own reader, over a resume; and no secret in any."""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.shard_writer import ShardWriter
from programs import Program
from runs import DEBUG
from training.metrics.jsonl import parse_line
from training.metrics.prometheus import family, parts
from training.metrics.registry import find
from training.metrics.trackers import allowed
from training.metrics.values import NO_CURVES, curves

pytestmark = pytest.mark.campaign

CANARY = "canary0123456789abcdef0123456789abcdef01"
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
FLAGS = """
    --nproc 2 --train.train_iters 5 --train.global_batch_size 4 --train.micro_batch_size 2
    --train.eval_interval 1 --train.eval_iters 1 --checkpoint.save_interval 2 --checkpoint.async_save False
    --model.num_moe_experts 4 --model.moe_router_topk 2 --model.moe_ffn_hidden_size 64 --model.moe_layer_freq [0,1,1,1]
    --model.moe_router_load_balancing_type aux_loss --model.moe_aux_loss_coeff 0.05 --model.mtp_num_layers 2
    --log.layer_stats_interval 1 --log.log_params_norm True --log.log_num_zeros_in_grad True
    --log.tensorboard True --log.wandb offline --log.mlflow offline --log.prometheus 127.0.0.1:0
""".split()
STOPPED_AT, RESUMED_FROM, LAST = 3, 2, 5


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that stopped at iteration 3, lost its newest checkpoint, and went on from 2 to 5."""

    run_dir: Path
    said: str
    first: list[dict[str, Any]]
    """Lines of metrics.jsonl of its first start."""
    second: list[dict[str, Any]]

    def latest(self) -> list[dict[str, Any]]:
        """Of two lines for an iteration the later one."""
        return [line for line in self.first if line["iteration"] <= RESUMED_FROM] + self.second

    def earliest(self) -> list[dict[str, Any]]:
        """Of two lines for an iteration the earlier one."""
        return self.first + [line for line in self.second if line["iteration"] > STOPPED_AT]


def lines_of(path: Path) -> list[dict[str, Any]]:
    found = [parse_line(line) for line in path.read_bytes().splitlines()]
    return [line for line in found if line is not None]


def shard(prefix: Path) -> str:
    draw = np.random.default_rng(1)
    with ShardWriter(prefix, 257) as writer:
        for _ in range(60):
            writer.add(draw.integers(0, 256, 200))
            writer.end_document()
    return str(prefix)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The program itself, twice in one folder; what its ranks would each import is imported here, once."""
    import mlflow.tracking  # noqa: F401
    import wandb  # noqa: F401

    folder = tmp_path_factory.mktemp("sinks")
    run_dir = folder / "run"
    blend = ("--data.blend", shard(folder / "wiki"), "0.7", shard(folder / "code"), "0.3")
    fixed = [str(DEBUG), "--run_dir", str(run_dir), "--data.cache_dir", str(folder / "cache"), *blend, *FLAGS]
    environ = {"WANDB_DIR": str(run_dir), "NETRC": str(folder / "none"), **dict.fromkeys(SECRETS, CANARY)}
    environ |= {f"WANDB_{kind}_DIR": str(folder / "wandb-own") for kind in ("CACHE", "CONFIG", "DATA")}
    said, ends = "", []
    for flags in (["--train.exit_interval", str(STOPPED_AT)], []):
        program = Program([*fixed, *flags], folder / "said", environ)
        said += "".join(program.communicate(timeout=120))
        assert program.returncode == 0, said
        ends.append(len(lines_of(run_dir / "metrics.jsonl")))
        shutil.rmtree(run_dir / f"checkpoints/iter_{STOPPED_AT:07d}", ignore_errors=True)
    lines = lines_of(run_dir / "metrics.jsonl")
    return Trained(run_dir, said, lines[: ends[0]], lines[ends[0] :])


Curves = dict[str, list[tuple[int, float]]]


def expected(lines: list[dict[str, Any]], max_experts: int) -> Curves:
    """Each curve that sinks draw of these lines."""
    found: Curves = {}
    for line in lines:
        values = {name: value for name, value in line.items() if name != "iteration"}
        for name, value in curves(values, max_experts):
            found.setdefault(name, []).append((line["iteration"], value))
    return found


def test_the_run_has_what_sinks_must_be_able_to_say(trained: Trained) -> None:
    """Numbers, lists, tables, tables of lists, starred names, evaluations; and it repeated an iteration."""
    train_lines = [line["iteration"] for line in trained.first + trained.second if "loss" in line]
    assert train_lines == [*range(1, STOPPED_AT + 1), *range(RESUMED_FROM + 1, LAST + 1)]
    names = {name for line in trained.latest() for name in line}
    assert {"loss", "mtp_loss", "expert_load", "layer_grad_norm", "validation_loss", "param_norm"} <= names
    assert {"epoch/", "tokens/"} <= {name[: name.find("/") + 1] for name in names}
    assert " is off " not in trained.said and "left behind" not in trained.said and "warning" not in trained.said


def test_tensorboard_has_every_number(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.run_dir / "events"), size_guidance={"scalars": 0})
    events.Reload()
    found = {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}
    wanted = expected(trained.latest(), max_experts=64)
    assert found == {
        name: [(step, float(np.float32(value))) for step, value in points] for name, points in wanted.items()
    }


def wandb_records(path: Path) -> Iterator[bytes]:
    """Records of an offline run's file, which wandb's package has no reader for: LevelDB's log format, in blocks of
    32 KiB, behind 7 bytes of wandb's own. A record is whole, or its first, middle and last part."""
    whole, first, _middle, last = 1, 2, 3, 4
    data, record = path.read_bytes(), b""
    at, block, head = 7, 1 << 15, 7
    while at + head <= len(data):
        if (left := block - at % block) < head:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record = (b"" if kind in (whole, first) else record) + data[at + head : at + head + length]
        at += head + length
        if kind in (whole, last):
            yield record


def test_wandb_has_every_number(trained: Trained) -> None:
    """Two files of one run: the second goes on where the first ends. Both have the configuration, redacted."""
    from wandb.proto.wandb_internal_pb2 import Record

    run_id = (trained.run_dir / "wandb_id").read_text().strip()
    files = sorted((trained.run_dir / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2
    found: Curves = {}
    configurations = []
    for record in (Record.FromString(data) for path in files for data in wandb_records(path)):
        configurations += [{item.key: item.value_json for item in record.run.config.update}] * record.HasField("run")
        history = record.history
        for item in history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                found.setdefault(name, []).append((history.step.num, json.loads(item.value_json)))
    assert found == expected(trained.earliest(), max_experts=0)
    for one in configurations[0], configurations[-1]:
        assert json.loads(one["train"])["global_batch_size"] == 4
        assert json.loads(one["data"])["jsonl_key"] == "[redacted]"  # named like a secret


def test_mlflow_has_every_number_and_the_configuration(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient((trained.run_dir / "mlflow").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'triplane'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (trained.run_dir / "mlflow_run_id").read_text().strip()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["train.global_batch_size"] == "4" and run.data.params["log.mlflow"] == "offline"
    assert run.data.params["data.jsonl_key"] == "[redacted]"  # named like a secret
    found = {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    wanted = expected(trained.earliest(), max_experts=0)
    assert found == {allowed(name): points for name, points in wanted.items()}


def test_prometheus_text_has_the_newest_of_every_number(trained: Trained) -> None:
    """By its own parser: a family has one type and help, and a sample stands once."""
    from prometheus_client.parser import text_string_to_metric_families

    text = (trained.run_dir / "metrics.prom").read_text()
    families = list(text_string_to_metric_families(text))
    assert len({one.name for one in families}) == len(families) and all(one.documentation for one in families)
    samples = {(one.name, tuple(sorted(one.labels.items()))): one.value for each in families for one in each.samples}
    assert len(samples) == sum(len(each.samples) for each in families)
    assert {dict(labels)["run"] for _, labels in samples} == {"run"}
    wanted = {
        (name, tuple(sorted({"run": "run", **labels}.items()))): value for name, labels, value in in_text(trained)
    }
    own = {key: value for key, value in samples.items() if key not in wanted}
    assert {key: samples.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-15)
    last = [line for line in trained.second if "loss" in line][-1]
    states = {dict(labels)["state"]: value for (name, labels), value in own.items() if name == "triplane_run_state"}
    assert states == {"running": 0, "done": 1, "stopped": 0}
    assert {name: value for (name, _), value in own.items() if name != "triplane_run_state"} == {
        "triplane_world_size": 2,
        "triplane_train_iters": LAST,
        "triplane_last_iteration_timestamp_seconds": last["time_s"],
    }


def in_text(trained: Trained) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of every sample that the second start's lines make: the newest, or, of what counters are
    made of, the sum."""
    newest = {name: value for line in trained.second for name, value in line.items()}
    for name, value in newest.items():
        metric = find(name)
        assert metric is not None
        known = family(metric)
        if name in NO_CURVES:
            continue
        if metric.counter == "increments":
            value = math.fsum(line[name] for line in trained.second if name in line)
        star = {"name": name.removeprefix(metric.name.removesuffix("*"))} if "*" in metric.name else {}
        for suffix, labels, number in parts(name, value):
            yield known.sample(suffix), {**known.labels, **star, **labels}, number * known.scale


def test_the_endpoint_was_served_on_loopback(trained: Trained) -> None:
    assert len(re.findall(r"Prometheus: http://127\.0\.0\.1:\d+/metrics", trained.said)) == 2


def test_no_secret_of_the_environment_is_anywhere(trained: Trained) -> None:
    folder = trained.run_dir.parent
    files = [path for path in folder.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files} | {path.name for path in files}
    assert {".wandb", ".log", "config.toml", "metrics.prom", "metrics.jsonl"} <= kinds
    assert any("tfevents" in path.name for path in files) and any("mlflow" in str(path) for path in files)
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in trained.said and CANARY not in " ".join(map(str, files))
    assert os.environ.get("WANDB_API_KEY") != CANARY  # the test's own environment never had it
