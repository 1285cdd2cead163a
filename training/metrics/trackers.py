"""The same numbers for others' services: TensorBoard's curves in the run's folder, Weights & Biases, and MLflow, at a
tracking server or in a folder.

A run that resumes from an earlier checkpoint repeats iterations. Those that a chart has already are left out, so that
no curve runs back or doubles where a service cannot take points back; metrics.jsonl has both.
"""

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import batched
from pathlib import Path
from typing import Any, Literal

from program.durable import replace_file
from program.untrusted import InputError, read_json, read_text
from training.config.recipe import flattened
from training.metrics.redaction import redacted
from training.metrics.registry import METRICS, Names, named_curves
from training.metrics.values import Number, Values


class DrawnCurves:
    """The last iteration of each curve of one chart, kept in a file of the run's folder."""

    def __init__(self, path: Path, chart: str) -> None:
        """``chart``: the id of what is drawn. Of another one, or of a file that cannot be read, nothing is drawn."""
        self._path, self._chart = path, chart
        self._last: dict[str, int] = {}
        with contextlib.suppress(OSError, InputError):
            by_chart = read_json(path, dict[str, dict[str, int]])
            self._last = by_chart.get(chart, {})

    def fresh(self, iteration: int, curves: Iterable[tuple[str, Number]]) -> dict[str, Number]:
        """The points that go on beyond their curve's last one. They count as drawn from here on, also if this process
        is killed before they are: a point that lacks is better than one that stands twice."""
        points = {name: value for name, value in curves if iteration > self._last.get(name, -1)}
        if points:
            self._last |= dict.fromkeys(points, iteration)
            with contextlib.suppress(OSError):
                text = json.dumps({self._chart: self._last})
                replace_file(self._path, text.encode(), durable=False)
        return points


INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 30.0
"""How long the end of a run waits for uploads; the rest can be sent with ``wandb sync``."""


