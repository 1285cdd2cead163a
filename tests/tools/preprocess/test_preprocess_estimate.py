"""What is expected before anything is read whole is about what there is: of rows too, which come in large groups."""

import gzip
import json
import re
import shutil
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from campaign import param
from data.raw import documents, inputs, units
from data.raw.reading import ReadOptions, Rejects
from program.errors import UserError
from tools.preprocess import estimate
from tools.preprocess.__main__ import main

READING = ReadOptions(jsonl_key="text", on_bad_document="stop", max_document_bytes=1 << 20, max_expansion=200)
TEXTS = [f"{number:05d} " * (number % 90) for number in range(24_000)]
TEXT_BYTES = sum(map(len, TEXTS))


@pytest.fixture(params=["jsonl", "gz", *map(param, ("zst", "parquet", "dataset")), "both"])
def source(request, tmp_path):
    """The same texts, of each kind."""
    import datasets

    table = pyarrow.table({"text": TEXTS, "other": [0.1 * number for number in range(len(TEXTS))]})
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    if request.param == "jsonl":
        (tmp_path / "in.jsonl").write_text(lines)
    if request.param == "gz":
        (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    if request.param == "zst":
        (tmp_path / "in.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    if request.param in ("parquet", "both"):
        pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=len(TEXTS))
    if request.param in ("dataset", "both"):
        datasets.Dataset(table).save_to_disk(tmp_path / "set")
    return [str(path) for path in sorted(tmp_path.iterdir())]


def read_whole(divided):
    """Bytes of text, and bytes that were counted as read."""
    batches = [batch for unit in divided for batch in documents.read(unit, READING, Rejects("stop"))]
    return sum(len(text) for batch in batches for text in batch.texts), sum(batch.source_bytes for batch in batches)


def test_what_is_expected_is_what_is_read(source):
    divided = units.divide(inputs.find(tuple(source)), 4 << 20)
    extent, sample = estimate.extent(divided), estimate.sample(divided, READING)
    text_bytes, read_bytes = read_whole(divided)
    assert text_bytes == len(source) * TEXT_BYTES
    packed = source[0].endswith(("gz", "zst"))  # of which a beginning tells little of all
    assert extent.text_bytes(sample) == pytest.approx(text_bytes, rel=0.4 if packed else 0.1)
    assert extent.to_read(sample) == pytest.approx(read_bytes, rel=0.1)
    if all(name.endswith(("jsonl", "parquet")) for name in source):
        assert extent.to_read(sample) == read_bytes == sum(unit.size for unit in divided)


def test_a_row_group_is_counted_as_it_is_read_from_its_middle_too(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "in.parquet", row_group_size=len(TEXTS))
    (unit,) = units.divide(inputs.find((str(tmp_path),)), 1 << 30)
    whole = list(documents.read(unit, READING, Rejects("stop")))
    assert {round(24 * batch.source_bytes / unit.size, 2) for batch in whole} == {1.0}
    assert list(documents.read(unit, READING, Rejects("stop"), whole[9].place)) == whole[9:]


def test_a_disk_with_half_the_room_is_refused(source, tmp_path, monkeypatch, capsys):
    """2 bytes a token, 28 a document."""
    free = len(source) * (2 * TEXT_BYTES + 30 * len(TEXTS)) // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert main([*source, "--output", str(tmp_path / "x"), "--tokenizer", "byte"]) == 2
    assert "Make room" in capsys.readouterr().err


def test_what_is_joined_needs_room_for_two(tmp_path, monkeypatch, capsys):
    """The joined shard is whole before those that it is made of are removed."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    free = 3 * (2 * TEXT_BYTES + 30 * len(TEXTS)) // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    command = [str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "x"), "--tokenizer", "byte"]
    for more in ("--merge", "--shuffle_docs=1"):
        assert main([*command, more]) == 2
        assert "Make room" in capsys.readouterr().err
    assert main(command) == 0


def test_what_was_read_of_a_dataset_before_is_counted_as_its_text(tmp_path, monkeypatch, capsys):
    import datasets

    from data.raw import hub

    monkeypatch.setattr(hub, "ROWS", 6_000)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "set")
    command = [str(tmp_path / "set"), "--output", str(tmp_path / "x"), "--tokenizer", "byte", "--workers", "1"]
    assert main(command) == 0
    for path in tmp_path.glob("x-00002-*"):
        path.unlink()
    capsys.readouterr()
    assert main(command) == 0
    printed = capsys.readouterr().err
    assert "continuing: 3 of 4 units are there" in printed
    total = re.search(r"tokenising: .*/([\d.]+)M ", printed)
    assert total and float(total[1]) == pytest.approx(TEXT_BYTES / 1e6, rel=0.05), printed


def test_the_rows_of_a_dataset_are_asked_for_once(tmp_path, monkeypatch):
    """Each of its steps is a part, of which a billion rows have a hundred thousand."""
    import datasets

    from data.raw import hub

    asked = []
    monkeypatch.setattr(hub, "ROWS", 100)
    step_rows = hub.step_rows
    monkeypatch.setattr(hub, "step_rows", lambda *name: asked.append(name) or step_rows(*name))
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "set")
    divided = units.divide(inputs.find((str(tmp_path / "set"),)), 1 << 20)
    assert estimate.extent(divided).rows == len(TEXTS)
    assert len(asked) == 1


def test_a_parquet_file_without_rows_is_no_input(tmp_path):
    with pyarrow.parquet.ParquetWriter(tmp_path / "in.parquet", pyarrow.schema([("text", pyarrow.string())])):
        pass
    with pytest.raises(UserError, match=r"no document in .*in\.parquet: its parquet files hold no rows"):
        units.divide(inputs.find((str(tmp_path),)), 1 << 20)
