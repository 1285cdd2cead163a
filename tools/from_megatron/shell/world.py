"""The files that a script sees: those beside it, what it writes itself (which stays in memory), and answers to what it
asks. Any other file is there only where ``Answers`` says so, or holds a mark in the place of what is not known."""

import ctypes
import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from program.untrusted import if_readable, read_text
from tools.from_megatron.shell.calls import FILE, FOLDER, Call, Listener

MAGIC = "/@/"
"""Below it are no files: opening one asks this process something."""
TOOLS = frozenset(
    "awk basename bc cat comm cut dirname egrep expr false fgrep fold gawk getopt grep head join mawk nl paste printf"
    " readlink realpath rev sed seq sort tac tail tee tr true uniq wc".split()
)
"""Programs that are started: their output is a function of their words and of what they read."""
FOLDERS = ("/usr/bin", "/bin")
"""Where they are."""
_SYSTEM = (
    "/usr/lib", "/lib", "/usr/lib64", "/lib64", "/usr/bin", "/bin", "/usr/share/locale", "/usr/share/awk",
    "/etc/ld.so.cache", "/etc/ld.so.preload",
)  # fmt: skip
"""What programs themselves read, and may map as code."""
SOURCES = re.compile(r"(builtin )?(source|\.) ")
"""A step of a trace that reads another script."""
_OF_PROCESS = re.compile(r"/dev/(null|fd/\d+|std(?:in|out|err))|/proc/self/fd/\d+")
_NOT_KNOWN_HERE = ("/etc/passwd", "/etc/nsswitch.conf", "/etc/localtime", "/etc/inputrc")
MOST_FILES, MOST_FORKS, MOST_BYTES = 64, 4000, 1 << 20


