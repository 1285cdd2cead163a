"""What the dashboard and the alerts ask Prometheus, and which metrics they name."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "slurm/monitoring"
DASHBOARD, ALERTS, ALERTS_TEST = (
    MONITORING / name for name in ("grafana_dashboard.json", "alerts.yml", "alerts_test.yml")
)
NOT_OF_A_CPU = ("GPUs", "Peak of the fullest GPU", "MFU and HFU")
"""Rows and panels that only a GPU has data for."""
MEASURED = {"triplane_exposed_communication", "triplane_pipeline_bubble"}  # with profile.timeline_interval
NOT_OF_EVERY_RUN = {"triplane_z_loss", *MEASURED}
"""Metrics that a recipe asks for, and the campaign's does not."""


@dataclass(frozen=True, slots=True)
class Query:
    """A target of a panel, or a rule."""

    row: str
    panel: str
    expr: str
    instant: bool = False

    @property
    def of_a_cpu_run(self) -> bool:
        """Whether the campaign's run must have data for it."""
        gpu = self.row in NOT_OF_A_CPU or self.panel in NOT_OF_A_CPU
        return not gpu and self.row != "alerts" and not metrics(self.expr) & NOT_OF_EVERY_RUN

    def substituted(self, run: str) -> str:
        """With Grafana's variables as they are for one run."""
        return self.expr.replace("$run", run).replace("$__rate_interval", "30s")


def dashboard() -> dict[str, Any]:
    """As Grafana reads it."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def of_the_dashboard() -> Iterator[Query]:
    """Every target of every panel."""
    row = ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", ()):
            yield Query(row, panel["title"], target["expr"], target.get("instant", False))


def rules() -> list[dict[str, Any]]:
    """The alerts."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def of_the_alerts() -> Iterator[Query]:
    """Every rule's expression."""
    return (Query("alerts", rule["alert"], rule["expr"], True) for rule in rules())


def metrics(expr: str) -> set[str]:
    """Names of the metrics in an expression: no labels, functions or keywords."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|on|ignoring|without)\s*\([^)]*\)", " ", expr)
    return set(re.findall(r"\b(?:[a-z]+_)+[a-z]+\b(?!\s*\()", bare))
