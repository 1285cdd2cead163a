"""What a file holds decides how it is read, by every entrance: data.paths, data.stream, tools.preprocess."""

import bz2
import gzip
import json
import lzma
import os
import socket

import pytest

from campaign import param
from data.config import DataConfig
from data.prepare import prepare
from data.raw import documents, format, inputs, pieces, units
from data.raw.reading import ReadOptions, Rejects
from data.shards import Shard
from program.errors import UserError
from tools.preprocess.__main__ import main

TEXTS = ["one ü", "two\nlines", "three"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
PROSE = b"Dear reader, this is prose, with commas.\nIt goes on, and on, and ends.\nHere, too.\n"
CSV = b"id,name,text\n1,a,hello\n2,b,world\n3,c,x\n"
PRETTY = json.dumps({"text": "a", "id": 1}, indent=2).encode()
ARRAY = json.dumps([{"text": text} for text in TEXTS]).encode()


def packed(data):
    """Without the time of packing: names of tests have these bytes in them, and each test process makes its own."""
    return gzip.compress(data, mtime=0)


def zst(data):
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def parquet():
    import io

    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), file)
    return file.getvalue()


def of_paths(path, tmp_path):
    config = DataConfig(paths=(str(path),), tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    (shard,) = prepare(config, lambda line: None).shards
    return bytes(255 if token == 256 else token for token in shard.tokens.tolist()).split(b"\xff")[:-1]


def of_stream(path, tmp_path):
    reading = ReadOptions(jsonl_key="text", on_bad_document="stop", max_document_bytes=10**6, max_expansion=200)
    found = units.divide(inputs.find((str(path),), "data.stream"), 1 << 20)
    batches = (documents.read(unit, reading, Rejects("stop")) for unit in found)
    return [text.encode() for batch in batches for one in batch for text in one.texts]


def of_preprocess(path, tmp_path, capsys):
    if main([str(path), "--output", str(tmp_path / "out" / "x"), "--tokenizer", "byte"]):
        raise UserError(capsys.readouterr().err)
    (index,) = (tmp_path / "out").glob("x-*.idx")
    shard = Shard(index.with_suffix(""))
    return bytes(255 if token == 256 else token for token in shard.tokens.tolist()).split(b"\xff")[:-1]


def read_by_all(path, tmp_path, capsys):
    """What each entrance reads, or says."""
    found = []
    for read in (of_paths, of_stream, lambda *which: of_preprocess(*which, capsys)):
        try:
            found.append(read(path, tmp_path))
        except UserError as error:
            found.append(str(error).split(str(path), 1)[-1].strip())
    return found


@pytest.mark.parametrize(
    "name, pack",
    [
        ("a.gz", bytes),
        ("a.jsonl.gz", bytes),
        ("a.jsonl.zst", gzip.compress),
        ("a.zst", gzip.compress),
        ("a.jsonl", gzip.compress),
        ("a.jsonl", zst),
        ("a.jsonl.bz2", bz2.compress),
        ("a.jsonl.xz", lzma.compress),
        ("a.jsonl.xz", lambda data: lzma.compress(data[:20]) + bytes(8192) + lzma.compress(data[20:])),
        ("a", bytes),
        ("a.txt", bytes),
        ("a.csv", bytes),
        ("a.parquet", bytes),
        ("a.jsonl", lambda data: parquet()),
        ("a", lambda data: parquet()),
        ("a.json", lambda data: b"\xef\xbb\xbf" + data),
        ("a", lambda data: data + LINES[:0] + b"\n \n"),
    ],
)
def test_lines_are_lines_whatever_the_name_says(tmp_path, capsys, name, pack):
    (tmp_path / name).write_bytes(pack(LINES))
    assert read_by_all(tmp_path / name, tmp_path, capsys) == [[text.encode() for text in TEXTS]] * 3


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", PROSE),
        ("a.txt", CSV),
        ("a.md", b"a,b\nc,d\ne,f\n"),
        ("a", PROSE),
        ("a", b"Roses are red, violets\nare blue, my love\nis, as you\n"),
        ("a.txt", b'{"an": "object"} within prose\nand more\n'),
        ("a.md", b"[1] a reference\n[2] another\n"),
        ("a.py", b'x = {"a": 1}\n'),
        ("a.ipynb", PRETTY),
        ("a.txt", b"{\n  braces\n}\n"),
        ("a", b"1,2\n3,4\n5,6\n"),
    ],
)
def test_text_is_one_document(tmp_path, capsys, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_by_all(tmp_path / name, tmp_path, capsys) == [[content]] * 3


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.jsonl", ARRAY, "one JSON array"),
        ("a.json", b"[\n  " + ARRAY[1:], "one JSON array"),
        ("a.txt", ARRAY, "one JSON array"),
        ("a.json", PRETTY, "one JSON document over several lines"),
        ("a.jsonl.gz", packed(PRETTY), "one JSON document over several lines"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
        ("a.txt", b"text\0more", "a NUL byte at byte 4"),
        ("a.txt", "Grüße".encode("utf-16"), "UTF-16 text"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "UTF-16 text"),
        ("a.txt", LINES.decode().encode("utf-16-le"), "UTF-16"),
        ("a.gz", packed(packed(LINES)), "packed twice"),
        ("a.parquet.gz", packed(b"PAR1"), "unpack the file"),
        ("a.txt.gz", packed(b"x" * 257 + b"ustar\0"), "a tar archive"),
        ("a.txt", b"x" * 200_000 + b"\0", "byte 200000): not text: a NUL byte"),
        ("a.jsonl.xz", lzma.compress(LINES)[:-9], "truncated or damaged"),
        ("a.jsonl.bz2", bz2.compress(LINES)[:-9], "truncated or damaged"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, capsys, name, content, said):
    (tmp_path / name).write_bytes(content)
    for found in read_by_all(tmp_path / name, tmp_path, capsys):
        assert isinstance(found, str) and said.lower() in found.lower(), found


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_no_file_is_named_at_once(tmp_path, capsys, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind("a.jsonl")
    else:
        path.symlink_to("/dev/zero")
    for found in read_by_all(path, tmp_path, capsys):
        assert kind in found and "expected a regular file" in found
    for read in (of_stream, lambda *which: of_preprocess(*which, capsys)):
        with pytest.raises(UserError, match="expected a regular file"):
            read(tmp_path, tmp_path)  # within a folder


def test_an_archive_that_asks_for_much_memory_or_disk_is_refused(tmp_path, monkeypatch):
    from data.raw import compressed

    monkeypatch.setattr(compressed, "ALLOWANCE_BYTES", 1 << 20)
    for name, data in (
        ("a.jsonl.bz2", bz2.compress(LINES * 20_000)),
        ("a.jsonl.xz", lzma.compress(LINES * 20_000)),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=r"unpacks to more than .*raise data\.max_expansion"):
            list(pieces.read(inputs.file_source(tmp_path / name), "text", 1))
    large = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    (tmp_path / "b.xz").write_bytes(b"".join(_xz_head(LINES, large)))
    with pytest.raises(UserError, match="points back further than"):
        list(pieces.read(inputs.file_source(tmp_path / "b.xz"), "text", 200))


@pytest.mark.parametrize(("name", "pack"), [param(("a.jsonl.gz", gzip.compress)), ("a.jsonl.xz", lzma.compress)])
def test_an_archive_may_be_padded_with_zeros_but_not_for_a_terabyte(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(LINES) + b"\0" * 1000)
    assert list(pieces.read(inputs.file_source(path), "text", 200))
    os.truncate(path, 10**12)
    with pytest.raises(UserError, match=r"bytes of zeros.*truncated or damaged"):
        list(pieces.read(inputs.file_source(path), "text", 200))


def _xz_head(data, filters):
    """As LZMACompressor would with that dictionary, for which it would take ten times the memory."""
    small = lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 4096}])
    header = bytearray(small[12:24])  # size, flags, filter id, its size, dictionary, padding, CRC32
    assert header[2:4] == b"\x21\x01"
    header[4] = 36  # 1 GiB
    header[8:12] = _crc(bytes(header[:8]))
    return small[:12], bytes(header), small[24:]


