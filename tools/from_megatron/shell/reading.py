"""One reading of a script with some assumptions: what its programs would be, and what they are answered."""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from program.errors import UserError
from tools.from_megatron.shell import programs
from tools.from_megatron.shell.run import EndOfRun, Ran, Setting, run
from tools.from_megatron.shell.world import SOURCES
from tools.from_megatron.unknown import MARK, Marks, Unknown

HERE = Unknown("$PWD", sets=("PWD",))
MOST_NESTED, MOST_READ = 40, 200
"""Scripts within scripts; in all."""
_AGAIN = 20
"""How often the same words are taken to succeed: loops that wait for something end so."""
_NOT_SET = re.compile(r"^(?:(.*): )?line (\d+): \$?([A-Za-z_]\w*|\d+)(?:\[.*\])?: unbound variable$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a reading takes for granted of the world outside."""

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    printed: Mapping[str, str] = field(default_factory=dict)
    """What commands print, by the keys of their marks."""
    failing: frozenset[str] = frozenset()
    """Keys of commands that fail."""
    there: Mapping[str, int] = field(default_factory=dict)
    """Files that exist, and as what."""
    functions: frozenset[str] = frozenset()
    """Programs that are called by their paths."""
    no_files: bool = False
    """Whether a pattern that fits no file is nothing; else it is itself, as if it were one."""
    empty: frozenset[str] = frozenset()
    """Variables that the script sets in a branch that is not taken."""

    def with_value(self, name: str, value: str) -> "Assumed":
        """With that in a variable, or as the argument of that number; those before it are empty."""
        if not name.isdigit():
            return replace(self, variables={**self.variables, name: value})
        words = [*self.arguments, *[""] * (int(name) - len(self.arguments))]
        words[int(name) - 1] = value
        return replace(self, arguments=tuple(words))


@dataclass(frozen=True, slots=True)
class Started:
    """A command that starts Megatron-LM; its words hold marks."""

    launcher: tuple[str, ...]
    program: str
    flags: tuple[str, ...]
    line: int
    slurm: Mapping[str, str]


@dataclass(slots=True)
class Reading:
    """What it shows."""

    launches: list[Started] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    """Files whose contents are not known, as if ``cat`` printed them: keys of their marks."""
    commands: list[str] = field(default_factory=list)
    """Other programs that it would start: keys of their marks."""
    other_tasks: list[str] = field(default_factory=list)
    not_followed: list[str] = field(default_factory=list)
    within_words: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of all scripts that were read."""
    ran: Ran = field(default_factory=Ran)

    @property
    def not_set(self) -> list[tuple[str, int]]:
        """Variables that were read and not set, with their lines."""
        return [(name, int(line)) for _, line, name in _NOT_SET.findall(self.ran.said)]


def read_once(
    text: str, path: Path | None, assumed: Assumed, marks: Marks, starts_megatron: Callable[[Sequence[str]], bool],
    strict: bool = False, first_only: bool = False,
) -> Reading:  # fmt: skip
    """Run the script once. first_only: until it starts Megatron-LM. Raises UserError for what cannot be followed."""
    slurm = programs.directives(text)
    answers = _Answers(assumed, marks, starts_megatron, first_only, slurm)
    answers.reading.texts.append(text)
    setting = Setting(
        text, path, {**slurm, **assumed.variables}, assumed.arguments, assumed.there, assumed.functions, strict,
        assumed.no_files, assumed.empty,
    )  # fmt: skip

    def marked(file: str, line: int) -> str:
        if not file:
            return marks.mark(Unknown("what it reads"))
        return answers.printed(answers.reading.contents, ["cat", file], line)

    answers.reading.ran = run(setting, answers.answer, marked, marks.mark(HERE))
    for file, step in answers.reading.ran.asked.items():
        if SOURCES.match(step):
            line = next((each.line for each in answers.reading.ran.steps if each.text == step), 0)
            answers.reading.not_followed.append(
                f"line {line}: another file, {marks.readable(file)}, is not read: put it beside the script, or its "
                "lines in the place of this one."
            )
    return answers.reading


class _Answers:
    def __init__(
        self, assumed: Assumed, marks: Marks, starts_megatron: Callable[[Sequence[str]], bool], first_only: bool,
        slurm: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.assumed, self.marks, self.starts_megatron, self.first_only = assumed, marks, starts_megatron, first_only
        self.reading = Reading()
        self.outer: list[tuple[tuple[str, ...], Mapping[str, str], int, tuple[str, ...]]] = [((), slurm, 0, ())]
        """Of each script that is read: what stands before it, what SLURM sets, its line if it is a word, and the texts
        of those that it stands in, its own the last one."""
        self.counts = Counter[str]()

    def answer(self, asked: list[str], with_input: bool, content: Callable[[str], str | None]) -> list[str]:
        """As ``prelude.sh`` expects it. asked: the number of the script, a line, words; what it reads comes last."""
        number, here, *words = [*asked, *["0"] * (2 - len(asked))]
        given = words.pop() if with_input and words else None
        place = _number(number, len(self.outer))
        launcher, slurm, line, _ = self.outer[place]
        line = line or (int(here) if here.isdigit() else 0)
        if not words or not words[0]:
            return ["print", "", "127"]
        if words[0].startswith("--"):
            raise UserError(
                f"line {line}: a command begins with {self.marks.readable(words[0])}. The line before it does not "
                "continue: a \\ must be its last character (no blank, no comment behind it)."
            )
        if MARK.fullmatch(words[0]) and len(words) == 1:
            return ["print", "", "0"]
        at = programs.launch_at(words, self.starts_megatron)
        if at is not None and programs.trains_nothing(words[at]):
            self._note(self.reading.other_tasks, f"line {line}: {self.marks.readable(words[at])} trains nothing.")
        elif at is not None:
            self._launch(Started((*launcher, *words[:at]), words[at], tuple(words[at + 1 :]), line, slurm))
            return ["print", "", "0"]
        elif (nested := programs.nested_script(words)) is not None:
            return self._nested(nested, place, line, given, content)
        return self._print(words, line)

    def _launch(self, started: Started) -> None:
        if started not in self.reading.launches:
            self.reading.launches.append(started)
        self.counts["launches"] += 1
        if self.first_only or self.counts["launches"] > _AGAIN:
            raise EndOfRun

    def _print(self, words: list[str], line: int) -> list[str]:
        """What another program prints: what is given for it, or a mark."""
        if any(len(word.split()) > 2 and self._starts(word.split()) for word in words[1:]):
            said = f"line {line}: what {self.marks.readable(words[0])} does with its words is not followed."
            self._note(self.reading.within_words, said)
        printed, key = self.printed(self.reading.commands, words, line), _key(words, line)
        self.counts[key] += 1
        if self.counts[key] > 20 * _AGAIN:
            raise EndOfRun
        fails = key in self.assumed.failing or self.counts[key] > _AGAIN
        if fails or programs.program_name(words[0]) in programs.SILENT:
            return ["print", "", str(int(fails))]
        return ["print", f"{printed}\n", "0"]

    def printed(self, keys: list[str], words: Sequence[str], line: int) -> str:
        """What a command prints: what is given for it, or a mark. keys: where it is noted."""
        key, called = _key(words, line), self._called(words)
        mark = self.marks.mark(Unknown(called, line, (called,)), key)
        known = self.marks.of(key)
        if len(called) > len(known.written):  # variables that are not set are marks by now
            self.marks.replace(key, Unknown(called, line, (called,) if known.sets == (known.written,) else known.sets))
        self._note(keys, key)
        return self.assumed.printed.get(key, mark)

    def _called(self, words: Sequence[str]) -> str:
        """``$(date +%F)``: a command as --set names it, with quotes as the script has them."""
        whole, shown = "\n".join(self.reading.texts), list[str]()
        for word in map(self.marks.readable, words):
            plain = re.fullmatch(r"[$\w./:,=@%+-]+|\$\(.*\)", word)
            double = re.search(r'["`\\]', word) is None and shlex.quote(word) not in whole
            shown.append(word if plain else f'"{word}"' if double else shlex.quote(word))
        return f"$({' '.join(shown)})"

    def _starts(self, words: list[str]) -> bool:
        return programs.launch_at(words, self.starts_megatron) is not None

    def _nested(
        self, nested: programs.NestedScript, number: int, line: int, given: str | None,
        content: Callable[[str], str | None],
    ) -> list[str]:  # fmt: skip
        """A script that a command starts, in a shell of its own."""
        if nested.kind == "input" and given is None:
            return ["input"]
        text = {"text": nested.source, "input": given or "", "file": None}[nested.kind]
        text = content(nested.source) if text is None else text
        if nested.kind == "input" and MARK.fullmatch(text.strip() if text else ""):
            text = None
        if text is None:
            shown = self.marks.readable(nested.source) or "its input"
            said = f"line {line}: it starts another script, {shown}, which is not read: put it beside this one."
            self._note(self.reading.not_followed, said)
            return self._print(["bash", nested.source], line)
        before = self.outer[number]
        within = *before[3], text
        if len(within) > MOST_NESTED or len(self.outer) > MOST_READ or text in (*before[3], *self.reading.texts[:1]):
            return ["print", "", "0"]  # a job that submits itself again
        assigned = dict(word.split("=", 1) for word in nested.launcher if re.match(r"[A-Za-z_]\w*=", word))
        launcher, slurm = (*before[0], *nested.launcher), dict(before[1])
        if nested.slurm is not None:
            launcher, slurm = (), programs.directives(text) | nested.slurm
        variables = {**(slurm if nested.slurm is not None else {}), **assigned}
        self.outer.append((launcher, slurm, line if nested.kind == "text" else 0, within))
        self.reading.texts.append(text)
        file = nested.source if nested.kind == "file" else f"/@/nested/{len(self.outer)}"
        pairs = [f"{name}={value}" for name, value in variables.items()]
        return [
            "script", str(int(nested.remote)), file, nested.name or "bash", str(len(self.outer) - 1), str(len(pairs)),
            *pairs, *nested.arguments, text.replace("\r\n", "\n"),
        ]  # fmt: skip

    @staticmethod
    def _note(lines: list[str], said: str) -> None:
        if said not in lines:
            lines.append(said)


def _number(text: str, most: int) -> int:
    """Below most; 0 for a script that has set our variable itself."""
    return int(text) if text.isdigit() and len(text) < 9 and int(text) < most else 0


def _key(words: Sequence[str], line: int) -> str:
    """Of a command on a line: the same whether what is not set is empty in it or a mark. A file's content is one."""
    words = [part for word in words if (part := MARK.sub("", word))]
    return f"$({0 if words[:1] == ['cat'] else line}: {' '.join(words)}"


def same_call(given: str, called: str) -> bool:
    """Whether a command of --set's is the one that is called so: what it has of variables may be anything."""
    if not given.startswith(("$(", "`")):
        return False
    sides = []
    for text in (given.removeprefix("$(").strip("`").removesuffix(")"), called[2:-1]):
        try:
            sides.append(shlex.split(text.partition("|")[0]))
        except ValueError:
            return False
    return len(sides[0]) == len(sides[1]) and all(
        one == other or "$" in one or "`" in one for one, other in zip(*sides, strict=True)
    )
