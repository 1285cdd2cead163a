"""A run that trains is scraped, at its endpoint and through node_exporter, and everything is asked about it."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.monitoring import queries
from tests.monitoring.servers import LOOPBACK, Prometheus, free_port, running, training, wait_for
from training.metrics.jsonl import read_jsonl
from training.metrics.prometheus import PrometheusSink, RunCollector

RUN, BROKEN = "run", "broken"
SECONDS = 40
"""Of scrapes before the questions."""


def scraped_run(folder: Path) -> Iterator[tuple[str, str]]:
    """Each question, and what is wrong with its answer: empty where nothing is."""
    textfiles, endpoint, exporter = folder / "textfiles", free_port(), free_port()
    textfiles.mkdir()
    (textfiles / f"{RUN}.prom").symlink_to(folder / RUN / "metrics.prom")
    _leave_a_broken_run(folder / BROKEN, textfiles)
    prometheus = Prometheus(folder / "prometheus", {"triplane": endpoint, "node": exporter})
    node_exporter = [
        "prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile",
        f"--collector.textfile.directory={textfiles}", f"--web.listen-address={LOOPBACK}:{exporter}",
    ]  # fmt: skip
    flags = [
        "--log.prometheus", f"127.0.0.1:{endpoint}", "--train.train_iters", "1000000",
        "--train.eval_interval", "20", "--train.eval_iters", "1", "--log.log_interval", "2",
    ]  # fmt: skip
    with ExitStack() as programs:
        programs.enter_context(running(node_exporter, folder / "node_exporter.log"))
        programs.enter_context(running(prometheus.command(), folder / "prometheus.log"))
        run = programs.enter_context(running(training(folder / RUN, *flags), folder / "run.log"))
        enough = f'count_over_time(triplane_loss{{run="{RUN}"}}[10m]) > {SECONDS}'
        wait_for(f"{SECONDS} scrapes by two jobs", lambda: len(prometheus.instant(enough)) == 2, within_s=180)
        yield from _questions(prometheus)
        yield "losses are those of metrics.jsonl", _compare_losses(prometheus, folder / RUN / "metrics.jsonl")
        yield from _rules(prometheus)
        os.kill(run.pid, signal.SIGTERM)
        run.wait(timeout=120)
        yield "a run that is asked to stop exits with 75", "" if run.returncode == 75 else f"found {run.returncode}"
        stopped = f'triplane_run_state{{run="{RUN}", state="stopped", job="node"}} == 1'
        wait_for("the textfile says stopped", lambda: prometheus.instant(stopped))
        yield "metrics.prom says that the run stopped", ""
        wait_for("the endpoint is gone", lambda: prometheus.instant('up{job="triplane"} == 0'))
        yield "the endpoint is gone with the run", ""


def _leave_a_broken_run(run_dir: Path, textfiles: Path) -> None:
    """What a run whose loss is NaN leaves while it runs."""
    run_dir.mkdir()
    sink = PrometheusSink(run_dir, RunCollector(BROKEN, 2, 100, 0), None, print)
    sink.write(1, {"loss": float("nan"), "epoch": 0.5})  # of one source: the other run has two
    (textfiles / f"{BROKEN}.prom").symlink_to(run_dir / "metrics.prom")


def _questions(prometheus: Prometheus) -> Iterator[tuple[str, str]]:
    """Of the dashboard and of the alerts: none is an error, and those of a CPU run have data, from both jobs."""
    for query in [*queries.of_the_dashboard(), *queries.of_the_alerts()]:
        expr = query.substituted(RUN)
        try:
            found = prometheus.instant(expr) if query.instant else prometheus.over(expr, SECONDS)
        except ValueError as error:
            yield f"{query.row}: {query.panel}: {query.expr}", f"an error: {error}"
            continue
        jobs = {series["metric"].get("job") for series in found}
        lacks = query.of_a_cpu_run and jobs != {"triplane", "node"}
        yield f"{query.row}: {query.panel}: {query.expr}", f"no data from both jobs, found {jobs}" if lacks else ""
    runs = prometheus.ask("label/run/values", **{"match[]": "triplane_iteration"})
    yield "runs to choose from: label_values(triplane_iteration, run)", "" if set(runs) == {RUN, BROKEN} else str(runs)


def _compare_losses(prometheus: Prometheus, metrics: Path) -> str:
    """Every loss that was scraped is one of metrics.jsonl."""
    scraped = {
        float(value)
        for series in prometheus.instant(f'triplane_loss{{run="{RUN}"}}[10m]')
        for _, value in series["values"]
    }
    logged = {line["loss"] for line in read_jsonl(metrics) if "loss" in line}
    if len(scraped) < 10:
        return f"only {len(scraped)} losses"
    return f"{len(scraped - logged)} of {len(scraped)} are not" if scraped - logged else ""


def _rules(prometheus: Prometheus) -> Iterator[tuple[str, str]]:
    """All are evaluated without an error, and only what the broken run's NaN asks for fires."""
    groups: list[dict[str, Any]] = prometheus.ask("rules")["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        yield f"{rule['name']} is evaluated", "" if rule["health"] == "ok" else f"{rule['health']}: {rule['lastError']}"
    firing = {  # a run of a minute has mostly started: its goodput is low, and waits for its hour
        (one["labels"]["alertname"], one["labels"]["run"])
        for one in prometheus.ask("alerts")["alerts"]
        if one["state"] == "firing"
    }
    only = {("TriplaneLossNotFinite", BROKEN)}
    yield "of all alerts, the one of the run with NaN fires", "" if firing == only else f"found {sorted(firing)}"
