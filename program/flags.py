"""Command lines read into dataclasses: a field is a flag, the docstring under it the flag's help."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import math
import re
import sys
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from program.errors import UserError, cut_short
from program.switches import as_tyro_has_them, switches


def parse_flags[Flags](
    kind: type[Flags], arguments: Sequence[str] | None, program: str, description: str | None = None
) -> Flags:
    """An instance of ``kind``, a dataclass or a union of them (subcommands).

    arguments: None: this process's. program: its name in --help. description: above the flags; None: that of ``kind``.
    Booleans are written in any of the ways of program/switches.py. Bad flags, and --help, end the process
    (SystemExit 2 and 0).
    """
    words = sys.argv[1:] if arguments is None else arguments
    given = as_tyro_has_them(words, switches(kind, words), program)
    registry = ConstructorRegistry()
    registry.struct_rule(_with_help)
    text = description and inspect.cleandoc(description)

    def parse(words: Sequence[str]) -> Flags:
        return tyro.cli(kind, args=words, prog=program, description=text, use_underscores=True, registry=registry)

    brief = [cut_short(word) for word in given]
    if brief == given:
        return parse(given)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse(given)
    except SystemExit as stopped:
        if stopped.code:
            parse(brief)  # refuses the same, and quotes less
            print(said.getvalue(), file=sys.stderr)
        raise


def number_problems(flags: Any) -> list[str]:
    """Numbers that no flag of a tool means: nan, infinities, and what no clock counts to. For its ``problems``."""
    found = []
    for field in dataclasses.fields(flags) if dataclasses.is_dataclass(flags) else ():
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            found += number_problems(value)
        most = MOST_SECONDS if field.name.endswith(TIMES) else MOST_NUMBER
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, float) and not math.isfinite(one):
                found.append(f"--{field.name} must be a finite number, found {one}.")
            elif isinstance(one, int | float) and abs(one) > most:
                shown = f"{one:g}" if abs(one) < MOST_SHOWN else "more digits"
                found.append(f"--{field.name} must be from {-most:g} to {most:g}, found {shown}.")
    return found


MOST_NUMBER, MOST_SECONDS, MOST_SHOWN = 1e18, 1e9, 1.7e308
TIMES = ("_s", "_minutes", "_hours", "minutes")
source = functools.cache(inspect.getsource)


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of those it inherits from, on one line."""
    found = {}
    for each in reversed(kind.__mro__):  # one that is made by dataclasses.make_dataclass says who documents its fields
        if dataclasses.is_dataclass(each):
            [body] = ast.parse(textwrap.dedent(source(getattr(each, "documented", each)))).body
            assert isinstance(body, ast.ClassDef)
            for field, below in itertools.pairwise(body.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found


def _with_help(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A dataclass as tyro has it, with docstrings of several lines joined, which tyro 1.0 prints as they stand."""
    if not dataclasses.is_dataclass(info.type) or info.type.__module__.startswith("tyro."):
        return None
    texts, hints = field_docs(info.type), typing.get_type_hints(info.type, include_extras=True)
    fields = tuple(
        StructFieldSpec(
            name=field.name, type=hints[field.name], default=_default(field), helptext=texts.get(field.name)
        )
        for field in dataclasses.fields(info.type)
    )
    return StructConstructorSpec(instantiate=info.type, fields=fields)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def size_in_bytes(text: str) -> int:
    """``"5GB"``, ``"500 MiB"``, ``"1000"``. Raises UserError for anything else."""
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    try:
        assert match is not None
        size = int(float(match[1]) * UNITS[match[2].upper()])
        assert size > 0
    except (AssertionError, ValueError, KeyError):
        raise UserError(f'"{text}" is no size. Use a number and KB, MB, GB, KiB, MiB or GiB, such as 5GB.') from None
    return size


def at_least_one(workers: int) -> int:
    """Raises UserError for none."""
    if workers < 1:
        raise UserError(f"--workers {workers}: expected 1 or more.")
    return workers
