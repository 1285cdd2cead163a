"""Objects are found, read and written whatever an S3 server answers on the way; or one error says why not."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import buckets
from buckets import BUCKET, Failure, Request, Server
from program.buckets import client, names, transfer

URL = f"s3://{BUCKET}"


def failing(count: int, failure: Failure, method: str = "", part: str = "") -> buckets.Rule:
    """The first ``count`` requests of a kind fail."""
    left = [count]

    def rule(request: Request) -> Failure | None:
        if left[0] and method in request.method and part in request.path:
            left[0] -= 1
            return failure
        return None

    return rule


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with buckets.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    """SeaweedFS; another one that a test names."""
    found: Server = request.getfixturevalue(getattr(request, "param", "s3"))
    with buckets.environment(found):
        client.write(f"{URL}/read/hundred", bytes(range(100)))
    return found


on_both = pytest.mark.parametrize("server", ["s3", "moto"], indirect=True)
"""What two projects have made of AWS' documents: what S3 says of objects, and what it promises of writes."""


@on_both
def test_reads_ranges_of_the_object_that_was_found(server: Server) -> None:
    with buckets.environment(server):
        found = client.facts(f"{URL}/read/hundred")
        assert found.size == 100 and found.etag and found.changed_ns
        file = client.opened(found)
        assert file.read_range(10, 20) == bytes(range(10, 20))
        buffered = io.BufferedReader(file, 16)
        assert buffered.seek(-5, os.SEEK_END) == 95 and buffered.read() == bytes(range(95, 100))
        client.write(f"{URL}/read/other", b"first")
        opened = client.opened(client.facts(f"{URL}/read/other"))
        assert opened.read_range(0, 5) == b"first"
        client.write(f"{URL}/read/other", b"later")
        with pytest.raises(OSError, match="read bytes 0 to 5") as caught:
            opened.read_range(0, 5)
        assert caught.value.errno == 116 and caught.value.filename == f"{URL}/read/other"


@on_both
def test_lists_by_the_beginning_of_names(server: Server) -> None:
    with buckets.environment(server):
        for name in ("list/web-1.idx", "list/web-2.idx", "list/wiki.idx", "list/deep/web-3.idx", "listed"):
            client.write(f"{URL}/{name}", name.encode())
        assert [one.url for one in client.listed(f"{URL}/list/web")] == [
            f"{URL}/list/web-1.idx",
            f"{URL}/list/web-2.idx",
        ]
        assert len(client.listed(f"{URL}/list/")) == 4
        assert client.listed(f"{URL}/nothing/here") == []
        with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
            client.listed("s3://no-such-bucket/x")


@on_both
def test_creates_an_object_once(server: Server) -> None:
    with buckets.environment(server):
        client.remove([f"{URL}/created"])
        assert client.create(f"{URL}/created", b"one")
        assert client.create(f"{URL}/created", b"one"), "an answer that was lost"
        assert not client.create(f"{URL}/created", b"two")
        assert client.read(f"{URL}/created", 10) == b"one"
        client.remove([f"{URL}/created", f"{URL}/created"])
        with pytest.raises(FileNotFoundError, match="look up"):
            client.facts(f"{URL}/created")


