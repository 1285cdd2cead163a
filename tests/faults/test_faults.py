"""The campaigns' bookkeeping: results that are gone on from, a document made of sections, and the command."""

import json
from pathlib import Path

from programs import Program
from tests.faults import document
from tests.faults.results import CaseResult, Store


def result(case: str, problem: str = "", seconds: float = 1.0) -> CaseResult:
    return CaseResult(campaign="damages", case=case, kind="bit flip", outcome="named", seconds=seconds, problem=problem)


def test_only_cases_without_a_result_are_left(tmp_path: Path) -> None:
    store = Store(path=tmp_path / "runs/results.jsonl", seed=1, commit="abc", date="2026-01-01")
    assert store.left("damages", ["a", "b"]) == ["a", "b"]
    store.add(result("a"))
    assert store.left("damages", ["a", "b"]) == ["b"]
    assert store.left("kills", ["a"]) == ["a"]
    for other in (
        Store(path=store.path, seed=2, commit="abc", date=""),
        Store(path=store.path, seed=1, commit="def", date=""),
    ):
        assert other.left("damages", ["a", "b"]) == ["a", "b"]  # another seed, other code: nothing is known
    store.add(result("a", problem="worse"))
    assert [found.problem for found in store.results("damages")] == ["worse"]


def test_what_went_well_at_another_commit_counts_where_only_the_rest_is_mended(tmp_path: Path) -> None:
    store = Store(path=tmp_path / "results.jsonl", seed=1, commit="abc", date="")
    store.add(result("a"))
    store.add(result("b", problem="worse"))
    mending = Store(path=store.path, seed=1, commit="def", date="", mend=True)
    assert mending.left("damages", ["a", "b", "c"]) == ["b", "c"]
    mending.add(result("b", problem="still"))
    assert mending.left("damages", ["a", "b"]) == []
    assert {found.case: found.commit for found in mending.results("damages")} == {"a": "abc", "b": "def"}
    assert Store(path=store.path, seed=2, commit="def", date="", mend=True).left("damages", ["a"]) == ["a"]


def test_a_section_replaces_its_own_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "docs/faults.md"
    for title, text in (("One", "first"), ("Two", "second"), ("One", "changed")):
        document.write(path, title, f"## {title}\n\n{text}\n")
    assert path.read_text() == f"{document.HEAD}\n## One\n\nchanged\n\n## Two\n\nsecond\n"


def test_a_section_counts_what_was_seen_and_names_what_went_wrong() -> None:
    text = document.section("T", "why", "command", "2 cores", [result("a"), result("b", seconds=2.001)])
    assert "| bit flip | 2 | named | 2.01 |" in text
    assert "All 2 as it must be" in text
    text = document.section("T", "why", "command", "2 cores", [result("a"), result("b", "tensor w\nis lost")])
    assert "**1** of 2 not as it must be" in text
    assert "- b, bit flip: tensor w is lost" in text


def test_the_command_writes_the_document_and_goes_on_where_it_was(tmp_path: Path) -> None:
    results, output = tmp_path / "results.jsonl", tmp_path / "faults.md"
    flags = ["--only", "damages", "--count", "2", "--results", str(results), "--output", str(output)]
    for _ in range(2):
        command = Program(flags, tmp_path / "said", module="tests.faults")
        said, errors = command.communicate()
        assert command.returncode == 0, errors
        assert "damages: 2 cases, 0 not as they must be" in said
        assert len(results.read_text().splitlines()) == 2
    cases = [json.loads(line)["case"] for line in results.read_text().splitlines()]
    assert sorted(cases) == ["1 rank(s), damage 0", "2 rank(s), damage 0"]
    assert "`python -m tests.faults --only damages --count 2 --seed 0`" in output.read_text()
