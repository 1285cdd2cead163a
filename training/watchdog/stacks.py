"""Python stacks of ranks, as faulthandler writes them, and what they say.

faulthandler's handler is C and needs no interpreter lock, so a rank that is blocked in gloo, in NCCL or in a driver
answers as well as one that loops in Python.
"""

import faulthandler
import linecache
import re
from dataclasses import dataclass
from pathlib import Path

from program.schema import Text
from training.watchdog.heartbeat import STACKS_SIGNAL

_ROOT = Path(__file__).resolve().parents[2]
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_WRAPPERS = ("torch/distributed/c10d_logger.py", "torch/_dynamo/", "torch/utils/_contextlib.py", "/contextlib.py")
_PIPELINE = "megatron/core/pipeline_parallel/p2p_communication.py"
_MEETING = "torch/distributed/rendezvous.py"
"""Where rank 0 waits until all have come, and the others until it has opened its store."""
_WAITING = (".wait(", "synchronize(")
_OURS = {"parallel/mcore_patches.py": "", "training/evaluation/asked.py": "all_reduce of the evaluation"}
"""Our own files that wait for a handle of torch's, and how to call that; "": as the function is called."""
_FOR_THE_DEVICE = re.compile(r"\.item\(\)|\.tolist\(\)|\.cpu\(\)|\b(?:bool|int|float)\(")
"""On CUDA these wait for all kernels, and so for the collectives among them; on the CPU they wait for nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StackPosition:
    """Where a rank's main thread stands."""

    waits: Text | None
    """The collective that it waits in, or None."""
    at: Text
    """The innermost line of our own, and what it is in: ``training/step.py:177 in unite (in torch/...)``."""


def register(path: Path) -> None:
    """From now on ``STACKS_SIGNAL`` makes this process write the stacks of its threads to ``path``, as a crash does."""
    path.unlink(missing_ok=True)
    # Kept open by faulthandler, in the node's memory: no handle on the shared file system. Appended to, so that
    # a reader of the stacks can empty the file.
    file = path.open("a")
    faulthandler.unregister(STACKS_SIGNAL)  # else it takes its handler for installed, whatever was set after it
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)


def stand(text: str, main_thread: int, cuda: bool = False) -> StackPosition | None:
    """Where the main thread of a rank stood by its last stacks, ``text``; None where there are none."""
    threads = list(_THREAD.finditer(text))
    mine = [found for found in threads if int(found[1], 16) == main_thread]
    if not mine:
        return None
    begin = mine[-1].end()
    end = next((found.start() for found in threads if found.start() > begin), len(text))
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(text[begin:end])]
    return StackPosition(waits=_waits(frames, cuda), at=_at(frames)) if frames else None


def crash(text: str) -> str | None:
    """What faulthandler wrote of a deadly signal: ``Segmentation fault``."""
    found = _FATAL.findall(text)
    return found[-1] if found else None


def _waits(frames: list[tuple[str, int, str]], cuda: bool) -> str | None:
    """The collective, by the outermost of the innermost functions that belong to torch's or Megatron's passing."""
    inner = 0
    while inner < len(frames) - 1 and any(part in frames[inner][0] for part in _WRAPPERS):
        inner += 1
    if _MEETING in frames[inner][0]:
        return "rendezvous"
    for kind in (_COLLECTIVES, _PIPELINE):
        names = []
        for file, _, name in frames[inner:]:
            if not any(part in file for part in (kind, *_WRAPPERS)):
                break
            names += [name] * (kind in file)
        if names:
            return _named(names[-1], file, name)
    return _by_line(*frames[inner], cuda)


def _named(function: str, file: str, caller: str) -> str:
    """``all_reduce``; where that name says little, ``_coalescing_manager of start_grad_sync``.

    Within a collective of our own, that: gloo may wait for the peer as its parts begin, or for their handles.
    """
    ours = _OURS.get(next((ours for ours in _OURS if Path(file) == _ROOT / ours), ""))
    if ours is not None and (not ours or ours.startswith(function)):
        return ours or caller
    return f"{function} of {caller}" if function.startswith("_") else function


def _by_line(file: str, line: int, name: str, cuda: bool) -> str | None:
    """Waiting that shows in the line only: a handle of torch's, whose C code has no Python frame."""
    code = linecache.getline(file, line)
    if any(word in code for word in _WAITING):
        if "torch/distributed/" in file or "megatron/core/" in file:
            return name
        for ours, called in _OURS.items():
            if Path(file) == _ROOT / ours:
                return called or name
    return f"the GPU ({code.strip()})" if cuda and _FOR_THE_DEVICE.search(code) else None


def _at(frames: list[tuple[str, int, str]]) -> str:
    inner, line, name = frames[0]
    innermost = f"{inner.rpartition('/site-packages/')[2].rpartition('/lib/')[2]}:{line} in {name}"
    for file, line, name in frames:
        if Path(file).is_relative_to(_ROOT) and "site-packages" not in file:
            ours = f"{Path(file).relative_to(_ROOT)}:{line} in {name}"
            return ours if file == inner else f"{ours} (in {innermost})"
    return innermost
