"""MLflow: the same numbers, and the configuration, at a tracking server or in a folder."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import batched
from pathlib import Path
from typing import Any

from parallel.durable import replace_file
from parallel.untrusted import read_text
from training.metrics.drawn import DrawnCurves
from training.metrics.megatron_names import Names, named_curves
from training.metrics.redaction import redacted
from training.metrics.registry import METRICS
from training.metrics.values import Values

OFFLINE = "offline"
MOST_METRICS, MOST_PARAMETERS = 1000, 100
"""That one request may carry (mlflow/utils/validation.py)."""
LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Of one request, in seconds: mlflow tries 7 times 120 s, longer than the end of a run waits to say why it failed."""
FORBIDDEN = re.compile(r"[^\w./: -]")
LONGEST_NAME = 250


class MlflowSink:
    """Logs to the run named in ``run_dir/mlflow_run_id``, so that a resumed run continues its charts.

    Every method may block on the network or raise whatever mlflow raises: wrap it in ``BackgroundSink``. User, password
    and token come from the environment, and mlflow alone reads them.
    """

    def __init__(
        self,
        run_dir: Path,
        where: str,
        experiment: str,
        config: Mapping[str, object],
        names: Names,
        train_iters: int,
        resumed_iteration: int,
        say: Callable[[str], None],
    ) -> None:
        """Start or continue the run. ``where``: "offline" or a tracking URI. ``config`` is handed over redacted."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else mlflow reports to its makers
        for name, most in LIMITS.items():
            os.environ.setdefault(name, most)
        if where == OFFLINE:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # "in maintenance mode", and refused without this
        from mlflow.tracking import MlflowClient  # one to two seconds

        uri = (run_dir / "mlflow").resolve().as_uri() if where == OFFLINE else where
        self._client, self._names = MlflowClient(uri), names
        self._train_iters, self._iteration = train_iters, resumed_iteration
        id_file = run_dir / "mlflow_run_id"
        self._run_id = self._continued(id_file)
        if not self._run_id:
            self._run_id = self._created(run_dir.resolve().name, experiment, config)
            replace_file(id_file, f"{self._run_id}\n".encode(), durable=False)
        self._drawn = DrawnCurves(run_dir / "mlflow_drawn.json", self._run_id)
        say(f"MLflow: run {self._run_id} {'in ' + str(run_dir / 'mlflow') if where == OFFLINE else 'at ' + where}")

    def write(self, iteration: int, values: Values) -> None:
        """Log ``values`` at ``iteration``, but for points that the chart has. Of experts, each block's fullest only."""
        from mlflow.entities import Metric

        self._iteration = max(self._iteration, iteration)
        now_ms = int(time.time() * 1000)
        curves = ((allowed(name), value) for name, value in named_curves(values, 0, self._names))
        points = self._drawn.fresh(iteration, curves)
        metrics = [Metric(name, value, now_ms, iteration) for name, value in points.items()]
        for part in batched(metrics, MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def close(self) -> None:
        """The run is finished; or, where it stopped before its last iteration, killed, until it is continued."""
        self._client.set_terminated(self._run_id, "FINISHED" if self._iteration >= self._train_iters else "KILLED")

    def _continued(self, id_file: Path) -> str:
        """The id of the run that ``id_file`` names, running again; empty where the server does not have it."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        if not id_file.exists() or not re.fullmatch(r"[0-9a-f]{32}", run_id := read_text(id_file).strip()):
            return ""
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return ""
            raise
        if run.info.lifecycle_stage != "active":
            return ""
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _created(self, name: str, experiment: str, config: Mapping[str, object]) -> str:
        """The id of a new run, with its parameters."""
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        for part in batched((Param(key, value) for key, value in parameters(redacted(config))), MOST_PARAMETERS):
            self._client.log_batch(run_id, params=part)
        return run_id


def parameters(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``train.seed`` and its value as text, of every field that is set."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from parameters(value, f"{prefix}{name}.")
        elif value not in (None, "", (), []):
            yield allowed(prefix + name), str(value)


def allowed(name: str) -> str:
    """``name`` as mlflow takes it: without characters and paths that it forbids. Its files cannot have a curve and a
    folder of the same name: ``expert_load_max/block_3`` is ``expert_load_max_each/block_3`` there."""
    steps = ["_" if step in (".", "..") else step for step in FORBIDDEN.sub("_", name).split("/") if step] or ["_"]
    if len(steps) > 1 and steps[0] in METRICS:
        steps[0] += "_each"
    return "/".join(steps)[:LONGEST_NAME].rstrip("/")
