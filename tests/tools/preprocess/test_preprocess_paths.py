"""What --output, verify and data.paths say about files that are in the way, lost, several or another part's."""

import errno
import fcntl

import pytest

from data.inputs import resolve
from program.errors import UserError
from tests.tools.preprocess_program import results
from tools.preprocess.__main__ import main

BYTES = ("--tokenizer", "byte")


def run(*arguments):
    return main([str(one) for one in arguments])


def test_another_prefix_that_begins_alike_is_left_alone(lines, tmp_path):
    """`web` and `web_en` side by side, the one overwritten while the other is at work."""
    for name in ("web_en", "web"):
        assert run(lines, "--output", tmp_path / name, *BYTES, "--merge") == 0
    half = tmp_path / "web_en-00001-of-00002.bin.tmp-123-abc"
    half.write_bytes(b"half")
    mine = tmp_path / "web-00001-of-00002.bin.tmp-123-abc"
    mine.write_bytes(b"half")
    kept = {name: data for name, data in results(tmp_path).items() if name.startswith("web_en")}
    assert len(kept) > 3
    assert run(lines, "--output", tmp_path / "web", *BYTES, "--merge", "--overwrite", "--unit_mb", 0.1) == 0
    assert {name: data for name, data in results(tmp_path).items() if name.startswith("web_en")} == kept
    assert not mine.exists()


def test_a_part_may_not_remove_the_work_of_others(lines, tmp_path, capsys):
    command = (lines, "--output", tmp_path / "x", *BYTES, "--unit_mb", 0.1)
    assert run(*command, "--part", "0/2") == 0
    done = results(tmp_path)
    assert done
    capsys.readouterr()
    assert run(*command, "--part", "1/2", "--overwrite") == 2
    printed = capsys.readouterr().err
    assert "--overwrite with --part 1/2: would remove the finished shards" in printed
    assert f"x.preprocess, x-[0-9]*-of-* and x_text_document.* in {tmp_path}" in printed
    assert results(tmp_path) == done
    assert run(*command, "--part", "0/1", "--overwrite") == 0  # one part is all of them


@pytest.mark.parametrize(
    "part, way", [((), "give --overwrite"), (("--part", "0/2"), "remove once, before any of them")]
)
def test_what_is_in_the_way_is_said_with_a_way_out_that_works(lines, tmp_path, capsys, part, way):
    command = (lines, "--output", tmp_path / "x", *BYTES)
    (tmp_path / "x-00000-of-00001.idx").write_text("mine")
    assert run(*command, *part) == 2
    strangers = capsys.readouterr().err
    (tmp_path / "x-00000-of-00001.idx").unlink()
    assert run(*command) == 0
    assert run(*command, "--unit_mb", 0.1, *part) == 2
    for printed in (strangers, capsys.readouterr().err):
        assert way in printed
        assert ("--overwrite" in printed) == (not part)


@pytest.mark.parametrize("lost", [(".idx",), (".bin",), (".idx", ".bin"), (".idx", ".json")])
def test_verify_of_a_folder_names_a_lost_file(lines, tmp_path, capsys, lost):
    assert run(lines, "--output", tmp_path / "x", *BYTES, "--unit_mb", 0.2) == 0
    (tmp_path / "other.bin").write_bytes(b"no shard")
    (tmp_path / "train-00000-of-00001.json").write_text("{}")
    assert run("verify", tmp_path) == 0
    prefix = sorted(tmp_path.glob("x-*.idx"))[1].with_suffix("")
    for suffix in lost:
        prefix.with_suffix(suffix).unlink()
    capsys.readouterr()
    assert run("verify", tmp_path) == 1
    assert f"{prefix}{lost[0]} is missing" in capsys.readouterr().out


def test_joined_shards_of_another_field_open_by_their_prefix(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"body": "a", "text": "b"}\n')
    assert run(source, "--output", tmp_path / "x", *BYTES, "--merge", "--jsonl_key", "body") == 0
    assert resolve((str(tmp_path / "x"),)).prefixes == (tmp_path / "x_body_document",)
    assert run("verify", tmp_path / "x") == 0
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x_text_document{suffix}").write_bytes((tmp_path / f"x_body_document{suffix}").read_bytes())
    capsys.readouterr()
    assert run("verify", tmp_path / "x") == 2
    assert "x_body_document, x_text_document" in capsys.readouterr().err


def test_a_longer_prefix_beside_is_not_taken_for_a_field(lines, tmp_path):
    """Neither alone, nor in place of the shards that the prefix has."""
    assert run(lines, "--output", tmp_path / "web_en", *BYTES, "--merge") == 0
    with pytest.raises(UserError):
        resolve((str(tmp_path / "web"),))
    assert run(lines, "--output", tmp_path / "web", *BYTES) == 0
    assert resolve((str(tmp_path / "web"),)).prefixes == (tmp_path / "web-00000-of-00001",)
    assert run(lines, "--output", tmp_path / "web", *BYTES, "--merge", "--overwrite") == 0
    assert resolve((str(tmp_path / "web"),)).prefixes == (tmp_path / "web_text_document",)


def test_several_fields_are_an_error_that_names_them(tmp_path):
    for key in ("text", "body"):
        (tmp_path / f"x_{key}_document.idx").touch()
    with pytest.raises(UserError, match=r"x_body_document, x_text_document in .*Give the whole name"):
        resolve((str(tmp_path / "x"),))


def test_a_saved_dataset_with_splits(texts, tmp_path, capsys):
    import datasets

    split = datasets.Dataset.from_dict({"text": texts[:9]})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"train": split}).save_to_disk(tmp_path / "one")
    assert run(tmp_path / "two", "--output", tmp_path / "x", *BYTES) == 2
    printed = capsys.readouterr().err
    assert "with the splits test, train; expected one dataset" in printed
    assert f"{tmp_path / 'two' / 'test'}" in printed
    assert not list(tmp_path.glob("x*"))
    for number, source in enumerate((tmp_path / "two" / "train", tmp_path / "one")):
        assert run(source, "--output", tmp_path / f"y{number}", *BYTES) == 0
        assert "9 documents" in capsys.readouterr().out


@pytest.mark.parametrize("name, guilty", [("afile/x", "afile"), ("afile/y/x", "afile"), ("x", "x.preprocess")])
def test_a_file_where_a_folder_should_be_is_named(lines, tmp_path, capsys, name, guilty):
    (tmp_path / guilty).write_text("")
    assert run(lines, "--output", tmp_path / name, *BYTES) == 2
    printed = capsys.readouterr().err
    assert f"--output {tmp_path / name}: {tmp_path / guilty} is a file, expected a folder" in printed


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(lines, tmp_path, monkeypatch, capsys, number):
    def refuse(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    command = (lines, "--output", tmp_path / "x", *BYTES, "--unit_mb", 0.1, "--merge")
    assert run(*command, "--part", "0/2") == 0
    assert "that file system has no locks" in capsys.readouterr().err
    assert run(*command, "--part", "1/2") == 0
    assert "give the command again without --part" in capsys.readouterr().out
    assert not list(tmp_path.glob("x_*"))
    assert run(*command) == 0
    assert run("verify", tmp_path / "x_text_document") == 0


def test_another_fault_of_locking_is_not_hidden(lines, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="broken"):
        run(lines, "--output", tmp_path / "x", *BYTES)
