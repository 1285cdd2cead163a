"""Files, flags and surroundings that somebody has made to break things: is each refused by name, or of no effect?

Every case draws a target, one of its files and a change, all from its number and the seed; the program that reads the
file runs in a process forked from one that has imported everything.
"""

import importlib
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random

from tests.faults import hostile_environment, hostile_signals, hostile_values
from tests.faults.hostile_attack import attack, hostile_words
from tests.faults.hostile_judge import CLASSES, CaseVerdict, Reference, contents, judge
from tests.faults.hostile_mutations import Mutation
from tests.faults.hostile_process import EndedProgram, forked
from tests.faults.hostile_scenes import make
from tests.faults.hostile_targets import TARGETS, Target
from tests.faults.results import CaseResult, Store

CAMPAIGN = "hostile"
TITLE = "Hostile files, flags and surroundings"
TEXT = """Every file that a run, a checkpoint, a shard, an import or a tool reads is changed with an eye for its
structure (other types, boundary numbers, depth, encodings, control characters, keys twice, offsets, links, FIFOs,
devices, sizes, names), and the command that reads it runs; then 1 case in 11 takes its surroundings: limits, closed
streams, full or missing folders, malformed variables, signals at random moments. Handled: as if nothing had been, or
the file or field is named, on the console or in one refusal with exit code 2. Poor: safe, but named neither, or a
screenful. Traceback: frames, a fault's line, a signal, or control characters on the console. Silent: another result
without a word, or a value ignored. Hang: 30 s. Loss: something good that lay there is changed or gone. "Re-signed"
are checkpoints whose manifest fits the changed file. A wait of 60 s for an unknown owner is cut to 2."""
LIMIT_S = 30.0
WORKERS = 2
PROGRAMS = (
    "tools.clusters", "tools.convert.__main__", "tools.from_megatron.__main__", "tools.plan.goodput.command",
    "tools.inspect_checkpoint.__main__", "tools.plan.__main__", "tools.preprocess.__main__", "tools.reshard.__main__",
    "tools.supervise.decide", "training.cli.dry_run", "training.train",
)  # fmt: skip
"""Imported before anything is forked."""
SHARE = 11
"""One case of so many is of the surroundings."""


def cases(count: int) -> list[str]:
    """``count`` cases: changed files and flags, and then surroundings."""
    surroundings = count // SHARE
    files = [f"file {number}" for number in range(count - surroundings)]
    return files + [f"surroundings {number}" for number in range(surroundings)]


def run(todo: Sequence[str], store: Store, scratch: Path, printed: Callable[[], None]) -> None:
    """Do the cases, ``WORKERS`` at a time, each worker forked from this process once it has imported everything."""
    scenes = scratch / "scenes"
    files = [case for case in todo if case.startswith("file ")]
    surroundings = [case for case in todo if case not in files]
    drawn = {target.name: target for target, _ in (chosen(case, store.seed) for case in files)}
    warm(scenes, {target.scene for target in drawn.values()} | ({"run"} if surroundings else set()))
    if files:
        references = {name: reference(target, scenes, scratch) for name, target in drawn.items()}
        in_workers(
            files, lambda case, folder: one(case, store.seed, scenes, references, folder), store, scratch, printed
        )
    if surroundings:
        hostile_signals.make(scenes, scratch)
        attempt = hostile_environment.one
        in_workers(surroundings, lambda case, at: attempt(case, store.seed, scenes, at), store, scratch, printed)


def in_workers(
    todo: Sequence[str], do: Callable[[str, Path], CaseResult], store: Store, scratch: Path, printed: Callable[[], None]
) -> None:
    """Share the cases out over processes. Raises RuntimeError where one of them fails, which is a bug here."""
    pids = []
    for number in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for case in todo[number::WORKERS]:
                    with tempfile.TemporaryDirectory(prefix="case-", dir=scratch, ignore_cleanup_errors=True) as folder:
                        store.add(do(case, Path(folder)))
                    if number == 0:
                        printed()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise RuntimeError(f"workers ended with {codes}")


