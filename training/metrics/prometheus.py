"""Prometheus: a run's newest numbers in ``metrics.prom``, for node_exporter's textfile collector, or at an endpoint.

A metric has OpenTelemetry's name where its semantic conventions have the same thing, in Prometheus' spelling: base
units, the unit as a suffix, ``_total`` behind counters (Prometheus' "Metric and label naming", OpenTelemetry's
"Prometheus and OpenMetrics Compatibility"). Others are ``triplane_`` and metrics.jsonl's key.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from program.durable import replace_file
from training.metrics.registry import METRICS, Counter, Metric, find
from training.metrics.values import NO_CURVES, Number, Value, Values

UNITS = {
    "s": ("_s", "seconds", 1.0), "GiB": ("_gib", "bytes", 2.0**30), "W": ("_w", "watts", 1.0),
    "J": ("_j", "joules", 1.0), "°C": ("_c", "celsius", 1.0), "MHz": ("_mhz", "hertz", 1e6),
}  # fmt: skip
"""Unit of the registry -> how its keys end, Prometheus' unit, and how many of that it is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Family:
    """What a metric is in Prometheus."""

    name: str
    """Without ``_total``."""
    unit: str = ""
    """A suffix of the name, or empty."""
    scale: float = 1.0
    """A value times this is in that unit."""
    counter: Counter = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def sample(self, suffix: str = "") -> str:
        """The name of its samples, or of those of another family, made of it by a suffix."""
        return f"{self.name}{suffix}_total" if self.counter else f"{self.name}{suffix}"


def family(metric: Metric) -> Family:
    """Of one metric of the registry. Its name ends before a ``*``, from where on it is the label ``name``."""
    ending, unit, scale = UNITS.get(metric.unit, ("", "", 1.0))
    labels: dict[str, str] = {}
    if metric.opentelemetry:
        dotted, _, attributes = metric.opentelemetry.rstrip("}").partition("{")
        pairs = (one.split("=") for one in attributes.split(",") if one)
        labels = {key.replace(".", "_"): value for key, value in pairs}
        name = dotted.replace(".", "_")
        unit = unit or ("" if metric.counter else "ratio")
    else:
        stem = metric.name.partition("/*")[0].replace("/", "_").removesuffix(ending)
        name = "triplane_" + re.sub(r"_per_s(?=_|$)", "_per_second", stem)
    name = f"{name}_{unit}" if unit else name
    return Family(name=name, unit=unit, scale=scale, counter=metric.counter, labels=labels)


def help_text(name: str) -> str:
    """Of a family by its name: what its metrics mean, and the unit where the name does not say it. The same in every
    run, as node_exporter asks of families that several files have."""
    return "; ".join(_meaning(one) for one in METRICS.values() if family(one).name == name)


def _meaning(metric: Metric) -> str:
    text = metric.meaning.replace("`", "")
    if metric.counter == "increments":
        text = text.replace("since the last line", "since this start")
    return f"{text} [{metric.unit}]" if metric.unit and not family(metric).unit else text


TEXTFILE = "metrics.prom"
State = Literal["running", "done", "stopped"]
STATES: tuple[State, ...] = ("running", "done", "stopped")
OF_THE_RUN = {
    "triplane_world_size": "ranks of the run",
    "triplane_train_iters": "iterations at which the run is done",
    "triplane_last_iteration_timestamp_seconds": "when the last training line was written, or this start began",
    "triplane_run_state": "1 for what the run does: running, done, or stopped before its last iteration",
}
"""Families beside those of the registry, and what they mean. All have the label ``run``."""
RECORDED = Metric(name="recorded", unit="", reduce="last", meaning="what metrics.record was given under this name")
"""Of the user's own metrics, by the label ``name``."""
DEPTHS = {"mtp_loss": "depth"}
"""Key whose value is a list -> the label of its entries."""
BLOCK_MAX, TABLES_OF_LISTS = "_block_max", {"expert_load"}
"""Of a table of lists there are each block's largest entry alone, and in a family of its own: thousands of series a run
are too many. 1.0 is an even share."""

Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]
"""A family's name, and the labels of one of its samples."""


