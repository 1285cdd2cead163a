"""Surroundings that a run does not expect: limits, streams, mounts, variables, rights, paths, signals. From a seed.

A run that has saved 3 of its 4 iterations is started again in them. It must end as it would, or say in a line what is
in the way; and in ordinary surroundings it then goes on to the same bits as an undisturbed run.
"""

import ctypes
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.faults import hostile_signals
from tests.faults.hostile_files import REPLACEMENTS
from tests.faults.hostile_judge import CaseVerdict, ugliness
from tests.faults.hostile_process import SCRIPT, EndedProgram, forked, in_surroundings
from tests.faults.hostile_values import word
from tests.faults.results import CaseResult
from training.checkpoint import folders
from training.checkpoint.format.verify import damages

LIMIT_S = 60.0
SOON = ("--parallel.distributed_timeout_minutes", "0.2", "--fault.start_timeout_s", "30")
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID",
    "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "LANG", "LC_ALL", "TMPDIR", "HOME", "XDG_CACHE_HOME", "TRIPLANE_ATTEMPT", "TRIPLANE_EXIT_CODE_FILE", "TERM",
    "COLUMNS", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_CLUSTER_NAME", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK",
)  # fmt: skip
TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip


@dataclass(kw_only=True)
class Surroundings:
    """What is different, and what a refusal must say of it."""

    kind: str
    text: str
    tells: tuple[str, ...]
    """A message has one of these words, in any case; empty: there is no console to say it on."""
    environ: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    before: Callable[[], None] = lambda: None
    prepare: Callable[[Path], None] = lambda _: None
    """To the copy."""
    cwd: str = "."
    new_interpreter: bool = False
    must_fail: bool = False
    """It is a fault, with exit code 1."""
    same_bits: bool = True
    """Whether the end is as in ordinary surroundings; not on another number of ranks."""


def one(case: str, seed: int, scenes: Path, folder: Path) -> CaseResult:
    """A case: start the run again in hostile surroundings, judge, and start it in ordinary ones."""
    began = time.monotonic()
    draw = Random(f"{seed} {case}")
    make = draw.choices([make for make, _ in KINDS], [weight for _, weight in KINDS])[0]
    if make is None:
        kind, text, verdict = hostile_signals.one(draw, scenes, folder)
    else:
        around = make(draw)
        kind, text = around.kind, around.text
        verdict = in_these(around, scenes, folder)
    problem = f"{text}: {verdict.why}" if verdict.name != "handled" else ""
    return CaseResult(
        campaign="hostile",
        case=case,
        kind=f"surroundings: {kind}",
        outcome=verdict.name,
        seconds=time.monotonic() - began,
        problem=problem.encode("utf-8", "backslashreplace").decode(),
        facts={"target": f"surroundings: {kind}", "class": verdict.name},
    )


def in_these(around: Surroundings, scenes: Path, folder: Path) -> CaseVerdict:
    """Start in these, then in ordinary ones."""
    folder.chmod(0o755)
    copy, plain = folder / "copy", {"TMPDIR": str(folder)}
    shutil.copytree(scenes / "run", copy, symlinks=True)
    around.prepare(copy)
    words = [SCRIPT, "recipe.toml", "--run_dir", "run", *SOON, *around.flags]
    environ = {**plain, **around.environ}
    ended = in_surroundings(
        words, copy / around.cwd, LIMIT_S, environ, around.before, new_interpreter=around.new_interpreter
    )
    restore(copy)
    verdict = judged(around, ended)
    if verdict.name != "handled":
        return verdict
    return goes_on(scenes, copy, plain, ended, around.same_bits)


def ugliness_of_a_fault(ended: EndedProgram) -> str:
    """As of any other end; but a traceback of a user's code belongs there."""
    return ugliness(EndedProgram(ended.code, ended.said.replace("Traceback (most recent call last)", "")))


