"""S3 servers that run here: SeaweedFS and moto's, and before them a proxy that fails as servers and networks do."""

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from program.buckets import client

KEY, SECRET = "TRIPLANETESTKEY", "triplane-test-secret-0123456789"
BUCKET = "triplane"
START_S = 60

Failure = Literal["500", "503", "truncated", "short", "reset", "lost", "expired", "denied", "stale"]
"""An answer of 500 InternalError or 503 SlowDown; half a body, and half
a body as if it were whole; a connection that ends; a request that is carried out
and whose answer is lost; credentials that have expired or may not; a listing as it was at first."""


@dataclass(frozen=True)
class Server:
    """A running S3 server."""

    endpoint: str
    pid: int
    filer: str = ""
    """Where SeaweedFS' own tools send files."""

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to find it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }  # fmt: skip


def free_port() -> int:
    """One that nothing listens to, below those that the kernel gives away: gRPC's is 10,000 more."""
    for port in random.sample(range(20_000, 30_000), 1_000):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10_000))
            return port
    raise RuntimeError("no free port")


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Server]:
    """SeaweedFS' S3 server over a folder, with the bucket BUCKET; a killed one continues with what it had."""
    folder.mkdir(parents=True, exist_ok=True)
    credentials = {"accessKey": KEY, "secretKey": SECRET}
    rights = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": [credentials], "actions": rights}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    for attempt in range(3, -1, -1):
        server, process = _started(folder)
        try:
            _make_bucket(server, process, folder)
            break
        except RuntimeError:  # another test's server was quicker to take a port
            _end(process)
            if not attempt:
                raise
    try:
        yield server
    finally:
        _end(process)


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """moto's S3 server, by which others test what they write for AWS, with the bucket BUCKET; all of it in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with (folder / "log").open("ab") as log:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        _make_bucket(server, process, folder)
        yield server
    finally:
        _end(process)


def _started(folder: Path) -> tuple[Server, "subprocess.Popen[bytes]"]:
    ports: dict[str, int] = {}
    for name in ("master", "volume", "filer", "s3"):
        with _taken(list(ports.values())):
            ports[name] = free_port()
    program = shutil.which("weed") or str(Path(sys.executable).parent / "weed")
    flags = [f"-{name}.port={port}" for name, port in ports.items()]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer",
             f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=512", "-volume.max=40", *flags,
             "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-s3.allowDeleteBucketNotEmpty"],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    endpoint, filer = (f"http://127.0.0.1:{ports[name]}" for name in ("s3", "filer"))
    return Server(endpoint, process.pid, filer), process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _taken(ports: list[int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            for one in (port, port + 10_000):
                holder = stack.enter_context(socket.socket())
                holder.bind(("127.0.0.1", one))
        yield


def _make_bucket(server: Server, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and not _answers(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    with environment(server):
        while True:
            try:
                store = client.filesystem(f"s3://{BUCKET}")
                if not store.exists(BUCKET):
                    store.mkdir(BUCKET)
                store.pipe_file(f"{BUCKET}/.probe", b"x")
                store.rm_file(f"{BUCKET}/.probe")
                return
            except Exception as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = (folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the S3 server did not start: {error!r}\n{said}") from error
                time.sleep(0.2)


def _answers(server: Server) -> bool:
    host, _, port = server.endpoint.removeprefix("http://").partition(":")
    with socket.socket() as one:
        return one.connect_ex((host, int(port))) == 0


@contextlib.contextmanager
def environment(server: Server, **more: str) -> Iterator[None]:
    """This process finds the server, within."""
    given = server.environment | more
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    _forget_connections()
    try:
        yield
    finally:
        _forget_connections()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


_forgotten: list[object] = []
"""s3fs closes one that is collected in the thread that does so, which may run another one's loop."""


def _forget_connections() -> None:
    """File systems are made once in a process, from the environment as it is then."""
    if client._made.cache_info().currsize:
        _forgotten.append(client.filesystem(f"s3://{BUCKET}"))
    client._made.cache_clear()


@dataclass(frozen=True)
class Request:
    """What came to the proxy."""

    number: int
    """From 0."""
    method: str
    path: str
    """With its query."""

    @property
    def is_listing(self) -> bool:
        """Of a bucket."""
        return self.method == "GET" and "list-type=" in self.path


Rule = Callable[[Request], Failure | None]


@dataclass
class Proxy:
    """Stands before a server; ``rule`` says which requests fail, and how."""

    server: Server
    rule: Rule = lambda _: None
    requests: list[Request] = field(default_factory=list)
    failures: list[tuple[Request, Failure]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    listings: dict[str, bytes] = field(default_factory=dict)

    @property
    def target(self) -> tuple[str, int]:
        """Host and port of the server behind it."""
        found = re.fullmatch(r"http://([\d.]+):(\d+)", self.server.endpoint)
        assert found is not None
        return found[1], int(found[2])

    def judge(self, method: str, path: str) -> tuple[Request, Failure | None]:
        """Note a request, and say what becomes of it."""
        with self.lock:
            request = Request(len(self.requests), method, path)
            self.requests.append(request)
            failure = self.rule(request)
            if failure is not None:
                self.failures.append((request, failure))
            return request, failure


ERRORS = {
    "500": (500, "InternalError"), "503": (503, "SlowDown"), "expired": (400, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *_: object) -> None:
        """Nothing to a terminal."""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request, failure = self.proxy.judge(self.command, self.path)
        if failure in ERRORS:
            self._refuse(*ERRORS[failure])
            return
        if failure == "reset":
            self._break()
            return
        connection = http.client.HTTPConnection(*self.proxy.target, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            self._break()
            return
        finally:
            connection.close()
        if request.is_listing:
            first = self.proxy.listings.setdefault(self.path, data)
            data = first if failure == "stale" else data
        if failure == "lost":
            self._break()
            return
        is_short = failure == "short" and self.command == "GET" and not request.is_listing
        self._answer(answer, data[: len(data) // 2] if is_short else data, cut=failure == "truncated")

    def _answer(self, answer: http.client.HTTPResponse, data: bytes, cut: bool) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", answer.getheader("Content-Length", "0") if is_head else str(len(data)))
        self.end_headers()
        if not is_head:
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self._break()

    def _refuse(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>made to fail</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _break(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass  # noqa: N815  http.server's names


@contextlib.contextmanager
def proxied(server: Server, rule: Rule = lambda _: None) -> Iterator[tuple[Server, Proxy]]:
    """A proxy before a server: the server as programs see it, and what they asked."""
    proxy = Proxy(server, rule)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{listening.server_port}", server.pid), proxy
        finally:
            listening.shutdown()
            thread.join()
