"""On the CPU nothing is compiled unless ``train.compile`` asks for it: Inductor wants a C++ compiler, and minutes.

Megatron decorates its fused functions with ``torch.compile`` as it is imported. That alone loads Dynamo and Inductor,
of which a CPU run uses nothing: a fifth of the processor time of a short run. `time python pretrain_gpt.py
slurm/recipes/debug.toml --nproc 2 --train.train_iters 4` took 6.9 and 6.4 s of user time without them, 8.6 and 8.3 s
with them, in turns (2 busy cores, 2026-11-21).
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parallel.launch import node_name
from program.errors import UserError


@contextlib.contextmanager
def eager_imports() -> Iterator[None]:
    """What is imported within keeps its functions as they are written, whatever ``torch.compile`` is asked for."""
    compile = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile


def install() -> None:
    """From here on this process runs all eagerly, also what was decorated outside ``eager_imports``.

    torch hides four methods of its optimizers from Dynamo, and loads it for that: a second in each rank.
    """
    for name in ("state_dict", "load_state_dict", "zero_grad", "add_param_group"):
        method = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, getattr(method, "__wrapped__", method))
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")


def allow_compilation() -> None:
    """What is given to ``torch.compile`` from here on is compiled, as ``train.compile`` asks for, on a CPU too.

    One thread compiles: torch's default starts a process for each core, in every rank, for a handful of kernels.
    Raises UserError where there is no C++ compiler.
    """
    import torch._inductor.config as inductor
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            f"train.compile needs a C++ compiler on a CPU: found none on {node_name(os.environ)} (looked for "
            f"{os.environ.get('CXX') or 'g++'}). Install g++, name one in CXX, or set train.compile = false."
        ) from error
    torch.compiler.set_stance("default")
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = 1


def _as_it_is(function: Callable[..., Any] | None = None, **_: object) -> Any:
    return function if function is not None else lambda decorated: decorated
