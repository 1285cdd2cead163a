"""How torch and Megatron are imported: once, for all ranks forked later, and without what training does not use."""

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from program.errors import UserError
from program.surroundings import torch_fits

FIRST_STEP = ("numpy.ma", "numpy.random", "megatron.core.models.mimo.model.base", "megatron.core.models.mimo.optimizer")
"""What numpy (np.unique, the shuffled order) and Megatron (get_megatron_optimizer) import when first called: 25 ms on
each rank, unless it is there before they are forked (`python -X importtime -c "import training.train, numpy.ma,
numpy.random, megatron.core.models.mimo"`; 2 cores, 2026-11-23)."""

TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")
"""Where they are installed, Megatron takes its optimizer and norms of gradients from them, which no CPU can run."""


@contextlib.contextmanager
def lean(device: str) -> Iterator[None]:
    """What is imported within is to run on ``device``, "cpu" or "cuda". Raises UserError where it does not fit."""
    if text := torch_fits():
        raise UserError(text)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept_for_good())
        stack.enter_context(_without("wandb"))
        if device == "cpu":
            from parallel.cpu.eager import eager_imports

            stack.enter_context(eager_imports())
            for package in TRANSFORMER_ENGINE:
                sys.modules[package] = None  # type: ignore[assignment]  # as in _without, for good
        else:
            _import_transformer_engine()
        yield
        for module in FIRST_STEP:
            importlib.import_module(module)


def _import_transformer_engine() -> None:
    """Where it is installed. Raises UserError where it cannot be imported: Megatron would stop with a traceback, or go
    on without it, at a fraction of the speed."""
    if importlib.util.find_spec(TRANSFORMER_ENGINE[0]) is None:
        return
    importlib.import_module("torch")  # loads CUDA's libraries, which Transformer Engine then asks for by name
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # OSError, RuntimeError, FileNotFoundError, ImportError: as many as ways to install it
        raise UserError(
            f"Transformer Engine is installed, but cannot be imported: {type(error).__name__}: {error}. Its extension "
            'for torch may be missing or built for another torch: pip install --no-build-isolation -e ".[te]" '
            '(docs/quickstart.md, "On GPUs"), or pip uninstall it.'
        ) from error


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
    if it is asked to (training/metrics/trackers.py).
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # the import system's own way to say: not there
    try:
        yield
    finally:
        del sys.modules[package]
