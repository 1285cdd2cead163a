"""What ``make lint`` checks beside ruff and mypy: phrases with a plainer word, and class names that stand twice.

Exit code 1 with a line for each finding; docs/glossary.md has the words to use.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHRASES = {
    r"\btold\b": "reported, printed, given, known",
    r"\bnobody\b": "no rank, no process, no run",
    r"\b(anew|afresh)\b": "again, fresh, over",
    r"\bgo(es)? along\b": "carried",
    r"\bwhat is left\b": "the rest",
    r"\bof ours\b": "our; Triplane's",
    r"\b(is|are|was|were) no numbers?\b": "NaN, Inf, non-finite; not a number",
    r"\b(is|are|was|were|be) passed over\b|\bpass(es|ed)? over (the|its) (update|batch)\b": "skipped",
    r"\bis none of them\b": "is not one of them",
    r"\bway out\b": "fix",
    r"\bno torch here\b|\bimports no torch\b": "nothing: tests/test_imports.py owns that fact",
}
EXEMPT = ("docs/faults.md", "docs/layouts.md", "tests/house/wording.py", "tests/test_imports.py")
"""Tables as runs of tests printed them; this file; and the owner of a fact."""
PRODUCT = ("parallel/", "models/", "data/", "training/", "tools/")


def phrases(name: str, text: str) -> Iterator[str]:
    """Findings in one file; a phrase may go over the end of a line."""
    for phrase, instead in PHRASES.items():
        for found in re.finditer(phrase.replace(" ", r"[\s#]+"), text, re.IGNORECASE):
            number = text.count("\n", 0, found.start()) + 1
            yield f'{name}:{number}: "{" ".join(found[0].split())}"; write: {instead}'


def class_names(sources: dict[str, str]) -> Iterator[str]:
    """Names that more than one file gives to a class."""
    files = defaultdict[str, list[str]](list)
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(name)
    yield from (f"class {name} stands in {', '.join(where)}" for name, where in files.items() if len(where) > 1)


def main() -> int:
    """Over all files that git knows."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md", "*.sbatch"], cwd=ROOT, capture_output=True, text=True)
    texts = {name: (ROOT / name).read_text() for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}
    found = [line for name, text in texts.items() if name not in EXEMPT for line in phrases(name, text)]
    found += class_names(
        {name: text for name, text in texts.items() if name.startswith(PRODUCT) and name[-3:] == ".py"}
    )
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
