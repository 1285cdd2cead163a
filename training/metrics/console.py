"""The line that a person reads: one per logged iteration."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from training.metrics.values import Values

FAMILIES = ("validation_loss", "eval")
"""Keys that begin with these, and /, are shown, too."""
MOST_SHOWN = 12
"""Sets, or tasks, of one line; metrics.jsonl has all."""


class ConsoleSink:
    """Says one line for each write, with the numbers that are there; nothing stands in for the others."""

    def __init__(self, say: Callable[[str], None], train_iters: int) -> None:
        """``say`` prints one line; ``train_iters`` is the iteration at which the run is done."""
        self._say = say
        self._train_iters = train_iters

    def write(self, iteration: int, values: Values) -> None:
        """Say the line of ``iteration``."""
        parts = [*_validation(values), *_scores(values)]
        parts += [shown(values[name]) for name, shown in SHOWN.items() if name in values]
        self._say(" | ".join([f"iteration {iteration:>6}/{self._train_iters}", *filter(None, parts)]))

    def close(self) -> None:
        """Nothing to do: what is said is said."""


def duration(seconds: float) -> str:
    """``seconds`` in its two largest units: ``42s``, ``1m 25s``, ``3h 07m``, ``2d 04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def _eta(seconds: float) -> str:
    return f"ETA {duration(seconds)}"


def _skipped(updates: float) -> str:
    """Marks updates that were not applied since the last line (gradients that overflowed)."""
    if not updates:
        return ""
    return "UPDATE SKIPPED" if updates == 1 else f"{updates:.0f} UPDATES SKIPPED"


def _recompiled(times: float) -> str:
    return f"{times:.0f} RECOMPILATIONS" if times else ""


def _validation(values: Values) -> list[str]:
    """Losses [nats per token] and exp of them: that of the validation split, then those of sets and sources."""
    names = [name for name in values if name.partition("/")[0] == "validation_loss"]
    shown = [f"{name.partition('/')[2]} {_loss(values[name])}".strip() for name in names[:MOST_SHOWN]]
    if shown:
        shown[0] = f"validation loss {shown[0]}".replace("(", "(perplexity ")
    return [*shown, f"{len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else shown


def _loss(loss: Any) -> str:
    """With its exp, which overflows a float beyond 709 nats."""
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return f"{loss:.3f} ({perplexity:,.1f})" if perplexity < 1e6 else f"{loss:.3f} ({perplexity:.2e})"


def _scores(values: Values) -> list[str]:
    """Of tasks, by their keys eval/TASK/METRIC: each task with its metrics."""
    tasks: dict[str, list[str]] = {}
    for name, value in values.items():
        family, _, rest = name.partition("/")
        if family == "eval":
            task, _, metric = rest.partition("/")
            tasks.setdefault(task, []).append(f"{metric} {value:.4g}")
    shown = [f"{task} {', '.join(metrics)}" for task, metrics in list(tasks.items())[:MOST_SHOWN]]
    return [*shown, f"{len(tasks) - MOST_SHOWN} more tasks"] if len(tasks) > MOST_SHOWN else shown


def _depths(losses: Sequence[float]) -> str:
    return "mtp " + " ".join(f"{loss:.2f}" for loss in losses)


SHOWN: dict[str, Callable[[Any], str]] = {
    "loss": "loss {:.4f}".format,
    "mtp_loss": _depths,
    "skipped": _skipped,
    "grad_norm": "norm {:.2f}".format,
    "learning_rate": "lr {:.2e}".format,
    "loss_scale": "scale {:,.0f}".format,
    "expert_load_max": "experts {:.2f}x".format,
    "dropped_tokens": "dropped {:.1%}".format,
    "iteration_s": "{:.2f} s".format,
    "tokens_per_s": "{:,.0f} tok/s".format,
    "tokens_per_s_per_gpu": "{:,.0f} tok/s/GPU".format,
    "mfu": "MFU {:.1%}".format,
    "pipeline_bubble": "bubble {:.1%}".format,
    "exposed_communication": "exposed communication {:.1%}".format,
    "recompilations": _recompiled,
    "memory_gib": "mem {:.1f} GiB".format,
    "eta_s": _eta,
}
"""Key of metrics.jsonl -> its text, in the order of the line. Keys that are not here are not shown."""
