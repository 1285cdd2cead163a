"""What is in the bucket is whole, whatever was killed, given up, taken away or claimed on the way."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import buckets
from buckets import BUCKET, Request, Server
from program.buckets import client, transfer
from small_checkpoints import committed
from training.checkpoint import folders
from training.checkpoint.bucket import process, stored, uploading
from training.checkpoint.bucket.uploading import UploadOrder
from training.checkpoint.format.manifest import MANIFEST, read_manifest
from training.checkpoint.format.verify import damages
from training.checkpoint.lineage import read_commit

NUMBERS = itertools.count()


@pytest.fixture
def url(s3: Server) -> Iterator[str]:
    """A prefix of its own, claimed by the start "me"."""
    with buckets.environment(s3):
        url = f"s3://{BUCKET}/uploading/{next(NUMBERS)}"
        uploading.claim(url, "me")
        yield url


def order_of(root: Path, url: str, **more: object) -> UploadOrder:
    return UploadOrder(**{"root": str(root), "url": url, "attempt": "me", "keep": 2, **more})  # type: ignore[arg-type]


def settle(order: UploadOrder) -> None:
    """As the first node's program does, until there is nothing to do."""
    while (view := uploading.look(order)).lacking:
        uploading.upload(order, view.lacking[0].path)
    for one in view.removable:
        uploading.remove(order, one)


def whole(url: str, folder: Path) -> dict[int, str]:
    """The seed in each complete checkpoint of a bucket, by iteration; each must be whole, byte by byte."""
    found = {}
    for one in stored.stored(stored.root_of(url)):
        assert one.is_complete
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        stored.fetched(one, folder, one.files)
        assert damages(folder, "hashes") == []
        found[one.iteration] = json.loads((folder / folders.STATE).read_text())["seed"]
    return found


def test_the_newest_first_and_what_retention_keeps(url: str, tmp_path: Path) -> None:
    root, order = tmp_path / "checkpoints", order_of(tmp_path / "checkpoints", url, retain_interval=10)
    parent = None
    for iteration in (10, 20, 25, 30, 35):
        parent = committed(root, iteration, parent).name
    assert [one.iteration for one in uploading.look(order).lacking] == [35, 30, 20, 10]
    settle(order)
    assert sorted(whole(url, tmp_path / "seen")) == [10, 20, 30, 35]
    committed(root, 45, parent)
    settle(order)
    assert sorted(whole(url, tmp_path / "seen")) == [10, 20, 30, 35, 45]
    committed(root, 47, "iter_0000045")
    settle(order)
    assert sorted(whole(url, tmp_path / "seen")) == [10, 20, 30, 45, 47]


def test_a_future_that_was_given_up_is_not_mixed_with_the_next(url: str, tmp_path: Path) -> None:
    """The same iteration and sizes, other bytes: half of the first upload is there when the second begins."""
    root, order = tmp_path / "checkpoints", order_of(tmp_path / "checkpoints", url)
    committed(root, 1)
    settle(order)
    first = committed(root, 2, "iter_0000001", seed=1)
    half = f"{stored.root_of(url)}/{stored.name_of(first, read_commit(first, 2).hash)}/rank_00000.bin"
    transfer.upload(first / "rank_00000.bin", half)
    folders.point_to(root / "iter_0000001")
    committed(root, 2, "iter_0000001", seed=2)
    settle(order)
    assert whole(url, tmp_path / "seen") == {1: 0, 2: 2}
    assert not client.listed(half), "what was left of the first is removed"
    committed(root, 2, "iter_0000001", seed=3)
    settle(order)
    assert whole(url, tmp_path / "seen") == {1: 0, 2: 3}, "and one that had come whole"


def test_a_killed_upload_goes_on_where_it_was(s3: Server, url: str, tmp_path: Path) -> None:
    root, order = tmp_path / "checkpoints", order_of(tmp_path / "checkpoints", url)
    committed(root, 1, sizes=(900, 800, 700))

    def refuse(request: Request) -> buckets.Failure | None:
        return "denied" if request.method == "PUT" and "state.json" in request.path else None

    with buckets.proxied(s3, refuse) as (before, proxy), buckets.environment(before):
        with pytest.raises(PermissionError, match=r"403 AccessDenied"):
            settle(order)
        assert stored.newer(None, url) == [], "there is no checkpoint without its manifest"
        sent = [one.path for one in proxy.requests if one.method == "PUT"]
        proxy.rule = lambda _: None
        settle(order)
        again = [one.path for one in proxy.requests if one.method == "PUT"][len(sent) :]
    assert not [path for path in again if "rank_" in path] and whole(url, tmp_path / "seen") == {1: 0}
    assert again[-2].endswith("manifest.json") and again[-1].endswith("latest"), "last of all"


def test_each_node_sends_its_share(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "OTHERS_S", 0.0)
    root = tmp_path / "checkpoints"
    path = committed(root, 1, sizes=(900, 800, 700))
    first, second = (order_of(root, url, node=node, nodes=2) for node in (0, 1))
    with pytest.raises(TimeoutError, match="files of other nodes have not come"):
        uploading.upload(first, path)
    uploading.upload(second, path)
    assert not stored.newer(None, url)
    uploading.upload(first, path)
    assert whole(url, tmp_path / "seen") == {1: 0}


