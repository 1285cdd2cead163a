"""One run of a script by bash in a sealed process: what it would have started, and what it asked for."""

import contextlib
import ctypes
import os
import re
import resource
import select
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from program.errors import UserError
from program.untrusted import read_text
from tools.from_megatron.shell.calls import Listener
from tools.from_megatron.shell.seal import BASH, CannotSeal, seal, start
from tools.from_megatron.shell.world import MAGIC, World

SECONDS, CPU_SECONDS = 30.0, 3
"""Of one run; of each of its processes."""
_PRELUDE = Path(__file__).with_name("prelude.sh")
_TRACE, _MOST_OUTPUT = 251, 8 << 20
_LIMITS = {
    resource.RLIMIT_FSIZE: 4 << 20, resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_CPU: CPU_SECONDS,
    resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 256,
}  # fmt: skip
_OURS = re.compile(r"__\w+|command_not_found_handle|type|hash|ulimit|command|exec|grep|pwd|cd|pushd|popd")
"""Functions of the prelude, whose own commands are no part of the script."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a script is run with."""

    text: str
    path: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    there: Mapping[str, int] = field(default_factory=dict)
    """Files that are said to exist, and as what."""
    functions: frozenset[str] = frozenset()
    """Paths of programs that stand for themselves, as names without a folder do."""
    strict: bool = False
    """Whether it ends where a variable is read that is not set."""
    no_files: bool = False
    """Whether a pattern that fits no file is nothing."""
    empty: frozenset[str] = frozenset()
    """Variables of the script's own that are empty at first."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command that bash has run, with its words expanded."""

    source: str
    line: int
    text: str


@dataclass(slots=True)
class Ran:
    """What one run has shown."""

    steps: list[Step] = field(default_factory=list)
    said: str = ""
    """On its outputs, and what of bash's own went to files."""
    asked: dict[str, str] = field(default_factory=dict)
    """Files that are not there, with the commands that asked for them."""
    started: list[str] = field(default_factory=list)
    """Programs by their paths that it tried to start."""
    main: str = ""
    """The source of its own steps."""
    over: bool = False
    """Whether it was ended before it came to its end itself."""
    bytes: int = 0
    pid: int = 0

    @property
    def last_line(self) -> int:
        """Where the script itself came to."""
        return next((step.line for step in reversed(self.steps) if step.source == self.main), 0)


class EndOfRun(Exception):
    """Nothing more is to be learned."""


def run(setting: Setting, answer: Callable[[list[str], bool, Callable[[str], str | None]], list[str]],
        marked: Callable[[str, int], str], here: str, seconds: float = SECONDS) -> Ran:  # fmt: skip
    """Run a script. answer: to the words of a program that it would start; see ``prelude.sh``. marked: a file's content
    that is not known. here: what its working folder is called. Raises UserError where no such process can be made."""
    home = setting.path.parent if setting.path is not None and setting.path.parent.is_dir() else None
    name = "script" if setting.path is None else str(setting.path)
    files, ran = dict[str, str](), Ran()

    def text(asked: str, words: bytes) -> bytes:
        kind = asked.partition("/")[0]
        if kind in ("answer", "with-input"):
            said = answer(words.decode(errors="surrogateescape").split("\0")[:-1], kind == "with-input", world.content)
            if said[0] == "script":
                files[said[2].removeprefix(MAGIC)] = said.pop()
            return "".join(f"{each}\0" for each in said).encode(errors="surrogateescape")
        if kind == "begin":
            world.begun = True
        return files.get(asked, "").encode(errors="surrogateescape")

    def unknown(file: str) -> str:
        return marked(file, ran.steps[-1].line if ran.steps else 0)

    files["prelude"] = _prelude(setting, here)
    content = {(f"/{name}" if setting.path is None else name): setting.text}
    world = World(home, content, setting.there, text, lambda: ran.steps[-1].text if ran.steps else "", unknown, here)
    errors, trace, given = os.pipe(), os.pipe(), os.pipe()
    os.write(given[1], f"{unknown('')}\n".encode())
    os.close(given[1])
    words = ["bash", "--norc", "--noprofile", name, *setting.arguments]
    process, listener = _started(words, str(home or "/"), given[0], errors[1], trace[1])
    for end in (errors[1], trace[1], given[0]):
        os.close(end)
    ran.pid, ran.main = process, name
    try:
        _serve(listener, world, (errors[0], trace[0]), ran, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        ran.over |= os.WIFSIGNALED(os.waitpid(process, 0)[1])
        with contextlib.suppress(ChildProcessError):
            while True:  # those whose parents have ended, which are this process's now
                os.waitpid(-process, 0)
        _adopt(False)
        ran.said += "".join(text for text in world.texts() if "unbound variable" in text)
        world.close()
        for end in (listener.descriptor, errors[0], trace[0]):
            os.close(end)
    ran.asked, ran.started = world.asked, world.started
    return ran


def _prelude(setting: Setting, here: str) -> str:
    lines = [read_text(_PRELUDE)]
    lines += ["__kept=$(builtin compgen -v)", "__kept=\" ${__kept//$'\\n'/ } \""]
    lines += [f'function {name} {{ __ask {name} "$@"; }}' for name in sorted(setting.functions)]
    lines += [f"PWD={here} OLDPWD={here} __here={here}"]
    lines += [f"unset -v {name}; export {name}={shlex.quote(value)}" for name, value in setting.variables.items()]
    lines += [f"{name}=" for name in sorted(setting.empty)]
    lines += ["shopt -s nullglob"] * setting.no_files
    strict = "-u" if setting.strict else "+u"
    lines += [f"builtin read -r __begun < {MAGIC}begin", f"set -T; set -x; trap 'set {strict} -x' DEBUG"]
    return "\n".join(lines) + "\n"


def _started(words: list[str], folder: str, given: int, said: int, traced: int) -> tuple[int, Listener]:
    """A sealed process that becomes bash, and where its calls arrive. Raises UserError."""
    (reports, reported), (wait, go) = os.pipe(), os.pipe()
    program = next((path for path in ("/bin/bash", "/usr/bin/bash") if Path(path).exists()), None)
    if program is None:
        raise UserError("bash is not on this machine, which reads scripts. Give the arguments with --arguments FILE.")
    _adopt(True)
    process = os.fork()
    if not process:
        try:
            os.close(go)
            _become(words, folder, program, (given, said, traced, reported, wait))
        finally:
            os._exit(126)
    os.close(reported)
    os.close(wait)
    with os.fdopen(reports, "rb") as lines, os.fdopen(go, "wb"):
        number = lines.readline().decode(errors="replace").strip()
        try:
            if not number.isdigit():
                raise OSError(0, number or "it ended")
            return process, Listener(process, int(number))
        except OSError as error:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            why = error.strerror
    raise UserError(
        f"scripts are read by bash in a process that can change nothing, which this kernel does not offer ({why}; it "
        "takes Linux 5.9 or later). Give the arguments with --arguments FILE."
    )


def _become(words: list[str], folder: str, program: str, ends: tuple[int, int, int, int, int]) -> None:
    """In the child: limits, descriptors, the seal, bash."""
    given, said, traced, reported, wait = ends
    os.setsid()
    os.chdir(folder)
    for limit, most in _LIMITS.items():
        hard = resource.getrlimit(limit)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (least, least))
    nothing = os.open("/dev/null", os.O_RDWR)
    reported, wait = _moved(reported, 249), _moved(wait, 248)
    os.dup2(os.open(program, os.O_RDONLY), BASH, inheritable=False)
    os.dup2(traced, _TRACE)
    for wanted, number in ((given, 0), (said, 2)):
        os.dup2(_moved(wanted, 252 + number), number)
    os.dup2(2, 1)
    for number in range(3, 10):
        os.dup2(nothing, number)
    os.closerange(10, 248)
    os.closerange(252, 1 << 20)
    try:
        listener = seal()
    except CannotSeal as error:
        os.write(reported, str(error).encode())
        return
    os.write(reported, f"{listener}\n".encode())
    os.read(wait, 1)  # until the listener has been fetched: it closes when bash starts
    start(words, {"BASH_ENV": f"{MAGIC}prelude", "LC_CTYPE": "C.UTF-8"})