@pytest.mark.parametrize("failure", ["500", "503", "truncated", "reset", "lost"])
def test_what_passes_is_tried_again(
    server: Server, tmp_path: Path, failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    data = os.urandom(200_000)
    (tmp_path / "up").write_bytes(data)
    with buckets.proxied(server) as (before, proxy), buckets.environment(before):
        for at, act in enumerate((_up, _down, _list, _create, _remove)):
            proxy.rule = failing(3, failure)
            act(tmp_path, data)
            assert len(proxy.failures) >= (at + 1) * (1 if failure == "truncated" else 3), act


def _up(folder: Path, data: bytes) -> None:
    assert transfer.upload(folder / "up", f"{URL}/faulty/file").size == len(data)


def _down(folder: Path, data: bytes) -> None:
    transfer.download(client.facts(f"{URL}/faulty/file"), folder / "down")
    assert (folder / "down").read_bytes() == data


def _list(folder: Path, data: bytes) -> None:
    assert [one.size for one in client.listed(f"{URL}/faulty/fi")] == [len(data)]


def _create(folder: Path, data: bytes) -> None:
    assert client.create(f"{URL}/faulty/new", b"all of it")


def _remove(folder: Path, data: bytes) -> None:
    client.remove([f"{URL}/faulty/new", f"{URL}/faulty/file"])
    assert not client.listed(f"{URL}/faulty/")


@pytest.mark.parametrize(("failure", "kind", "said"), [
    ("denied", PermissionError, "403 AccessDenied (made to fail). Give the credentials this right"),
    ("expired", PermissionError, "400 ExpiredToken (made to fail). The credentials have expired: renew them"),
])  # fmt: skip
def test_what_does_not_pass_is_said_at_once(server: Server, failure: Failure, kind: type[OSError], said: str) -> None:
    with buckets.proxied(server, lambda _: failure) as (before, proxy), buckets.environment(before):
        with pytest.raises(kind) as caught:
            client.write(f"{URL}/never", b"x")
        assert said in str(caught.value) and caught.value.filename == f"{URL}/never"
        assert len(proxy.requests) == 1


def test_patience_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    with (
        buckets.proxied(server, lambda _: "503") as (before, _),
        buckets.environment(before, TRIPLANE_BUCKET_PATIENCE_S="0.5"),
        pytest.raises(OSError, match=r"list: 503 SlowDown"),
    ):
        client.listed(f"{URL}/x")


def test_a_server_that_is_not_there(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    with (
        buckets.environment(Server("http://127.0.0.1:9", 0), TRIPLANE_BUCKET_PATIENCE_S="0"),
        pytest.raises(OSError, match="AWS_ENDPOINT_URL") as caught,
    ):
        client.facts(f"{URL}/x")
    assert not isinstance(caught.value, PermissionError), "a start takes that for a mistake"


@pytest.mark.parametrize("size", [0, 5, 40 << 20])
@on_both
def test_files_go_up_and_come_down_whole(server: Server, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "up").write_bytes(data)
    with buckets.proxied(server) as (before, proxy), buckets.environment(before):
        found = transfer.upload(tmp_path / "up", f"{URL}/whole/{size}")
        assert any("uploadId" in one.path for one in proxy.requests) == (size > 32 << 20), "multipart"
        through: list[int] = []
        transfer.download(found, tmp_path / "down", through.append)
    assert (tmp_path / "down").read_bytes() == data and sum(through) == size
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["down", "up"]


@on_both
def test_a_part_that_fails_is_sent_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "up").write_bytes(os.urandom(40 << 20))
    with (
        buckets.proxied(server, failing(1, "500", "PUT", "partNumber=2")) as (before, proxy),
        buckets.environment(before),
    ):
        transfer.upload(tmp_path / "up", f"{URL}/again/file")
    assert sum("partNumber" in one.path for one in proxy.requests) == 6


@on_both
def test_a_killed_multipart_upload_leaves_no_object(server: Server, tmp_path: Path) -> None:
    (tmp_path / "up").write_bytes(os.urandom(40 << 20))

    def rule(request: Request) -> Failure | None:
        return "denied" if "partNumber=3" in request.path else None

    with buckets.proxied(server, rule) as (before, _), buckets.environment(before):
        with pytest.raises(PermissionError, match="upload: 403 AccessDenied"):
            transfer.upload(tmp_path / "up", f"{URL}/half/file")
        assert not client.listed(f"{URL}/half/")


@pytest.mark.parametrize(("url", "said"), [
    ("s3://KEY:HUSH@bucket/x", "credentials do not belong in a URL"), ("s3:///x", "found no bucket"),
    ("s3://bucket/x?X-Amz-Signature=1", "found a query"),
])  # fmt: skip
def test_urls_that_are_none(url: str, said: str) -> None:
    found = names.problem(url)
    assert found is not None and said in found and "HUSH" not in found


def test_what_is_a_url() -> None:
    assert names.is_url("s3://bucket/key") and names.is_url("gs://b/k") and names.is_url("hf://datasets/O/N/f.jsonl")
    assert not names.is_url("hf://owner/dataset") and not names.is_url("corpus/web") and not names.is_url("s3:/x")
    assert names.problem("s3://bucket/key") is None


def test_a_forked_process_does_not_take_the_parents_connections(server: Server) -> None:
    """As workers and ranks are forked from a process that has looked into a bucket."""
    with buckets.environment(server):
        client.write(f"{URL}/fork/parent", b"0")
        for number in range(3):
            child = os.fork()
            if not child:
                try:
                    client.write(f"{URL}/fork/child", b"%d" % number)
                    inherited = client._made("s3", os.getppid())._loop._selector
                    for key in list(inherited.get_map().values()):
                        inherited.unregister(key.fileobj)  # as closing a connection does
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            client.write(f"{URL}/fork/parent", b"%d" % number)
            assert client.read(f"{URL}/fork/child", 9) == client.read(f"{URL}/fork/parent", 9) == b"%d" % number
