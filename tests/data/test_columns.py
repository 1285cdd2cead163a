"""Documents in a column of csv and tsv files, and in fields within others, by every entrance."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig
from data.prepare import prepare
from data.raw import documents, inputs, pieces, units
from data.raw.csv_records import RecordScanner
from data.raw.reading import DocumentOffset, ReadOptions, Rejects
from data.shards import Shard
from program.errors import UserError
from tools.preprocess.__main__ import main

TEXTS = [
    "one ü",
    "two\nlines",
    'with "quotes", and commas',
    "\ttabs\t",
    "a\r\nb\n\n",
    '"',
    "x" * 200_000,
    "é" * 30,
    "end",
]
BOM = b"\xef\xbb\xbf"


def written(texts=TEXTS, delimiter=",", line_end="\r\n", quoting=csv.QUOTE_MINIMAL):
    """As Python's csv writes; texts in the middle of three columns."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end, quoting=quoting)
    writer.writerows([["id", "body", "a,b"], *([number, text, ""] for number, text in enumerate(texts))])
    return file.getvalue().encode()


def reading(**changes):
    options = {"jsonl_key": "text", "csv_column": "body", "on_bad_document": "stop", "max_document_bytes": 10**6}
    return ReadOptions(**options | {"max_expansion": 200} | changes)


def texts_of(path, unit_bytes=1 << 20, rejects=None, **changes):
    options = reading(**changes)
    rejects = rejects or Rejects("stop")
    divided = units.divide(inputs.find((str(path),)), unit_bytes)
    return [text for unit in divided for batch in documents.read(unit, options, rejects) for text in batch.texts]


def of_shards(shards):
    tokens = [token for shard in shards for token in shard.tokens.tolist()]
    return (
        bytes(255 if token == 256 else token for token in tokens)
        .decode("latin-1")
        .encode("latin-1")
        .split(b"\xff")[:-1]
    )


def by_paths(path, folder, **names):
    config = DataConfig(paths=(str(path),), tokenizer="byte", cache_dir=str(folder / "cache"), **names)
    return of_shards(prepare(config, lambda line: None).shards)


def by_preprocess(path, folder, capsys, *flags, **names):
    options = [word for name, value in names.items() for word in (f"--{name}", value)]
    if main([str(path), "--output", str(folder / "out/x"), "--tokenizer", "byte", *options, *flags]):
        raise UserError(capsys.readouterr().err)
    return of_shards(Shard(one.with_suffix("")) for one in sorted((folder / "out").glob("x-*.idx")))


def by_all(path, folder, capsys, **names):
    """What each entrance reads, or says."""
    found = []
    for read in (
        lambda: by_paths(path, folder, **names),
        lambda: [text.encode() for text in texts_of(path, **{"csv_column": None} | names)],
        lambda: by_preprocess(path, folder, capsys, **names),
    ):
        try:
            found.append(read())
        except UserError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", written()),
        ("a.csv", written(line_end="\n", quoting=csv.QUOTE_ALL)),
        ("a.csv", BOM + written(quoting=csv.QUOTE_ALL)),
        ("a.tsv", b"\n\r\n" + written(delimiter="\t")),
        ("a", b"id,body\n1,a\n2,b\n"),
        ("a.csv.gz", gzip.compress(written(), mtime=0)),
        ("a.tsv.bz2", bz2.compress(written(delimiter="\t"))),
        ("a.csv.xz", lzma.compress(BOM + written())),
        ("a.csv", written().removesuffix(b"\r\n")),
    ],
    ids=range(9),
)
def test_a_column_is_read_by_all(tmp_path, capsys, name, content):
    (tmp_path / name).write_bytes(content)
    expected = ["a", "b"] if name == "a" else TEXTS
    assert by_all(tmp_path / name, tmp_path, capsys, csv_column="body") == [[text.encode() for text in expected]] * 3