class World:
    """Files for one run. home: the script's folder, of which files are read. marked: a mark for a file's content.

    text: of files that are asked for below ``MAGIC``, by the rest of their path. there: paths that are said to exist,
    and as what (FILE or FOLDER). last: the command that is being run, as bash's trace has it.
    """

    def __init__(
        self,
        home: Path | None,
        files: Mapping[str, str],
        there: Mapping[str, int],
        text: Callable[[str, bytes], bytes],
        last: Callable[[], str],
        marked: Callable[[str], str],
        here: str,
    ) -> None:
        self.home, self.there, self.text, self.last, self.marked, self.here = home, there, text, last, marked, here
        self.root = str(home or "/")
        self.written: dict[str, int] = {}
        """Descriptors of files in memory, by their paths."""
        self.forks = 0
        self.asked: dict[str, str] = {}
        """Paths of files that it asked for and that are not there, with the command that did."""
        self.started: list[str] = []
        """Paths of programs that it tried to start and that are none of the tools."""
        self.begun = self.sealed = False
        """Whether the script's own lines are reached; whether bash has been started."""
        for path, content in files.items():
            os.write(self._new(path), content.encode(errors="surrogateescape"))

    def texts(self) -> list[str]:
        """What was written."""
        return [_whole(file).decode(errors="replace") for file in self.written.values()]

    def close(self) -> None:
        """Forget everything that was written."""
        for file in self.written.values():
            os.close(file)

    def answer(self, listener: Listener, call: Call) -> None:
        """Answer one call."""
        if call.name in ("clone", "fork", "vfork"):
            self.forks += 1
            return listener.go_on(call) if self.forks < MOST_FORKS else listener.fail(call, errno.EAGAIN)
        if call.name == "execveat":
            first, self.sealed = not self.sealed, True
            return listener.go_on(call) if first else listener.fail(call, errno.EPERM)
        if call.name == "mmap":
            return listener.go_on(call) if _is_program(call) else listener.fail(call, errno.EPERM)
        path = call.path()
        if not listener.waits(call):
            return None
        if path is None or (call.by_descriptor() and path and not path.startswith("/")):
            return listener.fail(call, errno.EACCES)
        if call.name == "execve":
            return self._start(listener, call, path)
        try:
            if call.name.startswith("readlink"):
                return listener.fail(call, errno.EACCES if self._full(path).startswith("/proc/") else errno.EINVAL)
            if call.name in ("openat", "open"):
                file = self._open(call, path)
                return listener.go_on(call) if file is None else listener.give(call, file)
            mode, size = self._found(call, path)
            return listener.go_on(call) if mode is None else listener.describe(call, mode, size)
        except OSError as error:
            return listener.fail(call, error.errno or errno.EACCES)

    def content(self, path: str) -> str | None:
        """A text that was written, or that lies beside the script; None for any other."""
        full = self._full(path)
        if full in self.written:
            return _whole(self.written[full]).decode(errors="replace")
        real = self._beside(path, full)
        return None if real is None or not real.is_file() else if_readable(read_text, real, MOST_BYTES)

    def _full(self, path: str) -> str:
        """The path from the root; what the script takes for its working folder is its own."""
        path = path.removeprefix(f"{self.here}/") if path != self.here else "."
        return os.path.normpath(Path(self.root, path))

    def _beside(self, path: str, full: str) -> Path | None:
        """The file of that name in the script's folder or below; for a relative one, also seen from folders above."""
        if self.home is None:
            return None
        above = [each for each in self.home.parents if each.is_relative_to(Path.cwd())]
        for root in [self.root, *map(str, above)]:
            real = Path(full if root == self.root else Path(root, path.removeprefix(f"{self.here}/"))).resolve()
            if real.is_relative_to(self.home) and real.exists():
                return real
        return None

    def _new(self, path: str) -> int:
        if len(self.written) >= MOST_FILES * (2 if path.startswith(MAGIC) else 1):
            raise OSError(errno.EMFILE, "too many files")
        self.written[path] = os.memfd_create("written", os.MFD_CLOEXEC)
        return self.written[path]

    def _open(self, call: Call, path: str) -> int | None:
        """A descriptor to give; None: the kernel opens it. Raises OSError."""
        writes = call.flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC)
        full = self._full(path)
        if path.startswith(MAGIC) and (not writes or path.startswith(f"{MAGIC}ask/")):
            return self._magic(full, bool(writes))
        if found := _OF_PROCESS.fullmatch(path):
            return _opened(path, found[1], call) if writes else None
        if full.startswith(("/dev/", "/proc/", "/sys/")) and writes:
            raise OSError(errno.EACCES, "a device")
        if full in self.written or writes:
            if full not in self.written:
                self._new(full)
            elif call.flags & os.O_TRUNC:
                os.ftruncate(self.written[full], 0)
            mode = call.flags & (os.O_ACCMODE | os.O_APPEND) | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{self.written[full]}", mode)
        if not self.begun:
            return None
        if system := self._system(path):
            return os.open(system, os.O_RDONLY | call.flags & os.O_DIRECTORY)
        if full in _NOT_KNOWN_HERE or (call.flags & os.O_DIRECTORY and not self._is_home(full)):
            raise OSError(errno.ENOENT, "not here")
        if real := self._beside(path, full):
            return os.open(real, os.O_RDONLY | os.O_NONBLOCK | call.flags & os.O_DIRECTORY)
        self.asked.setdefault(path, self.last())
        sourced = SOURCES.match(self.last())
        return _holding("" if sourced else f"{self.marked(path)}\n")

    def _system(self, path: str) -> str:
        """The real path of what the kernel would open, where that is the system's; else empty."""
        real = os.path.realpath(os.path.join(self.root, path))  # noqa: PTH118  (Path would resolve ".." by itself)
        return real if _is_of_system(real) else ""

    def _is_home(self, full: str) -> bool:
        return self.home is not None and Path(os.path.realpath(full)).is_relative_to(self.home)

    def _magic(self, full: str, writes: bool) -> int:
        if writes:
            if full in self.written:
                os.close(self.written.pop(full))
            return os.dup(self._new(full))
        name = full.removeprefix(MAGIC)
        question = f"{MAGIC}ask/{name.rpartition('/')[2]}"
        asked = _whole(self.written[question]) if question in self.written else b""
        if question in self.written:
            os.close(self.written.pop(question))
        return _holding(self.text(name, asked))

    def _found(self, call: Call, path: str) -> tuple[int | None, int]:
        """What a file is and its size, as far as this says it; None: the kernel does. Raises OSError."""
        full = self._full(path)
        if full in self.written:
            return FILE, os.fstat(self.written[full]).st_size
        if path in self.there:
            return self.there[path], 1
        if not path or not self.begun or _OF_PROCESS.fullmatch(path):
            return None, 0
        if str(Path(full).parent) in FOLDERS and Path(full).name not in TOOLS:
            raise OSError(errno.ENOENT, "no tool")
        if self._system(path):
            return None, 0
        if real := self._beside(path, full):
            found = real.stat()
            return (FOLDER if stat.S_ISDIR(found.st_mode) else FILE), found.st_size
        if Path(self.root).is_relative_to(full):
            return FOLDER, 1
        self.asked.setdefault(path, self.last())
        raise OSError(errno.ENOENT, "not here")

    def _start(self, listener: Listener, call: Call, path: str) -> None:
        if str(Path(path).parent) in FOLDERS and Path(path).name in TOOLS:
            return listener.go_on(call)
        self.started.append(path)
        return listener.fail(call, errno.ENOENT)


def _opened(path: str, name: str, call: Call) -> int:
    """/dev/null, or what the process has open."""
    if name == "null":
        return os.open("/dev/null", os.O_RDWR)
    # What is open may be open for reading alone, and this process may more than the script.
    number = {"stdin": "0", "stdout": "1", "stderr": "2"}.get(name or "", path.rpartition("/")[2])
    open_there = f"/proc/{call.process}/fd/{number}"
    if not os.readlink(open_there).startswith(("pipe:", "/memfd:", "/dev/null")):  # noqa: PTH115
        raise OSError(errno.EACCES, "no pipe and no file in memory")
    return os.open(open_there, call.flags & (os.O_ACCMODE | os.O_APPEND))


def _is_program(call: Call) -> bool:
    """Whether what is to be mapped as code is a file of the system's."""
    number = ctypes.c_int32(call.arguments[4] & 0xFFFFFFFF).value
    try:
        return number >= 0 and _is_of_system(os.readlink(f"/proc/{call.process}/fd/{number}"))  # noqa: PTH115
    except OSError:
        return False


def _is_of_system(real: str) -> bool:
    return any(real == each or real.startswith(f"{each}/") for each in _SYSTEM)


def _holding(content: str | bytes) -> int:
    """A file in memory with that content, at its beginning."""
    file = os.memfd_create("read", os.MFD_CLOEXEC)
    os.write(file, content.encode(errors="surrogateescape") if isinstance(content, str) else content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _whole(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