class RunCollector:
    """A run's families and samples, for prometheus_client. One thread writes it, those of scrapes read it."""

    def __init__(self, run: str, world_size: int, train_iters: int, iteration: int) -> None:
        """``run``: a label of every sample. ``iteration``: the last one that was restored, or 0."""
        self.run, self.train_iters, self.iteration = run, train_iters, iteration
        self._families: dict[str, tuple[Family, str]] = {
            name: (Family(name=name), text) for name, text in OF_THE_RUN.items()
        }
        self._samples: dict[Series, float] = {
            ("triplane_world_size", ()): world_size,
            ("triplane_train_iters", ()): train_iters,
            ("triplane_last_iteration_timestamp_seconds", ()): time.time(),
        }
        self.enter("running")

    def enter(self, state: State) -> None:
        """What the run does from here on."""
        self._samples |= {("triplane_run_state", (("state", one),)): float(one == state) for one in STATES}

    def take(self, iteration: int, values: Values) -> None:
        """The numbers of a line; what it lacks stays as it was."""
        samples = dict(self._samples)
        if "loss" in values:  # else a line of an evaluation
            self.iteration = iteration
            self._add(samples, "iteration", iteration)
            written_s = values.get("time_s", time.time())
            assert isinstance(written_s, float | int)
            samples["triplane_last_iteration_timestamp_seconds", ()] = written_s
        for name, value in values.items():
            if name not in NO_CURVES:
                self._add(samples, name, value)
        self._samples = samples  # at once: a scrape sees whole lines

    def collect(self) -> Iterator[Any]:
        """prometheus_client's families, each with all of its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_name: dict[str, list[tuple[Labels, float]]] = {}
        for (name, labels), value in self._samples.items():
            by_name.setdefault(name, []).append((labels, value))
        for name, samples in by_name.items():
            known, text = self._families[name]
            found = (CounterMetricFamily if known.counter else GaugeMetricFamily)(
                name, text, labels=(), unit=known.unit
            )
            for labels, value in samples:
                found.add_sample(known.sample(name[len(known.name) :]), {"run": self.run, **dict(labels)}, value)
            yield found

    def _add(self, samples: dict[Series, float], name: str, value: Value) -> None:
        """The samples of one key of metrics.jsonl."""
        metric, labels = find(name), dict[str, str]()
        if metric is None:
            metric, labels = RECORDED, {"name": name}
        elif metric.name != name:
            labels = {"name": name.removeprefix(metric.name.partition("*")[0])}
        known = family(metric)
        for suffix, more, number in parts(name, value):
            series = known.name + suffix, tuple({**known.labels, **labels, **more}.items())
            before = samples.get(series, 0.0) if known.counter == "increments" else 0.0
            samples[series] = before + number * known.scale
            if series[0] not in self._families:
                text = help_text(known.name) or metric.meaning
                text += "; here the fullest of each block, 1 being an even share" if suffix else ""
                self._families[series[0]] = known, text


def parts(name: str, value: Value) -> Iterator[tuple[str, dict[str, str], Number]]:
    """A value's numbers, each with what it adds to the family's name and to the labels."""
    if isinstance(value, Mapping):
        for block, inner in value.items():
            if isinstance(inner, Sequence):
                yield BLOCK_MAX, {"block": block}, max(inner) * len(inner)
            else:
                yield "", {"block": block}, inner
    elif isinstance(value, Sequence):
        for number, inner in enumerate(value):
            yield "", {DEPTHS.get(name, "item"): str(number)}, inner
    else:
        yield "", {}, value


def sample_name(metric: Metric) -> str:
    """Of the samples of one metric of the registry."""
    return family(metric).sample(BLOCK_MAX if metric.name in TABLES_OF_LISTS else "")


def sample_names() -> set[str]:
    """Every name that a sample of a run can have."""
    known = [one for name, one in METRICS.items() if name not in NO_CURVES]
    return {*OF_THE_RUN, family(RECORDED).sample(), *map(sample_name, known)}


class PrometheusSink:
    """Keeps the newest line where Prometheus finds it. Wrap it in ``BackgroundSink``: a disk may be slow."""

    def __init__(
        self, run_dir: Path, collector: RunCollector, endpoint: tuple[str, int] | None, say: Callable[[str], None]
    ) -> None:
        """``endpoint``: address and port (0: a free one) to serve at, beside the file; None: the file alone."""
        from prometheus_client import CollectorRegistry

        self._path, self._say, self._full, self._collector = run_dir / TEXTFILE, say, False, collector
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._server = self._serve(*endpoint) if endpoint else None
        self._replace()

    def write(self, iteration: int, values: Values) -> None:
        """What the next scrape finds."""
        self._collector.take(iteration, values)
        self._replace()

    def close(self) -> None:
        """Done, or stopped. A run that is killed stays "running", and its last iteration grows old."""
        self._collector.enter("done" if self._collector.iteration >= self._collector.train_iters else "stopped")
        self._replace()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serve(self, address: str, port: int) -> Any:
        """prometheus_client's server, in a thread of its own; None where it cannot be had."""
        from prometheus_client import start_http_server

        try:
            server, _ = start_http_server(port, address, self._registry)
        except OSError as error:
            self._say(
                f"warning: no Prometheus endpoint at {address}, port {port} ({error.strerror}); {self._path} has the "
                "same. Set another address or port in log.prometheus, port 0 for a free one. Training goes on."
            )
            return None
        shown = f"[{address}]" if ":" in address else address
        self._say(f"Prometheus: http://{shown}:{server.server_port}/metrics")
        return server

    def _replace(self) -> None:
        """The whole file. A full disk is said once; the next line may find room."""
        from prometheus_client import generate_latest

        try:
            replace_file(self._path, generate_latest(self._registry), durable=False)
        except OSError as error:
            if not self._full:
                self._say(f"warning: {self._path} cannot be written ({error.strerror}); training goes on")
            self._full = True