CELL = st.text(st.sampled_from('a",\r\n\tü '), max_size=8)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(CELL, CELL), max_size=12),
    delimiter=st.sampled_from(",\t"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    line_end=st.sampled_from(["\n", "\r\n"]),
    sizes=st.tuples(*[st.integers(1, 40)] * 2),
)
def test_any_cut_gives_what_pythons_csv_reads(tmp_path_factory, rows, delimiter, quoting, line_end, sizes):
    file = io.StringIO()
    if line_end == "\n":  # with it, a lone carriage return would stand without quotes, against RFC 4180
        quoting = csv.QUOTE_ALL
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=line_end)
    writer.writerows([("body", "other"), *rows])
    path = tmp_path_factory.mktemp("cut") / ("a.csv" if delimiter == "," else "a.tsv")
    path.write_bytes(file.getvalue().encode())
    expected = [first for first, _ in rows]
    assert texts_of(path, sizes[0], batch_bytes=sizes[1]) == expected
    options = reading(batch_bytes=sizes[1])
    for source in (path, path.with_name(path.name + ".gz")):
        if source.suffix == ".gz":
            source.write_bytes(gzip.compress(path.read_bytes()))
        (unit,) = units.divide(inputs.find((str(source),)), 1 << 20)
        batches = list(documents.read(unit, options, Rejects("stop")))
        assert sum(batch.source_bytes for batch in batches) == (unit.size if rows else 0)
        for number, batch in enumerate(batches):  # continued where it begins
            later = list(documents.read(unit, options, Rejects("stop"), DocumentOffset(*batch.place)))
            assert [one.texts for one in later] == [one.texts for one in batches[number:]]


@given(content=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_the_scanner_finds_the_same_ends_in_any_pieces(content, cuts):
    content = content.translate(bytes(b'a",\n\r"\n\t'[byte % 8] for byte in range(256)))
    whole = RecordScanner("csv", 0).ends(content)
    scanner, found = RecordScanner("csv", 0), []
    borders = sorted({0, len(content), *(cut for cut in cuts if cut <= len(content))})
    for start, stop in itertools.pairwise(borders):
        found += [start + end for end in scanner.ends(content[start:stop])]
    assert found == whole


def test_a_quote_within_a_field_without_quotes_is_a_letter(tmp_path):
    texts = ['5" disk', 'a 3" one', "x"]
    (tmp_path / "a.tsv").write_text("".join(f"{text}\tid\n" for text in ["body", *texts]))
    for unit_bytes in (1, 10, 1000):
        assert texts_of(tmp_path / "a.tsv", unit_bytes) == texts


def test_units_are_cut_where_records_begin(tmp_path):
    (tmp_path / "a.csv").write_bytes(written(['"\n"' * 50] * 40))
    divided = units.divide(inputs.find((str(tmp_path / "a.csv"),)), 1000)
    assert len(divided) > 5
    assert texts_of(tmp_path / "a.csv", 1000) == ['"\n"' * 50] * 40
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(written(['"\n"' * 50] * 40)))
    assert len(units.divide(inputs.find((str(tmp_path / "a.csv.gz"),)), 1000)) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"id,text\n1,a\n", 'a.csv: no column "body"; found: "id", "text". Set'),
        (b"id,text\n1,a\n", "Or leave the file out: name those that have it, as by a glob."),
        (b"id;body\n1;a\n", "csv.reader(sys.stdin, delimiter=';'))\" < IN > OUT`"),
        (b"id;body\n1;a\n", 'no column "body"; found: "id;body". Set'),
        (b"body,id,body\n1,a,2\n", 'column "body" twice'),
        (b"id,b\xf6dy,body\n1,a,b\n", "the header: byte 4 of the record is not UTF-8 text."),
        (b'id,"body\n1,a\n', "the header: a quote that is never closed."),
        (b"id,body\n1,a\n2,gr\xfc\xdfe\n", "a.csv:3 (byte 12): byte 4 of the record is not UTF-8 text."),
        (b"id,body\n1,a\n2\n", "a.csv:3 (byte 12): 1 fields, expected 2 as in the header"),
        (b"id,body\n1,a, b\n", "a.csv:2 (byte 8): 3 fields, expected 2 as in the header"),
        (b'id,body\n1,"a\n2,b\n', "a.csv:2 (byte 8): a quote that is never closed."),
        (b'id,body\n1,"a"b\n', "a.csv:2 (byte 8): not as RFC 4180 has it"),
        (b"id,body\n1,a\0b\n", "NUL byte"),
        (b"id,body\r1,a\r", "not as RFC 4180 has it"),
        (b"id,body\n1,a\n".decode().encode("utf-16"), "UTF-16 text"),
        (b"id,body\n", "no document with text"),
        (b"\n\r\n", "no document with text"),
        (b"", "empty"),
        (b"id,body\n1,\n", "no document with text"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_one_message(tmp_path, capsys, content, said):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError) as stopped:
        by_preprocess(tmp_path / "a.csv", tmp_path, capsys, csv_column="body")
    assert said in str(stopped.value)
    assert not list(tmp_path.glob("out/*.idx"))
    if "no document" not in said:
        with pytest.raises(UserError):
            by_paths(tmp_path / "a.csv", tmp_path, csv_column="body")


