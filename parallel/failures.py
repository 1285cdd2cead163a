"""What a rank's end means: its exit code, and the failure that is shown for all ranks."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from parallel.launch import Identity, node_name
from program.errors import SharedFault, SharedMistake, StoppedOnRequest, UserError, printable
from program.schema import Text

# How torch.distributed says that a *peer* has gone; such a failure is an echo, never the cause.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "remote process exited",
    "Socket Timeout",
    "Connection refused",
    "recvValue failed",
    "failed to recv",
    "store->get",
)
STOPPED = 75
"""Exit code of a run that was asked to stop, has saved, and is to be continued (EX_TEMPFAIL of sysexits.h)."""
NEXT_STAGE = 76
"""Of a rank whose ``[[stage]]`` is over, where another follows: for the process that begins that, and no other."""
GOOD_ENDS = (0, STOPPED, NEXT_STAGE)


class SharedCause(NamedTuple):
    """Where a ``SharedFault`` began, as far as that is known."""

    rank: int | None
    host: Text | None


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """Why a rank ended, or, without a rank, why all did: the exit code, and a message or traceback."""

    rank: int | None
    code: int
    at: float
    text: Text
    echo: bool
    shared: SharedCause | None = None
    """Of a ``SharedFault``, which all ranks found alike."""
    notes: Text = ""
    """An exception's notes (PEP 678), which ``text`` leaves out: what to do about it, said last."""
    place: tuple[str, int] | None = None
    """Phase and iteration in which an exception was raised, where it tells them by an attribute of this name."""


def guard(run: Callable[[Identity], int], identity: Identity) -> tuple[int, Failure | None]:
    """Call ``run`` and turn whatever it raises into an exit code and a ``Failure``."""
    try:
        return run(identity), None
    except UserError as error:
        ignore_termination()
        return 2, Failure(rank=identity.rank, code=2, at=time.time(), text=str(error), echo=not shows(error, identity))
    except SharedFault as fault:
        return 1, of_all(fault, identity)
    except KeyboardInterrupt:
        code, failure = interrupted(signal.SIGINT)
        return code, dataclasses.replace(failure, echo=True)
    except StoppedOnRequest:
        return STOPPED, None
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        text = traceback.format_exc().removesuffix(f"{notes}\n")
        echo = isinstance(error, RuntimeError) and any(mark in str(error) for mark in ECHOES)
        place = getattr(error, "place", None)
        return 1, Failure(rank=identity.rank, code=1, at=time.time(), text=text, echo=echo, notes=notes, place=place)


def of_all(fault: SharedFault, identity: Identity) -> Failure:
    """What every rank makes of ``fault``; rank 0 shows it."""
    cause, echo = SharedCause(fault.rank, fault.host), identity.rank != 0
    return Failure(rank=None, code=1, at=time.time(), text=str(fault), echo=echo, shared=cause)


def shows(error: Exception, identity: Identity | None) -> bool:
    """Whether this process is the one to show a user's mistake. Under torchrun and srun each rank decides alone."""
    return identity is None or identity.rank == 0 or not isinstance(error, SharedMistake)


def ignore_termination() -> None:
    """While leaving with exit code 2: srun ends all ranks as soon as one has left, and its TERM would hide the code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def interrupted(number: int) -> tuple[int, Failure]:
    """The verdict on a run that a signal ended."""
    text = f"ended by {signal.Signals(number).name}; started again, the run continues from its newest checkpoint"
    return 128 + number, Failure(rank=None, code=128 + number, at=time.time(), text=text, echo=False)


def report(failure: Failure, logs: Path, world_size: int) -> None:
    """Show the failure that counts, once: a user's mistake as its message, a fault as its traceback and its notes.

    A fault is also written to the rank's own file in ``logs``.
    """
    text, notes = printable(failure.text), printable(failure.notes)
    if failure.code == 2 or failure.rank is None:
        print(f"pretrain_gpt.py: {text}", file=sys.stderr, flush=True)
        return
    own = logs / f"rank-{failure.rank:05d}.failed.log"
    with contextlib.suppress(OSError):
        own.write_text(f"{text}{notes}\n" if notes else text)
    where = f"rank {failure.rank} of {world_size} on {node_name(os.environ)}"
    last = f"\n{notes}" if notes else ""
    print(f"{text.rstrip()}\n{where} failed first; logs: {logs}{last}", file=sys.stderr, flush=True)
