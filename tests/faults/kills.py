"""Processes of a real run killed around saving: is there always a checkpoint, and does the next start go on from it?

Kills come in chains: a run in a folder is started and killed, started again and killed again, and in the end runs on
to its end. Its losses must then be, bit for bit, those of an undisturbed run.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults import program
from tests.faults.processes import Family, Process, all_gone, family, kill
from tests.faults.results import CaseResult, Store
from training.checkpoint import folders
from training.checkpoint.format.manifest import MANIFEST, DamagedError, read_manifest
from training.checkpoint.format.tables import INDEX
from training.checkpoint.format.verify import damages
from training.checkpoint.format.writer import DATA, TABLE
from training.metrics.jsonl import read_jsonl

CAMPAIGN = "kills"
TITLE = "Processes killed around saving"
TEXT = """`pretrain_gpt.py` on 2 local ranks saves at every iteration, in the background or while training waits. At a
random moment around a save a process gets SIGKILL: a rank, the launcher, a writer of the background, or all at once.
Then every checkpoint that is visible must be whole, byte by byte; what was committed must still be there; and the run,
started again in the same folder, must go on from it. Ten kills follow each other in a folder, then the run goes on to
its end: its losses are, bit for bit, those of an undisturbed run. A killed writer does not end the run: it
must commit again by itself. "Seen" is how the save that was hit was left."""
CHAIN = 10
"""Kills in one run folder."""
UNDISTURBED = 100
"""Iterations of the undisturbed run; a chain of 10 kills gets to about 50."""
LIMIT_S = 60.0
"""Whatever takes longer hangs."""

OLD = (f"{folders.TEMPORARY}removed", f"{folders.TEMPORARY}replaced")
"""Endings of committed checkpoints that are being deleted."""
SHARDS = ("--parallel.data_parallel_sharding_strategy", "optim_grads_params")
LAYOUTS = ((), ("--parallel.tensor_model_parallel_size", "2"), SHARDS)
STAGES = ("", DATA, TABLE, INDEX, MANIFEST)
"""What must be there of a save when the moment of the kill is drawn, by its ending; "": its folder. In the background
nothing else is there for as long as the copy is made, and the rest takes milliseconds."""
VICTIMS = ("rank 0", "rank 1", "the launcher", "all processes")
WRITERS = ("writer 0", "writer 1")


def cases(count: int) -> list[str]:
    """``count`` kills in chains: in the background and while training waits, with DP, TP and weights in shards."""
    return [f"chain {number // CHAIN}, kill {number % CHAIN}" for number in range(count)]


@dataclass(kw_only=True, slots=True)
class Chain:
    """A run's folder, how it is started, and what has been seen there."""

    run_dir: Path
    cache_dir: Path
    background: bool
    layout: Sequence[str]
    undisturbed: Sequence[float]
    draw: Random

    @property
    def root(self) -> Path:
        return folders.checkpoints(self.run_dir)

    def start(self, *flags: str) -> int:
        """The run, again."""
        saving = ("--checkpoint.save_interval", "1", "--checkpoint.async_save", str(self.background))
        argv = program.command(self.run_dir, self.cache_dir, 2, *saving, *self.layout, *flags)
        return program.start(argv, self.run_dir / "console.log")


@dataclass(slots=True, frozen=True)
class KillObservation:
    """The folder of checkpoints at a moment."""

    committed: int
    """The iteration that a start would go on from; 0: none."""
    temporary: frozenset[str]
    """Names of folders that are being written."""


