"""The name of each metric in Prometheus: OpenTelemetry's where its semantic conventions have the same thing.

In Prometheus' spelling: base units, the unit as a suffix, ``_total`` behind counters (Prometheus' "Metric and label
naming", OpenTelemetry's "Prometheus and OpenMetrics Compatibility"). Others are ``triplane_`` and metrics.jsonl's key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from training.metrics.registry import METRICS, Counter, Metric

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
