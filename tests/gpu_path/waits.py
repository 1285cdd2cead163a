"""A hook: where the host waits for the device in the third iteration, as torch's sync debug mode sees it.

``waits-RANK.txt`` in the folder EMULATED_CUDA_WAITS gets one line a place: how often, the file and line that waits, and
Triplane's innermost line that led there.
"""

import collections
import os
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gpu_path.counters import counts
from tests.gpu_path.emulator import ROOT
from training import train

ITERATION = 3

step, calls = train.one_step, 0


def one_step(*args: Any, **kwargs: Any) -> Any:
    """In place of training.train's."""
    global calls
    calls += 1
    if calls != ITERATION:
        return step(*args, **kwargs)
    found: collections.Counter[str] = collections.Counter()

    def count(message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            found[place(traceback.extract_stack())] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        before = counts()
        try:
            return step(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            grown = {kind: number - before[kind] for kind, number in counts().items()}
            lines = [f"{number} {where}\n" for where, number in sorted(found.items())]
            lines += [f"{number} {kind.name}\n" for kind, number in grown.items()]
            Path(os.environ["EMULATED_CUDA_WAITS"], f"waits-{os.environ['RANK']}.txt").write_text("".join(lines))


def place(stack: Sequence[traceback.FrameSummary]) -> str:
    """The line that waits, and ours."""
    own = (__file__, warnings.__file__)
    outside = [frame for frame in stack if "/torch/" not in frame.filename and frame.filename not in own]
    ours = [
        frame for frame in outside if frame.filename.startswith(str(ROOT)) and "site-packages" not in frame.filename
    ]
    return f"{named(outside[-1])} from {named(ours[-1])}"


def named(frame: traceback.FrameSummary) -> str:
    """By function, not by line: a line moves with every edit above it."""
    path = frame.filename.split("site-packages/")[-1].removeprefix(f"{ROOT}/")
    return f"{path}:{frame.name}"


train.one_step = one_step
