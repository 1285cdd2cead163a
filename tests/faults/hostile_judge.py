"""What came of a hostile file: handled, or one of five ways to fail.

handled     as if nothing had been, or else the change, the file or the field is named; or refused so (exit code 2)
poor        safe, but the message does not say which file or field, or fills a screen
traceback   frames, a fault's line, a signal, or control characters on the console
silent      another result, or a value that was ignored, and not a word
hang        not ended in time
loss        what was there and good is changed or gone
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.hostile_mutations import Mutation
from tests.faults.hostile_process import EndedProgram
from tests.faults.hostile_targets import Target
from training.checkpoint.format.verify import damages

CLASSES = ("handled", "poor", "traceback", "silent", "hang", "loss")
MOST_LINES = 25
MOST_BYTES = 1 << 26
OWN = b"somebody's own"
LINES = (".jsonl",)
FRAMES = re.compile(r"^\s*Traceback \(most recent call last\)|^[\w./-]+: fault: |^Fatal Python error", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """The class of a case and, but for ``handled``, why."""

    name: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the command does in an untouched folder."""

    code: int
    said: str
    results: Mapping[str, object]
    before: Mapping[str, bytes]
    after: Mapping[str, bytes]


def contents(folder: Path) -> dict[str, bytes]:
    """Every regular file's content by its path; what is larger than a scene's files are is left out."""
    found: dict[str, bytes] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_BYTES:
                found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def judge(
    target: Target,
    reference: Reference,
    mutation: Mutation,
    victim: Path | None,
    before: Mapping[str, bytes],
    folder: Path,
    ended: EndedProgram,
) -> CaseVerdict:
    """before: contents of the changed copy, before the command ran in it. folder: that copy, behind it."""
    if ended.code is None:
        return CaseVerdict("hang", ended.said[-300:])
    if lost := losses(reference, before, contents(folder), _superseded(victim, folder)):
        return CaseVerdict("loss", lost)
    if ugly := ugliness(ended):
        return CaseVerdict("traceback", ugly)
    new = new_lines(ended.said, reference.said)
    text = "\n".join(new)
    named = any(name in text for name in (mutation.file, *mutation.names) if name)
    short = len(new) <= MOST_LINES and len(text) < 8000
    if ended.code in target.refused:
        if not named:
            return CaseVerdict("poor", f"exit code {ended.code}, and neither file nor field is named: {text[-500:]!r}")
        return (
            CaseVerdict("handled")
            if short
            else CaseVerdict("poor", f"{len(new)} lines, {len(text)} characters: {text[:200]!r}")
        )
    if ended.code not in target.fine:
        return CaseVerdict("poor", f"exit code {ended.code}: {text[-500:]!r}")
    if not short and target.reads_all:
        return CaseVerdict("poor", f"{len(new)} lines, {len(text)} characters: {text[:200]!r}")
    if target.honours is not None and victim is not None and (problem := target.honours(victim, folder, ended.said)):
        return CaseVerdict("handled") if named else CaseVerdict("silent", f"{problem}: {text[-300:]!r}")
    results = target.results(folder, ended.said)
    if target.reads_all and target.honours is None and results != reference.results:
        if named or shown(ended.said.replace(str(folder), ""), reference.said):
            return CaseVerdict("handled")
        other = {
            key: (value, results.get(key)) for key, value in reference.results.items() if results.get(key) != value
        }
        return CaseVerdict("silent", f"expected and found {str(other)[:300]}: {text[-300:]!r}")
    return CaseVerdict("handled")


def losses(reference: Reference, before: Mapping[str, bytes], after: Mapping[str, bytes], exempt: str = "") -> str:
    """The first file that was good, is left alone without the attack, and is not there any more; empty: none.

    It may have another name now: damaged checkpoints are set aside. exempt: a folder that need not be kept.
    """
    kept = set(after.values())
    for name, content in before.items():
        whole, left = reference.before.get(name), reference.after.get(name)
        if whole is None:
            if content.startswith(OWN) and content not in kept:
                return f"{name}, somebody's own file, is gone"
            continue
        if left is None or (exempt and name.startswith(exempt)):
            continue
        if name.endswith(LINES) and left.startswith(whole):
            if gone := lines_lost(whole, content, after.get(name, b"")):
                return f"{name}: {gone}"
        elif content == whole == left and content and content not in kept:
            return f"{name} is {'changed' if name in after else 'gone'}"
        elif content == whole != left and left.startswith(whole) and not after.get(name, b"").startswith(whole):
            return f"{name} has lost what it began with"
    return ""


def _superseded(victim: Path | None, folder: Path) -> str:
    """The damaged checkpoint, where the run has come to its iteration again, and has verified the new one."""
    if victim is None or not victim.parent.name.startswith("iter_") or damages(victim.parent, "hashes"):
        return ""
    return str(victim.parent.relative_to(folder)) + "/"


def lines_lost(whole: bytes, content: bytes, after: bytes) -> str:
    """Lines that the change has left good, and that are not there any more."""
    there = set(after.split(b"\n"))
    for line in set(content.split(b"\n")) & set(whole.split(b"\n")) - there:
        return f"the line {line[:60].decode(errors='replace')!r} is gone"
    return ""


def ugliness(ended: EndedProgram) -> str:
    """What a console must not get; empty: nothing."""
    if ended.code is not None and (ended.code < 0 or ended.code == 70):
        return f"ended by signal {-ended.code}: {ended.said[-300:]!r}"
    if found := FRAMES.search(ended.said):
        return f"{ended.said[found.start() :][:200]!r} ... {ended.said.strip().splitlines()[-1][:300]!r}"
    wrong = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]", ended.said)
    if wrong:
        near = ended.said[max(0, wrong.start() - 80) : wrong.end() + 40]
        return f"{wrong[0]!r} on the console: {near!r}"
    return ""


def new_lines(said: str, usual: str) -> list[str]:
    """Lines that are not said in an untouched folder; numbers aside, unless a line has other words, too."""
    known = {_plain(line) for line in usual.splitlines()}
    return [line for line in said.splitlines() if _plain(line) not in known]


SHOWN = ("  at  ", "  changed ", "  layout ", "  from ", "schedule:")
"""Rows of what a run says when it goes on: another number there is the change, reported."""


def shown(said: str, usual: str) -> bool:
    """Whether the card of a run that goes on has another row than in an untouched folder."""
    cards = [{line for line in text.splitlines() if line.startswith(SHOWN)} for text in (said, usual)]
    return not cards[0] <= cards[1]


def _plain(line: str) -> str:
    return re.sub(r"[-+]?\d+([.,]\d+)*(e[-+]\d+)?", "0", line.strip())
