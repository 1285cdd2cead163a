"""Readings of one script, each with something assumed otherwise: what changes in the command depends on that.

What comes from outside is empty at first, as bash has it, and programs print marks. Then what is not set is tried with
marks, with numbers, and with the words that the script compares it with; commands fail, and files are there. Many are
assumed otherwise at once, and by themselves only where that makes a difference.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from program.errors import UserError
from tools.from_megatron.shell import others
from tools.from_megatron.shell.differences import changed, parts, same, with_open_values, with_text
from tools.from_megatron.shell.others import Other, OtherAnswer, all_changed, of_value
from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.shell.reading import Assumed, Reading, Started, read_once, same_call
from tools.from_megatron.unknown import MARK, Marks, OpenText, Unknown

MOST_READINGS, MOST_ENDLESS = 120, 4
"""Of one script, and those that do not end by themselves: questions that are left count as if they mattered not."""
_OUTSIDE = ("HOME", "HOSTNAME", "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME")
"""Variables that bash sets, each time or on each machine otherwise."""


class Rounds:
    """Readings of one script. path: of its file. given: what --set says."""

    def __init__(
        self, text: str, starts_megatron: Callable[[Sequence[str]], bool], given: Mapping[str, str], path: Path | None
    ) -> None:
        self.text, self.starts_megatron, self.given = text, starts_megatron, given
        self.path = None if path is None else path.resolve()
        self.marks, self.count, self.endless = Marks(), 0, 0
        self.known: list[tuple[Assumed, Reading | None]] = []
        """What has been read, and what it showed: rounds come back to the same assumptions."""
        self.not_set: dict[str, Unknown] = {}
        """Variables and arguments that nothing sets."""
        self.other_starts: list[OtherAnswer] = []
        """Other commands that it starts, by answers that are as good as those that were taken."""
        numbers = [int(name) for name in given if name.isdigit()]
        outside = {name: self.marks.mark(Unknown(f"${name}", 0, (name,))) for name in _OUTSIDE}
        named = {name: value for name, value in given.items() if name.isidentifier()}
        arguments = tuple(given.get(str(number), "") for number in range(1, max(numbers, default=0) + 1))
        self.assumed = Assumed({**outside, **named}, arguments)
        for number in set(range(1, len(arguments) + 1)) - set(numbers):
            self.not_set[str(number)] = others.argument(text, number)

    def read(self, assumed: Assumed, *, strict: bool = False, whole: bool = False) -> Reading:
        """Once through the script, or until it starts Megatron-LM. Raises UserError."""
        while True:
            self.count += 1
            functions = assumed.functions | self.assumed.functions
            reading = read_once(
                self.text, self.path, replace(assumed, functions=functions), self.marks, self.starts_megatron,
                strict=strict, first_only=not whole,
            )  # fmt: skip
            called = {each for each in reading.ran.started if re.fullmatch(r"[\w./@%+-]+", each)} - functions
            if not called or self.count > MOST_READINGS:
                return reading
            self.assumed = replace(self.assumed, functions=functions | called)

    def read_otherwise(self, assumed: Assumed) -> Reading | None:
        """As ``read``, or what it has shown before; None where it cannot be read so, and where enough has been read."""
        for before, reading in self.known:
            if before == assumed:
                return reading
        reading = self._read_or_none(assumed)
        self.known.append((assumed, reading))
        return reading

    def _read_or_none(self, assumed: Assumed) -> Reading | None:
        if self.count > MOST_READINGS or self.endless > MOST_ENDLESS:
            return None
        try:
            reading = self.read(assumed)
        except UserError:
            return None
        self.endless += reading.ran.over and not reading.launches
        return reading

    def settle(self) -> Reading:
        """Find every variable that is read and not set; each is taken to be empty."""
        while True:
            reading = self.read(self.assumed, strict=True, whole=True)
            fresh = [(name, line) for name, line in reading.not_set if not self._has(name)]
            if not fresh or self.count > MOST_READINGS:
                break
            for name, line in fresh:
                self._leave_empty(name, line)
        if reading.not_set or not reading.launches:  # arguments of functions, which are no arguments of the script
            for name, _ in reading.not_set:
                self.not_set.pop(name, None)
            reading = self.read(self.assumed, whole=True)
        printed = self._printed(reading)
        if printed == self.assumed.printed or self.count > MOST_READINGS:
            return reading
        self.assumed = replace(self.assumed, printed=printed)
        return self.settle()

    def search(self, run: Reading) -> Reading:
        """Of a script that starts nothing: other answers that make it start something, one after the other."""
        for _ in range(20):
            found: Other | None = None
            best, furthest = None, run.ran.last_line
            for other in self._ways_on(run):
                reading = self.read_otherwise(other.change(self.assumed))
                if reading is not None and reading.launches:
                    if found is not None and other.question.because:
                        self.other_starts.append(OtherAnswer(other.question, self.launch(reading.launches[0])))
                    found = found or other
                elif found is None and reading is not None and reading.ran.last_line > furthest:
                    best, furthest = other, reading.ran.last_line
                if found is not None and not found.compared:
                    break
            if (adopted := found or best) is None:
                break
            self.assumed = adopted.change(self.assumed)
            for number in range(1, len(self.assumed.arguments) + 1):
                if str(number) not in self.given:
                    self.not_set.setdefault(str(number), others.argument(self.text, number))
            if adopted.compared:
                self.not_set.pop(adopted.name, None)
            run = self.settle()
            if run.launches:
                break
        return run

    def explained(self, run: Reading) -> tuple[list[Launch], list[OtherAnswer]]:
        """What it starts, with what is open in it; and the guesses that matter."""
        self.known.append((self.assumed, run))
        base, answers = run.launches[0], [*self.other_starts]
        marked = [of_value(name, each, mark := self.marks.mark(each), mark) for name, each in self.not_set.items()]
        differ = self._differing(self.assumed, marked, lambda started, empty: parts(started, empty) == parts(base), "")
        branching = {other.name for other, started in differ
                     if started is None or not with_text(started, other.mark) & with_text(base, "")}  # fmt: skip
        joint = [other for other in marked if other.name not in branching]
        assumed = all_changed(self.assumed, joint)
        for other, _ in differ:
            as_well = other if other.name in branching else of_value(other.name, self.not_set[other.name], "", "")
            reading = self.read_otherwise(as_well.change(assumed))
            if reading is not None and reading.launches:
                asked = others.questions(reading, self.marks, other.mark, (other.name,)) or [other.question]
                answers.append(OtherAnswer(asked[0], self.launch(reading.launches[0])))
        whole = self.read_otherwise(assumed)
        whole = whole if whole is not None and whole.launches else run
        first, open_flags = whole.launches[0], dict[str, list[Unknown]]()
        values = self._values(whole, marked)

        def as_first(started: Started, values: Mapping[str, str]) -> bool:
            return parts(started, flags_only=True) == parts(first, values, flags_only=True)

        numbers = [
            of_value(*value, "3", asked[0] if asked else None) for value, asked in values if value[0] not in branching
        ]
        differ = self._differing(assumed, numbers, lambda started, three: parts(started) == parts(first, three))
        for other, started in differ:
            answers += self._number(other, started, assumed, first, open_flags)
        for value, asked in values:
            for question, word in others.compared_words(asked, self.text):
                other = of_value(*value, word, question, compared=True)
                for _, started in self._differing(assumed, [other], as_first):
                    self._leave_open(other, started, first, open_flags)
                    answers += [OtherAnswer(question, self.launch(started))] if started else []
        rest = [list(others.failing(run, self.marks, self.assumed.printed)), list(others.files(run, self.marks))]
        rest.append([*others.further_arguments(self.text, self.assumed, self.marks, 1), *others.no_files(self.text)])
        for group in rest:
            differ = self._differing(
                assumed, group, lambda started, empty: _stripped(started, empty) == _stripped(first, empty), ""
            )
            answers += [OtherAnswer(other.question, self.launch(started)) for other, started in differ if started]
        launches = [self.launch(first, open_flags), *map(self.launch, run.launches[1:])]
        return launches, [each for each in _first_of_each(answers) if not same(each.launch, launches[0])]

    def marked(self, run: Reading) -> Reading:
        """The same with marks in the place of what is not set, so that what it says names them."""
        values = [of_value(name, each, "", self.marks.mark(each)) for name, each in self.not_set.items()]
        reading = self.read_otherwise(all_changed(self.assumed, values)) if run.not_followed and values else None
        return reading if reading is not None and len(reading.not_followed) == len(run.not_followed) else run

    def launch(self, started: Started, open_flags: Mapping[str, list[Unknown]] | None = None) -> Launch:
        """A command with its marks read; of ``open_flags`` the values are not known."""
        launcher, flags = ([self.marks.word(word) for word in words] for words in (started.launcher, started.flags))
        for flag, unknowns in (open_flags or {}).items():
            value = OpenText(unknowns[0].written, tuple(unknowns))
            launcher, flags = with_open_values(launcher, flag, value), with_open_values(flags, flag, value)
        return Launch(launcher, self.marks.word(started.program), flags, started.line, dict(started.slurm))

    def _differing(
        self, assumed: Assumed, group: Sequence[Other], same: Callable[[Started, Mapping[str, str]], bool],
        value: str | None = None,
    ) -> list[tuple[Other, Started | None]]:  # fmt: skip
        """Those that make a difference by themselves, and the command that starts then. same: whether a command is the
        expected one, given what stands for marks (value: in the place of each one's own)."""
        if not group:
            return []
        reading = self.read_otherwise(all_changed(assumed, group))
        started = reading.launches[0] if reading is not None and reading.launches else None
        values = {other.mark: other.value if value is None else value for other in group if other.mark}
        if started is not None and same(started, values):
            return []
        if len(group) == 1:
            return [(group[0], started)]
        half = len(group) // 2
        return [each for part in (group[:half], group[half:]) for each in self._differing(assumed, part, same, value)]

    def _values(
        self, run: Reading, marked: Sequence[Other]
    ) -> list[tuple[tuple[str, Unknown, str], list[others.OpenQuestion]]]:
        """Values that are not known, and the tests of each."""
        found = [(other.name, self.not_set[other.name], other.mark) for other in marked]
        for key in [*run.commands, *run.contents]:
            known = self.marks.of(key)
            found += [] if key in self.assumed.printed else [(key, known, self.marks.mark(known, key))]
        asked = [
            others.questions(run, self.marks, mark, () if name.startswith("$(") else (name,)) for name, _, mark in found
        ]
        return [
            (each, tests) for each, tests in zip(found, asked, strict=True)
            if tests or each[0] in self.not_set or any(each[2] in step.text for step in run.ran.steps)
        ]  # fmt: skip

    def _number(
        self, other: Other, started: Started | None, assumed: Assumed, first: Started,
        open_flags: dict[str, list[Unknown]],
    ) -> list[OtherAnswer]:  # fmt: skip
        """Of a value that makes a difference as a number: the flags that are others with each number are open."""
        unknown = self.marks.found(other.mark)[0]
        reading = self.read_otherwise(of_value(other.name, unknown, other.mark, "5").change(assumed))
        if started is None or reading is None or not reading.launches:
            return []
        fifth = reading.launches[0]
        if parts(fifth) == parts(started):
            return [OtherAnswer(other.question, self.launch(started))]
        flags = changed(parts(first, {other.mark: "3"}), parts(started))
        for flag in flags & changed(parts(first, {other.mark: "5"}), parts(fifth)):
            open_flags.setdefault(flag, []).append(unknown)
        return []

    def _leave_open(
        self, other: Other, started: Started | None, first: Started, open_flags: dict[str, list[Unknown]]
    ) -> None:
        """Flags without a value, which have one where a variable has another value."""
        before = parts(first)
        for part in parts(started) if started and other.question.because else []:
            if len(part) > 1 and [part[0]] in before and part[0] not in open_flags:
                asked = other.question
                open_flags[part[0]] = [Unknown(asked.written, asked.line, asked.because, by_branch=True)]

    def _ways_on(self, run: Reading) -> Iterator[Other]:
        """What may make a script start something that starts nothing."""
        yield from others.further_arguments(self.text, self.assumed, self.marks, 8)
        for name, unknown in list(self.not_set.items()):
            mark = self.marks.mark(unknown)
            other = of_value(name, unknown, mark, mark)
            yield other
            reading = self.read_otherwise(other.change(self.assumed))
            asked = others.questions(reading, self.marks, mark, (name,)) if reading is not None else []
            for question, word in others.compared_words(asked, self.text):
                yield of_value(name, unknown, mark, word, question, compared=True)
        yield from others.files(run, self.marks)
        yield from others.failing(run, self.marks, self.assumed.printed)
        for value, asked in self._values(run, []):
            for question, word in others.compared_words(asked, self.text):
                yield of_value(*value, word, question)

    def _has(self, name: str) -> bool:
        if name.isdigit():
            return int(name) <= len(self.assumed.arguments)
        return name in self.assumed.variables or name in self.assumed.empty

    def _leave_empty(self, name: str, line: int) -> None:
        if self._has(name):
            return
        if not name.isdigit() and self._sets_somewhere(name):
            self.assumed = replace(self.assumed, empty=self.assumed.empty | {name})
            return
        self.not_set[name] = Unknown(f"${name}", line, (name,), "")
        self.assumed = self.assumed.with_value(name, "")

    def _sets_somewhere(self, name: str) -> bool:
        """Whether the script sets it itself, and not from what it was before: then it is none from outside."""
        assigned = rf"(?<![\w$-]){name}\+?=(?![^;\n]*\$\{{?{name}\b)"
        read = rf"\bfor\s+{name}\b|\b(?:read|getopts)\s[^\n;|&]*\b{name}\b"
        return re.search(f"{assigned}|{read}", self.text) is not None

    def _printed(self, reading: Reading) -> dict[str, str]:
        """What --set says that commands print: by the command, or by the variable that takes its output."""
        taken = {}
        for step in reading.ran.steps:
            if assigned := re.fullmatch(rf"(?:export )?(\w+)='?({MARK.pattern})'?", step.text):
                taken[assigned[2]] = assigned[1]
        found = dict(self.assumed.printed)
        for key in [*reading.commands, *reading.contents]:
            known = self.marks.of(key)
            variable = taken.get(self.marks.mark(known, key))
            if variable:
                self.marks.replace(key, replace(known, sets=(variable,)))
            for name, value in self.given.items():
                if same_call(name, known.written) or name == variable:
                    found[key] = value
        return found


def _stripped(started: Started, empty: Mapping[str, str]) -> list[list[str]]:
    return parts(started, empty, flags_only=True)


def _first_of_each(answers: Sequence[OtherAnswer]) -> list[OtherAnswer]:
    """One answer to each question, and one question of those on a line that are answered by the same command."""
    found: list[OtherAnswer] = []
    for answer in answers:
        asked = answer.question
        if not any(
            (each.question.line, each.question.because) == (asked.line, asked.because)
            and (each.question.written == asked.written or same(each.launch, answer.launch))
            for each in found
        ):
            found.append(answer)
    return found
