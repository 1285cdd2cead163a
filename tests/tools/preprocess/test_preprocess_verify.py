"""What verify says of shards that are lost, wholly or in part: 1 for damage, 2 for a path that is none."""

import multiprocessing
import os
import shutil

import pytest

from data.inputs import resolve
from data.shards import HEADER, Shard
from program.errors import UserError
from tests.tools.preprocess_program import results
from tools.preprocess.__main__ import main

FORK = multiprocessing.get_context("fork")
BYTES = ("--tokenizer", "byte")


def run(*arguments):
    return main([str(one) for one in arguments])


def removed(prefix, *suffixes):
    for suffix in suffixes:
        prefix.with_name(prefix.name + suffix).unlink()


@pytest.fixture
def shards(lines, tmp_path):
    """Prefixes of the shards of `x`."""
    assert run(lines, "--output", tmp_path / "x", *BYTES, "--unit_mb", 0.1) == 0
    found = sorted(path.with_suffix("") for path in tmp_path.glob("x-*.idx"))
    assert len(found) > 3
    return found


def printed(capsys):
    return capsys.readouterr().out.splitlines()


def how_to_fix(prefix):
    return (
        "Remove the .bin, .idx and .json of each shard that is named, and give the command again that made "
        f"{prefix}: it makes what is missing."
    )


def test_shards_that_are_lost_wholly_are_named_as_the_others_tell(shards, tmp_path, capsys):
    lost = (shards[0], shards[2], shards[-1])
    for prefix in lost:
        removed(prefix, ".bin", ".idx", ".json")
    for path in (tmp_path, tmp_path / "x"):
        capsys.readouterr()
        assert run("verify", path) == 1
        names = [f"{prefix}.bin, .idx and .json are missing: lost, or not made yet" for prefix in lost]
        assert printed(capsys) == [*names, "DAMAGED: 3 finding(s)", how_to_fix(tmp_path / "x")]
    assert run("verify", shards[2]) == 1
    assert run("verify", shards[1]) == 0
    assert printed(capsys) == [
        f"{shards[2]}.bin, .idx and .json are missing: lost, or not made yet",
        "DAMAGED: 1 finding(s)",
        how_to_fix(tmp_path / "x"),
        f"good: {shards[1]}",
    ]


@pytest.mark.parametrize("lost", [(".idx",), (".bin",), (".idx", ".bin"), (".idx", ".json")])
def test_a_prefix_with_a_lost_file_is_damaged(shards, tmp_path, capsys, lost):
    removed(shards[1], *lost)
    for path in (tmp_path / "x", shards[1], tmp_path):
        capsys.readouterr()
        assert run("verify", path) == 1
        assert f"{shards[1]}{lost[0]} is missing" in printed(capsys)[0]


@pytest.mark.parametrize("lost", [(".idx",), (".bin",), (".idx", ".bin")])
def test_a_joined_pair_with_a_lost_file_is_damaged(lines, tmp_path, capsys, lost):
    assert run(lines, "--output", tmp_path / "x", *BYTES, "--merge", "--unit_mb", 0.1) == 0
    removed(tmp_path / "x_text_document", *lost)
    for path in (tmp_path / "x", tmp_path / "x_text_document", tmp_path):
        capsys.readouterr()
        assert run("verify", path) == 1
        assert f"{tmp_path / 'x_text_document'}{lost[0]} is missing" in printed(capsys)[0]


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_lost_manifest_is_told_by_the_others(shards, tmp_path, capsys, is_copied):
    """Or by the folder of the work alone."""
    removed(shards[1], ".json")
    if is_copied:
        shutil.rmtree(tmp_path / "x.preprocess")
    else:
        for prefix in (shards[0], *shards[2:]):
            removed(prefix, ".json")
    named = 1 if is_copied else len(shards)
    for path in (tmp_path / "x", tmp_path, shards[1]):
        capsys.readouterr()
        assert run("verify", path) == 1
        told_of = 1 if path == shards[1] else named
        lines = printed(capsys)
        sign = f"{shards[0].name}.json" if is_copied else "x.preprocess"
        assert f"{shards[1]}.json is missing: lost, as {sign} is there" in lines
        assert f"DAMAGED: {told_of} finding(s)" in lines
        assert ("Copy the .bin, .idx and .json of each shard" in lines[-1]) == is_copied
    shutil.rmtree(tmp_path / "x.preprocess", ignore_errors=True)
    for prefix in shards:
        prefix.with_name(prefix.name + ".json").unlink(missing_ok=True)
    assert run("verify", tmp_path / "x") == 0  # as Megatron's, which have none
    assert "shards have no manifest" in printed(capsys)[-2]
    for prefix in shards[1:]:
        removed(prefix, ".bin", ".idx")
    (tmp_path / f"{shards[1].name}.json").write_text("{}")  # an input may be named like a shard
    assert run("verify", shards[0]) == 0
    assert "shards have no manifest" in printed(capsys)[-2]


