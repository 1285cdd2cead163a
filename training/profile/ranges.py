"""Named ranges of a step: its phases, the schedule's passes, layers, collectives. Nothing is installed outside of them.

While something listens, wrappers stand in place of functions; with the last listener they go: a step that is not
measured runs none of this. range_names.py has the names.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from megatron.core.timers import DummyTimer
from torch import nn

from parallel.ddp import Chunks, unwrap
from training import step
from training.profile.range_names import BACKWARD, FORWARD
from training.profile.waits import record_waits


class Ranges(Protocol):
    """Hears of ranges, which nest: ``pop`` ends the one that was pushed last."""

    def push(self, name: str) -> None:
        """A range begins."""

    def pop(self) -> None:
        """It ends."""


class StepRanges:
    """The ranges of this rank's steps, for a trace, NVTX, a clock, or several of them at once.

    Listeners come and go between steps.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.listeners: list[Ranges] = []
        self._installed = contextlib.ExitStack()

    def add(self, ranges: Ranges) -> None:
        """``ranges`` hears of what this rank does from here on."""
        if not self.listeners:
            self._installed.enter_context(_phases(self))
            self._installed.enter_context(_passes(self, self.chunks))
            self._installed.enter_context(_layers(self, self.chunks))
            self._installed.enter_context(record_waits(self.push, self.pop))
        self.listeners.append(ranges)

    def remove(self, ranges: Ranges) -> None:
        """Until here."""
        self.listeners.remove(ranges)
        if not self.listeners:
            self._installed.close()

    def push(self, name: str) -> None:
        """To all."""
        for listener in self.listeners:
            listener.push(name)

    def pop(self) -> None:
        """To all."""
        for listener in reversed(self.listeners):
            listener.pop()


@contextlib.contextmanager
def replaced(owner: Any, names: dict[str, Any]) -> Iterator[None]:
    """Attributes of a module, class or object have other values within."""
    before = {name: getattr(owner, name) for name in names}
    try:
        for name, value in names.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def ranged[**P, R](ranges: Ranges, name: str, function: Callable[P, R]) -> Callable[P, R]:
    """The function, as a range."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        ranges.push(name)
        try:
            return function(*args, **kwargs)
        finally:
            ranges.pop()

    return call


def _phases(ranges: Ranges) -> contextlib.AbstractContextManager[None]:
    """Of training/step.py's functions, and of the one that ``forward_backward`` returns."""
    forward_backward = ranged(ranges, "forward_backward", step.forward_backward)

    def with_reduce(*args: Any, **kwargs: Any) -> Any:
        sums, reduce_gradients = forward_backward(*args, **kwargs)
        return sums, ranged(ranges, "reduce", reduce_gradients)

    return replaced(step, {
        "forward_backward": with_reduce,
        "measure": ranged(ranges, "measure", step.measure),
        "clip_and_update": ranged(ranges, "update", step.clip_and_update),
    })  # fmt: skip


class _Timer:
    """What megatron-core calls around a pass."""

    def __init__(self, ranges: Ranges, name: str) -> None:
        self.ranges, self.name = ranges, name

    def start(self, barrier: bool = False) -> None:
        self.ranges.push(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.ranges.pop()


def _passes(ranges: Ranges, chunks: Chunks) -> contextlib.AbstractContextManager[None]:
    """By ``timers`` of the model's config, which megatron-core's schedules ask for a timer of each pass.

    Others, such as ``forward-recv``, hold what ``record_waits`` sees."""
    recorded = {name: _Timer(ranges, name) for name in (FORWARD, BACKWARD)}
    nothing = DummyTimer()

    def timers(name: str, log_level: int | None = None) -> _Timer | DummyTimer:
        return recorded.get(name, nothing)

    return replaced(chunks[0].config, {"timers": timers})


@contextlib.contextmanager
def _layers(ranges: Ranges, chunks: Chunks) -> Iterator[None]:
    handles = []
    plain = [chunk for chunk in chunks if chunk.config.cuda_graph_impl == "none"]  # else megatron-core refuses hooks
    for chunk in plain:
        for layer in layers_of(unwrap(chunk)):
            name = f"layer {getattr(layer, 'layer_number', '?')}"
            handles.append(layer.register_forward_pre_hook(lambda _module, _inputs, name=name: ranges.push(name)))
            handles.append(layer.register_forward_hook(lambda _module, _inputs, _output: ranges.pop()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Of the trunk, and of multi-token prediction: modules named layers.N that hold no such ones themselves."""
    paths = {path: module for path, module in model.named_modules() if _is_layer(path)}
    for path, module in paths.items():
        if not any(other.startswith(f"{path}.") for other in paths):
            yield module


def _is_layer(path: str) -> bool:
    parent, _, number = path.rpartition(".")
    return number.isdecimal() and parent.rpartition(".")[2] == "layers"
