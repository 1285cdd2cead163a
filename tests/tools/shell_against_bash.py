"""A script read by tools.from_megatron, and run by bash with its programs, in which torchrun prints its words."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from program.errors import UserError
from tools.from_megatron.script import read_script
from tools.from_megatron.unknown import OpenText

STUB = "#!/bin/sh\nprintf 'A%s\\0' \"$@\" >&9\nprintf 'E\\0' >&9\n"
"""In the place of torchrun: prints its words, and takes part in no pipe."""
MARK = "pretrain_gpt.py"


@dataclass(frozen=True, slots=True)
class Compared:
    """What both make of a script."""

    ours: list[str] | str
    """Words behind the program; or a sentence on why there are none."""
    bashs: list[str] | str

    @property
    def agree(self) -> bool:
        """Equal words, or a refusal."""
        return isinstance(self.ours, str) or self.ours == self.bashs


def compared(script: str, folder: Path, **variables: str) -> Compared:
    """Both on one script. folder: an empty one, with nothing but what this writes."""
    return Compared(ours(script, variables), bashs(script, folder, variables))


def starts_megatron(words: Sequence[str]) -> bool:
    """Any words do here."""
    return True


def ours(script: str, variables: Mapping[str, str]) -> list[str] | str:
    """The words; a text where it refuses, or says that something is open."""
    try:
        reading = read_script(script, starts_megatron, variables)
    except UserError as error:
        return f"refused: {error}"
    if not reading.launches:
        return "nothing starts"
    open_words = [str(word) for word in reading.launches[0].flags if isinstance(word, OpenText)]
    if open_words:
        return f"open: {open_words}"
    if reading.not_followed:
        return f"not followed: {reading.not_followed}"
    if uncertain := [answer.question for answer in reading.answers if not answer.question.because]:
        return f"guessed: {uncertain}"
    return [str(word) for word in reading.launches[0].flags]


def bashs(script: str, folder: Path, variables: Mapping[str, str]) -> list[str] | str:
    """The words that bash gives to the program, the first time that it starts it."""
    stub = folder / "bin" / "torchrun"
    if not stub.exists():
        stub.parent.mkdir()
        stub.write_text(STUB)
        stub.chmod(0o755)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", **variables}
    printed = folder / "printed"
    command = ["bash", "-c", f'exec 9>"{printed}"; ulimit -v 500000\n' + script, "script"]
    done = subprocess.run(command, capture_output=True, env=environment, cwd=work, timeout=20, stdin=subprocess.DEVNULL)
    words = printed.read_text(errors="replace").split("\0")
    if "E" not in words:
        return f"nothing starts: {done.stderr.decode(errors='replace')[:200]}"
    first = [word[1:] for word in words[: words.index("E")]]
    return first[first.index(MARK) + 1 :] if MARK in first else first