def run(todo: Sequence[str], store: Store, scratch: Path, printed: Callable[[], None]) -> None:
    """Do the cases. A chain that was begun before starts over with its remaining kills."""
    cache_dir = scratch / "cache"
    program.import_once(cache_dir)
    undisturbed = [reference(scratch / f"undisturbed-{n}", cache_dir, layout) for n, layout in enumerate(LAYOUTS)]
    by_chain: dict[int, list[str]] = {}
    for case in todo:
        by_chain.setdefault(int(case.split(",")[0].split()[1]), []).append(case)
    for number, mine in by_chain.items():
        run_dir = scratch / f"chain-{number}"
        run_dir.mkdir(parents=True)
        chain = Chain(
            run_dir=run_dir,
            cache_dir=cache_dir,
            background=number % 2 == 0,
            layout=LAYOUTS[number // 2 % len(LAYOUTS)],
            undisturbed=undisturbed[number // 2 % len(LAYOUTS)],
            draw=Random(f"{store.seed} {mine[0]}"),
        )
        for result in killed(chain, mine):
            store.add(result)
            printed()
        if not any(result.problem for result in store.results(CAMPAIGN) if result.case in mine):
            shutil.rmtree(run_dir, ignore_errors=True)


def reference(run_dir: Path, cache_dir: Path, layout: Sequence[str], iterations: int = UNDISTURBED) -> list[float]:
    """The losses of an undisturbed run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    flags = (*layout, "--train.exit_interval", str(iterations), "--checkpoint.async_save", "False")
    code = program.finish(program.start(program.command(run_dir, cache_dir, 2, *flags), run_dir / "console.log"))
    if code:
        raise RuntimeError(f"the undisturbed run ended with {code}: {(run_dir / 'console.log').read_text()}")
    return losses(run_dir)


def losses(run_dir: Path) -> list[float]:
    """Those of all iterations so far, from ``metrics.jsonl``."""
    path = run_dir / "metrics.jsonl"
    return [line["loss"] for line in read_jsonl(path) if "loss" in line] if path.exists() else []


def killed(chain: Chain, mine: Sequence[str]) -> Iterator[CaseResult]:
    """The chain's kills, one after the other; with the last one comes the end of the run."""
    for case in mine:
        began = time.monotonic()
        victim = chain.draw.choice(VICTIMS + WRITERS if chain.background else VICTIMS)
        how, problems = one(chain, victim)
        if case == mine[-1] and not problems:
            problems = to_its_end(chain)
        kind = f"{victim} ({'in the background' if chain.background else 'while training waits'})"
        seconds = time.monotonic() - began
        problem = "; ".join(problems)
        yield CaseResult(campaign=CAMPAIGN, case=case, kind=kind, outcome=how, seconds=seconds, problem=problem)


def one(chain: Chain, victim: str) -> tuple[str, list[str]]:
    """Start the run, kill ``victim`` around a save: how that save was left, and what is wrong."""
    before = look(chain.root)
    pid = chain.start()
    processes = None
    try:
        more = chain.draw.randrange(4)
        if victim in WRITERS:  # a run that has no checkpoint yet may end; one that has must go on
            more = max(1, more)
        seen, problems = wait_for_save(chain, before, more, pid)
        processes = family(pid)
        if len(processes.ranks) != 2 or (chain.background and len(processes.writers) != 2):
            return "?", [*problems, f"the run has no 2 ranks: {_tail(chain)}"]
        wait_for_stage(chain.root, seen.temporary - before.temporary, chain.draw.choice(STAGES))
        time.sleep(chain.draw.choice([0.0, chain.draw.uniform(0, 0.005), chain.draw.uniform(0, 0.05)]))
        seen = max(seen, look(chain.root), key=lambda moment: moment.committed)
        kill(chosen(processes, victim))
        if victim in WRITERS:
            problems += goes_on(chain, pid)
            processes = joined(processes, family(pid))
            kill(processes.all())
        if not all_gone(processes.all(), LIMIT_S):
            problems.append(f"processes of the run are left after {LIMIT_S:.0f} s")
    finally:
        kill([Process(pid, None)] if processes is None else processes.all())
        program.finish(pid)
    return left_behind(chain.root), problems + wrong(chain, seen)


def chosen(processes: Family, victim: str) -> list[Process]:
    """The processes to kill."""
    if victim == "all processes":
        return processes.all()
    if victim == "the launcher":
        return [processes.launcher]
    kind, number = victim.split()
    return [(processes.ranks if kind == "rank" else processes.writers)[int(number)]]


def joined(first: Family, second: Family) -> Family:
    """Processes that were seen at either moment."""
    ranks = tuple(dict.fromkeys(first.ranks + second.ranks))
    return dataclasses.replace(first, ranks=ranks, writers=tuple(dict.fromkeys(first.writers + second.writers)))


def look(root: Path) -> KillObservation:
    """The folder of checkpoints now, without opening a file of tensors."""
    try:
        names = os.listdir(root)  # noqa: PTH208  (a path object for each name would take too long here)
    except OSError:
        names = []
    temporary = frozenset(name for name in names if folders.TEMPORARY in name and not name.endswith(OLD))
    return KillObservation(committed=newest(root), temporary=temporary)


def newest(root: Path) -> int:
    """The iteration of the checkpoint that a start would go on from; 0: none."""
    while True:
        try:
            path = folders.latest(root)
        except FileNotFoundError:  # the run deleted a folder while we looked at it
            continue
        return (folders.iteration_of(path) or 0) if path else 0


def wait_for_save(chain: Chain, before: KillObservation, more: int, pid: int) -> tuple[KillObservation, list[str]]:
    """Until the first save of this start has begun, and ``more`` behind it; what was seen, what was wrong with it."""
    begun: list[str] = []
    deadline = time.monotonic() + LIMIT_S
    while len(begun) <= more:
        seen = look(chain.root)
        begun += sorted(seen.temporary - before.temporary - set(begun))
        if time.monotonic() > deadline or not _is_alive(pid):
            return seen, [f"no save within {LIMIT_S:.0f} s, or the run has ended: {_tail(chain)}"]
        time.sleep(0.0005)
    first = folders.iteration_of(Path(begun[0].partition(folders.TEMPORARY)[0]))
    expected = before.committed + 1
    return seen, [] if first == expected else [f"expected to go on with iteration {expected}, found {first}"]


def wait_for_stage(root: Path, temporary: frozenset[str], ending: str) -> None:
    """Until the folder that is being written has a file with this ending, or is gone; at most a second."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            names = [name for folder in temporary for name in os.listdir(root / folder)]  # noqa: PTH208
        except OSError:
            return
        if any(name.endswith(ending) for name in names) or not ending:
            return
        time.sleep(0.0002)


def goes_on(chain: Chain, pid: int) -> list[str]:
    """Without a writer: training goes on and commits again."""
    had, deadline = look(chain.root).committed, time.monotonic() + LIMIT_S
    while look(chain.root).committed < had + 2:
        if not _is_alive(pid):
            return [f"the run ended: {_tail(chain)}"]
        if time.monotonic() > deadline:
            return [f"no checkpoint within {LIMIT_S:.0f} s behind iteration {had}: {_tail(chain)}"]
        time.sleep(0.002)
    return []


def wrong(chain: Chain, seen: KillObservation) -> list[str]:
    """What a folder of checkpoints without a writer must not look like."""
    problems = [f"{path.name} is visible without its manifest" for path in folders.incomplete(chain.root)]
    for path in folders.complete(chain.root):
        problems += [f"{path.name} is visible and not whole: {damage.text}" for damage in damages(path, "hashes")]
        try:
            printed = read_manifest(path).about["iteration"]
        except DamagedError:
            continue
        if printed != folders.iteration_of(path):
            problems.append(f"{path.name} holds iteration {printed}")
    if (number := newest(chain.root)) < seen.committed:
        problems.append(f"iteration {seen.committed} was committed, now the newest is {number}")
    return problems + other_losses(chain)


def other_losses(chain: Chain) -> list[str]:
    """Whether the run's losses so far are those of the undisturbed one."""
    own = losses(chain.run_dir)
    for iteration, (ours, theirs) in enumerate(zip(own, chain.undisturbed, strict=False), start=1):
        if ours != theirs:
            return [f"iteration {iteration} has the loss {ours}, undisturbed it has {theirs}"]
    return []


def to_its_end(chain: Chain) -> list[str]:
    """Start once more and let the run end by itself."""
    before = look(chain.root).committed
    code = program.finish(chain.start("--train.exit_interval", "7"))
    problems = [] if code == 0 else [f"the last start ended with {code}: {_tail(chain)}"]
    expected = (before // 7 + 1) * 7
    if newest(chain.root) != expected or len(losses(chain.run_dir)) < expected:
        problems.append(f"expected the run to end at iteration {expected}, found {newest(chain.root)}")
    return problems + wrong(chain, look(chain.root))


def left_behind(root: Path) -> str:
    """How the save that was hit was left, by the files of its folder."""
    latest = folders.latest(root)
    complete = folders.complete(root)
    if complete and latest != complete[-1]:
        return "committed, latest still names the one before"
    left = list(root.glob(f"*{folders.TEMPORARY}*")) if root.is_dir() else []
    if not left:
        return "nothing half there"
    if all(path.name.endswith(OLD) for path in left):
        return "an old checkpoint half removed"
    names = {entry.name for path in left for entry in path.iterdir()}
    if MANIFEST in names:
        return "manifest there, name not given"
    if INDEX in names:
        return "index there, manifest not"
    if any(name.endswith(TABLE) for name in names):
        return "files of some ranks written"
    return "files half written" if any(name.endswith(DATA) for name in names) else "folder made, nothing in it"


def _is_alive(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _tail(chain: Chain) -> str:
    path = chain.run_dir / "console.log"
    return path.read_text()[-600:] if path.exists() else ""
