"""Running the same microbatches again: what must be put back for that, and what is looked at the second time.

megatron-core has a machinery for this (``rerun_state_machine.py``, experimental by its own words). It is left aside:
it waits for the device at each value it validates, wants data iterators of its own kind where we hold a list of
microbatches, and knows only after a restart, by exit codes 16 and 17, what our second run tells at once.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from models.layers.compiled import as_written
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from parallel.random_states import set_tracked_states, tracked_states
from training.checkpoint import model_state
from training.forward_backward import LossScale
from training.health.names import gradient_leaves, module_names, module_parameter_names
from training.health.nonfinite_locate import NonfinitePlace


class Before:
    """What a step changes before its update, besides gradients: random numbers, routers' counts and biases, loss scale,
    and fp8's scales (recipe "delayed") with their histories.

    Not put back are the meters of experts, which count the microbatches twice.
    """

    def __init__(self, chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> None:
        self.optimizer, self.device = optimizer, ranks.device
        self.buffers = [buffer for chunk in chunks for buffer in unwrap(chunk).buffers()]
        self.buffers += model_state.fp8_tensors(chunks).values()
        self.kept = [torch.empty_like(buffer) for buffer in self.buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """Remember what there is. A few KiB, by one kernel."""
        self.random = torch.get_rng_state(), tracked_states()
        self.scale = LossScale(self.optimizer)
        if self.device.type == "cuda":
            self.cuda = torch.cuda.get_rng_state(self.device)
        if self.buffers:
            torch._foreach_copy_(self.kept, self.buffers)

    def restore(self) -> None:
        """As ``keep`` found it."""
        cpu, tracked = self.random
        torch.set_rng_state(cpu)
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, self.device)
        set_tracked_states(tracked)
        self.scale.restore()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Routers' biases and fp8's scales, which were moved already, where there is no update."""
        if self.buffers:
            torch._foreach_copy_(self.buffers, self.kept)


class Trace:
    """Checks every module's output and every parameter's gradient. Slow: it waits for the device each time."""

    def __init__(self, chunks: Chunks, ranks: Ranks) -> None:
        self.chunks, self.layout, self.stage = chunks, ranks.layout, ranks.at.pp
        self.forward: NonfinitePlace | None = None
        self.backward: NonfinitePlace | None = None
        self.order = 0
        self.passes = [0] * len(chunks)
        self.gradients: dict[str, int] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Look while this is open. Collective where weights are sharded."""
        with as_written(self.chunks), self._hooked():
            yield

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for number, chunk in enumerate(self.chunks):
                model = unwrap(chunk)
                hooks.enter_context(model.register_forward_pre_hook(partial(self._begin, number)))
                for name, module in module_names(model, module_parameter_names(chunk)).items():
                    hooks.enter_context(module.register_forward_hook(partial(self._look_forward, number, name)))
                for name, leaf in gradient_leaves(chunk):
                    hooks.enter_context(leaf.register_hook(partial(self._look_backward, number, name)))
            yield

    def _begin(self, number: int, _module: nn.Module, _inputs: object) -> None:
        self.passes[number] += 1

    def _look_forward(self, number: int, name: str, _module: nn.Module, _inputs: object, outputs: Any) -> None:
        self.order += 1
        if self.forward is None and any(not bool(tensor.isfinite().all()) for tensor in _floating(outputs)):
            depth = number * self.layout.pp + self.stage
            self.forward = NonfinitePlace(self.passes[number] - 1, depth, self.order, f"the output of {name}")

    def _look_backward(self, number: int, name: str, gradient: Tensor) -> None:
        self.order += 1
        microbatch = self.gradients[name] = self.gradients.get(name, -1) + 1
        if self.backward is None and not bool(gradient.isfinite().all()):
            depth = self.layout.chunks - 1 - (number * self.layout.pp + self.stage)
            self.backward = NonfinitePlace(microbatch, depth, self.order, f"the gradient of {name}")


def _floating(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor) and outputs.is_floating_point():
        yield outputs
    elif isinstance(outputs, tuple | list):
        for output in outputs:
            yield from _floating(output)
