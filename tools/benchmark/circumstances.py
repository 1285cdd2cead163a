"""When, on what, and of which commit a number was measured."""

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from parallel.untrusted import read_text

ROOT = Path(__file__).resolve().parents[2]


def circumstances() -> dict[str, Any]:
    """What a number measured on the CPU depends on besides the code."""
    return {
        "date": now(),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions(("torch", "megatron-core")),
    }


def now() -> str:
    """ISO 8601, UTC, in seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str:
    """Of the checkout; "-dirty" where files differ from it, "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        found = ""
    return found or "unknown"


def versions(distributions: Sequence[str]) -> dict[str, str | None]:
    """Installed versions; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu_model() -> str:
    """What Linux calls the processor."""
    info = Path("/proc/cpuinfo")
    for entry in read_text(info).splitlines() if info.exists() else []:
        if entry.startswith("model name"):
            return entry.split(":", 1)[1].strip()
    return platform.machine()
