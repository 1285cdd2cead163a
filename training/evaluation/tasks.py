"""Tasks of lm-evaluation-harness, built before anything is computed: data sets loaded, every question written out.

One process does that, rank 0's: the others score what it asks (shared_model.py), so a data set is downloaded once.
``HF_HUB_OFFLINE=1`` keeps it from trying. A task file may name Python functions, which then run here.
"""

import contextlib
import difflib
import importlib.util
import io
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.cache import Console
from program.errors import UserError
from program.users_code import users_code
from training.config.small_sections import EvalConfig

GENERATES = "generate_until"
MOST_NEW_TOKENS = 256
"""Of a text whose task says nothing, as HFLM has it."""
FEWSHOT_SEED, RANDOM_SEED, NUMPY_SEED = 1234, 0, 1234
"""The harness' own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskRequest:
    """What to be judged by."""

    names: tuple[str, ...]
    folder: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    seq_length: int
    """Of the model: a text and its context must fit."""
    flags: str = "eval."
    """What stands before ``tasks`` and the others where a user sets them, for messages."""

    @classmethod
    def of(cls, given: EvalConfig, seq_length: int) -> "TaskRequest":
        """Those of a run."""
        return cls(
            names=given.tasks, folder=given.task_folder, limit=given.limit, num_fewshot=given.num_fewshot,
            seq_length=seq_length,
        )  # fmt: skip


@dataclass(kw_only=True, slots=True, frozen=True)
class PreparedTasks:
    """Tasks with all their requests, which every evaluation asks again."""

    names: tuple[str, ...]
    """As they were asked for: of tasks, groups or tags."""
    shown: tuple[str, ...]
    """Whose scores are logged: of a tag, and of a group without a score of its own, each task's."""
    loaded: dict[str, Any]
    """The harness' TaskDict: "tasks", "groups", "group_map"."""
    limit: int | None
    requests: int


def prepare_tasks(asked: TaskRequest, console: Console) -> PreparedTasks:
    """Find, load and build.

    Raises UserError for a name that there is not, with the nearest one; for a data set that cannot be loaded, and for
    a task that cannot be had here.
    """
    _check_installed(asked)
    _start_no_thread()
    with quiet():
        loaded, shown = _load(asked, _manager(asked))
        for name, task in loaded["tasks"].items():
            _check_task(asked, name, task)
        with seeded():
            for name, task in loaded["tasks"].items():
                _build(asked, name, task)
                _check_texts(asked, name, task)
    counted = Counter(instance.request_type for task in loaded["tasks"].values() for instance in task.instances)
    count = len(loaded["tasks"])
    documents = sum(len({instance.doc_id for instance in task.instances}) for task in loaded["tasks"].values())
    console(
        f"eval: {', '.join(asked.names)}: {count} {'task' if count == 1 else 'tasks'}, {documents:,} documents, "
        + ", ".join(f"{count:,} {kind} requests" for kind, count in counted.items())
    )
    return PreparedTasks(
        names=asked.names, shown=shown, loaded=loaded, limit=asked.limit, requests=counted.total()
    )  # fmt: skip


def check_names(asked: TaskRequest) -> None:
    """Raises UserError for a name that there is not, with the nearest one. Loads no data set."""
    _check_installed(asked)
    with quiet():
        _manager(asked)


def _check_installed(asked: TaskRequest) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f'{asked.flags}tasks needs lm-evaluation-harness, which is not installed: pip install -e ".[eval]"'
        )


def _start_no_thread() -> None:
    """Progress bars are watched by a thread otherwise, and ranks are forked from this process later."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0


def _manager(asked: TaskRequest) -> Any:
    """The harness' index. That of all its own tasks takes seconds, and is made only where it is needed."""
    from lm_eval.tasks import TaskManager

    if asked.folder is not None:
        if not Path(asked.folder).is_dir():
            raise UserError(f"{asked.flags}task_folder: no folder {asked.folder}.")
        own = TaskManager(include_path=asked.folder, include_defaults=False)
        if {*asked.names} <= {*own.all_subtasks}:
            return own
    everything = TaskManager(include_path=asked.folder)
    for name in asked.names:
        if name not in everything.all_tasks:
            near = difflib.get_close_matches(name, everything.all_tasks, n=3, cutoff=0.6)
            hint = f"Did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists those of the harness."
            where = f" or {asked.folder}" if asked.folder else ""
            raise UserError(
                f'{asked.flags}tasks: no task, group or tag "{name}" in lm-evaluation-harness{where}. {hint}'
            )
    return everything


