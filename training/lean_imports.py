"""How torch and Megatron are imported: once, for all ranks forked later, and without what training does not use."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

FIRST_STEP = ("numpy.ma", "numpy.random", "megatron.core.models.mimo.model.base", "megatron.core.models.mimo.optimizer")
"""What numpy (np.unique, the shuffled order) and Megatron (get_megatron_optimizer) import when first called: 25 ms on
each rank, unless it is there before they are forked (`python -X importtime -c "import training.train, numpy.ma,
numpy.random, megatron.core.models.mimo"`; 2 cores, 2026-11-23)."""


@contextlib.contextmanager
def lean(device: str) -> Iterator[None]:
    """What is imported within is to run on ``device``, "cpu" or "cuda"."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept_for_good())
        stack.enter_context(_without("wandb"))
        if device == "cpu":
            from parallel.cpu.eager import eager_imports

            stack.enter_context(eager_imports())
        yield
        for module in FIRST_STEP:
            importlib.import_module(module)


@contextlib.contextmanager
def _kept_for_good() -> Iterator[None]:
    """What is imported here stays: the collector of garbage passes it by, now, in every step and at the end.

    Some 480,000 objects of torch and Megatron (gc.get_freeze_count). A collection would also touch, and so copy, the
    memory that forked ranks share. `time python pretrain_gpt.py slurm/recipes/debug.toml --nproc 2 --train.train_iters
    4` took 10.9 and 12.1 s of user time with it, 15.2 and 14.0 s without, in turns (2 busy cores, 2026-11-21).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Megatron imports wandb, if there is one, for a writer that is not ours: half a second and 335 modules on each
    rank (`python -X importtime -c "import wandb"`; 2 cores, 2026-11-21). The one rank that logs to it imports it later,
    if it is asked to (training/metrics/wandb.py).
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # the import system's own way to say: not there
    try:
        yield
    finally:
        del sys.modules[package]
