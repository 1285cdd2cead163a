"""Everything that can be an input gives the same documents; what is bad is named with its place."""

import codecs
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from data.shards import Shard
from tools.preprocess.__main__ import main


def run(*arguments):
    return main([str(one) for one in arguments])


def made(*inputs, output, flags=()):
    """Tokens of all shards that some inputs give, as one list of documents of bytes."""
    assert run(*inputs, "--output", output, "--tokenizer", "byte", *flags) == 0
    found = []
    for path in sorted(output.parent.glob(f"{output.name}-*.idx")):
        shard = Shard(path.with_suffix(""))
        ends = np.cumsum(shard.document_lengths())
        found += [bytes(part[:-1].astype(np.uint8)) for part in np.split(shard.tokens, ends)[:-1]]
    return found


def zst(path, data):
    import zstandard

    half = len(data) // 2
    packed = zstandard.ZstdCompressor().compress(data[:half]) + zstandard.ZstdCompressor().compress(data[half:])
    path.write_bytes(packed)  # two frames, as parallel compressors write them
    return path


def parquet(path, texts, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts, **columns}), path, row_group_size=7)
    return path


def test_every_kind_of_file_gives_the_same_documents(texts, lines, tmp_path):
    expected = [text.encode() for text in texts]
    raw = lines.read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw[:9999]) + gzip.compress(raw[9999:]))
    inputs = {
        "jsonl": lines,
        "gz": tmp_path / "a.jsonl.gz",
        "zst": zst(tmp_path / "a.jsonl.zst", raw),
        "parquet": parquet(tmp_path / "a.parquet", texts, id=list(range(len(texts)))),
    }
    for name, path in inputs.items():
        assert made(path, output=tmp_path / name, flags=("--unit_mb", 0.05)) == expected, name


def test_folders_and_globs_in_the_order_of_names(tmp_path):
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name, text in (("c.txt", "3"), ("b/a.md", "2"), ("a.txt", "1"), (".hidden/x.txt", "no"), ("x.bin", "no")):
        (folder / name).write_text(text)
    assert made(folder, output=tmp_path / "x") == [b"1", b"3", b"2"]
    assert made(f"{folder}/**/*.md", folder / "c.txt", output=tmp_path / "y") == [b"2", b"3"]


def test_a_saved_dataset(texts, tmp_path, monkeypatch):
    import datasets

    from data.raw import hub

    monkeypatch.setattr(hub, "ROWS", 50)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "set")
    expected = [text.encode() for text in texts]
    assert made(tmp_path / "set", output=tmp_path / "x", flags=("--unit_mb", 0.01)) == expected
    assert len(list(tmp_path.glob("x-*.idx"))) == 3


GOOD = b'{"text": "gut"}\n'


