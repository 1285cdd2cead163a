"""A hook: kernels and collectives that the host launches in the third iteration, by pass.

``launches-RANK.json`` in the folder EMULATED_CUDA_LAUNCHES. One of aten's operators with a CUDA kernel counts as a
launch, and so does one call of Transformer Engine's compiled extension, whatever its emulation computes with. What
Megatron fuses by torch.compile counts operator by operator, but in a process with the hook ``jit_fused``.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.pipeline_parallel import schedules

from tests.gpu_path.counters import Count, counts
from training import train

ITERATION = 3
ENGINE, JIT_FUSED = "transformer_engine_torch", "tests.gpu_path.jit_fused"


class Meter:
    """Counts what happens while functions run that are to be measured, in one iteration."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {}
        """Launches and collectives by name."""
        self.counting = False
        self._inner = 0
        """Launches within calls of Transformer Engine's extension, beyond one each."""

    def measured[**P, R](self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def measuring(*args: P.args, **kwargs: P.kwargs) -> R:
            before = self._now()
            result = function(*args, **kwargs)
            if self.counting:
                so_far = self.found.get(name, [0, 0])
                self.found[name] = [
                    was + now - then for was, now, then in zip(so_far, self._now(), before, strict=True)
                ]
            return result

        return measuring

    def one_launch[**P, R](self, function: Callable[P, R]) -> Callable[P, R]:
        """For a kernel of the emulated extension; one that launches nothing stays so."""
        return self.at_most(1, function)

    def at_most[**P, R](self, launches: int, function: Callable[P, R]) -> Callable[P, R]:
        """What it launches counts as so many, where it is more."""

        @functools.wraps(function)
        def launching(*args: P.args, **kwargs: P.kwargs) -> R:
            before, _ = self._now()
            result = function(*args, **kwargs)
            self._inner += max(0, self._now()[0] - before - launches)
            return result

        return launching

    def _now(self) -> tuple[int, int]:
        table = counts()
        return table[Count.LAUNCHES] - self._inner, table[Count.COLLECTIVES]


def wrap_extension(meter: Meter) -> None:
    """Wherever Transformer Engine has its functions by name."""
    from tests.gpu_path.te.cross_entropy import REPLACED
    from tests.gpu_path.te.kernels import KERNELS

    for kernel in REPLACED.values():
        kernel.function = meter.one_launch(kernel.function)
    wrapped = {id(function): meter.one_launch(function) for function in KERNELS.values()}
    for name, module in list(sys.modules.items()):
        if name == ENGINE or name.startswith("transformer_engine."):
            for key, value in list(vars(module).items()):
                if id(value) in wrapped:
                    setattr(module, key, wrapped[id(value)])


meter, calls, step = Meter(), 0, train.one_step


def one_step(*args: Any, **kwargs: Any) -> Any:
    """In place of training.train's."""
    global calls
    calls += 1
    meter.counting = calls == ITERATION
    try:
        return meter.measured("step", step)(*args, **kwargs)
    finally:
        if meter.counting:
            path = Path(os.environ["EMULATED_CUDA_LAUNCHES"], f"launches-{os.environ['RANK']}.json")
            path.write_text(json.dumps(meter.found))
        meter.counting = False


if ENGINE in sys.modules:
    wrap_extension(meter)
if JIT_FUSED in sys.modules:
    sys.modules[JIT_FUSED].measured.append(meter.one_launch)
schedules.forward_step = meter.measured("forward", schedules.forward_step)
schedules.backward_step = meter.measured("backward", schedules.backward_step)
train.one_step = one_step
