"""A Megatron-LM command's words as flags and their values, and what each turned out to be."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from program.errors import UserError
from tools.from_megatron.flags import Flag, known, nearest
from tools.from_megatron.flags_forks import HARMLESS, OTHER_MODELS
from tools.from_megatron.spellings import respelled
from tools.from_megatron.unknown import OpenText, ScriptWord, Unknown, joined

_DASHES = re.compile("[\u2010-\u2015\u2212]+-*(?=[a-zA-Z])")
"""What word processors and PDFs make of --."""
MAY_STAY_OPEN = frozenset(
    "data-path data-args-path tokenizer-model save load pretrained-checkpoint tensorboard-dir wandb-project"
    " wandb-exp-name vocab-file merge-file tokenizer-name-or-path".split()
)
"""Flags of paths and names: the recipe is complete apart from them."""


@dataclass(slots=True)
class Arguments:
    """What a command says. Names are without dashes; the last of several wins, as with Megatron-LM."""

    given: dict[str, list[ScriptWord]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was read otherwise than it is written."""
    irrelevant: list[str] = field(default_factory=list)
    """Unknown flags that change nothing, by their names."""
    strays: list[str] = field(default_factory=list)
    """What else is left out, and changes nothing that is trained; each a sentence."""
    not_understood: list[str] = field(default_factory=list)
    """Words that belong to no flag, and unknown flags: they may change what is trained; each a sentence."""
    other_model: list[str] = field(default_factory=list)
    """Unknown flags that are known to make another model, or to train it otherwise."""
    unknown_flags: list[Unknown] = field(default_factory=list)
    """Variables that may stand for further flags."""
    asked: set[str] = field(default_factory=set)
    """Flags that a rule has read."""

    def switch(self, name: str) -> bool:
        """Whether a flag is given."""
        self.asked.add(name)
        return name in self.given

    def raw(self, name: str) -> list[ScriptWord]:
        """All values of a flag, unknown ones as the script has them. Empty where it is not given."""
        self.asked.add(name)
        return self.given.get(name, [])

    def texts(self, name: str) -> list[str]:
        """All values of a flag. Raises UserError where one is not known."""
        return [known_text(name, word) for word in self.raw(name)]

    def text(self, name: str, default: str | None = None) -> str | None:
        """The value of a flag that takes one. Raises UserError where it is not known."""
        values = self.texts(name)
        return values[0] if values else default

    def whole(self, name: str, default: int | None = None, least: int | None = None) -> int | None:
        """The value as a whole number; an empty default means that there is none. Raises UserError."""
        text = self.text(name)
        value: int | None = default if text is None else number(name, text, int)
        if value is not None and least is not None and value < least:
            raise UserError(f"--{name}: expected {least} or more, found {value}.")
        return value

    def size(self, name: str) -> int:
        """A size of 1 or more, which is 1 where it is not given. Raises UserError."""
        return self.whole(name, 1, 1) or 1

    def real(self, name: str, default: float | None = None) -> float | None:
        """The value as a number. Raises UserError."""
        text = self.text(name)
        return default if text is None else number(name, text, float)

    def required(self, *names: str) -> int:
        """A whole number that Megatron-LM demands too, under its first name or an older one. Raises UserError."""
        values = [value for name in names if (value := self.whole(name)) is not None]
        if not values:
            raise UserError(
                f"--{names[0]} is missing: Megatron-LM does not start without it either. {self._where_from()}"
            )
        return values[0]

    def _where_from(self) -> str:
        """How a missing flag may be given."""
        names = list(dict.fromkeys(name for unknown in self.unknown_flags for name in unknown.sets))
        if not names:
            return "Add it."
        written = ", ".join(dict.fromkeys(unknown.written for unknown in self.unknown_flags))
        return (
            f"{written} may hold it, which the script does not set: give it as in --set {names[0]}='--flag value ...'."
        )


def number(name: str, text: str, kind: type) -> Any:
    """``kind(text)``. Raises UserError where it is not one."""
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f'--{name}: expected {what}, found "{text}".') from None


def known_text(name: str, word: ScriptWord) -> str:
    """The word. Raises UserError where a value that the model depends on is not known."""
    if isinstance(word, OpenText):
        raise UserError(f"--{name} {word}: {word.unknowns[0].written} is not known.")
    return word


