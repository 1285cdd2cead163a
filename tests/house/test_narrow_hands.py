"""Narrow hands: no function takes a bag of arguments, and the table of contents of a run names few modules."""

import ast
from collections.abc import Iterator

from tests.test_imports import MODULES, ROOT, imports, name_of

MOST_ARGUMENTS = 8
MOST_MODULES = 30
"""Our own, that training/train.py imports: who reads a run looks into these."""
NOT_OURS = {"models/layers/mtp.py: process_mtp_loss": "stands in for megatron-core's, which calls it by its signature"}


def test_hands_are_narrow() -> None:
    """Of more than eight, some belong together: name the object that they are (gpt.Blueprint, step.RankParts)."""
    found = [one for path in MODULES for one in functions(path.read_text(), f"{path.relative_to(ROOT)}")]
    wide = {name: f"{name}: {count} arguments" for name, count in found if count > MOST_ARGUMENTS}
    assert len(found) > 3000 and wide.keys() == NOT_OURS.keys(), wide
    names = {name_of(path) for path in MODULES}
    used = {each if each in names else each.rpartition(".")[0] for each in imports(ROOT / "training/train.py")} & names
    assert len(used) <= MOST_MODULES, f"training/train.py imports {len(used)} of our modules"


def functions(text: str, file: str) -> Iterator[tuple[str, int]]:
    """Each function or method, and how many arguments it takes beside self, the class, and what ``*`` gathers."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield f"{file}: {node.name}", sum(one.arg not in ("self", "cls") for one in taken)
