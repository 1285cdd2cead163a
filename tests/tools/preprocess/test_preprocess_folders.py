"""What a folder gives: all that lies in it or is linked into it, once, and nothing that the program made itself."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from data.raw import inputs
from data.shards import Shard
from program.errors import UserError
from tests.tools.preprocess_program import process
from tools.preprocess.__main__ import main


def run(*arguments):
    return main([str(one) for one in arguments])


def corpus_in(folder, name="a.jsonl", documents=60):
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": f"{name} {number} " * 40}) + "\n" for number in range(documents))
    (folder / name).write_text("".join(lines))
    return folder


def found(*names):
    return [Path(one.path) for one in inputs.find(tuple(map(str, names)))]


def shards_in(folder):
    return {path.name: path.read_bytes() for path in folder.glob("out[-_]*")}


@pytest.mark.parametrize("named, flags", [("{}", ("--merge",)), ("{}/*.json", ()), ("{}/**/*", ())])
def test_an_output_within_the_inputs_is_continued_after_kill_9_and_is_no_input(tmp_path, named, flags):
    corpus = corpus_in(tmp_path / "corpus", "a.json", 400)
    corpus_in(corpus / "b", "c.json", 400)
    given = (named.format(corpus), "--tokenizer", "byte", "--unit_mb", 0.01, "--workers", 2, *flags)
    assert run(*given, "--output", tmp_path / "elsewhere" / "out") == 0
    command = (*given, "--output", corpus / "out")
    started = process(*command)
    while len([*corpus.rglob("*-of-*.json")]) < 3:
        assert started.poll() is None, started.communicate()[1]
        time.sleep(0.001)
    os.kill(started.pid, signal.SIGKILL)
    started.communicate()
    place = corpus if not flags else corpus / "out.preprocess"
    for torn in [*place.glob("*-of-*.idx")][:1]:  # killed between two names
        torn.rename(f"{torn}.tmp-1-0a1b2c3d")
    assert run(*command) == 0
    assert shards_in(corpus) == shards_in(tmp_path / "elsewhere")
    assert run(*command) == 0
    assert run(*command, "--overwrite") == 0
    assert shards_in(corpus) == shards_in(tmp_path / "elsewhere")
    assert not list(corpus.rglob("*.tmp-*"))


def test_shards_that_a_shell_names_beside_the_inputs_are_left_out_aloud(tmp_path, capsys):
    corpus = corpus_in(tmp_path / "corpus")
    command = ("--output", corpus / "out", "--tokenizer", "byte", "--unit_mb", 0.01)
    assert run(*sorted(corpus.iterdir()), *command) == 0
    assert run(*sorted(corpus.iterdir()), *command) == 0
    assert "of the inputs named are left out, as they are of token shards: " in capsys.readouterr().err
    shards = sorted(corpus.glob("out-*.bin"))
    assert run(*shards, "--output", tmp_path / "x", "--tokenizer", "byte") == 2
    assert f"{shards[0]} is of token shards" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"data\.stream: .*out-00000.*\.bin is of token shards.*expected documents"):
        inputs.find_each((str(corpus), str(shards[0])), "data.stream")


def test_a_unit_without_a_document_is_no_input_and_raw_files_named_like_shards_are(tmp_path):
    corpus = corpus_in(tmp_path / "corpus", "train-00000-of-00002.json")
    (corpus / "train-00001-of-00002.json").write_text('{"format": 1, "files": {}, "text": ""}\n' * 30)
    (corpus / "notes.preprocess").mkdir()
    (corpus / "notes.preprocess" / "plan.txt").write_text("of somebody")
    assert run(corpus, "--output", corpus / "out", "--tokenizer", "byte", "--unit_mb", 0.001) == 0
    assert list(corpus.glob("out-*.empty.json"))
    expected = ["train-00000-of-00002.json", "train-00001-of-00002.json", "notes.preprocess/plan.txt"]
    assert found(corpus) == [corpus / name for name in expected]


def test_linked_folders_are_read_once_and_loops_not_at_all(tmp_path):
    far, corpus = corpus_in(tmp_path / "far", "f.jsonl"), corpus_in(tmp_path / "corpus")
    corpus_in(far / "deep", "d.jsonl")
    corpus_in(corpus / "z", "z.jsonl")
    for link, target in (("b", far), ("c", far), ("d", corpus / "z"), ("z/up", corpus), ("z/out", tmp_path)):
        (corpus / link).symlink_to(target)
    (far / "self").symlink_to(far)
    expected = [corpus / name for name in ("a.jsonl", "b/f.jsonl", "b/deep/d.jsonl", "z/z.jsonl")]
    assert found(corpus) == expected
    assert run(corpus, "--output", tmp_path / "x", "--tokenizer", "byte") == 0
    assert Shard(tmp_path / "x-00000-of-00001").document_count == 240


@pytest.mark.parametrize("name", ["x.jsonl", "x", "x.tar"])
def test_a_link_that_leads_nowhere_is_said(tmp_path, name):
    corpus = corpus_in(tmp_path / "corpus")
    (corpus / name).symlink_to("gone")
    for named in (corpus, corpus / name, corpus / "*"):
        with pytest.raises(UserError, match=rf"{corpus}/{name} is a link to gone, which cannot be reached \(No such"):
            found(named)


def test_what_is_left_out_of_a_folder_is_said_once(tmp_path, capsys):
    corpus = corpus_in(tmp_path / "corpus")
    others = ("z.jsonl.lz4", "y.jsonl.lz4", "x.csv", "part-00000", "README", "_SUCCESS", ".hidden.csv")
    for name in others:
        (corpus / name).write_text("x")
    command = (corpus, "--output", corpus / "out", "--tokenizer", "byte")
    for _ in range(2):
        assert run(*command) == 0
        printed = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
        assert len(printed) == 1
        assert "4 file(s) in folders are left out, of endings that are not known" in printed[0]
        assert "2 .jsonl.lz4, 1 without ending, 1 .csv" in printed[0]


def test_inputs_that_are_the_same_by_other_names_are_refused(tmp_path, monkeypatch):
    corpus = corpus_in(tmp_path / "corpus")
    (tmp_path / "link.jsonl").symlink_to(corpus / "a.jsonl")
    (tmp_path / "folder").symlink_to(corpus)
    monkeypatch.chdir(tmp_path)
    for names in (("corpus", f"./../{tmp_path.name}/corpus"), ("corpus/a.jsonl", "link.jsonl"), ("folder", "corpus"),
                  ("corpus/*.jsonl", "link.jsonl"), ("folder", "corpus/a.jsonl")):  # fmt: skip
        with pytest.raises(UserError, match=r"is named more than once, as .* too"):
            found(*names)


def test_a_link_within_a_folder_to_another_file_there_gives_it_once(tmp_path):
    corpus = corpus_in(tmp_path / "corpus")
    (corpus / "latest.jsonl").symlink_to("a.jsonl")
    assert found(corpus) == found(f"{corpus}/*.jsonl") == [corpus / "a.jsonl"]