def test_bad_records_are_left_out_and_counted(tmp_path, capsys):
    (tmp_path / "a.csv").write_bytes(b'id,body\n1,a\n2\n3,\xff\n4,"b\nc"\n5,"d"e\n6,f\n7,"never')
    rejects = Rejects("skip")
    assert texts_of(tmp_path / "a.csv", rejects=rejects) == ["a", "b\nc", "f"]
    assert rejects.count == 4


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_longer_record_than_may_be_is_a_bad_one_and_not_held(tmp_path, name):
    content = written(["a", "x\n" * 5000, "b"])
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for batch_bytes in (50, 100_000):
        rejects = Rejects("skip")
        options = {"max_document_bytes": 4000, "batch_bytes": batch_bytes, "on_bad_document": "skip"}
        assert texts_of(tmp_path / name, rejects=rejects, **options) == ["a", "b"]
        assert rejects.count == 1 and "a document of more than 0.004 MB" in rejects.shown[0]


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    from data.raw import compressed

    monkeypatch.setattr(compressed, "ALLOWANCE_BYTES", 1 << 20)
    (tmp_path / "a.csv.bz2").write_bytes(bz2.compress(b"body\n" + b"\n" * 4_000_000 + b"a\n"))
    with pytest.raises(UserError, match=r"unpacks to more than .*raise data\.max_expansion"):
        list(pieces.read(inputs.file_source(tmp_path / "a.csv.bz2"), "body", 1))


def test_a_folders_tables_are_read_where_a_column_is_named(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "b.csv").write_text("id,body\n1,b\n")
    said = []
    assert [one.kind for one in inputs.find((str(folder),), say=said.append)] == ["jsonl"]
    assert "1 .csv" in said[0] and ".csv and .tsv files are read where --csv_column names a column" in said[0]
    assert by_preprocess(folder, tmp_path, capsys, csv_column="body") == [b"a", b"b"]
    (folder / "a.jsonl").unlink()
    with pytest.raises(UserError, match="files are read where --csv_column names a column"):
        inputs.find((str(folder),))
    with pytest.raises(UserError, match=r"files are read where data\.csv_column names a column"):
        inputs.find((str(folder),), "data.paths")


def test_the_command_that_writes_commas_is_right(tmp_path, capsys):
    (tmp_path / "a.csv").write_text('id;body\n1;"a;b"\n2;"c,d"\n')
    with pytest.raises(UserError) as stopped:
        by_preprocess(tmp_path / "a.csv", tmp_path, capsys, csv_column="body")
    command = str(stopped.value).partition("`")[2].partition("`")[0]
    command = command.replace("python", sys.executable).replace("IN", "a.csv").replace("OUT", "b.csv")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert texts_of(tmp_path / "b.csv") == ["a;b", "c,d"]


def test_another_column_is_other_work(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("text,body\na,b\n")
    assert by_preprocess(tmp_path / "a.csv", tmp_path, capsys) == [b"a"]
    with pytest.raises(UserError, match="csv_column: text there, body here"):
        by_preprocess(tmp_path / "a.csv", tmp_path, capsys, csv_column="body")
    assert by_paths(tmp_path / "a.csv", tmp_path) == [b"a"]
    assert by_paths(tmp_path / "a.csv", tmp_path, csv_column="body") == [b"b"]
    with pytest.raises(UserError, match="--csv_column '': expected the name of a field, found nothing"):
        by_preprocess(tmp_path / "a.csv", tmp_path, capsys, csv_column="")


ROWS = [
    {"doc": {"text": "one", "meta": {"x.y": "two"}}, "doc.id": "three"},
    {"doc": {"text": "four", "meta": {"x.y": "five"}}, "doc.id": "six"},
]


def nested(folder, kind):
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return folder / "a.jsonl"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
        return folder / "a.parquet"
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "set")
    return folder / "set"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_a_field_within_another_is_named_with_a_dot(tmp_path, capsys, kind):
    path = nested(tmp_path, kind)
    expected = {"doc.text": ["one", "four"], "doc.meta.x.y": ["two", "five"], "doc.id": ["three", "six"]}
    for key, texts in expected.items():
        assert texts_of(path, jsonl_key=key) == texts
    assert by_preprocess(path, tmp_path, capsys, "--merge", jsonl_key="doc.text") == []
    if kind != "saved":
        assert by_paths(path, tmp_path, jsonl_key="doc.text") == [b"one", b"four"]
    joined = tmp_path / "out" / "x_doc.text_document"
    assert of_shards([Shard(joined)]) == [b"one", b"four"]
    assert [
        one.prefix for one in prepare(DataConfig(paths=(str(tmp_path / "out/x"),), tokenizer="byte"), print).shards
    ] == [joined]
    with pytest.raises(UserError, match=r"no (field|column) \"body\".*doc\.text, doc\.meta\.x\.y, doc\.id"):
        texts_of(path, jsonl_key="body")
    with pytest.raises(UserError, match=r"\"doc\" holds further fields, expected text; found in it: text, meta\.x\.y"):
        texts_of(path, jsonl_key="doc")


