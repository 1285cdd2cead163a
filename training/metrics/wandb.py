"""Weights & Biases: the same numbers as a chart that others can open."""

import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from parallel.durable import replace_file
from parallel.untrusted import read_text
from training.metrics.values import Values, curves

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
        say: Callable[[str], None],
    ) -> None:
        """Start or continue the run. ``name`` None: the folder's name. ``config`` is handed over redacted.

        Raises RuntimeError when ``mode`` is online and no key is found.
        """
        import wandb  # about a second

        settings = wandb.Settings(
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
        self._run = wandb.init(
            project=project,
            name=name or run_dir.resolve().name,
            id=stable_id(run_dir / "wandb_id"),
            resume="allow",
            mode=mode,
            config=redacted(config),
            settings=settings,
        )
        where = self._run.url if mode == "online" else f"offline in {Path(self._run.dir).parent}"
        say(f"wandb: {where}")

    def write(self, iteration: int, values: Values) -> None:
        """Log ``values`` at ``iteration``. wandb drops those that its chart has: curves do not double.

        Of experts, each block's fullest only: wandb draws a panel per name.
        """
        self._run.log(dict(curves(values, max_experts=0)), step=iteration)

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


REDACTED = "[redacted]"

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|(?i:secret|password|(?:keys?|token)$)")
"""Upper-case names, as environments have them, are taken broadly. Lower-case ones must end in ``key`` or
``token``: else ``tokenizer`` and ``moe_token_dispatcher_type`` would be hidden."""

ASSIGNMENT = re.compile(r"\s*([\w.-]+)\s*=")


def redacted(config: Mapping[str, object]) -> dict[str, object]:
    """A copy of ``config`` in which the value under every name that looks like a secret's is ``[redacted]``.

    Sections and lists are searched too, and so are ``name=value`` strings (those of ``model.megatron``).
    """
    return {name: REDACTED if SECRET_NAME.search(name) else _cleaned(value) for name, value in config.items()}


def _cleaned(value: object) -> object:
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    if isinstance(value, str) and (match := ASSIGNMENT.match(value)) and SECRET_NAME.search(match[1]):
        return f"{match[1]}={REDACTED}"
    return value