class WandbSink:
    """Logs to the run named in ``run_dir/wandb_id``, so that a resumed run continues its chart.

    Every method may block on the network or raise whatever wandb raises: wrap it in ``BackgroundSink``.
    The key comes from the environment or the user's netrc, and wandb alone reads it.
    """

    def __init__(
        self,
        run_dir: Path,
        mode: Literal["offline", "online"],
        project: str,
        name: str | None,
        config: Mapping[str, object],
        names: Names,
        say: Callable[[str], None],
    ) -> None:
        """Start or continue the run. ``name`` None: the folder's name. ``config`` is handed over redacted.

        Raises RuntimeError when ``mode`` is online and no key is found.
        """
        import wandb  # about a second

        settings = wandb.Settings(
            root_dir=os.environ.get("WANDB_DIR") or str(run_dir),  # its files lie in the folder `wandb` there
            silent=True,
            console="off",  # else wandb wraps stdout and keeps all that is printed
            disable_git=True,  # a remote's URL may hold a token
            save_code=False,
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        wandb.setup(settings)  # before login(), which else announces itself on the console
        # Without a key, init() would ask for one on the terminal and wait for ever.
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no API key: set WANDB_API_KEY, run `wandb login` or use --log.wandb offline")
        run_id = stable_id(run_dir / "wandb_id")
        self._names, self._drawn = names, DrawnCurves(run_dir / "wandb_drawn.json", run_id)
        self._run = wandb.init(
            project=project,
            name=name or run_dir.resolve().name,
            id=run_id,
            resume="allow",
            mode=mode,
            config=redacted(config),
            settings=settings,
        )
        where = self._run.url if mode == "online" else f"offline in {Path(self._run.dir).parent}"
        say(f"wandb: {where}")

    def write(self, iteration: int, values: Values) -> None:
        """Log ``values`` at ``iteration``, but for points that the chart has.

        Of experts, each block's fullest only: wandb draws a panel per name.
        """
        if points := self._drawn.fresh(iteration, named_curves(values, 0, self._names)):
            self._run.log(points, step=iteration)

    def close(self) -> None:
        """Wait until the data is sent, at most ``FINISH_TIMEOUT_S``."""
        self._run.finish()


def stable_id(path: Path) -> str:
    """The run's id: read from ``path``, or made up and stored there (atomically) when there is none yet."""
    if path.exists() and re.fullmatch(r"[a-z0-9]{8,64}", stored := read_text(path).strip()):
        return stored
    fresh = uuid.uuid4().hex[:16]
    replace_file(path, f"{fresh}\n".encode(), durable=False)
    return fresh


MAX_EXPERTS = 64
"""More experts than these get no curve each: their block's fullest has one, metrics.jsonl has all."""


class TensorBoardSink:
    """One scalar curve per number of metrics.jsonl, over iterations.

    TensorBoard keeps float32: the exact numbers are those of metrics.jsonl.
    """

    def __init__(self, folder: Path, resumed_iteration: int, names: Names = "triplane") -> None:
        """Open an event file in ``folder``; ``resumed_iteration`` is the last one restored, or 0.

        Points after it, which an earlier attempt left in ``folder``, are purged: else the curves would run
        back and double. This holds at 0 too, for a run that died before its first checkpoint.
        """
        from torch.utils.tensorboard import SummaryWriter  # imports torch; it costs about a second

        attempted_before = folder.is_dir() and any(folder.iterdir())
        purge_step = resumed_iteration + 1 if attempted_before else None
        self._names = names
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def write(self, iteration: int, values: Values) -> None:
        """Queue one point per value; the writer flushes every 30 s."""
        for name, value in named_curves(values, MAX_EXPERTS, self._names):
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


MLFLOW_OFFLINE = "offline"
MOST_METRICS, MOST_PARAMETERS = 1000, 100
"""That one request may carry (mlflow/utils/validation.py)."""
MLFLOW_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Of one request, in seconds: mlflow tries 7 times 120 s, longer than the end of a run waits to say why it failed."""
MLFLOW_FORBIDDEN = re.compile(r"[^\w./: -]")
MLFLOW_LONGEST_NAME = 250


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
        for name, most in MLFLOW_LIMITS.items():
            os.environ.setdefault(name, most)
        if where == MLFLOW_OFFLINE:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # "in maintenance mode", and refused without this
        from mlflow.tracking import MlflowClient  # one to two seconds

        uri = (run_dir / "mlflow").resolve().as_uri() if where == MLFLOW_OFFLINE else where
        self._client, self._names = MlflowClient(uri), names
        self._train_iters, self._iteration = train_iters, resumed_iteration
        id_file = run_dir / "mlflow_run_id"
        self._run_id = self._continued(id_file)
        if not self._run_id:
            self._run_id = self._created(run_dir.resolve().name, experiment, config)
            replace_file(id_file, f"{self._run_id}\n".encode(), durable=False)
        self._drawn = DrawnCurves(run_dir / "mlflow_drawn.json", self._run_id)
        place = f"in {run_dir / 'mlflow'}" if where == MLFLOW_OFFLINE else f"at {where}"
        say(f"MLflow: run {self._run_id} {place}")

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


def parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """``train.seed`` and its value as text, of every field that is set."""
    return ((allowed(name), str(value)) for name, value in flattened(config) if value not in (None, "", (), []))


def allowed(name: str) -> str:
    """``name`` as mlflow takes it: without characters and paths that it forbids. Its files cannot have a curve and a
    folder of the same name: ``expert_load_max/block_3`` is ``expert_load_max_each/block_3`` there."""
    steps = [step for step in MLFLOW_FORBIDDEN.sub("_", name).split("/") if step] or ["_"]
    steps = ["_" if step in (".", "..") else step for step in steps]
    if len(steps) > 1 and steps[0] in METRICS:
        steps[0] += "_each"
    return "/".join(steps)[:MLFLOW_LONGEST_NAME].rstrip("/")
