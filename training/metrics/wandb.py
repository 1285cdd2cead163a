"""Weights & Biases: the same numbers as a chart that others can open."""

import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from parallel.durable import replace_file
from parallel.untrusted import read_text
from training.metrics.drawn import DrawnCurves
from training.metrics.megatron_names import Names, named_curves
from training.metrics.redaction import redacted
from training.metrics.values import Values

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