def test_a_lost_manifest_of_a_joined_pair_is_told_by_its_work(body, tmp_path, capsys):
    for key in ("text", "raw_body"):
        assert run(body, "--output", tmp_path / key, *JOINED, "--jsonl_key", key) == 0
        pair = tmp_path / f"{key}_{key}_document"
        removed(pair, ".json")
        capsys.readouterr()
        assert run("verify", pair) == 1
        assert printed(capsys)[0] == f"{pair}.json is missing: lost, as {key}.preprocess is there"
        shutil.rmtree(tmp_path / f"{key}.preprocess")
        assert run("verify", pair) == 0


@pytest.mark.parametrize("array", ["length", "pointer"])
def test_an_index_that_contradicts_itself_is_damaged_without_a_manifest_too(shards, tmp_path, capsys, array):
    shutil.rmtree(tmp_path / "x.preprocess")
    for prefix in shards:
        removed(prefix, ".json")
    index = shards[1].with_name(f"{shards[1].name}.idx")
    raw = bytearray(index.read_bytes())
    pointers = HEADER.size + 4 * Shard(shards[1]).sequence_count
    raw[HEADER.size + 4 * 5 if array == "length" else pointers + 8 * 5] ^= 2  # of a document in the middle
    index.write_bytes(raw)
    capsys.readouterr()
    assert run("verify", tmp_path / "x") == 1
    assert any(line.startswith(f"{index} has sequence {6 if array == 'length' else 5} of") for line in printed(capsys))


@pytest.mark.parametrize("flags", [(), ("--shuffle_docs", 3), ("--merge",)])
def test_the_way_out_of_damage_is_one(lines, tmp_path, capsys, flags):
    command = (lines, "--output", tmp_path / "x", *BYTES, "--unit_mb", 0.1, *flags)
    assert run(*command) == 0
    before, guilty = results(tmp_path), max(tmp_path.glob("x*.bin"))
    guilty.write_bytes(bytes(guilty.stat().st_size))
    assert run(*command) == 0 and results(tmp_path) != before  # there is all, by its names
    capsys.readouterr()
    assert run("verify", tmp_path / "x") == 1
    assert printed(capsys)[-1] == how_to_fix(tmp_path / "x")
    removed(guilty.with_suffix(""), ".bin", ".idx", ".json")
    assert run(*command) == 0
    assert results(tmp_path) == before


@pytest.mark.parametrize("flags", [(), ("--shuffle_docs", 3), ("--merge",), ("--merge", "--shuffle_docs", 3)])
@pytest.mark.parametrize("lost", [(".idx",), (".bin", ".idx", ".json")])
def test_the_same_command_makes_again_what_was_lost(lines, tmp_path, capsys, flags, lost):
    command = (lines, "--output", tmp_path / "x", *BYTES, "--unit_mb", 0.1, *flags)
    assert run(*command) == 0
    before, said = results(tmp_path), printed(capsys)
    removed(min(tmp_path.glob("x*.idx")).with_suffix(""), *lost)
    assert run(*command) == 0
    assert results(tmp_path) == before
    assert printed(capsys) == said
    assert not list(tmp_path.rglob("*.tmp-*")) and not list(tmp_path.rglob("hashes-*"))


def test_where_shards_were_joined_none_of_them_is_missed(shards, lines, tmp_path):
    """Those that are left of another division too: the pair is what data.paths opens."""
    (tmp_path / "joined").mkdir()
    assert run(lines, "--output", tmp_path / "joined" / "x", *BYTES, "--merge") == 0
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / "joined" / f"x_text_document{suffix}").rename(tmp_path / f"x_text_document{suffix}")
    removed(shards[1], ".bin", ".idx", ".json")
    assert run("verify", tmp_path) == 0
    assert run("verify", tmp_path / "x") == 0
    assert run("verify", tmp_path / "joined" / "x") == 2


def test_a_unit_without_documents_is_not_missed_while_its_note_is_there(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"text": "{text}"}}\n' for text in ("a" * 100, "", "", "", "b" * 100)))
    assert run(source, "--output", tmp_path / "x", *BYTES, "--unit_mb", 0.00002) == 0
    note = min(tmp_path.glob("x-*.empty.json"))
    for path in (tmp_path, tmp_path / "x"):
        assert run("verify", path) == 0
    note.unlink()
    for path in (tmp_path, tmp_path / "x"):
        assert run("verify", path) == 1