@pytest.mark.parametrize(
    "bad, reason",
    [
        (b'{"text": "x"', "not JSON"),
        (b"[1]", "no field"),
        (b'{"txt": "x"}', 'no field "text"; found: txt. Set --jsonl_key.'),
        (b'{"text": 3}', 'field "text" is a int, expected text'),
        (b'{"text": "\xff"}', "byte 10 of the line is not UTF-8"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b"[" * 3_000, "not JSON"),
        (b'{"text": "' + b"x" * 5000 + b'"}', "more than 0.004 MB"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_bad_line_is_named_or_left_out(tmp_path, capsys, bad, reason, ending):
    path = tmp_path / f"x.jsonl{ending}"
    content = GOOD * 3 + bad + b"\n" + GOOD * 2
    path.write_bytes(gzip.compress(content) if ending else content)
    command = (path, "--output", tmp_path / "x", "--tokenizer", "byte", "--max_document_mb", 0.004)
    assert run(*command) == 2
    printed = capsys.readouterr().err
    assert reason in printed
    assert f"{path}:4 (byte {len(GOOD) * 3}{' unpacked' if ending else ''})" in printed
    assert not list(tmp_path.glob("x-*"))
    assert run(*command, "--on_bad_document", "skip", "--overwrite") == 0
    assert Shard(tmp_path / "x-00000-of-00001").document_count == 5
    assert "1 bad ones left out" in capsys.readouterr().out


def test_a_line_longer_than_memory_should_hold_is_skipped_over(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD + b'{"text": "' + b"x" * 9_000_000 + b'"}\n' + GOOD)
    flags = ("--max_document_mb", 0.1, "--on_bad_document", "skip")
    assert made(path, output=tmp_path / "x", flags=flags) == [b"gut", b"gut"]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_byte_order_mark_begins_a_file_and_no_line(tmp_path, capsys, ending):
    mark, path = codecs.BOM_UTF8, tmp_path / f"x.jsonl{ending}"
    pack = gzip.compress if ending else bytes
    path.write_bytes(pack(mark + GOOD * 4000))
    assert made(path, output=tmp_path / "x", flags=("--unit_mb", 0.01)) == [b"gut"] * 4000
    path.write_bytes(pack(mark + GOOD + mark + GOOD))
    at_the_second_line = (len(mark + GOOD) + 0.1) / 1e6  # a unit begins there
    assert run(path, "--output", tmp_path / "y", "--tokenizer", "byte", "--unit_mb", at_the_second_line) == 2
    assert f"{path}:2 (byte {len(mark + GOOD)}" in capsys.readouterr().err


SPECIAL = "abc </s> def"


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet", "txt", "dataset"])
def test_a_control_tokens_text_is_named_with_its_place(tmp_path, capsys, sentencepiece_model, kind):
    """Also where documents before it were left out."""
    import datasets

    texts = ["gut", None, "gut", SPECIAL, "gut"]
    folder = tmp_path / "in"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path, byte = folder / f"x.{kind}", lines.index('{"text": "abc')
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "gz":
        path = folder / "x.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        parquet(path, texts)
    elif kind == "txt":
        path.write_text(SPECIAL)
        (folder / "a.txt").write_text("gut")
    else:
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)
    places = {"jsonl": f":4 (byte {byte})", "gz": f":4 (byte {byte} unpacked)", "parquet": ": row group 0, row 3",
              "txt": "", "dataset": ": step 0, row 3"}  # fmt: skip
    command = (folder, "--output", tmp_path / "x", "--tokenizer", sentencepiece_model, "--special_tokens", "error")
    assert run(*command, "--on_bad_document", "skip") == 0
    printed = (
        f"{path}{places[kind]}: the document holds the text of a control token, </s>, at character 4 ('abc </s> def')"
    )
    assert f"left out: {printed}" in capsys.readouterr().out
    if kind == "txt":
        assert run(*command, "--overwrite") == 2
        assert f"preprocess: {printed}. --on_bad_document skip leaves" in capsys.readouterr().err


def test_text_that_is_not_utf8_is_named(tmp_path, capsys):
    (tmp_path / "x.txt").write_bytes(b"abc\xff")
    assert run(tmp_path / "x.txt", "--output", tmp_path / "x", "--tokenizer", "byte") == 2
    assert "x.txt (byte 3): not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_bomb_is_not_unpacked(tmp_path, capsys, ending, monkeypatch):
    from data.raw import compressed

    monkeypatch.setattr(compressed, "ALLOWANCE_BYTES", 1 << 20)
    path, line = tmp_path / f"x.jsonl.{ending}", b'{"text": "' + b"0" * 1000 + b'"}\n'
    content = line * 20_000
    if ending == "gz":
        path.write_bytes(gzip.compress(content))
    else:
        zst(path, content)
    assert run(path, "--output", tmp_path / "x", "--tokenizer", "byte", "--max_expansion", 10) == 2
    assert f"{path}: unpacks to more than" in capsys.readouterr().err
    assert not list(tmp_path.glob("x-*"))


def test_an_archive_that_asks_for_much_memory_is_refused(tmp_path, capsys):
    """A frame's header says how far back it may point, which is held: 2^(10 + exponent) bytes (RFC 8878, 3.1.1.1.2)."""
    line = b'{"text": "once"}\n'
    for exponent, code in ((10, 0), (18, 0), (22, 2)):
        block = (len(line) << 3 | 1).to_bytes(3, "little") + line
        (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([exponent << 3]) + block)
        assert run(tmp_path / "a.jsonl.zst", "--output", tmp_path / f"{exponent}" / "x", "--tokenizer", "byte") == code
    assert "than the 2,048 MiB of memory that a file gets here" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_truncated_archive_is_named(tmp_path, capsys, ending, lines):
    path = tmp_path / f"x.jsonl.{ending}"
    if ending == "gz":
        path.write_bytes(gzip.compress(lines.read_bytes()))
    else:
        zst(path, lines.read_bytes())
    path.write_bytes(path.read_bytes()[:-9])
    assert run(path, "--output", tmp_path / "x", "--tokenizer", "byte") == 2
    assert "truncated or damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("x-*"))


def test_a_damaged_parquet_file_is_named(tmp_path, capsys, texts):
    path = parquet(tmp_path / "x.parquet", texts)
    raw = path.read_bytes()
    command = (path, "--output", tmp_path / "x", "--tokenizer", "byte")
    path.write_bytes(raw[:-20])
    assert run(*command) == 2
    assert "x.parquet is not a parquet file" in capsys.readouterr().err
    path.write_bytes(raw)
    assert run(*command, "--jsonl_key", "body") == 2
    assert 'no column "body"; found: text' in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_inputs_without_text_are_a_mistake(tmp_path, capsys, content):
    (tmp_path / "x.jsonl").write_text(content)
    assert run(tmp_path / "x.jsonl", "--output", tmp_path / "x", "--tokenizer", "byte") == 2
    assert "INPUT" in capsys.readouterr().err
    assert not list(tmp_path.glob("x-*.idx"))


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("missing.jsonl",), "no file, folder or glob missing.jsonl"),
        (("*.none",), r"no file fits *.none"),
        (("x.jsonl", "x.jsonl"), "named more than once"),
        (("x.jsonl", "--tokenizer", "missing.model"), "missing.model"),
        (
            ("x.jsonl", "--tokenizer", "builtin"),
            'own text; expected "byte", a tokenizer.json, a SentencePiece or Llama',
        ),
        (("x.jsonl", "--tokenizer", "x.jsonl"), "--tokenizer: "),
        (("x.jsonl", "--tokenizer", "x.json"), "--tokenizer: "),
        (("x.jsonl", "--tokenizer", "x.tiktoken"), "--tokenizer: "),
        (("x.jsonl", "--tokenizer", "no_eod.json"), "Name it with --eod_token; its control tokens: none"),
        (("x.jsonl", "--part", "4/4"), "expected I/N"),
        (("x.jsonl", "--output", "."), "is a folder"),
        (("x.jsonl", "--engine", "tiktoken"), "whose engine is bytes"),
    ],
)
def test_mistakes_of_the_command_line(tmp_path, monkeypatch, capsys, flags, reason):
    from tokenizers import Tokenizer, models

    monkeypatch.chdir(tmp_path)
    for name in ("x.jsonl", "x.json", "x.tiktoken"):
        Path(name).write_bytes(GOOD)
    Tokenizer(models.BPE({"a": 0}, [])).save("no_eod.json")
    assert run("--output", "out", "--tokenizer", "byte", *flags) == 2
    printed = capsys.readouterr().err
    assert reason in printed and "data." not in printed
    assert not list(tmp_path.glob("out-*"))


