"""``train.callbacks``: the user's classes, what they are given, and whose fault it is when one raises."""

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from data.tokenizers.base import Tokenizer
from models.shapes import GPTShape
from parallel.ddp import Chunks
from parallel.groups import Ranks
from program.errors import SharedMistake
from program.users_code import users_code
from training.config.import_path import accepts, load
from training.config.run_config import RunConfig
from training.loop import Callback, Reason
from training.progress import Progress
from training.step import StepRequests, StepResult
from training.watchdog.heartbeat import Heartbeat

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
    """Calls a user's callback. What it raises names it, and so does the watchdog where its process ends within."""

    def __init__(self, path: str, inner: Any, heartbeat: Heartbeat | None = None) -> None:
        self.path, self.inner, self.heartbeat = path, inner, heartbeat or Heartbeat()

    def start(self, progress: Progress) -> None:
        self._call("start", progress)

    def requests(self) -> StepRequests:
        answer = self._call("requests")
        if not isinstance(answer, StepRequests | None):
            raise TypeError(f"{FIELD} {self.path}: requests() must return StepRequests, found {type(answer).__name__}")
        return StepRequests() if answer is None else self._checked(answer)

    def _checked(self, answer: StepRequests) -> StepRequests:
        """With plain bools, whatever library's they were."""
        found = {}
        for name in (one.name for one in dataclasses.fields(StepRequests)):
            given = getattr(answer, name)
            value = given.item() if getattr(given, "ndim", None) == 0 else given
            if not isinstance(value, bool):
                shown = f"{given!r}"[:80]
                raise TypeError(f"{FIELD} {self.path}: StepRequests({name}=...) must be True or False, found {shown}")
            found[name] = value
        return StepRequests(**found)

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
        what = f"{hook} of your callback {self.path} ({FIELD})"
        with users_code(what), self.heartbeat.inside(what):
            method = getattr(self.inner, hook, None)
            if method is None:  # a class of its own, without that method
                return None
            answer = method(*arguments)
            if inspect.isgenerator(answer) or inspect.isawaitable(answer) or inspect.isasyncgen(answer):
                raise TypeError(f"{hook} returned a {type(answer).__name__}, which never runs: write it without yield")
        return answer


def build_callbacks(run: RunContext, heartbeat: Heartbeat) -> list[UserCallback]:
    """In the order of the recipe. Raises SharedMistake for one that is none."""
    return [UserCallback(path, _made(path, run), heartbeat) for path in run.config.train.callbacks]


def _made(path: str, run: RunContext) -> Any:
    kind = load_callback(path)
    with users_code(f"__init__ of your callback {path} ({FIELD})"):
        return kind(run=run) if _takes_run(kind) else kind()


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
        names = ", ".join(inspect.signature(vars(Callback)[name]).parameters)
        if not callable(hook):
            return f"expected a method {name}({names}), found {type(hook).__name__}."
        plain = inspect.unwrap(hook)
        if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
            return f"{name} is a generator: it would never run. Write it without yield."
        if inspect.iscoroutinefunction(plain):
            return f"{name} is a coroutine: it would never be awaited. Write it without async."
        bound = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        if not accepts(hook, HOOKS[name] + (not bound)):  # and self
            return f"expected {name}({names}), found {name}{inspect.signature(hook)}."
    required = [
        name
        for name, one in _parameters(kind).items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and name != "run"
    ]
    if required:
        return f"expected __init__(self) or __init__(self, run), found one that also needs {', '.join(required)}."
    return None


def _takes_run(kind: type) -> bool:
    return "run" in _parameters(kind)


def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    """Of its making; none are known of what is not written in Python."""
    try:
        return inspect.signature(kind).parameters
    except ValueError:
        return {}
