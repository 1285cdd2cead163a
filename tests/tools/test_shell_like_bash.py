"""Scripts that tools.from_megatron reads in closed bash, beside bash with programs: the same words, or a refusal."""

import re
from pathlib import Path

import pytest

from campaign import param
from tests.tools.shell_against_bash import Compared, compared

SNIPPETS = re.split(r"\n\n+", Path(__file__).with_name("shell_snippets.txt").read_text().strip("\n"))
REFUSED = 14
"""Snippets whose words depend on what may come from outside, or that start nothing in bash either."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where bash runs."""
    return tmp_path_factory.mktemp("bash")


def run(script: str, folder: Path) -> Compared:
    for path in (folder / "work").glob("*"):
        path.unlink()
    (folder / "printed").unlink(missing_ok=True)
    return compared(re.sub(r"\bRUN\b", "torchrun pretrain_gpt.py", script), folder)


@pytest.mark.parametrize("snippets", [SNIPPETS[::8], param(SNIPPETS)], ids=["some", "all"])
def test_snippets(folder: Path, snippets: list[str]) -> None:
    wrong, refused = [], []
    for snippet in snippets:
        found = run(snippet, folder)
        wrong += [] if found.agree else [(snippet, found)]
        refused += [snippet] if isinstance(found.ours, str) else []
    assert not wrong, wrong[0]
    assert len(refused) <= REFUSED, refused


@pytest.mark.parametrize(
    "script",
    [
        "RUN ${X/o/0}",  # X may come from outside
        param("RUN $(date +%s) a"),
        "RUN --a $(ls)",
        "A=($(ls) b); RUN ${A[1]} ${#A[@]}",
        param("set -- $(ls) b; RUN $2 $#"),
        param("A=(0 $X); RUN ${!A[@]} ${A[-1]} ${A[@]:1:1}"),
        "if ls | grep -q x; then A=1; fi; RUN --x $A",
        "while read -r x; do A+=$x; done < /etc/hostname; RUN [$A]",
        "RUN ~/x ~root/y",
        "RUN $RANDOM $$ $PPID $SECONDS",
        "A=$(cat file); case $A in x) B=1;; *) B=2;; esac; RUN $B",
        param("X=$(cat f); RUN ${#X} ${X:0:2} ${X^^} ${X//a/b}"),
        "read -p 'Go? ' X; RUN $X",
        param("X=$(python3 -c 'print(3)'); RUN $((X * 2))"),
        "[[ $(cat f) == @(x|y) ]] && A=1; RUN [$A]",
    ],
)
def test_what_only_running_would_show_is_refused(folder: Path, script: str) -> None:
    found = run(script, folder)
    assert isinstance(found.ours, str), found.ours