def _load(asked: TaskRequest, manager: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The harness' TaskDict, and whose scores are logged. One by one, so that a message can name the one that fails."""
    built, shown = [], list[str]()
    for name in asked.names:
        try:
            with users_code(f"task {name}"):
                built.append(manager.load([name]))
        except UserError:
            raise
        except Exception as error:  # of datasets, of the network, of a task's own code
            offline = "HF_HUB_OFFLINE is set: " if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
            raise UserError(
                f"{asked.flags}tasks: {name} cannot be loaded: {offline}{_first_line(error)} Its data set must be in "
                "the cache of Hugging Face, or within reach: run the same once on a machine with a network and this "
                "HF_HOME."
            ) from error
    tasks, groups = ({key: one for each in built for key, one in each[kind].items()} for kind in ("tasks", "groups"))
    if len(tasks) < sum(len(each["tasks"]) for each in built):
        raise UserError(f"{asked.flags}tasks: a task is in two of {', '.join(asked.names)}. Name it once.")
    for name, each in zip(asked.names, built, strict=True):
        group = each["groups"].get(name)
        shown += [name] if name in each["tasks"] or (group and group.has_aggregation) else each["tasks"]
    group_map = {key: one.child_names for key, one in groups.items()}
    return {"tasks": tasks, "groups": groups, "group_map": group_map}, tuple(shown)


def _check_task(asked: TaskRequest, name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"{asked.flags}tasks: {name} runs code that a model wrote, which Triplane does not.")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{asked.flags}tasks: {name} asks about images; the model reads text.")


def _check_texts(asked: TaskRequest, name: str, task: Any) -> None:
    """Of a task that generates: whether its texts fit, and are those of greedy decoding."""
    for instance in task.instances:
        if instance.request_type != GENERATES:
            return
        if instance.args[1].get("do_sample") or float(instance.args[1].get("temperature") or 0) > 0:
            raise UserError(f"{asked.flags}tasks: {name} draws its texts at random; Triplane's are greedy.")
        if (new_tokens := limits_of(instance)[1]) >= asked.seq_length:
            raise UserError(
                f"{asked.flags}tasks: {name} asks for texts of up to {new_tokens} tokens; with their context they must "
                f"fit into model.seq_length = {asked.seq_length}."
            )


def limits_of(instance: Any) -> tuple[tuple[str, ...], int]:
    """Of a request for a text: what ends it, and its tokens at most."""
    from lm_eval.models.utils import normalize_gen_kwargs

    found = normalize_gen_kwargs(instance.args[1], MOST_NEW_TOKENS)
    return tuple(found["until"]), int(found["max_gen_toks"])


def _build(asked: TaskRequest, name: str, task: Any) -> None:
    """All requests of a task, with the harness' rules for the number of examples (its simple_evaluate)."""
    own = task.get_config("num_fewshot")
    if asked.num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=asked.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    try:
        with users_code(f"task {name}"), contextlib.redirect_stderr(io.StringIO()):  # a progress bar for each task
            task.build_all_requests(limit=asked.limit, rank=0, world_size=1)
    except Exception as error:
        raise UserError(f"{asked.flags}tasks: {name}: a question cannot be written: {_first_line(error)}") from error
    if not task.instances:
        raise UserError(f"{asked.flags}tasks: {name} has no documents.")
    task.build_all_requests = lambda **_: None  # the harness would build them again in each evaluation


def _first_line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")[:300].rstrip(".")
    return f"{type(error).__name__}: {text}."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The harness says what is wrong, and no more; data sets show their progress on terminals alone."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, shown = logging.getLogger("lm_eval"), not are_progress_bars_disabled()
    before = logger.level
    logger.setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(before)
        if shown:
            enable_progress_bars()


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """The harness' seeds within, for tasks that draw; afterwards the generators are as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
