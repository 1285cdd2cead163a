"""The same output again, by another command or after damage: what may go on does, and what may not says how."""

import json
from pathlib import Path

import pytest

from tests.tools.preprocess_program import results
from tools.preprocess.__main__ import main

GOOD = json.dumps({"text": "once upon a time"}) + "\n"
OTHER = json.dumps({"story": "there was"}) + "\n"


def run(*arguments: object) -> int:
    return main([str(one) for one in arguments])


@pytest.fixture
def command(tmp_path: Path) -> tuple[object, ...]:
    """Two units, of which the second one has a bad line."""
    (tmp_path / "a.jsonl").write_text(GOOD * 3000)
    (tmp_path / "b.jsonl").write_text(GOOD * 1000 + "{bad\n" + GOOD * 1000)
    inputs = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    return (*inputs, "--output", tmp_path / "o" / "x", "--tokenizer", "byte", "--workers", 1, "--unit_mb", 0.1)


def test_a_bad_line_is_left_out_as_the_message_says_and_whole_units_stay(
    command: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command) == 2
    assert "--on_bad_document skip" in capsys.readouterr().err
    assert run(*command, "--on_bad_document", "skip") == 0
    said = capsys.readouterr()
    assert "units are there" in said.err and "1 bad ones left out" in said.out
    found = results(tmp_path / "o")
    fresh = [tmp_path / "f" / "x" if one == tmp_path / "o" / "x" else one for one in command]
    assert run(*fresh, "--on_bad_document", "skip") == 0
    assert found == results(tmp_path / "f")
    assert run(*command) == 2  # what was left out cannot be asked for again
    assert "on_bad_document: skip there, stop here" in capsys.readouterr().err


def test_documents_may_be_longer_than_before_where_none_was_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 3000)
    (tmp_path / "b.jsonl").write_text(GOOD * 3000 + json.dumps({"text": "x" * 3000}) + "\n")
    inputs = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    command = (*inputs, "--output", tmp_path / "x", "--tokenizer", "byte", "--unit_mb", 0.05, "--workers", 1)
    assert run(*command, "--max_document_mb", 0.001) == 2
    assert "--max_document_mb" in capsys.readouterr().err
    assert run(*command) == 0
    assert run(*command, "--max_document_mb", 0.001) == 2
    assert "max_document_bytes: 64000000 there, 1000 here" in capsys.readouterr().err


def test_a_plan_without_output_can_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(OTHER * 10)
    command = (tmp_path / "a.jsonl", "--output", tmp_path / "x", "--tokenizer", "byte")
    assert run(*command) == 2
    assert "--jsonl_key" in capsys.readouterr().err
    assert run(*command, "--part", "0/2", "--jsonl_key", "story") == 2  # another part may be at work on the plan
    assert "there is the work of another command" in capsys.readouterr().err
    assert run(*command, "--jsonl_key", "story", "--unit_mb", 1) == 0


@pytest.mark.parametrize("damage", [b'{"tok', b"\xff\xfe", b"{}", b"[]"])
def test_damaged_sums_are_counted_again(damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 10)
    command = (tmp_path / "a.jsonl", "--output", tmp_path / "o" / "x", "--tokenizer", "byte")
    assert run(*command) == 0
    whole, before = capsys.readouterr().out, results(tmp_path / "o")
    totals = tmp_path / "o" / "x.preprocess" / "totals.json"
    totals.write_bytes(damage)
    assert run(*command) == 2
    assert "totals.json is damaged" in capsys.readouterr().err
    totals.unlink()
    assert run(*command) == 0
    assert capsys.readouterr().out == whole.replace("9 duplicates kept", "duplicates not known")
    assert results(tmp_path / "o") == before


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("",), "an empty name"),
        (("a.jsonl", "--jsonl_key", "a/b", "--merge"), "which cannot hold it"),
        (("a.jsonl", "--unit_mb", "nan"), "--unit_mb nan: expected a number above 0"),
        (("a.jsonl", "--max_expansion", "inf"), "--max_expansion inf: expected a number above 0"),
        (("a" * 300,), "File name too long"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(GOOD)
    assert run(*arguments, "--output", tmp_path / "o" / "x", "--tokenizer", "byte") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_tokenizer_is_not_trained_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    (tmp_path / "file").write_text("")
    for more, said in (
        (("--sample_mb", 0), "--sample_mb 0.0: expected a number above 0"),
        (("--vocab_size", 0), "--vocab_size 0: expected a number above 0"),
    ):
        assert run("train", tmp_path / "a.jsonl", "--output", tmp_path / "a.model", *more) == 2
        assert said in capsys.readouterr().err


def test_where_nothing_can_be_written_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD)
    assert run(tmp_path / "a.jsonl", "--output", f"/proc/{'x' * 20}/x", "--tokenizer", "byte") == 2
    assert "No such file or directory: /proc/" in capsys.readouterr().err
