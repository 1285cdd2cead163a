"""What comes from outside is read through program/untrusted.py, wherever in the product it is read."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    path
    for name in ("program", "parallel", "models", "data", "training", "tools")
    for path in (ROOT / name).rglob("*.py")
)
DOOR = "program/untrusted.py"
ALLOWED = {
    "data/raw/documents.py": "lines of documents: millions, each parsed and rejected by itself",
}
FORBIDDEN = {"json.load", "json.loads", "tomllib.load", "tomllib.loads", "orjson.loads"}


def reads(path: Path) -> Iterator[str]:
    """Every use in a file of what only the door may use."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted in FORBIDDEN or node.attr == "read_text":
                yield f"line {node.lineno}: {dotted}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("json", "tomllib", "orjson"):
            yield from (
                f"line {node.lineno}: from {node.module} import {one.name}" for one in node.names if "load" in one.name
            )
        elif isinstance(node, ast.Import) and any(one.name == "tomllib" for one in node.names):
            yield f"line {node.lineno}: import tomllib"


def test_only_the_door_parses_and_reads_texts() -> None:
    reading = {str(path.relative_to(ROOT)): found for path in MODULES if (found := list(reads(path)))}
    past_the_door = {name: found for name, found in reading.items() if name not in {DOOR, *ALLOWED}}
    assert not past_the_door
    assert not {DOOR, *ALLOWED} - reading.keys(), "these need not be allowed any more"


BYTES = ("peak", "states", "activations", "mixers", "offloaded_modules")
"""Files of models/costs behind its door, predict.py."""
PRICES = {"tools/plan/cost/offload.py": "seconds that a block's bytes take to the host and back"}


def test_bytes_are_asked_of_three_doors() -> None:
    """Predicted: models/costs/predict.py; traced: tools/plan/trace; measured: training/memory/measured.py."""
    inside = {f"models.costs.{name}" for name in BYTES}
    asking = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if path.parent != ROOT / "models/costs" and "models.costs" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in inside
    }
    assert asking == PRICES.keys(), "ask models/costs/predict.py; who asks no more need not be allowed"
