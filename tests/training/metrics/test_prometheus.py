"""metrics.prom and the endpoint: names, units, states, and what happens where they cannot be had."""

import importlib
import math
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from training.metrics.prometheus import PrometheusSink, RunCollector, family, sample_names
from training.metrics.registry import METRICS

ADDRESS = "127.0.0.1"


def sink(folder: Path, said: list[str], port: int | None = None, resumed_iteration: int = 0) -> PrometheusSink:
    collector = RunCollector("one", world_size=4, train_iters=10, iteration=resumed_iteration)
    return PrometheusSink(folder, collector, None if port is None else (ADDRESS, port), said.append)


def samples(text: str) -> dict[str, float]:
    """By name and labels, as they are written, but for the label run."""
    found = {}
    for each in parser.text_string_to_metric_families(text):
        for one in each.samples:
            labels = [f"{name}={value}" for name, value in sorted(one.labels.items()) if name != "run"]
            found[" ".join([one.name, *labels])] = one.value
    return found


def in_file(folder: Path) -> dict[str, float]:
    return samples((folder / "metrics.prom").read_text())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stays_so(tmp_path: Path, value: float) -> None:
    sink(tmp_path, []).write(3, {"loss": value})
    found = in_file(tmp_path)["triplane_loss"]
    assert math.isnan(found) if math.isnan(value) else found == value


def test_units_are_base_units_and_increments_add_up(tmp_path: Path) -> None:
    written = sink(tmp_path, [])
    for iteration in (1, 2):
        written.write(iteration, {
            "loss": 2.0, "memory_gib": 1.5, "gpu_sm_clock_mhz": 1980.0, "iteration_s": 0.5, "skipped": 1,
            "network_sent_gib": 0.25, "network_received_gib": 0.5, "gpu_energy_j": 300.0,
            "consumed_tokens": 100 * iteration, "gpu_utilization": 0.9, "gpu_power_w": 500.0, "gpu_temperature_c": 61.0,
            "tokens_per_s": 8.0, "eval/hellaswag/acc": 0.25, "validation_loss/wiki": 4.0,
        })  # fmt: skip
    assert (
        in_file(tmp_path).items()
        >= {
            "triplane_iteration": 2,
            "triplane_memory_bytes": 1.5 * 2**30,
            "triplane_gpu_sm_clock_hertz": 1.98e9,
            "triplane_iteration_seconds": 0.5,
            "triplane_tokens_per_second": 8.0,
            "triplane_skipped_total": 2,
            "triplane_eval name=hellaswag/acc": 0.25,
            "triplane_validation_loss name=wiki": 4.0,
            "triplane_consumed_tokens_total": 200,
            "system_network_io_bytes_total network_io_direction=transmit": 2**29,
            "system_network_io_bytes_total network_io_direction=receive": 2**30,
            "hw_energy_joules_total hw_type=gpu": 600,
            "hw_gpu_utilization_ratio hw_type=gpu": 0.9,
            "hw_power_watts hw_type=gpu": 500,
            "hw_temperature_celsius hw_type=gpu": 61,
        }.items()
    )


def test_names_and_attributes_are_open_telemetrys() -> None:
    """By its own package of semantic conventions."""
    conventions = [f"opentelemetry.semconv._incubating.metrics.{one}_metrics" for one in ("hw", "process", "system")]
    kinds = [f"opentelemetry.semconv._incubating.attributes.{one}_attributes" for one in ("hw", "network")]
    known, attributes = (
        {value for one in modules for value in vars(importlib.import_module(one)).values() if isinstance(value, str)}
        for modules in (conventions, kinds)
    )
    used = [one.opentelemetry for one in METRICS.values() if one.opentelemetry]
    assert len(used) >= 9
    for dotted, _, labels in (one.rstrip("}").partition("{") for one in used):
        assert dotted in known
        assert not labels or labels.split("=")[0] in attributes


def test_every_name_can_be_served() -> None:
    """Names are valid, end with their unit as OpenMetrics asks, and no two metrics are the same series."""
    series = [(one.sample(), tuple(one.labels.items())) for one in map(family, METRICS.values())]
    doubled = {one for one in series if series.count(one) > 1}
    # "epoch" and "epoch/*", which has the label name
    assert doubled == {("triplane_epoch", ()), ("triplane_validation_loss", ())}
    for one in map(family, METRICS.values()):
        assert one.name.replace("_", "").isalnum() and one.name.islower()
        assert not one.unit or one.name.endswith(f"_{one.unit}")
    assert {"triplane_loss", "triplane_run_state", "triplane_expert_load_block_max"} <= sample_names()


