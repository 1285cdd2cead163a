"""What tasks came to: metrics' names, and the lines of ``RUN_DIR/evaluations.jsonl``."""

import importlib.metadata
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from program.untrusted import append_regular
from training.evaluation.tasks import PreparedTasks

Results = Mapping[str, Any]
"""What the harness returns."""


def metrics_of(results: Results, name: str) -> dict[str, float]:
    """The numbers of a task or group: ``acc``, ``acc_stderr``, ``exact_match/strict-match``, ..."""
    found = {}
    for key, value in results["results"].get(name, {}).items():
        metric, comma, filtered = key.partition(",")
        if comma and isinstance(value, int | float) and not isinstance(value, bool):
            found[metric if filtered == "none" else f"{metric}/{filtered}"] = float(value)
    return found


def is_stderr(metric: str) -> bool:
    """Whether it is the standard error of another one."""
    return metric.partition("/")[0].endswith("_stderr")


def stderr_of(metric: str) -> str:
    """The metric that is this one's standard error."""
    name, slash, filtered = metric.partition("/")
    return f"{name}_stderr{slash}{filtered}"


def logged(results: Results, tasks: PreparedTasks) -> dict[str, float]:
    """Scores for the run's metrics, ``eval/TASK/METRIC``; without standard errors."""
    return {
        f"eval/{name}/{metric}": value
        for name in tasks.shown
        for metric, value in metrics_of(results, name).items()
        if not is_stderr(metric)
    }


def entries(results: Results, tasks: PreparedTasks, iteration: int) -> Iterator[dict[str, Any]]:
    """Of each task and group, subtasks included, an object for ``evaluations.jsonl``."""
    versions = {"lm_eval": importlib.metadata.version("lm_eval")}
    for name in results["results"]:
        if metrics := metrics_of(results, name):
            yield {
                "iteration": iteration,
                "task": name,
                "metrics": {key: value if math.isfinite(value) else str(value) for key, value in metrics.items()},
                "num_fewshot": results["n-shot"].get(name),
                "documents": results["n-samples"].get(name, {}).get("effective"),
                "limit": tasks.limit,
                "version": results["versions"].get(name),
                "versions": versions,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }


def append(path: Path, objects: Iterator[dict[str, Any]]) -> None:
    """One line each, all at once. Raises OSError, or UserError where ``path`` is no regular file."""
    text = "".join(json.dumps(one, allow_nan=False, default=str) + "\n" for one in objects)
    with append_regular(path) as file:
        file.write(text.encode())
