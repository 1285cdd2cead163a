"""The shards of an output are all made by one engine: engines are proven equal on a sample only."""

import json
import os

import pytest

from tests.tools.preprocess_program import interpreter, process
from tools.preprocess.__main__ import main


def run(*arguments):
    return main([str(one) for one in arguments])


def plan_of(prefix):
    return prefix.with_name(f"{prefix.name}.preprocess") / "plan.json"


@pytest.fixture
def command(lines, tokenizer_json, tmp_path):
    return (lines, "--output", tmp_path / "x", "--tokenizer", tokenizer_json, "--unit_mb", 0.1, "--workers", 1)


@pytest.fixture
def without_tiktoken(tmp_path):
    """Variables of a process that cannot import it, as where it is not installed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "tiktoken.py").write_text("raise ImportError('not here')")
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_another_engine_does_not_go_on_and_auto_takes_the_one_that_began(command, tmp_path, capsys):
    assert run(*command, "--engine", "tokenizers", "--part", "0/2") == 0
    for flags in (("--part", "1/2"), ()):
        capsys.readouterr()
        assert run(*command, "--engine", "tiktoken", *flags) == 2
        printed = capsys.readouterr().err
        assert f"--output {tmp_path / 'x'}: there is the work of another command" in printed
        assert "  engine: tokenizers there, tiktoken here\nGive that command to continue it" in printed
        assert ("--overwrite" in printed) == (not flags)
    assert run(*command, "--part", "1/2") == 0
    assert "encoded by tokenizers\n" in capsys.readouterr().out
    assert json.loads(plan_of(tmp_path / "x").read_text())["engine"] == "tokenizers"
    assert run(*command, "--engine", "tiktoken") == 2  # what is complete is not said to be another engine's either
    assert run(*command, "--engine", "tiktoken", "--overwrite") == 0
    assert "encoded by tiktoken\n" in capsys.readouterr().out


def test_what_gigatoken_began_only_gigatoken_continues(command, tmp_path, capsys):
    pytest.importorskip("gigatoken")
    assert run(*command, "--engine", "gigatoken", "--part", "0/2") == 0
    assert run(*command, "--engine", "tokenizers", "--part", "1/2") == 2
    assert "engine: gigatoken there, tokenizers here" in capsys.readouterr().err
    assert run(*command, "--part", "1/2") == 0
    assert "encoded by gigatoken\n" in capsys.readouterr().out
    assert run(*command, "--overwrite", "--part", "0/1", "--engine", "tokenizers") == 0
    assert run(*command, "--engine", "gigatoken") == 2


def test_a_node_without_the_engine_says_what_it_lacks(command, without_tiktoken, tmp_path, capsys):
    assert run(*command, "--part", "0/2") == 0
    lacking = interpreter(*command, "--part", "1/2", env=without_tiktoken)
    err = lacking.communicate()[1]
    assert lacking.returncode == 2, err
    assert f"--output {tmp_path / 'x'}: its shards are made by engine tiktoken; expected the same here" in err
    assert "tiktoken is not installed (`pip install tiktoken`). Make it usable here, or" in err
    assert "remove once, before any of them starts" in err
    assert run(*command, "--part", "1/2") == 0
    assert "encoded by tiktoken\n" in capsys.readouterr().out


def test_what_began_without_tiktoken_goes_on_without_it_where_there_is_one(command, without_tiktoken, capsys):
    begun = interpreter(*command, "--part", "0/2", env=without_tiktoken)
    err = begun.communicate()[1]
    assert begun.returncode == 0, err
    assert run(*command, "--part", "1/2") == 0
    assert "encoded by tokenizers\n" in capsys.readouterr().out


def test_of_parts_that_start_at_once_with_two_engines_one_is_refused(command):
    both = [
        process(*command, "--engine", name, "--part", f"{n}/2") for n, name in enumerate(("tokenizers", "tiktoken"))
    ]
    errors = [one.communicate()[1] for one in both]
    assert sorted(one.returncode for one in both) == [0, 2], errors
    assert any("engine: tokenizers there, tiktoken here" in err for err in errors) or any(
        "engine: tiktoken there, tokenizers here" in err for err in errors
    )


def test_a_plan_of_an_earlier_version_names_no_engine_and_is_continued(command, tmp_path, capsys):
    assert run(*command, "--part", "0/2", "--engine", "tokenizers") == 0
    plan = json.loads(plan_of(tmp_path / "x").read_text())
    del plan["engine"]
    plan_of(tmp_path / "x").write_text(json.dumps(plan))
    capsys.readouterr()
    assert run(*command, "--part", "1/2", "--engine", "tiktoken") == 0
    assert "what engine made the shards that are there is not known" in capsys.readouterr().err
    assert json.loads(plan_of(tmp_path / "x").read_text()) == {**plan, "engine": "tiktoken"}


def test_a_finished_output_of_an_earlier_version_says_again_what_there_is(command, tmp_path, capsys):
    assert run(*command) == 0
    plan = json.loads(plan_of(tmp_path / "x").read_text())
    del plan["engine"]
    plan_of(tmp_path / "x").write_text(json.dumps(plan))
    capsys.readouterr()
    assert run(*command) == 0
    printed = capsys.readouterr()
    assert "120 documents" in printed.out and "encoded by" not in printed.out and not printed.err
