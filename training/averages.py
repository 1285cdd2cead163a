"""Averages of the weights over updates, beside the weights that are trained.

ema                  weights of long ago count less: average = d * average + (1 - d) * weights after each update
                     (train.ema_decay)
average_last         the plain mean of the weights after each update of the last N iterations (train.average_last;
                     stochastic weight averaging, arXiv:1803.05407, and LAWA, arXiv:2209.14981)

In fp32, cut as the optimizer's state is, and saved, moved to another layout and restored with it. Training never reads
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from training.checkpoint.chosen_weights import AVERAGES
from training.config.train_config import TrainConfig
from training.loop import Callback
from training.optimizer_forms import StateForm, form_of
from training.progress import Progress
from training.step import StepResult

BEGINS = "average_last_begins"


class Averages(Callback):
    """This rank's share, as ``optimizer.averages``; ``part.averages[main][name]`` of each chained optimizer's
    parameters: floats [n]."""

    def __init__(self, optimizer: MegatronOptimizer, train: TrainConfig) -> None:
        """They begin as the weights of now."""
        self.train, self.names = train, averages_of(train)
        self.counts: dict[str, int] = dict.fromkeys(self.names, 0)
        """Updates whose weights are in them."""
        self.begins = train.train_iters - (train.average_last or 0)
        """Iteration behind which ``average_last`` collects."""
        self.optimizer = optimizer
        for part, form, main in self._mains():
            weight = form.weight(main)
            kept = torch.device("cpu") if train.averages_on_host else weight.device
            pinned = train.averages_on_host and weight.is_cuda
            part.averages[main] = {
                name: torch.empty(weight.shape, dtype=torch.float32, device=kept, pin_memory=pinned).copy_(weight)
                for name in self.names
            }

    def numbers(self) -> dict[str, int]:
        """What a checkpoint keeps beside the tensors."""
        return self.counts | ({BEGINS: self.begins} if "average_last" in self.names else {})

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Inverse of ``numbers``. The mean of other iterations, of a run that was made longer, say, starts over."""
        for name in self.names:
            self.counts[name] = int(saved.get(name, 0))
        if "average_last" in self.names and saved.get(BEGINS) != self.begins:
            self.counts["average_last"] = 0

    def start_again(self, names: Sequence[str]) -> None:
        """Of those that a checkpoint has not: from the weights of now."""
        for name in names:
            self.counts[name] = 0
            for part, form, main in self._mains():
                part.averages[main][name].copy_(form.weight(main))

    @torch.no_grad()
    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Collect this update's weights, if there was one."""
        if result.skipped:
            return
        shares = {name: share for name in self.names if (share := self._share(name, progress)) is not None}
        for name in shares:
            self.counts[name] += 1
        for part, form, main in self._mains() if shares else ():
            weight = form.weight(main)
            for name, share in shares.items():
                average = part.averages[main][name]
                average.lerp_(weight.to(average.device), share)

    def _share(self, name: str, progress: Progress) -> float | None:
        """Of the newest weights in an average; None: they do not count yet."""
        if name == "ema":
            return 1.0 - (self.train.ema_decay or 0.0)
        return None if progress.iteration <= self.begins else 1.0 / (self.counts[name] + 1)

    def _mains(self) -> Iterator[tuple[Any, StateForm, Tensor]]:
        """(optimizer, how it keeps its weights, one of its parameters)."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if part.optimizer is not None:
                part.averages = getattr(part, "averages", {})
                form = form_of(part)
                yield from ((part, form, main) for group in part.optimizer.param_groups for main in group["params"])


def averages_of(train: TrainConfig) -> tuple[str, ...]:
    """Which a run keeps."""
    asked = (train.ema_decay, train.average_last)
    return tuple(name for name, value in zip(AVERAGES, asked, strict=True) if value is not None)
