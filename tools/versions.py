"""Check the installed versions against what Triplane has been run with; ``make setup VENV=system`` calls it.

Reads package metadata only: nothing is imported, so it answers on a login node.
"""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def problems(requirements: list[str]) -> list[str]:
    """What is missing or outside the range of each requirement, in one line each."""
    found = []
    for requirement in map(Requirement, requirements):
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed; expected {requirement}")
            continue
        # A container's "2.11.0a0+nv" is a pre-release of 2.11 to the letter; what counts is its number.
        if not requirement.specifier.contains(Version(installed).base_version):
            found.append(f"{requirement.name} {installed} is outside the range that has been run: {requirement}")
    return found


def main() -> int:
    """Exit code 0 where all fit, else 1 with a line for each that does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = problems(project["dependencies"])
    if sys.version_info[:2] != (3, 12):
        found.append(f"Python {sys.version_info.major}.{sys.version_info.minor}: expected 3.12")
    print("\n".join(found) or "all versions are in the range that has been run")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