def test_empty_documents_are_left_out_and_counted_and_duplicates_kept(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "", "b", "a", "")))
    assert made(tmp_path / "x.jsonl", output=tmp_path / "x") == [b"a", b"b", b"a"]
    assert "2 empty documents left out, 0 bad ones left out, 2 duplicates kept" in capsys.readouterr().out


def nested(tmp_path):
    """A folder of lines with a dataset, and one of the single split `train`, deep in it."""
    import datasets

    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    for name, text in (("a.jsonl", "1"), ("z.jsonl", "2"), ("b/a.jsonl", "3")):
        (folder / name).write_text(json.dumps({"text": text}) + "\n")
    datasets.Dataset.from_dict({"text": ["4", "5"]}).save_to_disk(folder / "b" / "set", num_shards=2)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["6"]})}).save_to_disk(folder / "c")
    (folder / "d.d").mkdir()
    (folder / "d.d" / "x.txt").write_text("7")
    return folder


def test_saved_datasets_within_a_folder_are_read_as_datasets(tmp_path):
    folder = nested(tmp_path)
    expected = [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
    assert made(folder, output=tmp_path / "x") == expected
    assert made(folder / "b", output=tmp_path / "y") == expected[2:5]
    assert made(folder / "c", folder / "b" / "set", output=tmp_path / "z") == [b"6", b"4", b"5"]


def test_the_order_of_files_and_datasets_within_a_folder(tmp_path):
    from data.raw import inputs

    folder = nested(tmp_path)
    found = [(Path(one.path).relative_to(folder).as_posix(), one.kind) for one in inputs.find((str(folder),))]
    assert found == [("a.jsonl", "jsonl"), ("z.jsonl", "jsonl"), ("b/a.jsonl", "jsonl"), ("b/set", "dataset"),
                     ("c/train", "dataset"), ("d.d/x.txt", "text")]  # fmt: skip


def test_what_is_beside_a_saved_datasets_data_is_never_a_document(tmp_path, capsys):
    """Named by a glob, or left of a dataset that is not whole."""
    folder = nested(tmp_path)
    for name in ("b/set/*.json", "b/**/*.json", "b/set/state.json", "*/dataset_dict.json"):
        assert run(f"{folder}/{name}", "--output", tmp_path / "x", "--tokenizer", "byte") == 2
        printed = capsys.readouterr().err
        assert "is of a saved dataset, not documents; expected its folder: give " in printed
    (folder / "b" / "set" / "state.json").unlink()
    for name in (folder, folder / "b" / "set"):
        assert run(name, "--output", tmp_path / "x", "--tokenizer", "byte") == 2
        printed = capsys.readouterr().err
        assert f"{folder}/b/set holds dataset_info.json and .arrow files; expected also state.json" in printed
    assert not list(tmp_path.glob("x*"))


def test_a_dataset_of_several_splits_within_a_folder_is_refused(tmp_path, capsys):
    import datasets

    folder, split = nested(tmp_path), datasets.Dataset.from_dict({"text": ["8"]})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(folder / "e")
    assert run(folder, "--output", tmp_path / "x", "--tokenizer", "byte") == 2
    assert f"{folder}/e is a saved DatasetDict with the splits test, train; expected one" in capsys.readouterr().err
