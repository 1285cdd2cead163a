"""``train.callbacks``: the user's classes, what they are given, and whose fault it is when one raises."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from data.tokenizers import Tokenizer
from models.shapes import GPTShape
from parallel.ddp import Chunks
from parallel.errors import SharedMistake
from parallel.groups import Ranks
from training.config.import_path import load
from training.config.run_config import RunConfig
from training.loop import Callback, Reason
from training.parts import TrainingRun
from training.progress import Progress
from training.step import StepRequests, StepResult

FIELD = "train.callbacks"
HOOKS = {name: len(inspect.signature(hook).parameters) - 1 for name, hook in vars(Callback).items() if name[0] != "_"}
"""The methods that the loop calls, and how many arguments each gets."""


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class RunContext:
    """What a callback gets as ``run``: this rank's parts of the run."""

    config: RunConfig
    """The recipe, with the flags over it."""
    shape: GPTShape
    ranks: Ranks
    """This process: ``ranks.rank``, ``ranks.layout``, its groups, and ``ranks.say``, which prints on rank 0."""
    run_dir: Path
    tokenizer: Tokenizer
    chunks: Chunks
    """This rank's part of the model, a module for each virtual stage."""
    optimizer: MegatronOptimizer


class UserCallback(Callback):
    """Calls a user's callback. What it raises names it."""

    def __init__(self, path: str, inner: Any) -> None:
        self.path, self.inner = path, inner

    def start(self, progress: Progress) -> None:
        self._call("start", progress)

    def requests(self) -> StepRequests:
        answer = self._call("requests")
        if not isinstance(answer, StepRequests | None):
            raise TypeError(f"{FIELD} {self.path}: requests() must return StepRequests, found {type(answer).__name__}")
        return answer or StepRequests()

    def before_step(self, progress: Progress) -> None:
        self._call("before_step", progress)

    def before_update(self) -> None:
        self._call("before_update")

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self._call("after_step", progress, result)

    def after_save(self, progress: Progress, path: Path, stall_s: float) -> None:
        self._call("after_save", progress, path, stall_s)

    def stop(self, progress: Progress, reason: Reason) -> None:
        self._call("stop", progress, reason)

    def _call(self, hook: str, *arguments: Any) -> Any:
        method = getattr(self.inner, hook, None)
        if method is None:  # a class of its own, without that method
            return None
        try:
            return method(*arguments)
        except Exception as error:
            error.add_note(f"raised by {hook} of your callback {self.path} ({FIELD})")
            raise


def build_callbacks(run: TrainingRun, chunks: Chunks, optimizer: MegatronOptimizer) -> list[UserCallback]:
    """In the order of the recipe. Raises SharedMistake for one that is none."""
    context = RunContext(
        config=run.config,
        shape=run.shape,
        ranks=run.ranks,
        run_dir=run.run_dir,
        tokenizer=run.prepared.tokenizer,
        chunks=chunks,
        optimizer=optimizer,
    )
    return [UserCallback(path, _made(path, context)) for path in run.config.train.callbacks]


def _made(path: str, run: RunContext) -> Any:
    kind = load_callback(path)
    try:
        return kind(run=run) if _takes_run(kind) else kind()
    except Exception as error:
        error.add_note(f"raised by __init__ of your callback {path} ({FIELD})")
        raise


def load_callback(path: str) -> type:
    """The class of an import path. Raises SharedMistake where it is not a callback that the loop can call."""
    kind = load(FIELD, path)
    if problem := _problem(kind):
        raise SharedMistake(f'{FIELD} "{path}": {problem}')
    return kind


def _problem(kind: Any) -> str | None:
    if not isinstance(kind, type):
        return f"expected a class, found {type(kind).__name__}."
    own = {name: getattr(kind, name) for name in HOOKS if getattr(kind, name, None) not in (None, vars(Callback)[name])}
    if not own:
        return f"{kind.__name__} has none of the methods that are called: {', '.join(HOOKS)}."
    for name, hook in own.items():
        if not _accepts(hook, HOOKS[name] + 1):  # and self
            names = ", ".join(inspect.signature(vars(Callback)[name]).parameters)
            return f"expected {name}({names}), found {name}{inspect.signature(hook)}."
    required = [
        name
        for name, one in inspect.signature(kind).parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and name != "run"
    ]
    if required:
        return f"expected __init__(self) or __init__(self, run), found one that also needs {', '.join(required)}."
    return None


def _accepts(hook: Any, count: int) -> bool:
    try:
        inspect.signature(hook).bind(*range(count))
    except TypeError:
        return False
    return True


def _takes_run(kind: type) -> bool:
    return "run" in inspect.signature(kind).parameters