def _crc(data):
    import zlib

    return zlib.crc32(data).to_bytes(4, "little")


def test_a_column_of_text_that_is_no_utf8_is_a_bad_document(tmp_path, capsys):
    """Writers of parquet do not check it."""
    import pyarrow
    import pyarrow.parquet

    offsets = pyarrow.py_buffer(b"".join(number.to_bytes(4, "little") for number in (0, 3, 5)))
    texts = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"one\xff\xfe"))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    for found in read_by_all(tmp_path / "a.parquet", tmp_path, capsys):
        assert isinstance(found, str) and 'row group 0, row 1: byte 0 of column "text" is not UTF-8 text' in found
    assert main([*map(str, (tmp_path / "a.parquet", "--output", tmp_path / "y", "--tokenizer", "byte")),
                 "--on_bad_document", "skip"]) == 0  # fmt: skip


@pytest.mark.parametrize("name", ["~no-user-of-this-name/a.jsonl", "\0", "a\0b.jsonl", "x" * 5000])
def test_a_name_that_cannot_be_one_is_one_message(tmp_path, capsys, name):
    for found in read_by_all(name, tmp_path, capsys):
        assert isinstance(found, str)


def test_a_file_is_known_without_reading_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(LINES)
        file.truncate(1 << 40)  # sparse
    with path.open("rb") as file:
        assert format.format_in(file, path) == ("jsonl", "", "")