def _adopt(whether: bool) -> None:
    """Whether processes whose parents have ended become this one's, which waits for them (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, int(whether), 0, 0, 0)


def _moved(file: int, to: int) -> int:
    """The descriptor, out of the way of those that are given out."""
    os.dup2(file, to, inheritable=False)
    return to


def _serve(listener: Listener, world: World, ends: tuple[int, int], ran: Ran, seconds: float) -> None:
    """Answer until every process of the run has ended, or for so long. ends: of standard error, and of the trace."""
    until, (said, traced) = time.monotonic() + seconds, ends
    read = {said: bytearray(), traced: bytearray()}
    waiting = select.poll()
    for end in (listener.descriptor, *ends):
        waiting.register(end, select.POLLIN)

    def drain(end: int) -> bool:
        """Whether anybody is left who may write there."""
        try:
            while part := os.read(end, 1 << 16):
                read[end] += part
                ran.bytes += len(part)
                if ran.bytes > _MOST_OUTPUT:
                    raise EndOfRun
        except BlockingIOError:
            return True
        return False

    open_ends = set(ends)
    for end in ends:
        os.set_blocking(end, False)
    try:
        while open_ends:
            events = dict(waiting.poll(max(0.0, until - time.monotonic()) * 1000))
            if not events or time.monotonic() > until:
                raise EndOfRun
            for end in [end for end in open_ends if end in events and not drain(end)]:
                open_ends.discard(end)
                waiting.unregister(end)
            if events.get(listener.descriptor, 0) & select.POLLIN and (call := listener.receive()) is not None:
                if traced in open_ends:
                    drain(traced)
                ran.steps += _steps(read[traced])
                world.answer(listener, call)
    except EndOfRun:
        ran.over = True
    ran.steps += _steps(read[traced] + b"\n\1")
    ran.said = read[said].decode(errors="replace")


def _steps(trace: bytearray) -> list[Step]:
    """Entries of bash's trace, which are taken out of it; the last one may go on where no line ends."""
    if not trace.endswith((b"\n", b"\1")):
        end = trace.rfind(b"\n\1") + 1
    else:
        end = len(trace)
    whole = trace[:end].decode(errors="replace")
    del trace[:end]
    found = []
    for entry in re.split(r"(?:^|\n)\x01+", whole):
        source, *rest = entry.split("\2", 3)
        if len(rest) == 3 and not _OURS.fullmatch(rest[1]) and source != f"{MAGIC}prelude":
            found += [Step(source, int(rest[0] or 0), rest[2].rstrip("\n"))] * (
                not rest[2].startswith(("set +u -x", "set -u -x"))
            )
    return found
