"""Booleans are written alike in every program of the project: each of its parsers takes every form."""

import ast
import dataclasses
import importlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import tyro

from program import switches
from program.flags import parse_flags
from training.cli.flags import given, override
from training.config.recipe import names
from training.config.run_config import RunConfig

ROOT = Path(__file__).parents[2]
READERS = {"program/flags.py", "training/cli/help.py", "tools/versions.py"}
"""What reads command lines itself; the last one takes no flags."""
NEGATIONS = ("--{section}no-{last}", "--{section}no_{last}")
TRUE, FALSE = ("--{}", "--{} true", "--{} True", "--{}=TRUE"), ("--{} false", "--{} False", "--{}=false")


def calls(name: str) -> dict[str, list[ast.expr]]:
    """First arguments of the calls of a function, by file."""
    found: dict[str, list[ast.expr]] = {}
    for folder in ("program", "parallel", "training", "tools", "models", "data", "tests", "slurm"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if name in text and "/test_" not in str(path) else ():
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name):
                    found.setdefault(str(path.relative_to(ROOT)), []).extend(node.args[:1])
    return found


def kinds() -> dict[str, Any]:
    """Every dataclass that a program reads its command line into, by module and name."""
    found = {}
    for file, arguments in calls("parse_flags").items():
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for argument in arguments:
            name = ast.unparse(argument)
            if isinstance(vars(module).get(name), type) or typing.get_origin(vars(module).get(name)) is not None:
                found[f"{file}:{name}"] = getattr(module, name)
                continue
            commands = getattr(module, "SUBCOMMANDS", None) or module.COMMANDS  # type: ignore[attr-defined]
            for command, kind in commands.items():
                found[f"{file}:{command}"] = kind[0] if isinstance(kind, tuple) else kind
    return found


def members(kind: Any) -> list[tuple[list[str], Any]]:
    """A dataclass, or each of a union's behind the word that chooses it."""
    found = []
    for one in typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, type(int | str)) else [kind]:
        marks = typing.get_args(one)[1:] if typing.get_origin(one) is Annotated else ()
        words = [mark.name for mark in marks if getattr(mark, "name", None)]
        found.append((words, typing.get_args(one)[0] if marks else one))
    return found


def required(kind: Any) -> list[str]:
    """Words for what has no default."""
    words, last = [], []
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            text = str(hints[field.name])
            value = "1" if "int" in text or "float" in text else "x"
            if "Positional" in text:
                last.append(value)
            else:
                words += [f"--{field.name}", value]
    return [*words, *last]


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return {prefix: value}
    parts = [leaves(getattr(value, one.name), f"{prefix}.{one.name}") for one in dataclasses.fields(value)]
    return {name: leaf for part in parts for name, leaf in part.items()}


def difference(first: Any, second: Any) -> list[tuple[Any, Any]]:
    one, other = leaves(first), leaves(second)
    return [(one[name], other[name]) for name in one if one[name] != other[name]]


def test_every_parser_takes_every_form() -> None:
    tried = 0
    for place, kind in kinds().items():
        for words, member in members(kind):
            base, flags = [*words, *required(member)], list(switches.switches(member))
            true, false = (
                [parse_flags(kind, [*base, *_all(form, flags)], place) for form in forms]
                for forms in (TRUE, (*FALSE, *NEGATIONS, "--{} --{} false"))
            )
            assert all(one == true[0] for one in true), (place, flags)
            assert all(one == false[0] for one in false), (place, flags)
            assert difference(true[0], false[0]) == [(True, False)] * len(flags), (place, flags)
            tried += len(flags)
    assert tried > 30


def _all(form: str, flags: Sequence[str]) -> list[str]:
    """A command line with every flag in one form."""
    parts = [(flag, *flag.rpartition(".")) for flag in flags]
    return [
        word
        for flag, section, dot, last in parts
        for word in form.replace("{}", flag).format(section=f"{section}{dot}", last=last, name=flag).split()
    ]


def test_training_takes_every_form() -> None:
    booleans = [name for name, kind in names().items() if bool in (kind, *typing.get_args(kind))]
    assert len(booleans) > 30
    for value, forms in ((True, TRUE), (False, (*FALSE, *NEGATIONS, "--no-{name}"))):
        for form in forms:
            arguments = _all(form, booleans)
            found = leaves(override(RunConfig(), arguments, "x"))
            assert [name for name in booleans if found[f".{name}"] is not value] == [], form
            assert given(arguments) == set(booleans)


def test_nothing_else_reads_command_lines() -> None:
    own = {*calls("ArgumentParser"), *calls("tyro.cli")}
    assert own == READERS


@dataclasses.dataclass(kw_only=True)
class Sample:
    """Booleans of each kind."""

    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Any."""
    merge: bool = False
    """One."""
    no_cache: tyro.conf.FlagCreatePairsOff[bool] = False
    """Without a negation of tyro's own."""
    maybe: bool | None = None
    """Three values."""


def test_a_word_that_is_neither_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, said in (
        ("--merge=maybe", "x: --merge: expected true or false, found 'maybe'."),
        ("--no-merge=false", "x: --no-merge: expected no value, as --merge=false has one, found 'false'."),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_flags(Sample, [argument], "x")
        assert said in capsys.readouterr().err
    assert parse_flags(Sample, ["--merge", "maybe"], "x") == Sample(merge=True, words=("maybe",))
    assert parse_flags(Sample, ["--maybe", "None", "true"], "x").maybe is None
    assert parse_flags(Sample, ["--merge", "true", "true", "false"], "x") == Sample(merge=True, words=("true", "false"))


def test_in_training_a_negation_takes_no_value() -> None:
    from program.errors import SharedMistake

    with pytest.raises(SharedMistake, match=r"--data\.no-eod_mask_loss: expected no value, as --data\.eod_mask_loss f"):
        override(RunConfig(), ["--data.no-eod_mask_loss", "true"], "x")
    with pytest.raises(SharedMistake, match=r"unknown flag --data\.no-paths"):
        override(RunConfig(), ["--data.no-paths"], "x")
