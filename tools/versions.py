"""Check the installed versions against what Triplane has been run with; ``make setup VENV=system`` calls it, and
``make versions`` asks it which torch the ends of the range are.

Reads package metadata only: nothing is imported, so it answers on a login node.
"""

import argparse
import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from program import command
from program.untrusted import read_toml

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


def torch_at(end: str, requirements: list[str]) -> str:
    """What pip is asked for: the "oldest" minor version of torch in the range, or the "newest"."""
    whole = next(one for one in map(Requirement, requirements) if one.name == "torch")
    if end == "newest":
        return str(whole)
    [least] = [one.version for one in whole.specifier if one.operator == ">="]
    return f"torch=={least}.*"


def main() -> int:
    """Exit code 1 where something is missing or a pin is broken; a version that has not been run is only said."""
    parser = argparse.ArgumentParser(prog="python -m tools.versions", description=__doc__)
    parser.add_argument("--extras", nargs="*", default=[], help="of pyproject.toml, which are to be there, too")
    parser.add_argument("--torch", choices=("oldest", "newest"), help="print what pip is asked for, and end")
    args = parser.parse_args()
    project = read_toml(ROOT / "pyproject.toml")["project"]
    if args.torch:
        print(torch_at(args.torch, project["dependencies"]))
        return 0
    extras = [one for extra in args.extras for one in project["optional-dependencies"][extra]]
    found, untested = problems(project["dependencies"] + [one for one in extras if not one.startswith("triplane")])
    if sys.version_info[:2] != (3, 12):
        found.append(f"Python {sys.version_info.major}.{sys.version_info.minor}: expected 3.12")
    print("\n".join(found + untested) or "all versions are in the range that has been run")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(command.run("tools.versions", main))