def test_a_list_is_no_field_and_is_said_to_be_one(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [{"content": "a"}], "id": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(UserError, match=r"no (column|field) \"messages\.content\"; found: messages \(a list\), id"):
            texts_of(tmp_path / name, jsonl_key="messages.content")


def test_a_null_within_nested_columns_is_a_bad_document(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"doc": {"text": "a"}}, {"doc": None}, {"doc": {"text": None}}, {"doc": {"text": "b"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r'row group 0, row 1: column "doc\.text" is null, expected text'):
        texts_of(tmp_path / "a.parquet", jsonl_key="doc.text")
    rejects = Rejects("skip")
    assert texts_of(tmp_path / "a.parquet", jsonl_key="doc.text", rejects=rejects) == ["a", "b"]
    assert rejects.count == 2


def test_a_column_whose_own_name_has_a_dot_comes_first(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"doc": [{"text": "within"}], "doc.text": ["own"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", jsonl_key="doc.text") == ["own"]
    (tmp_path / "a.jsonl").write_text('{"doc": {"text": "within"}, "doc.text": "own"}\n{"doc": {"text": "within"}}\n')
    assert texts_of(tmp_path / "a.jsonl", jsonl_key="doc.text") == ["own", "within"]


def test_a_tokenizer_is_trained_on_a_column(tmp_path, capsys):
    (tmp_path / "a.csv").write_bytes(written([f"some words, {number} and more\nlines" for number in range(500)]))
    command = ["train", str(tmp_path / "a.csv"), "--output", str(tmp_path / "t.model"), "--vocab_size", "300"]
    assert main(command) == 2
    assert 'no column "text"; found: "id", "body", "a,b". Set --csv_column' in capsys.readouterr().err
    assert main([*command, "--csv_column", "body"]) == 0
    assert (tmp_path / "t.model").is_file()


def test_a_column_of_bytes_is_read_where_they_are_text(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": [b"gr\xc3\xbcn", b"a"]}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == ["gr\xfcn", "a"]
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"a", b"gr\xfcn"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match='row 1: byte 2 of column "text" is not UTF-8 text'):
        texts_of(tmp_path / "b.parquet")


def test_a_column_that_is_there_twice_is_not_chosen(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([["a"], ["b"], ["c"]], names=["text", "text", "id"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match='column "text" 2 times; found: text, text, id'):
        texts_of(tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", jsonl_key="id") == ["c"]


def test_what_stands_behind_a_packed_file_is_damage(tmp_path):
    content = b'{"text": "a"}\n'
    for name, packed in (("a.jsonl.bz2", bz2.compress(content)), ("a.jsonl.xz", lzma.compress(content))):
        (tmp_path / name).write_bytes(packed + packed + b"\0" * 8)
        assert texts_of(tmp_path / name) == ["a", "a"]
        (tmp_path / name).write_bytes(packed + b"garbage")
        with pytest.raises(UserError, match="truncated or damaged"):
            texts_of(tmp_path / name)
        (tmp_path / name).write_bytes(packed[:-3])
        with pytest.raises(UserError, match="truncated or damaged"):
            texts_of(tmp_path / name)


def test_an_lzma_archive_is_named(tmp_path):
    (tmp_path / "a.jsonl.lzma").write_bytes(lzma.compress(b'{"text": "a"}\n', lzma.FORMAT_ALONE))
    with pytest.raises(UserError, match=r"an \.lzma archive .*`xz -d`"):
        texts_of(tmp_path / "a.jsonl.lzma")
