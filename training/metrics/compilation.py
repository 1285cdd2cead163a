"""What torch.compile does in a run (train.compile): what the first step costs, and each recompilation by its cause."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from models.layers.compiled import cache_dir
from parallel.groups import Ranks
from training.checkpoint.agreement import gathered
from training.loop import Callback
from training.metrics.values import Value
from training.progress import Progress
from training.run_dir.history import Note, unnoted
from training.step import StepResult

MOST_NAMED = 5
"""Recompilations of one line; metrics.jsonl has up to ``MOST_KEPT``."""
MOST_KEPT = 50


@dataclass(frozen=True, slots=True)
class Compilation:
    """One function, or the rest of one behind a break, that Dynamo went through; or the backward pass of one."""

    function: str
    operations: int
    """Of its forward graph; 0: none was left to compile, or it is a backward pass."""
    seconds: float
    cause: str
    """The guard that failed; empty the first time."""

    @property
    def name(self) -> str:
        """Of a recompilation: ``forward (transformer_layer.py:746): tensor 'hidden_states' size mismatch ...``."""
        return f"{self.function}: {self.cause}"


def take_compilations() -> list[Compilation]:
    """Of this process since the last call."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    found = [_read(one) for one in get_compilation_metrics()]
    clear_compilation_metrics()
    return found


def _read(of_torch: Any) -> Compilation:
    """torch's reason begins with the number of the compilation whose guard failed, and may go on for lines."""
    place = f"{(of_torch.co_filename or '').rpartition('/')[2]}:{of_torch.co_firstlineno}"
    lines = (of_torch.recompile_reason or "").splitlines()
    return Compilation(
        function=f"{of_torch.co_name} ({place})" if of_torch.co_name else "",
        operations=of_torch.graph_op_count or 0,
        seconds=(of_torch.duration_us or 0) / 1e6,
        cause=" ".join(re.sub(r"^\d+/\d+:", "", lines[0]).split())[:200] if lines else "",
    )


class CompilationMeter(Callback):
    """Says before the first step that it will take long, and after it how long; then counts and names recompilations,
    on every rank, for each logged line."""

    def __init__(self, ranks: Ranks, note: Note = unnoted) -> None:
        self.ranks, self.note = ranks, note
        self.first, self.iteration = True, 0
        self.recompiled: Counter[str] = Counter()

    def start(self, progress: Progress) -> None:
        take_compilations()  # what this process compiled before is not the first step's
        self.ranks.say(
            "train.compile: the first step compiles each kind of block, for a minute or more; kernels are kept in "
            f"{cache_dir()} (TORCHINDUCTOR_CACHE_DIR) for the next start"
        )

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.iteration = progress.iteration
        found = take_compilations()
        if self.first:
            self.first = False
            self.ranks.say(_summary(found))
            self.note("compiled", progress.iteration, text=_summary(found))
        else:
            self.recompiled.update(one.name for one in found if one.cause)

    def report(self) -> dict[str, Value]:
        """``recompilations`` over all ranks; where there are any, ``recompiled`` with their causes. Collective."""
        own = [(self.recompiled.total(), Counter(dict(self.recompiled.most_common(MOST_KEPT))))]
        if not (found := gathered(own if self.recompiled else [], self.ranks)):
            return {"recompilations": 0}
        self.recompiled = Counter()
        total, causes = sum(count for count, _ in found), sum((each for _, each in found), Counter[str]())
        text = _named(total, causes)
        self.ranks.say(text)
        self.note("recompiled", self.iteration, text=text)
        return {"recompilations": total, "recompiled": dict(causes.most_common(MOST_KEPT))}


def _summary(found: list[Compilation]) -> str:
    graphs = [one for one in found if one.operations]
    again = sum(bool(one.cause) for one in graphs)
    seconds, operations = sum(one.seconds for one in found), sum(one.operations for one in graphs)
    return (
        f"train.compile: {seconds:.1f} s of the first step went into compiling {len(graphs)} graphs of {operations} "
        f"operations, {again} of them again for other sizes or kinds"
    )


def _named(total: int, causes: Counter[str]) -> str:
    shown = [f"{count} x {name}" for name, count in causes.most_common(MOST_NAMED)]
    more = [f"{len(causes) - MOST_NAMED} other causes"] if len(causes) > MOST_NAMED else []
    return f"train.compile: {total} recompilations since the last line: {'; '.join([*shown, *more])}"
