"""When, on what, and of which commit a number was measured."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from program.untrusted import read_json
from tools.shared.processor import cpu_model
from tools.shared.written import check_file, marked, write_file

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


PLACE = "--output", marked('"load_average_1min": ')
"""Where what was measured may go, for ``tools.shared.written``."""


def earlier(output: Path) -> dict[str, Any]:
    """What was measured before, by subject. Raises UserError where the file is none of these."""
    check_file(output, *PLACE)
    return read_json(output) if output.is_file() and output.stat().st_size else {}


def keep(output: Path, measured: Mapping[str, Any]) -> None:
    """Readable JSON. Raises UserError."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, (json.dumps(measured, indent=2) + "\n").encode(), *PLACE)


def now() -> str:
    """ISO 8601, UTC, in seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str:
    """Of the checkout; "-dirty" where files differ from it, "unknown" outside a repository.

    TRIPLANE_COMMIT, where only files were copied to.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        found = ""
    return found or os.environ.get("TRIPLANE_COMMIT", "unknown")


def versions(distributions: Sequence[str]) -> dict[str, str | None]:
    """Installed versions; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