def restore(copy: Path) -> None:
    """Rights as they were, for the start that follows."""
    for path in [copy, *copy.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def judged(around: Surroundings, ended: EndedProgram) -> CaseVerdict:
    """Of what was said in hostile surroundings."""
    if ended.code is None:
        return CaseVerdict("hang", ended.said[-300:])
    if around.must_fail:
        named = ended.code == 1 and around.tells[0] in ended.said and not ugliness_of_a_fault(ended)
        return (
            CaseVerdict("handled") if named else CaseVerdict("silent", f"exit code {ended.code}: {ended.said[-300:]}")
        )
    if ugly := ugliness(
        EndedProgram(ended.code, ended.said.replace("fault: ", "") if around.kind in SYSTEM else ended.said)
    ):
        return CaseVerdict("traceback", ugly)
    if ended.code == 0 or not around.tells:
        return CaseVerdict("handled")
    said = ended.said.strip()
    if not any(one.lower() in said.lower() for one in around.tells):
        return CaseVerdict("poor", f"exit code {ended.code}, expected one of {around.tells} in {said[-400:]!r}")
    return (
        CaseVerdict("handled")
        if len(said.splitlines()) <= 40
        else CaseVerdict("poor", f"{len(said.splitlines())} lines")
    )


def goes_on(scenes: Path, copy: Path, environ: Mapping[str, str], ended: EndedProgram, same_bits: bool) -> CaseVerdict:
    """In ordinary surroundings: the same last loss and tensors as an undisturbed run, nothing damaged."""
    for path in folders.complete(folders.checkpoints(copy / "run")):
        if found := damages(path, "hashes"):
            return CaseVerdict("loss", f"{path.name}: {found[0].text}")
    again = forked((SCRIPT, "recipe.toml", "--run_dir", "run"), copy, LIMIT_S, environ)
    if again.code:
        return CaseVerdict(
            "loss", f"the next start ended with {again.code}: {again.said[-400:]!r} (before: {ended.code})"
        )
    if same_bits and hostile_signals.last_tensors(copy) != (scenes / hostile_signals.TENSORS).read_text():
        return CaseVerdict("silent", f"other tensors after {ended.code}: {ended.said[-300:]!r}")
    return CaseVerdict("handled")


# ---- the kinds


def limits(draw: Random) -> Surroundings:
    """Of files' sizes and numbers, memory, processes."""
    name, values, tells = draw.choice([
        ("RLIMIT_FSIZE", (0, 512, 4096, 65536, 300_000, 700_000), ("file too large", "ulimit -f")),
        ("RLIMIT_NOFILE", (10, 12, 16, 24, 32, 48), ("ulimit -n",)),
        ("RLIMIT_AS", (200 << 20, 500 << 20, 1 << 30, 2 << 30), ("memory", "map segment", "allocate", "ulimit -v")),
    ])  # fmt: skip
    value = draw.choice(values)

    def before() -> None:
        number = getattr(resource, name)
        resource.setrlimit(number, (value, value))

    new_interpreter = name == "RLIMIT_AS" or draw.random() < 0.3
    return Surroundings(
        kind="limits", text=f"{name} {value}", tells=tells, before=before, new_interpreter=new_interpreter
    )


def streams(draw: Random) -> Surroundings:
    """Closed, full, or without a reader."""
    numbers = draw.choice([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
    how = draw.choice(["closed", "/dev/full", "a pipe without a reader", "for reading only"])

    def before() -> None:
        for number in numbers:
            if how == "closed":
                os.close(number)
                continue
            if how == "a pipe without a reader":
                reading, target = os.pipe()
                os.close(reading)
            else:
                target = os.open(
                    "/dev/full" if how == "/dev/full" else os.devnull,
                    os.O_WRONLY if how == "/dev/full" else os.O_RDONLY,
                )
            os.dup2(target, number)
            os.close(target)

    return Surroundings(
        kind="streams", text=f"{numbers} {how}", tells=(), before=before, new_interpreter=draw.random() < 0.4
    )


def variables(draw: Random) -> Surroundings:
    """One of a launcher's, a locale's or ours holds something else; half of the time among whole ones of torchrun."""
    name, value = draw.choice(VARIABLES), word(draw)
    given = {**TORCHRUN, "MASTER_PORT": str(free_port())} if draw.random() < 0.5 else {}
    if name == "WORLD_SIZE" and value.isdigit() and int(value[:9]) > 1:
        value = "-1"  # others would be waited for
    tells = (name, "nproc", "ranks", "temporary", "No such file", "File name too long")
    if name in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        value = draw.choice(["/nowhere", "/dev/null", "", "/proc", value])
    return Surroundings(
        kind="variables", text=f"{name}={value[:60]!r}", tells=tells, environ={**given, name: value[:100_000]},
        new_interpreter=name in ("LANG", "LC_ALL", "OMP_NUM_THREADS", "HOME"),
    )  # fmt: skip


def free_port() -> int:
    """For this case alone: others run beside it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def mounts(draw: Random) -> Surroundings:
    """Small, read-only or full file systems under /dev/shm, the run's folder, its cache or the temporary folder."""
    place = draw.choice(["/dev/shm", "run", "cache", "small"])
    options = draw.choice(["size=4k", "size=64k", "size=500k", "size=800k", "size=1m,nr_inodes=12", "ro"])
    flags = ("--nproc", "2") if place == "/dev/shm" else ("--run_dir", "small/run") if place == "small" else ()

    def before() -> None:
        os.unshare(os.CLONE_NEWNS)
        mount("--make-rprivate", "/")
        if place == "small" or place == "/dev/shm":
            Path(place).mkdir(exist_ok=True)
            mount("-t", "tmpfs", "-o", options, "triplane-faults", place)
        else:
            mount("--bind", place, place)
            mount("-o", "remount,bind,ro", place)

    tells = ("read-only", "no space", "has 0 free", "bytes", "files")
    return Surroundings(
        kind="mounts", text=f"{place} {options}", tells=tells, before=before, flags=flags,
        same_bits=place != "/dev/shm",
    )  # fmt: skip


def mount(*words: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(["mount", *words], check=True, stdout=subprocess.DEVNULL)


def permissions(draw: Random) -> Surroundings:
    """A file or folder that may not be read or written, and none of root's rights to do it all the same."""
    victim = draw.choice([
        "run", "run/checkpoints", "run/metrics.jsonl", "run/checkpoints/latest", "run/checkpoints/iter_0000003",
        "run/checkpoints/iter_0000003/state.json", "cache", "recipe.toml", "corpus.txt", "run/config.toml", "run/logs",
    ])  # fmt: skip
    mode = draw.choice([0, 0o444, 0o555])

    def prepare(copy: Path) -> None:
        (copy / victim).chmod(mode)

    text = f"{victim} has mode {mode:o}"
    tells = ("permission denied", "not permitted", "no permission")
    return Surroundings(kind="permissions", text=text, tells=tells, prepare=prepare, before=without_rights)


def without_rights() -> None:
    """Give up root's rights over files, in this process and those that it starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    no_root, no_new = 0b11, 28
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.prctl(no_new, no_root, 0, 0, 0) or libc.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def paths(draw: Random) -> Surroundings:
    """The run's folder, or the one that a start is in, is none or has a strange name."""
    odd = draw.choice(
        [os.fsdecode(b"\xff\xfe"), "a\nb", "\x1b[31mred", "x" * 250, "-", "~", "$(touch witness)", "ü 你"]
    )
    kind = draw.choice(["FIFO", "dangling link", "circle of links", "socket", "link to /dev/zero", "1 TB, sparse"])
    how = draw.choice(["kind", "name", "cwd", "cwd gone"])

    def prepare(copy: Path) -> None:
        if how == "kind":
            (copy / "other").write_text("")
            REPLACEMENTS[kind](copy / "other")
        elif how == "cwd":
            (copy / odd).mkdir(exist_ok=True)
            for name in ("recipe.toml", "corpus.txt"):
                shutil.copyfile(copy / name, copy / odd / name)
        elif how == "cwd gone":
            (copy / "gone").mkdir()

    def before() -> None:
        if how == "cwd gone":
            Path("../gone").rmdir()

    flags: Mapping[str, tuple[str, ...]] = {
        "kind": ("--run_dir", "other"), "name": (f"--run_dir={odd}",), "cwd gone": ()
    }  # fmt: skip
    return Surroundings(
        kind="paths", text=f"{how}: {odd!r} {kind}", tells=("run_dir", "recipe", "folder"), prepare=prepare,
        before=before, flags=flags.get(how, ()), cwd=odd if how == "cwd" else "gone" if how == "cwd gone" else ".",
    )  # fmt: skip


def libraries(draw: Random) -> Surroundings:
    """A variable that torch or Python reads holds nonsense."""
    name = draw.choice(["TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "PYTHONWARNINGS"])
    value = draw.choice(["error", "default"]) if name == "PYTHONWARNINGS" else draw.choice(["nonsense", "", "+x,-y"])
    return Surroundings(
        kind="libraries", text=f"{name}={value!r}", tells=(name,), environ={name: value}, new_interpreter=True
    )


ENDS = """
import ctypes, os, sys
from training.loop import Callback

END = {END!r}


class Ends(Callback):
    def after_step(self, progress, result):
        exec(END)
"""


def ends(draw: Random) -> Surroundings:
    """A user's callback ends its process, or forks, after the one iteration that is left."""
    end = draw.choice([
        "sys.exit(0)", "sys.exit(75)", "sys.exit('text')", "sys.exit()", "os._exit(0)", "os._exit(75)", "os._exit(2)",
        "raise KeyboardInterrupt", "raise GeneratorExit", "os.fork()", "raise ValueError('\\x1b[31mred')",
    ])  # fmt: skip

    def prepare(copy: Path) -> None:
        (copy / "ends.py").write_text(ENDS.replace("{END!r}", repr(end)))

    return Surroundings(
        kind="ends", text=end, tells=("ends:Ends",), prepare=prepare, flags=("--train.callbacks", "ends:Ends"),
        must_fail=end != "os.fork()",
    )  # fmt: skip


Make = Callable[[Random], Surroundings]
KINDS: tuple[tuple[Make | None, int], ...] = (
    (limits, 3), (streams, 3), (variables, 5), (mounts, 3), (permissions, 3), (paths, 2), (None, 6), (libraries, 1),
    (ends, 2),
)  # fmt: skip
"""What makes a case, and its share; None: signals."""
SYSTEM = ("limits", "mounts", "permissions", "streams")
"""The system's own refusal is no bad input: a fault's line says it."""
