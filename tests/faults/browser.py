"""A page in headless Chromium: light, dark, and as wide as a phone; without a line on its console."""

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
SHAPES = {"light": ("1200,4000", ()), "dark": ("1200,4000", ("preferredColorScheme=0",)), "phone": ("390,4000", ())}


def problems_in_a_browser(page: Path, pictures: Path) -> list[str]:
    """What its console says; the pictures are left in a folder. Nothing, and no picture, where there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print("no chromium: the page was not opened")
        return []
    return [problem for shape in SHAPES for problem in _open(program, page, pictures, shape)]


def _open(program: str, page: Path, pictures: Path, shape: str) -> list[str]:
    size, settings = SHAPES[shape]
    picture = pictures / f"report-{shape}.png"
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
        flags += [f"--user-data-dir={profile}", f"--window-size={size}", f"--screenshot={picture}"]
        flags += [f"--blink-settings={one}" for one in settings]
        done = subprocess.run([program, *flags, page.resolve().as_uri()], capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return [f"{shape}: {line}" for line in said] + ([] if picture.exists() else [f"{shape}: no picture"])