def warm(scenes: Path, names: Collection[str]) -> None:
    """Import what commands import, and make the scenes of these names."""
    for module in PROGRAMS:
        importlib.import_module(module)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scenes.with_name("hypothesis"))
    hostile_values.draw_from(hostile_values.TREES, 0)
    for name in sorted(names):
        make(name, scenes)


def chosen(case: str, seed: int) -> tuple[Target, Random]:
    """The target of a case, by weight, and what draws the rest of it."""
    draw = Random(f"{seed} {case}")
    return draw.choices(TARGETS, [target.weight for target in TARGETS])[0], draw


def copied(target: Target, scenes: Path, folder: Path) -> Path:
    """A fresh copy of a target's scene."""
    copy = folder / "copy"
    shutil.copytree(scenes / target.scene, copy, symlinks=True)
    (folder / "tmp").mkdir()
    target.prepare(copy)
    return copy


def execute(target: Target, words: Sequence[str], copy: Path) -> EndedProgram:
    """Run a target's command in a copy of its scene."""
    return forked(words, copy, LIMIT_S, {"TMPDIR": str(copy.with_name("tmp"))}, target.before)


def reference(target: Target, scenes: Path, scratch: Path) -> Mapping[tuple[str, ...], Reference]:
    """What each of a target's commands does in an untouched copy. Raises RuntimeError where that is no answer."""
    found = {}
    for words in target.words:
        with tempfile.TemporaryDirectory(prefix="reference-", dir=scratch) as folder:
            copy = copied(target, scenes, Path(folder))
            before = contents(copy)
            ended = execute(target, words, copy)
            if ended.code not in target.fine:
                raise RuntimeError(f"{target.name}: {' '.join(words)} ended with {ended.code}: {ended.said}")
            said = ended.said.replace(str(copy), "")
            found[words] = Reference(ended.code or 0, said, target.results(copy, said), before, contents(copy))
    return found


def one(
    case: str, seed: int, scenes: Path, references: Mapping[str, Mapping[tuple[str, ...], Reference]], folder: Path
) -> CaseResult:
    """A case: change a copy, run the command, judge."""
    began = time.monotonic()
    target, draw = chosen(case, seed)
    words = draw.choice(target.words)
    copy = copied(target, scenes, folder)
    victim: Path | None
    if target.victims:
        victim, mutation = attack(target, words, copy, draw)
        given = list(words)
    else:
        victim, (given, mutation) = None, hostile_words(words, draw)
    before = contents(copy)
    ended = execute(target, given, copy)
    verdict = judge(target, references[target.name][words], mutation, victim, before, copy, ended)
    return result(case, target.name, mutation, verdict, time.monotonic() - began, " ".join(given))


def result(
    case: str, target: str, mutation: Mutation, verdict: CaseVerdict, seconds: float, command: str
) -> CaseResult:
    """What the store keeps of a case."""
    problem = f"{mutation.text}: {verdict.why}" if verdict.name != "handled" else ""
    return CaseResult(
        campaign=CAMPAIGN,
        case=case,
        kind=f"{target}: {mutation.kind}",
        outcome=verdict.name,
        seconds=seconds,
        problem=_storable(problem),
        facts={"target": target, "class": verdict.name, "command": _storable(command[:300])},
    )


def _storable(text: str) -> str:
    return json.loads(json.dumps(text.encode("utf-8", "backslashreplace").decode()))


def table(results: Sequence[CaseResult]) -> list[str]:
    """A row for each target, a column for each class."""
    lines = [f"| Target | Cases | {' | '.join(name.capitalize() for name in CLASSES)} |", "|---|" + "---|" * 7]
    for target in sorted({result.facts["target"] for result in results}):
        mine = [result for result in results if result.facts["target"] == target]
        lines.append(_row(target, mine))
    return [*lines, _row("all", results)]


def _row(name: str, results: Sequence[CaseResult]) -> str:
    counts = [sum(result.outcome == one for result in results) for one in CLASSES]
    return f"| {name} | {len(results)} | {' | '.join(map(str, counts))} |"