def test_a_family_has_the_same_help_in_every_run(tmp_path: Path) -> None:
    """node_exporter, which reads several runs' files, refuses another one."""
    texts = []
    for name, line in (("one", {"loss": 1.0, "epoch": 0.5}), ("two", {"epoch/wiki": 0.5, "loss": 1.0})):
        (tmp_path / name).mkdir()
        sink(tmp_path / name, []).write(1, line)
        text = (tmp_path / name / "metrics.prom").read_text()
        texts.append({line for line in text.splitlines() if line.startswith("# HELP")})
    assert texts[0] == texts[1] and any("triplane_epoch how often" in line for line in texts[0])


def test_names_of_sources_and_metrics_are_labels_whatever_they_hold(tmp_path: Path) -> None:
    path, odd = '/data/a "b" \\ c', 'two\nlines "and" \\ more'
    sink(tmp_path, []).write(1, {"loss": 1.0, f"epoch/{path}": 0.5, odd: 7.0, "attention/max_logit": 3.0})
    found = in_file(tmp_path)
    assert found[f"triplane_epoch name={path}"] == 0.5
    assert found[f"triplane_recorded name={odd}"] == 7.0 and found["triplane_recorded name=attention/max_logit"] == 3.0


@pytest.mark.parametrize(("last", "state"), [(10, "done"), (9, "stopped"), (None, "stopped")])
def test_a_run_says_how_it_ended(tmp_path: Path, last: int | None, state: str) -> None:
    written = sink(tmp_path, [])
    assert in_file(tmp_path)["triplane_run_state state=running"] == 1
    if last is not None:
        written.write(last, {"loss": 1.0, "time_s": 1e9})
        assert in_file(tmp_path)["triplane_last_iteration_timestamp_seconds"] == 1e9
    written.close()
    found = {name: value for name, value in in_file(tmp_path).items() if name.startswith("triplane_run_state")}
    assert found == {f"triplane_run_state state={one}": one == state for one in ("running", "done", "stopped")}


def test_a_run_that_was_done_already_stays_done(tmp_path: Path) -> None:
    sink(tmp_path, [], resumed_iteration=10).close()
    assert in_file(tmp_path)["triplane_run_state state=done"] == 1


def test_an_evaluation_is_no_iteration(tmp_path: Path) -> None:
    written = sink(tmp_path, [])
    written.write(4, {"loss": 1.0, "time_s": 5.0})
    written.write(4, {"validation_loss": 2.0})
    found = in_file(tmp_path)
    assert (found["triplane_last_iteration_timestamp_seconds"], found["triplane_loss"]) == (5.0, 1.0)
    assert found["triplane_validation_loss"] == 2.0


def test_a_disk_that_takes_nothing_is_said_once_and_may_come_back(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "run").mkdir()
    written = sink(tmp_path / "run", said)
    shutil.rmtree(tmp_path / "run")
    written.write(1, {"loss": 1.0})
    written.write(2, {"loss": 2.0})
    (tmp_path / "run").mkdir()
    written.write(3, {"loss": 3.0})
    assert in_file(tmp_path / "run")["triplane_loss"] == 3.0
    assert len(said) == 1 and "metrics.prom cannot be written (No such file or directory)" in said[0]
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run/metrics.prom"]  # nothing half-written beside it


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind((ADDRESS, 0))
        held.listen()
        yield held.getsockname()[1]


def test_a_port_in_use_ends_nothing(tmp_path: Path, taken_port: int) -> None:
    said: list[str] = []
    written = sink(tmp_path, said, taken_port)
    written.write(1, {"loss": 1.0})
    written.close()
    assert in_file(tmp_path)["triplane_loss"] == 1.0
    assert (
        len(said) == 1 and f"no Prometheus endpoint at {ADDRESS}, port {taken_port} (Address already in use)" in said[0]
    )


def test_the_endpoint_serves_both_formats_until_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    written = sink(tmp_path, said, 0)
    written.write(1, {"loss": 1.0, "iteration_s": 0.5, "skipped": 0})
    url = said[0].removeprefix("Prometheus: ")
    assert url.startswith(f"http://{ADDRESS}:")
    with urllib.request.urlopen(url) as plain:
        assert samples(plain.read().decode()) == in_file(tmp_path)
    asked = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(asked) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        found = {one.name: one for one in openmetrics_parser.text_string_to_metric_families(answer.read().decode())}
    assert (found["triplane_iteration_seconds"].unit, found["triplane_skipped"].type) == ("seconds", "counter")
    written.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)