def test_local_retention_leaves_what_is_on_its_way(url: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    path = committed(root, 1)
    uploading.pin(root, path)
    committed(root, 2, path.name, keep=1)
    committed(root, 3, "iter_0000002", keep=1)
    assert [one.name for one in folders.complete(root)] == ["iter_0000001", "iter_0000003"]
    assert folders.recover(root) == []
    committed(root, 4, "iter_0000003", keep=1)
    assert [one.name for one in folders.complete(root)] == ["iter_0000004"], "of a killed start"


def test_a_checkpoint_that_is_replaced_on_its_way_is_not_mixed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "FILES_AT_ONCE", 1)
    root, order = tmp_path / "checkpoints", order_of(tmp_path / "checkpoints", url)
    path = committed(root, 1, seed=1, sizes=(700, 10))
    replaced = []

    def replace(_: int) -> None:
        if not replaced:
            replaced.append(committed(root, 1, seed=2, sizes=(700, 10)))

    with pytest.raises(FileNotFoundError):
        uploading.upload(order, path, replace)
    assert not stored.newer(None, url)
    settle(order)
    assert whole(url, tmp_path / "seen") == {1: 2}


def test_damage_is_not_uploaded(url: str, tmp_path: Path) -> None:
    order = order_of(tmp_path / "checkpoints", url)
    path = committed(tmp_path / "checkpoints", 1)
    data = bytearray((path / "rank_00000.bin").read_bytes())
    data[3] ^= 1
    (path / "rank_00000.bin").write_bytes(data)
    with pytest.raises(OSError, match=f"{path}/rank_00000.bin: expected hash"):
        settle(order)
    assert not stored.newer(None, url)


def test_another_start_takes_the_prefix_over(url: str, tmp_path: Path) -> None:
    order = order_of(tmp_path / "checkpoints", url)
    committed(tmp_path / "checkpoints", 1)
    uploading.claim(url, "another")
    with pytest.raises(OSError, match=r"another start writes there now, on .*, attempt another"):
        settle(order)
    assert not stored.newer(None, url)


def test_a_listing_that_lags_hides_nothing_and_deletes_nothing(s3: Server, url: str, tmp_path: Path) -> None:
    """It shows half of the second checkpoint, which has come whole since."""
    root, order = tmp_path / "checkpoints", order_of(tmp_path / "checkpoints", url)
    committed(root, 1)
    settle(order)
    second = committed(root, 2, "iter_0000001")
    target = f"{stored.root_of(url)}/{stored.name_of(second, read_commit(second, 2).hash)}"
    transfer.upload(second / "rank_00000.bin", f"{target}/rank_00000.bin")
    with buckets.proxied(s3) as (before, proxy), buckets.environment(before):
        assert [one.iteration for one in uploading.look(order).lacking] == [2]
        proxy.rule = lambda request: "stale" if request.is_listing else None
        uploading.upload(order, second)
        uploading.upload(order, second)  # once more, by a start that does not see it
        assert [one.iteration for one in stored.newer(None, stored.root_of(url))] == [2, 1], "latest names it"
        client.write(f"{stored.root_of(url)}/latest", b"iter_0000001\n")
        shutil.rmtree(second)
        for one in uploading.look(order).removable:
            uploading.remove(order, one)
    assert whole(url, tmp_path / "seen") == {1: 0, 2: 0}


def test_a_listing_from_before_all_checkpoints_begins_no_run_anew(s3: Server, url: str, tmp_path: Path) -> None:
    root, order = tmp_path / "checkpoints", order_of(tmp_path / "checkpoints", url)
    committed(root, 1)
    with buckets.proxied(s3) as (before, proxy), buckets.environment(before):
        assert not stored.newer(None, stored.root_of(url))
        settle(order)
        proxy.rule = lambda request: "stale" if request.is_listing else None
        [found] = stored.newer(None, stored.root_of(url))
        (tmp_path / "there").mkdir()
        stored.fetched(found, tmp_path / "there", [MANIFEST, *read_manifest(root / "iter_0000001").files])
    assert not damages(tmp_path / "there", "hashes")


def test_the_program_says_what_it_does(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    committed(tmp_path / "checkpoints", 1)
    heard = iter([True, False, None])
    monkeypatch.setattr(process, "_heard", lambda _: next(heard))
    assert process.first_node(order_of(tmp_path / "checkpoints", url)) == 0
    said = [json.loads(line)["what"] for line in capfd.readouterr().out.splitlines()]
    assert said == ["sent", "sent", "uploaded", "idle"]


def test_a_fetch_goes_on_where_it_was(s3: Server, url: str, tmp_path: Path) -> None:
    order = order_of(tmp_path / "checkpoints", url)
    path = committed(tmp_path / "checkpoints", 1)
    settle(order)
    [one] = stored.newer(None, url)
    (tmp_path / "half").mkdir()
    shutil.copyfile(path / "rank_00000.bin", tmp_path / "half/rank_00000.bin")
    (tmp_path / "half/rank_00001.bin.tmp-1").write_bytes(b"a part")
    with buckets.proxied(s3) as (before, proxy), buckets.environment(before):
        stored.fetched(one, tmp_path / "half", [name for name in one.files if name.endswith(".bin")])
    assert {name for name in ("rank_00000", "rank_00001") if any(name in one.path for one in proxy.requests)} == {
        "rank_00001"
    }
    assert (tmp_path / "half/rank_00001.bin").read_bytes() == (path / "rank_00001.bin").read_bytes()
