"""A rank's progress in a small file of its node's memory, which its node's watchdogs read.

One page: what the rank writes, what its watchdog writes, and who the rank is. A beat is a store into mapped memory,
one or two microseconds and no system call; a process that is stopped, blocked in C or dead leaves its last word.
"""

import contextlib
import json
import mmap
import os
import signal
import struct
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from program.errors import printable
from program.schema import Text
from program.untrusted import parse_json

PHASES = ("start", "data", "load", "step", "evaluation", "generation", "save", "shutdown", "ended")
"""What a rank does, in the order in which an iteration comes to it: a rank in an earlier one is behind."""

_RANK, _RANK_AT = struct.Struct("<QqBBBi"), 0
_WATCHDOG, _WATCHDOG_AT = struct.Struct("<qqQB"), 256
_INSIDE_AT, _ABOUT_AT, _PAGE = 320, 512, 4096
SUFFIX = ".heartbeat"


@dataclass(kw_only=True, slots=True, frozen=True)
class RankInfo:
    """Who a rank is, and how it is watched."""

    rank: int
    world_size: int
    host: str
    pid: int
    process_start: int | None
    main_thread: int
    """As faulthandler prints it."""
    folder: Text
    """RUN_DIR/watch/start-..., absolute."""
    told_by_launcher: bool
    """The launcher of local ranks shows the verdict itself."""
    step_timeout_s: float
    start_timeout_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class HeartbeatReading:
    """What a rank wrote last."""

    beats: int
    iteration: int
    phase: str
    stepped: bool
    """A first step has ended, so that ``step_timeout_s`` holds."""
    asked: bool
    """It was asked to stop."""
    code: int
    """Exit code, in phase ``ended``."""


class Heartbeat:
    """The rank's side. Without a path it writes nothing, as in tests and tools that train by themselves."""

    def __init__(self, path: Path | None = None, about: RankInfo | None = None) -> None:
        self.path = path
        self.code = 0
        """Exit code with which the rank will leave."""
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        """Seconds in each phase that was entered by ``within``."""
        self.watchdog: subprocess.Popen[bytes] | None = None
        """Kept: subprocess itself would complain of a child that it lost."""
        self._beats, self._iteration, self._phase, self._stepped, self._asked = 0, 0, 0, False, False
        self._page = mmap.mmap(-1, _PAGE) if path is None or about is None else _create(path, about)
        self._write()

    def watched_by(self, watchdog: subprocess.Popen[bytes], process_start: int | None) -> None:
        """The rank signs for a watchdog that it has started, until that one does: a page is taken away where neither
        lives, and a rank may be killed while its watchdog is still being loaded."""
        self.watchdog = watchdog
        _WATCHDOG.pack_into(self._page, _WATCHDOG_AT, watchdog.pid, process_start or 0, 0, False)

    def dismiss(self) -> None:
        """End the watchdog of a process that is to go on as another program: it would take that for this one, which
        stands still."""
        if self.watchdog is not None:
            self.watchdog.kill()
            self.watchdog.wait()
        if self.path is not None:
            remove(self.path)

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """The rank begins with ``phase``, of ``iteration`` if that is a new one."""
        self._phase = PHASES.index(phase)
        self._iteration = self._iteration if iteration is None else iteration
        self.beat()

    def beat(self) -> None:
        """The rank has done something that another beat will not count again."""
        self._beats += 1
        self._write()

    def stepped(self) -> None:
        """An iteration has ended."""
        self._stepped = True
        self.beat()

    def ask(self) -> None:
        """This rank was asked to stop: its death after that is no failure. Called by a signal handler."""
        self._asked = True
        self._write()

    def end(self, code: int) -> None:
        """The rank leaves by itself and says why by itself, if there is anything to say."""
        self.code = code
        self.enter("ended")

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Within, the rank runs a user's code, which the page names: its process may end there without a word."""
        self._note(what)
        yield
        self._note("")

    def _note(self, what: str) -> None:
        size = _ABOUT_AT - _INSIDE_AT
        self._page[_INSIDE_AT:_ABOUT_AT] = what.encode(errors="replace")[:size].ljust(size, b"\0")

    def within[**P, T](self, phase: str, call: Callable[P, T]) -> Callable[P, T]:
        """``call``, and while it runs the rank is in ``phase``."""

        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            before, began_s = PHASES[self._phase], time.monotonic()
            self.enter(phase)
            result = call(*args, **kwargs)
            self.spent_s[phase] += time.monotonic() - began_s
            self.enter(before)
            return result

        return called

    def read(self) -> HeartbeatReading:
        """What is written there now."""
        return read_rank(self._page)

    def _write(self) -> None:
        _RANK.pack_into(
            self._page, _RANK_AT,
            self._beats, self._iteration, self._phase, self._stepped, self._asked, self.code,
        )  # fmt: skip


def _create(path: Path, about: RankInfo) -> mmap.mmap:
    """A new page under ``path``, in place of any that an earlier process left; it appears whole."""
    unfinished = path.with_suffix(f".{os.getpid()}.new")
    with unfinished.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, _PAGE)  # where memory is full this is an error; a store would be SIGBUS
        page = mmap.mmap(file.fileno(), _PAGE)
        text = json.dumps(asdict(about)).encode()
        if len(text) >= _PAGE - _ABOUT_AT:
            raise OSError(None, f"the run's folder has too long a path for the watchdog: {about.folder}")
        page[_ABOUT_AT : _ABOUT_AT + len(text)] = text
        unfinished.replace(path)
    return page


class Page:
    """A watchdog's view of one rank's file. Raises OSError or ValueError where there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            self._page = mmap.mmap(file.fileno(), _PAGE)
        self.about: RankInfo = parse_json(self._page[_ABOUT_AT:].rstrip(b"\0"), RankInfo, path)

    def read(self) -> HeartbeatReading:
        """The rank's last word, whole: read until two looks agree."""
        return read_rank(self._page)

    def inside(self) -> str:
        """The user's code that the rank runs, or ran when it ended; empty: none."""
        return printable(self._page[_INSIDE_AT:_ABOUT_AT].rstrip(b"\0").decode(errors="replace"))

    def sign(self, pid: int, process_start: int | None, beats: int, done: bool) -> None:
        """The rank's own watchdog: I am ``pid``, I have looked ``beats`` times, and I am done or not."""
        _WATCHDOG.pack_into(self._page, _WATCHDOG_AT, pid, process_start or 0, beats, done)

    def watchdog(self) -> tuple[int, int, int, bool]:
        """What the rank's watchdog signed; before it has looked, what the rank signed for it."""
        return _WATCHDOG.unpack_from(self._page, _WATCHDOG_AT)


def read_rank(page: mmap.mmap) -> HeartbeatReading:
    """What a rank wrote; a write takes no lock, so look again where one came between."""
    seen: Any = _RANK.unpack_from(page, _RANK_AT)
    while (again := _RANK.unpack_from(page, _RANK_AT)) != seen:
        seen = again
    beats, iteration, phase, stepped, asked, code = seen
    return HeartbeatReading(
        beats=beats, iteration=iteration, phase=PHASES[min(phase, len(PHASES) - 1)],
        stepped=bool(stepped), asked=bool(asked), code=code,
    )  # fmt: skip


def memory_folder() -> Path:
    """Where processes of a node meet in memory; a container's own where it has its own."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def remove(path: Path) -> None:
    """A rank's page and all that lies beside it."""
    for suffix in (SUFFIX, ".stacks", ".pipe"):
        with contextlib.suppress(OSError):
            path.with_suffix(suffix).unlink()


STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write its Python stacks beside its page."""
