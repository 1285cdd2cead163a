"""Whatever the files of a corpus hold, or are, a start reads them rightly or says one thing about them, at once."""

import contextlib
import io
import json
import os
import random
import shutil
import struct

import numpy as np
import pytest

from data import blend
from data.config import DataConfig
from data.prepare import prepare
from data.shards import Shard, bin_path, idx_path
from data.source import build_source
from data.tokenizers.base import open_tokenizer
from program.errors import UserError
from tools.preprocess import verify
from tools.preprocess.__main__ import main
from tools.preprocess.summary import Totals

VALUES = [None, True, -1, 2**62, 10**400, 1.5, float("inf"), "", "x", "\0", "\ud800", "\x1b[2J", [], {}, [None]]
SPECIAL = ["fifo", "folder", "link to nowhere", "link to itself", "device", "sparse"]
CASES = 30


def preprocess(folder, name, *flags):
    command = (folder / "in.jsonl", "--output", folder / name, "--tokenizer", "byte", "--unit_mb", "0.003")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        return main([*map(str, command), "--workers", "1", *flags]), said.getvalue()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    lines = (json.dumps({"text": f"document {number} " * 10}) + "\n" for number in range(40))
    (folder / "in.jsonl").write_text("".join(lines))
    assert preprocess(folder, "x")[0] == 0
    assert preprocess(folder, "m", "--merge")[0] == 0
    (folder / "blend.toml").write_text('"x" = 0.7\n"in.jsonl" = 0.3\n')
    return folder


