"""The ``eval`` section of a recipe: what a model is judged by, beside the loss on its own validation split."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from data.config import DataConfig, split_weights

SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Of a validation set: a part of its metric's name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """What the model is judged by while it trains."""

    tasks: tuple[str, ...] = ()
    """Tasks, groups or tags of lm-evaluation-harness, such as "hellaswag", scored on the running model."""

    task_folder: str | None = None
    """Folder with task files (.yaml) of your own, beside those that the harness brings (its --include_path)."""

    interval: int | None = None
    """Iterations between evaluations on eval.tasks. None: only after the last, train.train_iters, or where a callback
    ends the training; not where a run stops to go on later."""

    limit: int | None = None
    """Documents of each task, the first ones. None: all."""

    num_fewshot: int | None = None
    """Examples before each question. None: what the task's file says."""

    validation_sets: Mapping[str, str] = field(default_factory=dict)
    """Held-out text beside the validation split: a table of name = prefix, file or glob, as in data.blend. Each is
    measured every train.eval_interval iterations, as validation_loss/NAME."""

    full_pass: bool = False
    """Measure validation losses on all tokens of the split, and of each set, instead of on train.eval_iters batches
    (Megatron's --full-validation)."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = []
        for name, least in (("interval", 1), ("limit", 1), ("num_fewshot", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                found.append(f"eval.{name} must be {least} or more, found {value}.")
        if not all(self.tasks) or len(set(self.tasks)) < len(self.tasks):
            found.append("eval.tasks: expected names, each once, found an empty or a repeated one.")
        if self.task_folder == "":
            found.append("eval.task_folder is empty; leave it out for the harness' own tasks.")
        for name, path in self.validation_sets.items():
            if not SET_NAME.fullmatch(name) or not path:
                found.append(
                    f'eval.validation_sets: {name} = "{path}": expected a name of letters, digits, ".", "_" and "-", '
                    "and a prefix, file or glob."
                )
        return found


def validation_problems(config: EvalConfig, data: DataConfig) -> list[str]:
    """Full passes over a validation split that has no end, or one that Megatron's order has no samples for."""
    if not config.full_pass or not has_own_split(config, data):
        return []
    if data.stream:
        return [
            "eval.full_pass: how much the validation split of data.stream holds is not known before it is read. Name "
            'held-out files in eval.validation_sets and set data.split = "1,0,0", or leave eval.full_pass out.'
        ]
    if data.order == "megatron":
        return [
            'eval.full_pass with data.order = "megatron": its validation samples are counted by train.eval_iters. Name '
            'held-out files in eval.validation_sets and set data.split = "1,0,0", or leave eval.full_pass out.'
        ]
    return []


def has_own_split(config: EvalConfig, data: DataConfig) -> bool:
    """Whether the data's validation split is measured: where it has no weight, named sets can stand in for it."""
    return not config.validation_sets or split_weights(data.split)[1] > 0