def parse(words: Sequence[ScriptWord]) -> Arguments:
    """Flags and values; unknown flags take the words up to the next flag. Raises UserError for a missing value."""
    flags, arguments, at, before = known(), Arguments(), 0, ""
    for text in map(str, words):
        if found := _DASHES.match(text):
            written = f"--{text[found.end() :]}"
            raise UserError(f'"{text}" begins with {found[0]}, as in a printed text, which is not --: write {written}.')
    while at < len(words):
        word = words[at]
        name, equals, value = str(word).removeprefix("--").partition("=")
        at += 1
        if not str(word).startswith("--"):
            together = _plain(words[at - 1 :]) or [word]
            _stray(arguments, together, before)
            at += len(together) - 1
        elif name not in flags:
            until = at + _values(words[at:])
            _unknown_flag(arguments, name, joined([word, *words[at:until]]), nearest(name, flags))
            at = until
        elif equals and flags[name].arity == "0":
            raise UserError(f"{word}: --{name} takes no value. Write --{name}, or leave it out.")
        else:
            count = 0 if equals else _count(flags[name], words[at:])
            single: ScriptWord = OpenText(value, word.unknowns) if isinstance(word, OpenText) else value
            values = [single] if equals else list(words[at : at + count])
            at += count
            if further := _split_value(flags[name], words[at:]):
                values, at = [_open_value([*values, *further])], at + len(further)
            arguments.given[name], before = values, joined([f"--{name}", *values])
    arguments.given, arguments.notes, unread = respelled(arguments.given)
    arguments.not_understood += unread
    return arguments


def _split_value(flag: Flag, rest: Sequence[ScriptWord]) -> list[ScriptWord]:
    """Words behind a path or a name that belong to it: the shell has split what is not quoted."""
    if flag.name not in MAY_STAY_OPEN or flag.arity != "1":
        return []
    return _plain(rest)


def _plain(rest: Sequence[ScriptWord]) -> list[ScriptWord]:
    """The known words up to the next flag."""
    return list(itertools.takewhile(lambda word: isinstance(word, str) and not word.startswith("-"), rest))


def _open_value(words: Sequence[ScriptWord]) -> OpenText:
    """Such a path: "your model path" is to be filled in."""
    unknowns = [unknown for word in words if isinstance(word, OpenText) for unknown in word.unknowns]
    return OpenText(joined(words), (*unknowns, Unknown(f'"{joined(words)}"')))


def _stray(arguments: Arguments, words: Sequence[ScriptWord], before: str) -> None:
    word = words[0]
    if isinstance(word, OpenText) and word.text == word.unknowns[0].written:
        arguments.unknown_flags += [] if word.unknowns[0].by_branch else [word.unknowns[0]]
    elif not re.fullmatch(r"-\w", str(word)):
        behind = f" behind {before}" if before else ""
        arguments.not_understood.append(
            f'"{joined(words)}"{behind} belongs to no flag: the shell splits what is not quoted at blanks, and '
            '"${ARRAY[@]}" does not.'
        )


def _unknown_flag(arguments: Arguments, name: str, written: str, hint: str) -> None:
    for pattern, what in OTHER_MODELS.items():
        if re.search(pattern, name):
            arguments.other_model.append(f"{written}: {what}")
            return
    for pattern, what in HARMLESS.items():
        if re.search(pattern, name):
            arguments.irrelevant.append(f"{written}: {what}")
            return
    if re.match(r"deepspeed|ds-|zero-|no-pipeline-parallel", name):
        hint = " It is DeepSpeed's; what shards here is parallel.use_distributed_optimizer and its like."
    arguments.not_understood.append(f"{written} is no flag of Megatron-LM 0.19.2.{hint}")


def _count(flag: Flag, rest: Sequence[ScriptWord]) -> int:
    """How many of the words behind a flag are its values."""
    found = _values(rest)
    if flag.arity in "+*":
        wanted = found or int(flag.arity == "+")
    else:
        wanted = int(flag.arity)
    if found < wanted:
        raise UserError(f"--{flag.name} takes {wanted} value{'s' * (wanted > 1)}, found {found}. Add what is missing.")
    return wanted


def _values(rest: Sequence[ScriptWord]) -> int:
    return next((count for count, word in enumerate(rest) if str(word).startswith("--")), len(rest))
