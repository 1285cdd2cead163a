"""A launch script: which command starts Megatron-LM, with which flags, and what that depends on."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from program.errors import UserError
from tools.from_megatron.shell.others import ALL_ARGUMENTS, OtherAnswer
from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.shell.reading import Reading, same_call
from tools.from_megatron.shell.rounds import Rounds
from tools.from_megatron.unknown import MARK

_BASHS_WORDS = re.compile(
    r"^(.*): line (\d+): ((?:syntax error|unexpected EOF).*|.*(?:division by 0|function nesting|cannot allocate).*)"
    r"(?:\n\1: line \d+: `(.*)')?",
    re.MULTILINE,
)


@dataclass(slots=True)
class ScriptReading:
    """What a script says."""

    launches: list[Launch] = field(default_factory=list)
    """Commands that start Megatron-LM, each once."""
    not_followed: list[str] = field(default_factory=list)
    """What was not followed and may set or start something: sentences with their lines."""
    answers: list[OtherAnswer] = field(default_factory=list)
    """Guesses that matter."""
    overwritten: dict[str, int] = field(default_factory=dict)
    """What --set gives to no effect, as the script sets it, with the line."""
    not_read: list[str] = field(default_factory=list)
    """What --set gives and the script asks for nowhere."""
    names: set[str] = field(default_factory=set)
    """What it does ask for."""
    other_tasks: list[str] = field(default_factory=list)
    """Programs of Megatron-LM's that it starts and that train nothing."""
    within_words: list[str] = field(default_factory=list)
    """Commands of which a word would start it: sentences with their lines."""
    holding_flags: list[str] = field(default_factory=list)
    """Variables that hold flags of Megatron-LM's in the end."""
    other_starts: list[OtherAnswer] = field(default_factory=list)
    """Other commands that it starts, by answers that are as good as the one taken: without any, it starts none."""
    ends_at: int | None = None
    """The line of what ends it before its last line."""


def read_script(
    text: str, starts_megatron: Callable[[Sequence[str]], bool], given: Mapping[str, str], path: Path | None = None
) -> ScriptReading:
    """Run a script where it can change nothing, and say what it would start.

    starts_megatron: whether these words are a Megatron-LM command's. given: variables from outside. path: of its file.
    Raises UserError for what bash cannot read, and where the machine offers no closed process.
    """
    rounds = Rounds(MARK.sub("", text.replace("\r\n", "\n")), starts_megatron, given, path)
    run = rounds.settle()
    if not run.launches and not run.other_tasks:
        run = rounds.search(run)
    found = ScriptReading(
        not_followed=rounds.marked(run).not_followed, other_tasks=run.other_tasks, within_words=run.within_words,
        other_starts=rounds.other_starts,
    )  # fmt: skip
    if run.launches:
        found.launches, found.answers = rounds.explained(run)
    else:
        _refuse_errors(rounds, run, text)
        last = [step for step in run.ran.steps if step.source == run.ran.main][-1:]
        found.ends_at = last[0].line if last and last[0].text.startswith("exit") else None
    _note_given(found, rounds, run, given)
    for step in run.ran.steps:
        assigned = re.match(r"([A-Za-z_]\w*)\+?=(.*)", step.text, re.DOTALL)
        if assigned and starts_megatron(_words(assigned[2])) and assigned[1] not in found.holding_flags:
            found.holding_flags.append(assigned[1])
    return found


def _refuse_errors(rounds: Rounds, run: Reading, text: str) -> None:
    """Raises UserError for what bash says of a script that starts nothing."""
    if found := _BASHS_WORDS.search(run.ran.said):
        file, line, said, source = found.groups()
        where = f"line {line}" if file == run.ran.main else f"{Path(file).name}, line {line}"
        if source is None and file == run.ran.main and int(line) <= len(lines := text.splitlines()):
            source = lines[int(line) - 1]
        source = (source or "").strip()[:200]
        if re.search(r"=\s*<[^<>]+>", source):
            raise UserError(f"{where}: a value that is to be filled in: {source}. Write it in its place.")
        raise UserError(f"{where}: bash says: {said.strip()}" + f", in: {source}" * bool(source))
    if run.ran.over:
        asks = ", ".join(rounds.marks.of(key).written for key in run.commands[-3:])
        known = f" What is not known: {asks}." if asks else ""
        raise UserError(f"a loop that does not end, or more than a script needs (line {run.ran.last_line}).{known}")


def _note_given(found: ScriptReading, rounds: Rounds, run: Reading, given: Mapping[str, str]) -> None:
    """Which --set has no effect."""
    whole = "\n".join(run.texts)
    found.names = set(re.findall(r"\$\{?[!#]?(\w+)", whole))
    words = set(re.findall(r"\w+", whole))
    all_arguments = ALL_ARGUMENTS.search(whole)
    calls = [rounds.marks.of(key).written for key in (*run.commands, *run.contents)]
    for name, value in given.items():
        if name.isdigit():
            read = name in found.names or all_arguments is not None
        elif name.isidentifier():
            read = name in words
            for step in run.ran.steps:
                assigned = re.match(rf"(?:(?:export|readonly|declare) (?:-\w+ )*)?{name}=(.*)", step.text, re.DOTALL)
                if assigned and " ".join(_words(assigned[1])) != value:
                    found.overwritten[name] = step.line
        else:
            read = any(same_call(name, each) for each in calls)
        if not read:
            found.not_read.append(name)


def _words(text: str) -> list[str]:
    """Words of a trace, without their quotes."""
    try:
        return " ".join(shlex.split(text.strip("()"))).split()
    except ValueError:
        return text.split()
