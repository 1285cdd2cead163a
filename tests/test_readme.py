"""What the documents promise: commands that parse, links that lead somewhere, recipes that exist."""

import re
import shlex
from pathlib import Path

import pytest

from models.families import SHAPES
from training.cli import parse

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "docs/layouts.md"]


def commands(page: str) -> list[str]:
    fenced = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [
        line
        for block in fenced
        for line in block.splitlines()
        if re.search(r"pretrain_gpt\.py|pretrain\.sbatch", line) and not line.startswith("#")
    ]


def test_there_are_commands() -> None:
    assert len(commands("README.md")) >= 5


@pytest.mark.parametrize("command", commands("README.md"))
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    script = next(index for index, word in enumerate(words) if word.endswith(("pretrain_gpt.py", "pretrain.sbatch")))
    assert (ROOT / words[script]).exists()
    parse.parse_config(words[script + 1 :])


def test_every_family_is_listed() -> None:
    named = set(re.findall(r"`(\w+_tiny)`", (ROOT / "README.md").read_text()))
    assert named == {name for name in SHAPES if name.endswith("_tiny")}


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([\w-]+)`?", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