def test_a_file_that_became_another_is_not_read_on(tmp_path):
    """Of the same size and time."""
    path, times = tmp_path / "a.jsonl", (10**9, 10**9)
    path.write_bytes(LINES)
    os.utime(path, times)
    (source,) = inputs.find((str(path),))
    path.write_bytes(LINES.replace(b"one", b"ONE"))
    os.utime(path, times)
    with pytest.raises(UserError, match="no longer the file that was there at the start: its beginning or end"):
        list(pieces.read(source, "text", 200))


def replaced(path, new):
    """By a file of the same size and time."""
    status = path.stat()
    assert len(new) == status.st_size
    path.write_bytes(new)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_preprocessing_is_not_continued_with_a_file_that_was_replaced(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    command = [str(path), "--output", str(tmp_path / "x"), "--tokenizer", "byte"]
    assert main(command) == 0
    replaced(path, LINES.replace(b"one", b"ONE"))
    assert main(command) == 2
    assert "inputs: 1 gone or changed, 1 new" in capsys.readouterr().err


def test_a_plan_of_an_earlier_version_is_continued(tmp_path, capsys):
    """It says nothing of the content of its inputs."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    command = [str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x"), "--tokenizer", "byte"]
    assert main(command) == 0
    path = tmp_path / "x.preprocess" / "plan.json"
    plan = json.loads(path.read_text())
    plan["inputs"] = [one.rpartition(", ends ")[0] + ")" for one in plan["inputs"]]
    path.write_text(json.dumps(plan))
    assert main(command) == 0
    command[0] = str(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").write_bytes(LINES)
    assert main(command) == 2


def test_streams_and_folders_of_datasets_are_known_by_content_too(tmp_path):
    from data.raw import hub
    from data.streaming.opening import fingerprint

    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    before = fingerprint(inputs.find((str(path),))), hub._state_of(tmp_path)
    assert before == (fingerprint(inputs.find((str(path),))), hub._state_of(tmp_path))
    replaced(path, LINES.replace(b"one", b"ONE"))
    after = fingerprint(inputs.find((str(path),))), hub._state_of(tmp_path)
    assert before[0] != after[0] and before[1] != after[1]


@pytest.mark.parametrize("read", [of_paths, of_stream])
def test_a_zst_with_a_window_of_2_gib_is_read_and_of_a_larger_one_it_is_said(read, tmp_path):
    import zstandard

    path = tmp_path / "a.jsonl.zst"
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    data = compressor.compress(LINES) + compressor.flush()
    assert zstandard.get_frame_parameters(data).window_size == 2 << 30
    path.write_bytes(data)
    assert read(path, tmp_path) == [text.encode() for text in TEXTS]
    path.write_bytes(data[:5] + b"\xf8" + data[6:])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst: points back further than the 2,048 MiB .* zstd --long=31"):
        read(path, tmp_path)
