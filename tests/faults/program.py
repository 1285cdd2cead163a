"""``pretrain_gpt.py`` itself, started from a process that has imported everything once and computes nothing."""

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from data.config import DataConfig
from data.prepare import prepare
from tests.benchmarks.circumstances import ROOT

TINY = (
    "--model.num_layers", "2", "--model.hidden_size", "32", "--model.ffn_hidden_size", "88",
    "--model.seq_length", "16", "--train.global_batch_size", "4", "--log.tensorboard", "False", "--log.report", "False",
    "--train.train_iters", "1000", "--checkpoint.keep", "2",
)  # fmt: skip
"""Flags over the debug recipe: a run whose iterations and checkpoints take milliseconds."""


def command(run_dir: Path, cache_dir: Path, nproc: int, *flags: str) -> list[str]:
    """What stands behind ``python`` on the command line."""
    recipe = str(ROOT / "slurm/recipes/debug.toml")
    place = ("--run_dir", str(run_dir), "--data.cache_dir", str(cache_dir), "--nproc", str(nproc))
    return [str(ROOT / "pretrain_gpt.py"), recipe, *place, *TINY, *flags]


def import_once(cache_dir: Path) -> None:
    """What every start would else repeat: import torch and megatron, and prepare the data."""
    import training.train  # noqa: F401

    prepare(DataConfig(tokenizer="byte", cache_dir=str(cache_dir)), lambda _: None)


def start(argv: Sequence[str], log: Path) -> int:
    """Fork a process that runs ``argv`` as its own program: its pid. What it prints is appended to ``log``."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        _redirect(log)
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def finish(pid: int) -> int:
    """Wait for it: its exit code, or minus the signal that ended it."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
