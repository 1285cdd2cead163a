"""Preprocessing out of a bucket and into one gives the shards that it gives on a disk."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import buckets
from buckets import BUCKET, Failure, Request, Server
from program.buckets import client, names, transfer
from tools.preprocess.__main__ import main

URL = f"s3://{BUCKET}/preprocess"
COMMON = ("--tokenizer", "byte", "--unit_mb", "0.02", "--workers", "2")


@pytest.fixture
def server(s3: Server) -> Iterator[Server]:
    with buckets.environment(s3):
        yield s3


@pytest.fixture
def raw(server: Server, tmp_path: Path) -> Path:
    """Text in a folder, and the same in the bucket."""
    (tmp_path / "raw").mkdir()
    for number in range(2):
        lines = (json.dumps({"text": f"document {number} {line} " * (line % 7 + 1)}) for line in range(400))
        path = tmp_path / "raw" / f"{number}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        transfer.upload(path, f"{URL}/raw/{path.name}")
    return tmp_path / "raw"


def objects(url: str) -> dict[str, bytes]:
    return {names.last(one.url): client.read(one.url, one.size) for one in client.listed(url)}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def without_source(found: dict[str, bytes]) -> dict[str, object]:
    """Manifests say where the text came from."""
    return {name: json.loads(data) | {"source": ()} if name.endswith(".json") else data for name, data in found.items()}


@pytest.mark.parametrize("way", [(), ("--merge", "--shuffle_docs", "3")])
def test_shards_are_those_of_a_disk(raw: Path, tmp_path: Path, way: tuple[str, ...]) -> None:
    there, work = f"{URL}/shards{len(way)}/x", str(tmp_path / "work")
    assert main([f"{URL}/raw", "--output", there, "--work_dir", work, *COMMON, *way]) == 0
    assert main([str(raw), "--output", str(tmp_path / "here" / "x"), *COMMON, *way]) == 0
    assert without_source(objects(there)) == without_source(files(tmp_path / "here"))
    assert [path.suffix for path in Path(work).iterdir()] == [".lock"]


def test_an_upload_that_was_cut_off_goes_on(
    raw: Path, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [f"{URL}/raw", "--output", f"{URL}/cut/x", "--work_dir", str(tmp_path / "work"), *COMMON]

    def rule(request: Request) -> Failure | None:
        return "expired" if request.method == "PUT" and "x-00002" in request.path and ".idx" in request.path else None

    with buckets.proxied(server, rule) as (before, proxy), buckets.environment(before):
        assert main(command) == 2
        assert "400 ExpiredToken" in capsys.readouterr().err
        there = objects(f"{URL}/cut/x")
        assert "x-00001-of-00004.json" in there and "x-00002-of-00004.bin" in there
        assert "x-00002-of-00004.json" not in there, "a manifest before what it describes"
        proxy.rule = lambda _: None
        other = [
            *command,
            "--append_eod",
            "false",
            "--overwrite",
        ]  # other shards: none of the first ones counts as uploaded
        assert main(other) == 0
        assert main([str(raw), "--output", str(tmp_path / "other" / "x"), *other[5:-1]]) == 0
        assert without_source(objects(f"{URL}/cut/x")) == without_source(files(tmp_path / "other"))
        client.remove([one.url for one in client.listed(f"{URL}/cut/x")])
        proxy.rule = rule
        assert main(command) == 2
        proxy.rule = lambda _: None
        proxy.requests.clear()
        assert main(command) == 0
        again = {one.path.rpartition("/")[2] for one in proxy.requests if one.method == "PUT"}
    assert not any(name.startswith(("x-00000", "x-00001")) for name in again), "what is there is not sent again"
    assert main([str(raw), "--output", str(tmp_path / "here" / "x"), *COMMON]) == 0
    assert without_source(objects(f"{URL}/cut/x")) == without_source(files(tmp_path / "here"))


def test_what_is_there_is_not_harmed(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [f"{URL}/raw", "--output", f"{URL}/kept/x", "--work_dir", str(tmp_path / "work"), *COMMON]
    assert main(command) == 0
    before = objects(f"{URL}/kept/x")
    foreign = ("x-of-another", "x.json", "x_en_text_document.bin", "x_en_text_document.idx", "x.bin", "x.idx")
    for name in foreign:
        client.write(f"{URL}/kept/{name}", b"not ours")
    (tmp_path / "work" / "notes.json").write_text("not ours")
    assert main(command) == 2 and "is there already" in capsys.readouterr().err
    assert main([*command, "--append_eod", "false", "--overwrite"]) == 0
    after = objects(f"{URL}/kept/x")
    assert {after.pop(name) for name in foreign} == {b"not ours"}
    assert after.keys() == before.keys() and after != before
    assert (tmp_path / "work" / "notes.json").read_text() == "not ours"
    assert main([*command, "--part", "0/2"]) == 2 and "--part with --output in a bucket" in capsys.readouterr().err
    with buckets.environment(Server("http://127.0.0.1:9", 0), TRIPLANE_BUCKET_PATIENCE_S="0"):
        assert main(command) == 2
    assert "EndpointConnectionError" in capsys.readouterr().err


def test_verify_names_damage_in_a_bucket(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = f"{URL}/damaged/x"
    assert main([f"{URL}/raw", "--output", there, "--work_dir", str(tmp_path / "work"), *COMMON]) == 0
    assert main(["verify", there]) == 0 and main(["verify", f"{URL}/damaged"]) == 0
    (first, second, *_) = (one.url for one in client.listed(there) if one.url.endswith(".bin"))
    data = bytearray(client.read(first, 1 << 20))
    data[100] ^= 1
    client.write(first, bytes(data))
    for ending in ("bin", "idx", "json"):
        client.remove([f"{second.removesuffix('bin')}{ending}"])
    capsys.readouterr()
    assert main(["verify", there]) == 1
    said = capsys.readouterr().out
    assert f"{first}: bytes 0 to {len(data)} are not what was written" in said
    assert f"{second.removesuffix('.bin')} is missing" in said
    assert main(["verify", f"{URL}/nothing"]) == 2
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("triplane-verify-*"))