@pytest.fixture
def work(good, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(good, tmp_path / "work")


def samples(folder, **fields):
    given = {"paths": (str(folder / "x"),), "tokenizer": "byte", "cache_dir": str(folder / "cache"), **fields}
    config = DataConfig(**given, split="1,0,0")
    return build_source(prepare(config, lambda line: None), config, 64, 0, "train").fetch(np.arange(8)).tolist()


def become(path, kind, chance):
    """Another kind of file."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 42)
    else:
        path.symlink_to({"link to nowhere": "nowhere", "link to itself": path.name, "device": "/dev/zero"}[kind])


def deep(chance):
    value = []
    for _ in range(chance.choice([70, 500])):
        value = [value]
    return value


def mutate_json(value, chance):
    places = []

    def walk(one, container, key):
        places.append((one, container, key))
        for name, inner in one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ():
            walk(inner, one, name)

    root = [value]
    walk(value, root, 0)
    one, container, key = chance.choice(places)
    how = chance.randrange(4)
    if how == 0 and isinstance(container, dict):
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif how == 2 and type(one) is int:
        container[key] = one + chance.choice([1, -1, 2**40, -one - 1])
    else:
        container[key] = deep(chance) if how == 3 else chance.choice(VALUES)
    return root[0]


def mutate_bytes(data, chance):
    place, bit = chance.randrange(len(data) + 1), 1 << chance.randrange(8)
    return chance.choice(
        [
            data[:place],
            data[:place] + bytes([data[place] ^ bit] if place < len(data) else []) + data[place + 1 :],
            data[:place] + b"\xff\0\xfe" + data[place:],
            data.decode("latin-1").encode("utf-16"),
            data * 2,
            b"[" * 100_000,
            b"9" * 5_000,
        ]
    )


def mutate(path, chance):
    if chance.random() < 0.2:
        become(path, chance.choice(SPECIAL), chance)
    elif path.suffix == ".json" and chance.random() < 0.7:
        path.write_text(json.dumps(mutate_json(json.loads(path.read_text()), chance), indent=1))
    elif path.suffix == ".idx" and chance.random() < 0.6:
        data = bytearray(path.read_bytes())
        layout, place, values = chance.choice(
            [
                ("<Q", chance.choice([18, 26]), [0, 2**62, 2**64 - 1]),
                ("<i", 34 + 4 * chance.randrange(4), [-1, 2**31 - 1]),
                ("<q", chance.randrange(34, len(data) - 8), [-1, 2**62, 0]),
            ]
        )
        struct.pack_into(layout, data, place, chance.choice(values))
        path.write_bytes(data)
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), chance))


@pytest.mark.parametrize("seed", range(CASES))
def test_a_shard_with_a_damaged_file_is_refused_or_the_same(good, work, seed):
    chance = random.Random(seed)
    expected = samples(good)
    path = chance.choice(sorted(work.glob("x-*")))
    mutate(path, chance)
    with contextlib.suppress(UserError):
        found = samples(work)
        assert found == expected or path.suffix == ".bin"  # which only verify reads as a whole
        if found != expected:
            assert verify.verify(work / "x")
    with contextlib.redirect_stderr(io.StringIO()):
        verify.verify(work / "x")


@pytest.mark.parametrize("seed", range(CASES // 2))
def test_damaged_records_of_the_work_are_one_message(work, seed):
    chance = random.Random(1000 + seed)
    name, flags = chance.choice([("x", ()), ("m", ("--merge",))])
    mutate(chance.choice(sorted((work / f"{name}.preprocess").glob("*.json"))), chance)
    code, said = preprocess(work, name, *flags)
    assert code in (0, 2) and "Traceback" not in said


@pytest.mark.parametrize("seed", range(CASES // 2))
def test_a_damaged_file_of_weights_is_one_message(work, monkeypatch, seed):
    monkeypatch.chdir(work)
    monkeypatch.setattr(blend, "PERIOD", 512)  # a real table takes a second
    mutate(work / "blend.toml", random.Random(2000 + seed))
    with contextlib.suppress(UserError):
        samples(work, paths=(), blend_file=str(work / "blend.toml"))


def test_a_source_of_a_blend_that_is_not_there_is_said_with_where_it_was_named(work):
    (work / "gone.txt").write_text(f"0.5 {work / 'nowhere'}\n")
    with pytest.raises(UserError, match=r"^data\.blend_file: .*gone\.txt: no file or \.bin/\.idx prefix .*nowhere"):
        samples(work, paths=(), blend_file=str(work / "gone.txt"))
    with pytest.raises(UserError, match=r"^data\.blend: no file or \.bin/\.idx prefix .*nowhere"):
        samples(work, paths=(), blend={str(work / "nowhere"): 1.0})


@pytest.mark.parametrize("counts", [(2**62, 2**62), (2**64 - 1, 1), (2**61, 0), (1, 2**63)])
def test_an_index_of_absurd_counts_takes_no_memory(work, counts):
    prefix = sorted(work.glob("x-*.idx"))[0].with_suffix("")
    data = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into("<QQ", data, 18, *counts)
    idx_path(prefix).write_bytes(data)
    with pytest.raises(UserError, match="where its header promises"):
        Shard(prefix)


@pytest.mark.parametrize("kind", [*SPECIAL[:5]])
def test_a_half_of_a_pair_that_is_no_file_is_named(work, kind):
    prefix = sorted(work.glob("x-*.idx"))[0].with_suffix("")
    become(bin_path(prefix), kind, None)
    with pytest.raises(UserError, match=rf"{bin_path(prefix)}"):
        Shard(prefix)


def test_a_name_that_says_there_are_billions_is_not_counted_through(tmp_path):
    (tmp_path / "x-00000-of-99999999999.idx").touch()
    with pytest.raises(UserError, match=r"99999999998 of the 99999999999 shards of .*x are missing, the first x-00001"):
        samples(tmp_path)
    with pytest.raises(UserError, match="is one of 99999999999 by its name, and 1 are there"):
        verify.verify(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda said: said.update(tokens=2**62),
        lambda said: said.update(tokens=-1),
        lambda said: said.update(eod=255),
        lambda said: said.update(vocab_size=2**62),
        lambda said: said.update(tokenizer="\x1b[2J"),
        lambda said: said.update(engined=said.pop("engine")),
        lambda said: said["files"].clear(),
        lambda said: said.update(dtype="9" * 5000),
        lambda said: said["files"]["bin"].update(end=said["files"]["bin"].pop("ends")),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(work, damage):
    path = sorted(work.glob("x-*-of-*.json"))[0]
    said = json.loads(path.read_text())
    damage(said)
    path.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"manifest|are not the files that") as caught:
        samples(work)
    assert len(str(caught.value)) < 1000


def test_checksums_that_do_not_add_up_are_found(work, capsys):
    """Without a block's, nothing would be compared."""
    path = sorted(work.glob("x-*-of-*.json"))[0]
    said = json.loads(path.read_text())
    said["files"]["bin"]["blocks"] = []
    path.write_text(json.dumps(said, indent=1))
    assert main(["verify", str(work / "x")]) == 1
    assert "the checksums of its blocks are not those" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"shards": 2**62}, {"tokens": -1}, {"duplicates": "1"}, {"examples": [1]}])
