import json

import numpy as np
import pytest

from data import inputs
from data.raw import pieces
from data.raw.inputs import file_source
from data.shard_writer import ShardWriter
from program.errors import UserError


def documents(path, key="text"):
    found, text = [], ""
    for piece in pieces.read(file_source(path), key, 200):
        text += piece.text
        if piece.ends_document:
            found.append(text)
            text = ""
    assert text == ""
    return found


def jsonl(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def folder(tmp_path):
    with ShardWriter(tmp_path / "tiny.v1", 257) as writer:
        writer.add(np.arange(5))
        writer.end_document()
    jsonl(tmp_path / "story.jsonl", json.dumps({"text": "once"}))
    (tmp_path / "story.txt").write_text("upon")
    return tmp_path


@pytest.mark.parametrize("name", ["tiny.v1", "tiny.v1.bin", "tiny.v1.idx"])
def test_a_prefix_may_carry_either_suffix(folder, name):
    assert inputs.resolve((str(folder / name),)).prefixes == (folder / "tiny.v1",)


def test_kinds_are_told_apart_and_keep_their_order(folder):
    found = inputs.resolve(tuple(str(folder / name) for name in ("story.txt", "tiny.v1", "story.jsonl")))
    assert found.prefixes == (folder / "tiny.v1",)
    assert found.raw_files == (str(folder / "story.txt"), str(folder / "story.jsonl"))


def test_what_a_glob_finds_of_one_shard_is_that_shard_once(folder):
    (folder / "tiny.v1.json").write_text('{\n "format": 1, "files": {}}')
    halves = tuple(str(folder / f"tiny.v1{suffix}") for suffix in (".bin", ".idx", ".json", ""))
    assert inputs.resolve(halves) == inputs.Inputs((folder / "tiny.v1",), ())
    assert inputs.resolve((halves[2],)).prefixes == (folder / "tiny.v1",)  # a manifest is no text to train on


def test_a_manifest_without_its_shard_is_refused(folder):
    (folder / "gone.json").write_text('{\n "format": 1, "files": {}}')
    with pytest.raises(UserError, match=r"gone\.json is a shard's manifest"):
        inputs.resolve((str(folder / "gone.json"),))


@pytest.mark.parametrize("name", ["tiny.v1", "story.txt"])
def test_what_is_named_twice_is_refused(folder, name):
    with pytest.raises(UserError, match="named more than once"):
        inputs.resolve((str(folder / name), str(folder / name)))


def test_a_list_that_came_as_one_text_is_refused(folder):
    with pytest.raises(UserError, match="File name too long"):
        inputs.resolve((" ".join(["a.txt"] * 100),))


@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "a.JSONL", "a.jsonl"])
def test_lines_are_documents_whatever_their_ending_is_spelled_like(tmp_path, name):
    """And a byte order mark is no part of the first."""
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert documents(tmp_path / name) == ["one", "two"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert documents(tmp_path / "a.txt") == ["one"]


def test_a_missing_file_is_named_with_its_neighbours(folder):
    with pytest.raises(UserError) as caught:
        inputs.resolve((str(folder / "storry.jsonl"),))
    assert "storry.jsonl" in str(caught.value)
    assert "nearest there: story.jsonl" in str(caught.value)


def test_a_missing_prefix_is_named_with_its_neighbours(folder):
    with pytest.raises(UserError, match=r"nearest there: .*tiny\.v1"):
        inputs.resolve((str(folder / "tiny.v2"),))


def test_a_missing_folder_says_how_far_the_path_exists(folder):
    with pytest.raises(UserError, match=f"only {folder} exists"):
        inputs.resolve((str(folder / "no" / "such" / "x"),))


def test_a_folder_is_refused(folder):
    with pytest.raises(UserError, match="is a folder"):
        inputs.resolve((str(folder),))


def test_jsonl_has_a_document_a_line_and_blank_lines_are_skipped(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", '{"text": "a\\nb"}', "", '{"text": "é", "other": 1}')
    assert documents(path) == ["a\nb", "é"]
    assert documents(jsonl(path, '{"body": "c"}'), key="body") == ["c"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON"),
        ('{"body": "x", "id": 1}', 'no field "text"; found: body, id'),
        ('["text"]', 'no field "text"; found: a list'),
        ('{"text": 5}', 'field "text" is a int'),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    path = jsonl(tmp_path / "x.jsonl", '{"text": "good"}', line)
    with pytest.raises(UserError) as caught:
        documents(path)
    assert f"{path}:2" in str(caught.value)
    assert message in str(caught.value)


def test_other_encodings_are_refused_with_the_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes("abcé".encode("latin-1"))
    with pytest.raises(UserError, match=r"x\.txt \(byte 3\): not UTF-8"):
        documents(tmp_path / "x.txt")


def test_a_text_file_is_one_document_whatever_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "READ_BYTES", 10)
    text = "".join(f"zeile {number} ü\r\n" for number in range(100))
    (tmp_path / "x.md").write_bytes(text.encode())
    assert documents(tmp_path / "x.md") == [text]
    found = list(pieces.read(file_source(tmp_path / "x.md"), "text", 200))
    assert len(found) > 10
    assert sum(piece.source_bytes for piece in found) == len(text.encode())
