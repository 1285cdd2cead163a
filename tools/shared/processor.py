"""What Linux calls this host's processor."""

import platform
from pathlib import Path

from program.untrusted import read_text


def cpu_model() -> str:
    """Of /proc/cpuinfo; elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    for entry in read_text(info).splitlines() if info.exists() else []:
        if entry.startswith("model name"):
            return entry.split(":", 1)[1].strip()
    return platform.machine()
