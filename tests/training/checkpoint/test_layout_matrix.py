"""Saved in one layout, loaded in others: a few of the cells in docs/faults.md."""

from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once: ranks are forked from this process)
from tests.faults import matrix
from tests.faults.results import Store

SAMPLE = (
    "experts: TP2 EP2 -> PP2 VPP2",
    "experts: PP2 VPP2 -> one rank",
    "experts with Muon: TP2 PP2 DP2 -> TP2 EP2",
)
"""Experts, which move furthest. The dense ones are in test_checkpoint_layouts.py, with more layouts."""


@pytest.mark.campaign  # each mechanism once: test_checkpoint_layouts.py
def test_every_layout_s_checkpoint_is_every_other_s(tmp_path: Path) -> None:
    store = Store(path=tmp_path / "results.jsonl", seed=0, commit="", date="")
    matrix.run(SAMPLE, store, tmp_path, lambda: None)
    results = store.results(matrix.CAMPAIGN)
    assert sorted(result.case for result in results) == sorted(SAMPLE)
    assert [(result.case, result.problem) for result in results if result.problem] == []


def test_the_sample_is_of_the_matrix_and_the_matrix_is_whole() -> None:
    every = matrix.cases(1000)
    assert set(SAMPLE) <= set(every)
    assert len(every) == 2 * (5 * 5 + 6 * 6)  # with Adam and Muon, each source into each other layout and one rank


@pytest.mark.parametrize("found", [{"a": "1"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "4"}])
def test_a_tensor_that_differs_is_a_problem(found: dict[str, str]) -> None:
    assert matrix.differing(found, {"a": "1", "b": "2"}) != []
    assert matrix.differing({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
    assert matrix.furthest([1.0, float("nan")], [1.0, 2.0]) > matrix.TOLERANCE
    assert matrix.furthest([1.0, 2.0001], [1.0, 2.0]) > matrix.TOLERANCE
