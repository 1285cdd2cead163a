"""Tools read from and write to a bucket what they read from and write to folders."""

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import buckets
from buckets import BUCKET, Server
from models.families import TINY
from program.buckets import client, names, transfer
from program.buckets.client import ObjectFacts
from program.errors import UserError
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main as convert
from tools.inspect_checkpoint.__main__ import main as inspect
from tools.reshard.__main__ import main as reshard
from tools.shared import bucket_paths
from tools.shared.held_checkpoint import find
from training.checkpoint.bucket import uploading
from training.checkpoint.bucket.uploading import UploadOrder

URL = f"s3://{BUCKET}/tools"


@pytest.fixture(scope="module")
def folder(s3: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf/, ours/ converted from it, and both in the bucket: the latter as a run's newest."""
    folder = tmp_path_factory.mktemp("tools")
    write_folder(folder / "hf", TINY["llama2_tiny"])
    assert convert(["import", str(folder / "hf"), str(folder / "ours"), "--no_logits"]) == 0
    (folder / "ours").rename(folder / "iter_0000000")
    with buckets.environment(s3):
        for path in (folder / "hf").iterdir():
            transfer.upload(path, f"{URL}/hf/{path.name}")
        uploading.claim(f"{URL}/run", "me")
        order = UploadOrder(root=str(folder), url=f"{URL}/run", attempt="me")
        uploading.upload(order, folder / "iter_0000000")
    return folder


@pytest.fixture
def scratch(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tools leave nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with buckets.environment(s3):
        yield tmp_path


def in_bucket(url: str) -> dict[str, str]:
    return {names.last(one.url): _hash(client.opened(one).readall()) for one in client.listed(f"{url}/")}


def in_folder(folder: Path) -> dict[str, str]:
    return {path.name: _hash(path.read_bytes()) for path in folder.iterdir()}


def _hash(data: bytes | None) -> str:
    return hashlib.sha256(data or b"").hexdigest()


def test_a_hugging_face_folder_there_and_back(folder: Path, scratch: Path, s3: Server) -> None:
    with buckets.proxied(s3) as (before, proxy), buckets.environment(before):
        assert convert(["import", f"{URL}/hf", f"{URL}/imported", "--no_logits", "--verify"]) == 0
        assert [one.path for one in proxy.requests if one.method == "PUT"][-1].endswith("imported/manifest.json")
        assert convert(["export", f"{URL}/imported", f"{URL}/exported"]) == 0
        assert [one.path for one in proxy.requests if one.method == "PUT"][-1].endswith("exported/config.json")
    assert convert(["export", str(folder / "iter_0000000"), str(scratch / "local")]) == 0
    assert in_bucket(f"{URL}/exported") == in_folder(scratch / "local")
    assert not list(scratch.glob("triplane-written-*"))


def test_reshard_reads_a_run_and_writes_a_folder(folder: Path, scratch: Path) -> None:
    flags = ["--dtype", "float16", "--verify"]
    assert reshard([f"{URL}/run", f"{URL}/resharded", *flags]) == 0
    assert reshard([str(folder / "iter_0000000"), str(scratch / "local"), *flags]) == 0
    assert in_bucket(f"{URL}/resharded") == in_folder(scratch / "local")


def test_what_is_there_is_not_written_over(folder: Path, scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(["export", f"{URL}/run", f"{URL}/hf"]) == 2
    assert f"HF_FOLDER {URL}/hf: already there" in capsys.readouterr().err
    assert convert(["import", f"{URL}/nothing", f"{URL}/new"]) == 2
    assert f"{URL}/nothing: nothing is there" in capsys.readouterr().err


def test_inspect_fetches_tensors_where_they_are_asked_for(
    folder: Path, scratch: Path, s3: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetched() -> int:
        return sum(".bin" in one.path and one.method == "GET" for one in proxy.requests)

    with buckets.proxied(s3) as (before, proxy), buckets.environment(before):
        assert inspect([f"{URL}/run", "--list"]) == 0 and inspect([f"{URL}/run"]) == 0
        assert "output_layer.weight" in capsys.readouterr().out and fetched() == 0
        assert inspect([f"{URL}/run", "--verify", "hashes"]) == 0 and fetched() > 0
        proxy.rule = lambda _: "denied"
        assert inspect([f"{URL}/run"]) == 2
        assert f"{URL}/run/: list: 403 AccessDenied" in capsys.readouterr().err


def test_an_object_whose_name_leads_elsewhere(scratch: Path) -> None:
    named = [ObjectFacts(f"{URL}/hostile/a/../../../x", 2, "", 0)]
    with pytest.raises(UserError, match="would lie outside of the folder"):
        bucket_paths._fetched(named, f"{URL}/hostile", scratch / "fetched")
    assert not (scratch.parent / "x").exists()


def test_one_door_for_all_that_compute(folder: Path, scratch: Path) -> None:
    """Evaluate, generate and parity find their checkpoint by it."""
    assert in_folder(find(Path(f"{URL}/run"))) == in_folder(folder / "iter_0000000")


def test_a_path_that_was_a_url() -> None:
    assert names.of_path(Path("s3://bucket/a/b")) == "s3://bucket/a/b"
    assert names.of_path(Path("runs/a")) is None and names.of_path(Path("/s3/a")) is None
