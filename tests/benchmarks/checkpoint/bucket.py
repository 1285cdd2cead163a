"""A checkpoint's way into a bucket, against the same bytes copied plainly to the same server, in turns.

The server is SeaweedFS on this machine, a fresh one for each round. Plain copies: curl, one file after the other, each
by one signed PUT, which is the rate of the server's S3 interface; and SeaweedFS' own filer.copy, which goes past it,
so that no client of S3 can reach it: the server's processor time for each says what the interface costs. Ours is all
that the uploader does between two looks: the files hashed, sent by multipart upload, looked up, and the manifest
created.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.checkpoint.goals import ratio
from tests.support import buckets
from tests.support.buckets import BUCKET, KEY, SECRET, Server
from tests.support.small_checkpoints import committed
from training.checkpoint.bucket import uploading
from training.checkpoint.bucket.uploading import UploadOrder

FILES = 2
"""As many as ranks would write."""


def against_copies(size: int, folder: Path, rounds: int) -> dict[str, Any]:
    """Medians of all rounds, and of each round's ratios; one more round comes first and does not count."""
    path = committed(folder / "checkpoints", 1, sizes=(size // FILES,) * FILES)
    files = sorted(path.glob("*.bin"))
    found = [_round(path, files, folder / f"server-{number}", number) for number in range(rounds + 1)][1:]
    shutil.rmtree(folder)
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    ratios = {f"{name}_ratio": statistics.median(one[f"{name}_s"] / one["upload_s"] for one in found)
              for name in ("curl", "filer_copy")}  # fmt: skip
    return {"bytes": size, "rounds": rounds} | medians | ratios


def _round(path: Path, files: list[Path], folder: Path, number: int) -> dict[str, float]:
    def upload() -> None:
        uploading.upload(UploadOrder(root=str(path.parent), url=f"s3://{BUCKET}/run", attempt="me"), path)

    with buckets.seaweed(folder) as server, buckets.environment(server):
        uploading.claim(f"s3://{BUCKET}/run", "me")  # connects
        sides = {"upload": upload, "curl": lambda: _curl(files, server),
                 "filer_copy": lambda: _filer_copy(files, server)}  # fmt: skip
        order = sorted(sides, reverse=number % 2 == 1)
        found: dict[str, float] = {}
        for name in order:
            before = _processor_s(server)
            found[f"{name}_s"] = _seconds(sides[name])
            found[f"{name}_server_processor_s"] = _processor_s(server) - before
    shutil.rmtree(folder)
    return found


def _seconds(act: Callable[[], None]) -> float:
    os.sync()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _processor_s(server: Server) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return times.user + times.system


def _curl(files: list[Path], server: Server) -> None:
    for file in files:
        url = f"{server.endpoint}/{BUCKET}/copy/{file.name}"
        words = ["curl", "--fail", "--silent", "--show-error", "-K", "-", "-o", "/dev/null", "-T", str(file),
                 "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", url]  # fmt: skip
        settings = f'user = "{KEY}:{SECRET}"\naws-sigv4 = "aws:amz:us-east-1:s3"\n'
        subprocess.run(words, input=settings.encode(), check=True)


def _filer_copy(files: list[Path], server: Server) -> None:
    program = shutil.which("weed") or str(Path(sys.executable).parent / "weed")
    words = [program, "filer.copy", *map(str, files), f"{server.filer}/buckets/{BUCKET}/copied/"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def table(row: dict[str, Any]) -> list[str]:
    """The numbers as lines, each with its goal."""
    mib = row["bytes"] / 2**20
    return [
        f"{mib:,.0f} MiB in {FILES} files, medians of {row['rounds']}: uploaded at {mib / row['upload_s']:,.0f} MiB/s, "
        f"curl {mib / row['curl_s']:,.0f}, filer.copy {mib / row['filer_copy_s']:,.0f}",
        ratio("upload / curl", row["curl_ratio"], 0.8),
        f"  the server's processor s: {row['upload_server_processor_s']:.2f}, curl "
        f"{row['curl_server_processor_s']:.2f}, filer.copy {row['filer_copy_server_processor_s']:.2f}; "
        f"upload / filer.copy {row['filer_copy_ratio']:.3f}",
    ]
