"""Translate every script and configuration below some folders, and count: translated, in part, refused, failed.

    python tests/support/translate_peers.py MEGATRON_LM/examples MEGATRON_LM/tests/functional_tests [--all]

For checkouts of other programs, which are fetched and not committed. "in part": the recipe lists what it left out;
"refused": one message and no recipe; "failed": a traceback, which is our error. Exit code 1 where anything failed.
"""

import collections
import contextlib
import io
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.from_megatron.__main__ import main as from_megatron  # noqa: E402

SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".toml", ".json")
OUTCOMES = {0: "translated", 1: "in part", 2: "refused"}
SKIPPED = re.compile(r"golden_values|baseline_values|package(-lock)?\.json|/\.github/|/node_modules/")


def sources(folders: list[Path]) -> Iterator[Path]:
    """Files that may be scripts or configurations."""
    for folder in folders:
        found = [folder] if folder.is_file() else sorted(folder.rglob("*"))
        yield from (
            path for path in found if path.suffix in SUFFIXES and not SKIPPED.search(str(path)) and path.is_file()
        )


def translate(path: Path, *flags: str) -> tuple[str, str]:
    """What became of one, and the first lines of why."""
    recipe, said = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(recipe), contextlib.redirect_stderr(said):
            code = from_megatron([str(path), *flags])
    except Exception:
        return "failed", traceback.format_exc(limit=-3)
    if code != 2 and any(one >= "\U000f0000" or "\ue000" <= one < "\uf900" for one in recipe.getvalue()):
        return "failed", "a mark of our own is in the recipe"
    return OUTCOMES[code], said.getvalue().removeprefix(f"tools.from_megatron: {path}: ").strip()


def reason(said: str) -> str:
    """The kind of a refusal: without names and numbers."""
    first = said.partition("\n")[0]
    first = re.sub(r"line \d+: ", "", first)
    if first.startswith("no recipe:"):
        heading, item = said.splitlines()[1:3]
        another = re.sub(r"^ *- \S+( \S+)?: ", "", item)[:90] if heading.startswith("Another") else ""
        return f"another model: {another}" if another else "not understood, and may change the training"
    return re.sub(r"\d+ values? (is|are)", "values are", first)[:110]


def main(argv: list[str]) -> int:
    """Print a line for each file with --all, and the counts."""
    show = "--all" in argv
    outcomes, reasons = collections.Counter[str](), collections.Counter[str]()
    started, slowest = time.monotonic(), (0.0, Path())
    for path in sources([Path(word) for word in argv if not word.startswith("--")]):
        begun = time.monotonic()
        outcome, said = translate(path)
        slowest = max(slowest, (time.monotonic() - begun, path))
        outcomes[outcome] += 1
        if outcome == "refused":
            reasons[reason(said)] += 1
        if show or outcome == "failed":
            print(f"{outcome:10} {path}: {said.partition(chr(10))[0][:200] if outcome != 'failed' else said}")
    for text, count in reasons.most_common():
        print(f"{count:5} refused: {text}")
    print(f"{sum(outcomes.values())} files in {time.monotonic() - started:.0f} s: ", end="")
    print(", ".join(f"{outcomes[name]} {name}" for name in (*OUTCOMES.values(), "failed")))
    print(f"slowest: {slowest[0]:.1f} s, {slowest[1]}")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
