"""A Hugging Face Hub on the loopback: what the Hub's own clients ask of it to read a dataset."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class Hub:
    """Datasets with their commits, the newest last."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.asked: list[str] = []
        """Method and path of every request."""

    def commit(self, name: str, files: Files) -> str:
        """A new commit of a dataset: its sha."""
        earlier = self.commits.setdefault(name, {})
        sha = hashlib.sha1(f"{name} {len(earlier)}".encode()).hexdigest()
        earlier[sha] = files
        return sha

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Of a path of a request: commit, and bytes of a file or of JSON; None where there is nothing."""
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            return self._about("/".join(parts[2:4]), parts[4:])
        if parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            name, revision, file = "/".join(parts[1:3]), parts[4], "/".join(parts[5:])
            found = self._at(name, revision)
            return (found[0], found[1][file]) if found and file in found[1] else None
        return None

    def _about(self, name: str, rest: list[str]) -> tuple[str, bytes] | None:
        found = self._at(name, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return None
        sha, files = found
        if rest[:1] == ["tree"]:
            return sha, json.dumps(_tree(files, "/".join(rest[2:]))).encode()
        about = {"id": name, "sha": sha, "private": False, "gated": False, "disabled": False, "tags": [],
                 "downloads": 0, "likes": 0, "siblings": [{"rfilename": path} for path in files]}  # fmt: skip
        return (sha, json.dumps(about).encode()) if rest[:1] in ([], ["revision"]) else None

    def _at(self, name: str, revision: str) -> tuple[str, Files] | None:
        commits = self.commits.get(name, {})
        sha = list(commits)[-1] if commits and revision == "main" else revision
        return (sha, commits[sha]) if sha in commits else None


def _tree(files: Files, folder: str) -> list[dict[str, object]]:
    """What lies in a folder, and below it."""
    below = {path: data for path, data in files.items() if path.startswith(f"{folder}/" if folder else "")}
    folders = {path.rsplit("/", 1)[0] for path in below if "/" in path} - {folder}
    listed: list[dict[str, object]] = [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for path, data in below.items()
    ]
    return listed + [{"type": "directory", "path": path, "size": 0, "oid": path} for path in sorted(folders)]


@contextlib.contextmanager
def served(hub: Hub) -> Iterator[str]:
    """Serves it on a free port of the loopback: its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._reply()

        def do_GET(self) -> None:
            self._reply()

        def _reply(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            found = hub.answer(path)
            sha, data = found or ("", b'{"error": "not found"}')
            start, end = 0, len(data)
            if found and (wanted := self.headers.get("Range")):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or end) + 1, end)
            self.send_response(404 if not found else 206 if self.headers.get("Range") else 200)
            headers = {"Content-Length": f"{end - start}", "X-Repo-Commit": sha, "Accept-Ranges": "bytes",
                       "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Content-Type": "application/json",
                       "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}  # fmt: skip
            if not found:
                headers["X-Error-Code"] = "EntryNotFound" if "/resolve/" in path else "RepoNotFound"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[start:end])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda request, address: None  # a client that has gone away is no fault of a test
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
