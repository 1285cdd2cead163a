"""Check the installed versions against what Triplane has been run with; ``make setup VENV=system`` calls it.

Reads package metadata only: nothing is imported, so it answers on a login node.
"""

import argparse
import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from parallel import command
from parallel.untrusted import read_toml

ROOT = Path(__file__).resolve().parent.parent


def problems(requirements: list[str]) -> tuple[list[str], list[str]]:
    """(what cannot work, what has not been run): missing packages and broken pins, and versions outside a range."""
    found: list[str] = []
    untested: list[str] = []
    for requirement in map(Requirement, requirements):
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed; expected {requirement}")
            continue
        # A container's "2.11.0a0+nv" is a pre-release of 2.11 to the letter; what counts is its number.
        if not requirement.specifier.contains(Version(installed).base_version):
            pinned = any(specifier.operator == "==" for specifier in requirement.specifier)
            (found if pinned else untested).append(
                f"{requirement.name} {installed} is outside the range that has been run: {requirement}"
            )
    return found, untested


def main() -> int:
    """Exit code 1 where something is missing or a pin is broken; a version that has not been run is only said."""
    argparse.ArgumentParser(prog="python -m tools.versions", description=__doc__).parse_args()
    project = read_toml(ROOT / "pyproject.toml")["project"]
    found, untested = problems(project["dependencies"])
    if sys.version_info[:2] != (3, 12):
        found.append(f"Python {sys.version_info.major}.{sys.version_info.minor}: expected 3.12")
    print("\n".join(found + untested) or "all versions are in the range that has been run")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(command.run("tools.versions", main))