def test_two_divisions_side_by_side_are_no_prefix(shards, lines, tmp_path, capsys):
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"x-00000-of-00001{suffix}").write_bytes(shards[0].with_suffix(suffix).read_bytes())
    assert run("verify", tmp_path / "x") == 2
    assert "parts side by side; remove the old ones" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none", "no/such/folder", "in.jsonl", "folder"])
def test_a_path_that_is_no_shard_is_a_mistake(tmp_path, capsys, name):
    (tmp_path / "in.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    assert run("verify", tmp_path / name) == 2
    assert str(tmp_path / name) in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["", "x-00001-of-{count:05d}.bin", "x-00001-of-{count:05d}.json"])
def test_what_may_not_be_read_is_a_mistake_not_damage(shards, tmp_path, capfd, closed):
    guilty = tmp_path / closed.format(count=len(shards))
    for folder in (tmp_path, *(one for one in tmp_path.parents if one.stat().st_uid == os.getuid())):
        folder.chmod(folder.stat().st_mode | 0o555)
    guilty.chmod(0)
    assert run("verify", shards[0]) == (0 if os.getuid() == 0 or closed else 2)

    def without_rights():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        os._exit(run("verify", tmp_path))

    worker = FORK.Process(target=without_rights)
    worker.start()
    worker.join()
    guilty.chmod(0o755)
    err = capfd.readouterr().err
    assert worker.exitcode == 2, err
    assert str(guilty) in err and "ermission" in err


JOINED = ("--merge", *BYTES)


@pytest.fixture
def body(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"raw_body": "a", "en_text": "b", "text": "c"}\n')
    return source


def test_a_field_with_an_underscore_opens_by_its_prefix(body, tmp_path):
    """By the plan beside it, or by the pair's manifest where only the pair was copied."""
    assert run(body, "--output", tmp_path / "x", *JOINED, "--jsonl_key", "raw_body") == 0
    pair = tmp_path / "x_raw_body_document"
    (tmp_path / "copied").mkdir()
    for suffix in (".bin", ".idx", ".json"):
        copy = tmp_path / "copied" / f"{pair.name}{suffix}"
        copy.write_bytes(pair.with_suffix(suffix).read_bytes())
    for prefix in (tmp_path / "x", tmp_path / "copied" / "x"):
        assert resolve((str(prefix),)).prefixes == (prefix.with_name(pair.name),)
        assert run("verify", prefix) == 0
    pair.with_suffix(".json").unlink()
    assert resolve((str(tmp_path / "x"),)).prefixes == (pair,)
    (tmp_path / "copied" / f"{pair.name}.json").unlink()  # nothing says any more whose it is
    with pytest.raises(UserError, match="x_raw_body_document may be another prefix's: give the whole name"):
        resolve((str(tmp_path / "copied" / "x"),))


def test_a_longer_prefix_stays_another_ones_whatever_the_field(body, tmp_path, capsys):
    """`web_en_text_document` may be `web`'s by its name; it is `web_en`'s by what made it."""
    assert run(body, "--output", tmp_path / "web", *BYTES, "--jsonl_key", "en_text") == 0  # not joined
    assert run(body, "--output", tmp_path / "web_en", *JOINED) == 0
    assert resolve((str(tmp_path / "web"),)).prefixes == (tmp_path / "web-00000-of-00001",)
    for path in tmp_path.glob("web-*"):
        path.unlink()
    with pytest.raises(UserError, match=r"no file or .bin/.idx prefix .*; web_en_text_document may be"):
        resolve((str(tmp_path / "web"),))
    assert run("verify", tmp_path / "web") == 2
    assert run("verify", tmp_path / "web_en") == 0
    assert run(body, "--output", tmp_path / "web", *JOINED, "--jsonl_key", "en_text", "--overwrite") == 2
    assert "web_en_text_document.bin is already there" in capsys.readouterr().err  # and is not removed
    assert run(body, "--output", tmp_path / "web", *JOINED, "--jsonl_key", "raw_body", "--overwrite") == 0
    assert resolve((str(tmp_path / "web"),)).prefixes == (tmp_path / "web_raw_body_document",)
    assert resolve((str(tmp_path / "web_en"),)).prefixes == (tmp_path / "web_en_text_document",)


def test_two_fields_of_one_prefix_stay_an_error_that_names_them(body, tmp_path):
    for key in ("raw_body", "text"):
        assert run(body, "--output", tmp_path / key / "x", *JOINED, "--jsonl_key", key) == 0
        for path in (tmp_path / key).glob("x_*"):
            path.rename(tmp_path / path.name)
    with pytest.raises(UserError, match="x_raw_body_document, x_text_document"):
        resolve((str(tmp_path / "x"),))