def test_sums_that_cannot_be_right_are_refused(work, wrong):
    path = work / "m.preprocess" / "totals.json"
    sums = json.loads(path.read_text())
    assert Totals.load(path, 9).documents == 40
    path.write_text(json.dumps({**sums, **wrong}))
    with pytest.raises(UserError, match="remove this file, and the same command counts again"):
        Totals.load(path, 9)


def test_a_manifest_can_be_read_whatever_was_left_out(work):
    """A bad document's fields are shown; they may have any name."""
    with (work / "in.jsonl").open("a") as file:
        file.write('{"\\u001b[2J\\ud800": 1}\n')
    assert preprocess(work, "odd", "--on_bad_document", "skip")[0] == 0
    assert samples(work, paths=(str(work / "odd"),))
    assert "\x1b" not in preprocess(work, "stop")[1]


@pytest.mark.parametrize(
    "name, change",
    [
        ("k.tiktoken", lambda lines: lines[1:]),
        ("k.tiktoken", lambda lines: [*lines, b"aGU= 5"]),
        ("k.tiktoken", lambda lines: [*lines, b"aGU= -1"]),
        ("k.tiktoken", lambda lines: [*lines, b"aGU= " + b"9" * 5000]),
        ("k.json", lambda lines: [b'{"pat_str": "(", "special_tokens": {"e": 300}, "eod": "e"}']),
        ("k.json", lambda lines: [b'{"pat_str": "a", "special_tokens": {"e": 9999999999}, "eod": "e"}']),
        ("k.json", lambda lines: [b'{"pat_str": "a", "special_tokens": ["e"], "eod": "e"}']),
        ("k.json", lambda lines: [b"[" * 100_000]),
    ],
)
def test_damaged_tiktoken_files_are_one_message(tmp_path, name, change):
    import base64

    files = {
        "k.tiktoken": [base64.b64encode(bytes([one])) + b" %d" % one for one in range(256)],
        "k.json": [b'{"pat_str": "\\\\w+|\\\\W+", "special_tokens": {"e": 300}, "eod": "e"}'],
    }
    for one, lines in files.items():
        (tmp_path / one).write_bytes(b"\n".join(lines))
    assert open_tokenizer(tmp_path / "k.tiktoken", None).encode("a b").tolist() == [97, 32, 98]
    (tmp_path / name).write_bytes(b"\n".join(change(files[name])))
    with pytest.raises(UserError, match=r"data\.tokenizer: "):
        open_tokenizer(tmp_path / "k.tiktoken", None)


@pytest.mark.parametrize("name", ["a.json", "a.model", "a.tiktoken"])
def test_a_tokenizer_that_is_no_file_is_named_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "a.json").exists() or (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match="expected a regular file, found a FIFO"):
        open_tokenizer(tmp_path / name, None)
