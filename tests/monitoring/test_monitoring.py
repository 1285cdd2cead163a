"""The dashboard and the alerts, as far as they can be checked without Grafana and Prometheus; `make monitoring` asks
a real Prometheus."""

import itertools
import re
from typing import Any

import pytest

from tests.monitoring import queries
from training.metrics.prometheus import sample_names

PANELS = [panel for panel in queries.dashboard()["panels"] if panel["type"] != "row"]
QUERIES = [*queries.of_the_dashboard(), *queries.of_the_alerts()]
UNITS = {"short", "s", "percentunit", "bytes", "watt", "celsius", "hertz", "joule", "Bps"}
"""Of Grafana's, those that are used."""
WIDTH = 24


def test_a_panel_has_an_id_a_title_and_a_unit_of_its_own() -> None:
    everything = queries.dashboard()["panels"]
    ids, titles = [panel["id"] for panel in everything], [panel["title"] for panel in everything]
    assert len(ids) == len(set(ids)) and len(titles) == len(set(titles)) and len(PANELS) > 30
    assert {panel["type"] for panel in PANELS} == {"stat", "gauge", "timeseries"}
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS} <= UNITS


def test_rows_are_those_that_are_asked_for() -> None:
    rows = [panel["title"] for panel in queries.dashboard()["panels"] if panel["type"] == "row"]
    assert rows == ["Health", "Speed", "Memory", "GPUs", "Network", "Data", "Experts and multi-token prediction"]
    assert {query.row for query in queries.of_the_dashboard()} == {*rows}


def box(panel: dict[str, Any]) -> tuple[range, range]:
    at = panel["gridPos"]
    return range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])


def test_panels_lie_in_the_grid_and_on_no_other() -> None:
    everything = queries.dashboard()["panels"]
    assert all(across.start >= 0 and across.stop <= WIDTH and down for across, down in map(box, everything))
    for one, other in itertools.combinations(everything, 2):
        (left, top), (right, bottom) = box(one), box(other)
        across = left.start < right.stop and right.start < left.stop
        down = top.start < bottom.stop and bottom.start < top.stop
        assert not (across and down), (one["title"], other["title"])


def test_the_data_source_and_the_run_are_variables() -> None:
    variables = {one["name"]: one for one in queries.dashboard()["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    asked = re.fullmatch(r"label_values\((\w+), run\)", variables["run"]["query"])
    assert asked and asked[1] in sample_names()
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert [panel["datasource"] for panel in [*PANELS, variables["run"]]] == [chosen] * (len(PANELS) + 1)
    used = {name for query in QUERIES for name in re.findall(r"\$\{?(\w+)", query.expr)}
    assert used == {"run", "__rate_interval"}
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(references) == len(set(references))


@pytest.mark.parametrize("query", QUERIES, ids=lambda one: f"{one.row}: {one.panel}: {one.expr}")
def test_a_query_asks_for_what_a_run_writes(query: queries.Query) -> None:
    names = queries.metrics(query.expr)
    assert names and names <= sample_names()
    if query.row != "alerts":
        assert query.expr.count('run=~"$run"') == len(re.findall(r"\{", query.expr)) >= len(names)


def test_alerts_are_those_that_are_asked_for_and_only_of_a_run_that_runs() -> None:
    assert {rule["alert"] for rule in queries.rules()} == {
        "TriplaneLossNotFinite", "TriplaneNoStep", "TriplaneGPULost", "TriplaneGoodputLow",
    }  # fmt: skip
    for rule in queries.rules():
        assert 'triplane_run_state{state="running"} == 1' in rule["expr"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"] and rule["annotations"]["description"]
        assert rule["alert"] in queries.ALERTS_TEST.read_text()


def test_names_are_found_in_expressions() -> None:
    """What the tests above stand on."""
    expr = 'sum by (a_b) (rate(x_total{run_name="a_b"}[1m])) / on (c_d) max_over_time(y_seconds[6h]) and z_state == 1'
    assert queries.metrics(expr) == {"x_total", "y_seconds", "z_state"}
