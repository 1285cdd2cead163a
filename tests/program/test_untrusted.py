"""The door for files from outside: which files it opens, and what it makes of what is in them."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from program.schema import JSON, Count, Infinite, Range, shown, structured
from program.untrusted import (
    InputError,
    append_regular,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_text,
    read_toml,
)


def a_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (os.mkfifo, "a FIFO"),
        (Path.mkdir, "a folder"),
        (a_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.symlink_to("/dev/full"), "a device"),
        (lambda path: path.symlink_to("x"), "a circle of links"),
    ],
)
def test_only_regular_files_are_opened_and_none_is_waited_for(
    make: Callable[[Path], object], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    make(Path("x"))
    for read in (read_bytes, read_text, read_json, read_toml, append_regular):
        with pytest.raises(InputError, match=f"expected a regular file, found ({found}|a socket or a device)"):
            read(Path("x"))


def test_what_the_system_says_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    with pytest.raises(InputError, match="NUL character"):
        read_bytes(Path("a\0b"))
    assert int(read_text(Path("/proc/sys/kernel/pid_max"))) > 0  # no size, and a regular file


def test_size_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100)
    assert len(read_bytes(path, 100)) == 100
    with pytest.raises(InputError, match="expected at most 99 bytes, found more"):
        read_bytes(path, 99)
    os.truncate(path, 1 << 40)  # a hole
    with pytest.raises(InputError, match="found more"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("NaN", "NaN is no JSON number"),
        ("[-Infinity]", "-Infinity is no JSON number"),
        ("1e999", "expected a finite number, found inf"),
        ("1" * 400, "expected a whole number of 64 bits, found a number of more than 18 digits"),
        ("1" * 5000, "not JSON: Exceeds the limit"),
        ("[" * 100_000, "nest too deep"),
        ("[" * 70 + "]" * 70, "nest deeper than 64"),
        ('{"a":' * 70 + "1" + "}" * 70, "nest deeper than 64"),
        ('"\\u001b[31m"', r"a control character (U+001B) at character 1"),
        ('["\\ud800"]', "half a surrogate pair"),
        ('{"a\\u0000": 1}', "a control character (U+0000)"),
        ('{"a": 1}{"a": 1}', "Extra data"),
    ],
)
def test_json_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text, where="a.json")
    assert str(caught.value).startswith("a.json: ")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500


def test_bytes_are_utf_8_with_or_without_a_mark() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": "\xc3\xa9"}') == {"a": "é"}
    with pytest.raises(InputError, match="byte 2: expected UTF-8 text, found 0xff"):
        parse_json(b'["\xff"]')
    with pytest.raises(InputError, match='"a" is there twice'):
        parse_json('{"a": 1, "a": 2}', unique_names=True)


class Pair(NamedTuple):
    first: Count
    second: str


@dataclass(kw_only=True)
class Inner:
    kind: Literal["a", "b"] = "a"


@dataclass(kw_only=True)
class Outer:
    size: Annotated[int, Range(1, 9)]
    ratio: float = 1.0
    wait: Annotated[float, Infinite] = 1.0
    flag: bool = False
    names: tuple[str, ...] = ()
    both: tuple[int, int] | None = None
    pairs: dict[str, Pair] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    rest: Mapping[str, JSON] = field(default_factory=dict)


def test_a_value_of_the_right_type_is_read() -> None:
    text = """{"size": 3, "ratio": 2, "names": ["x"], "both": [1, 2], "pairs": {"p": [5, "q"]}, "inner": {"kind": "b"},
        "rest": {"any": [1, null, {"thing": 2.5}]}, "of another version": 1}"""
    found = parse_json(text, Outer)
    assert found == Outer(
        size=3, ratio=2.0, names=("x",), both=(1, 2), pairs={"p": Pair(5, "q")}, inner=Inner(kind="b"),
        rest={"any": [1, None, {"thing": 2.5}]},
    )  # fmt: skip
    assert isinstance(found.ratio, float)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "size is missing."),
        ({"size": 0}, "size: expected a whole number from 1 to 9, found 0."),
        ({"size": True}, "size: expected a whole number, found true."),
        ({"size": 1.0}, "size: expected a whole number, found 1.0."),
        ({"size": 1, "ratio": "2"}, 'ratio: expected a number, found "2".'),
        ({"size": 1, "ratio": float("inf")}, "ratio: expected a finite number, found inf."),
        ({"size": 1, "wait": float("nan")}, "wait: expected a finite number, found nan."),
        ({"size": 1, "names": "x"}, 'names: expected a list of strings, found "x".'),
        ({"size": 1, "both": [1]}, "both: expected a list of 2 whole numbers, found [1]."),
        (
            {"size": 1, "pairs": {"p": [-1, "q"]}},
            "pairs.p: expected a list of a whole number and a string, found [-1, 'q'].",
        ),
        ({"size": 1, "inner": {"kind": "c"}}, 'inner.kind: expected "a" or "b", found "c".'),
        ({"size": 1, "inner": []}, "inner: expected an object, found []."),
        ({"size": 1, "rest": {"x": [{"y": 1 << 70}]}}, "rest.x: expected a whole number of 64 bits"),
    ],
)
def test_a_value_of_another_type_is_named(table: dict[str, Any], said: str) -> None:
    _, [problem] = structured(table, Outer)
    assert problem.startswith(said)


def test_infinity_is_a_value_where_the_field_says_so() -> None:
    assert structured({"size": 1, "wait": float("inf")}, Outer)[1] == []


def test_all_problems_of_a_recipe_are_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        parse_toml("size = 10\nflag = 1\nother = 2", Outer, "r.toml", lambda name, _: f"unknown key {name}.")
    assert str(caught.value).splitlines() == [
        "r.toml: size: expected a whole number from 1 to 9, found 10.",
        "r.toml: flag: expected true or false, found 1.",
        "r.toml: unknown key other.",
    ]


def test_a_value_is_shown_on_one_line_as_a_recipe_spells_it() -> None:
    assert shown('a\nfault: "b"') == '"a\\nfault: \\"b\\""'


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 100_000) + " = 1", "[" + ".".join("a" * 100_000) + "]",
        "x = {" + " . ".join("a" * 9999) + " = 1}", ".".join(['"a"'] * 100_000) + " = 1",
        "x = [{" + ".".join("a" * 50_000) + " = 1}]",
    ],
)  # fmt: skip
def test_a_toml_key_of_very_many_parts_is_refused_at_once(text: str) -> None:
    with pytest.raises(InputError, match=r"a key of more than 64 parts, with dots between"):
        parse_toml(text)


def test_dots_elsewhere_in_toml_are_none_of_a_key() -> None:
    table = f"x = [{'0.5, ' * 200}]\ny = '{'a.' * 200}'\n# {'a.' * 200}\n'{'.' * 200}' = 1\n"
    table += f'prompts = ["{"One. " * 200}",\n"{"Don't. " * 200}"]\n'
    assert len(parse_toml(table)) == 4
