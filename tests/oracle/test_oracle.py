"""Drawn recipes train as transformers, PyTorch and Megatron's own scheduler do; ``python -m tests.oracle`` has more."""

from pathlib import Path

import pytest
import torch

import ranks  # noqa: F401  (imports torch and megatron once)
from campaign import some
from models.families import TINY
from tests.oracle import results
from tests.oracle.compared import GRADIENT, Notes, Verdict, gradients, judge
from tests.oracle.imported import import_models
from tests.oracle.page import page
from tests.oracle.recipes import drawn

SEEDS, CAMPAIGN = (18, 46, 218, 225, 318, 334), (44, 53, 116)
# 18: Muon, tied, on TP and DP; 46: embeddings at a rate of their own, tied, on TP and CP; 44: Muon, experts, ZeRO-3
# 334: QK-clip on TP and CP
"""Each kind of layout, shard, loss, batch, data, memory and schedule (tests/oracle/kinds.py) is in one of these."""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """transformers' classes, once, here, and not in every forked process."""
    import_models(TINY[drawn(seed).config.model.shape] for seed in SEEDS + CAMPAIGN)


@pytest.mark.parametrize("seed", some(SEEDS + CAMPAIGN, SEEDS))
def test_a_drawn_recipe_trains_as_the_oracle_says(seed: int) -> None:
    case = drawn(seed)
    verdict = judge(case)
    assert verdict.kind == "equal", (case.title, verdict.words[:8])


def test_a_case_is_a_function_of_its_number() -> None:
    assert all(drawn(seed) == drawn(seed) for seed in range(40))
    assert len({drawn(seed).title for seed in range(40)}) == 40


@pytest.mark.parametrize(("spoiled", "words"), [
    (lambda tensor: tensor * (1 + 3 * GRADIENT), "gradient of a is off"),
    (lambda tensor: tensor.where(torch.arange(8) > 0, torch.nan), "gradient of a is off"),
    (None, "gradient of a is one side's alone"),
])  # fmt: skip
def test_a_wrong_gradient_is_named(spoiled: object, words: str) -> None:
    theirs = {"a": torch.arange(1.0, 9.0), "b": torch.ones(3)}
    ours = {"b": torch.ones(3)} | ({"a": spoiled(theirs["a"])} if callable(spoiled) else {})
    verdict = Verdict("equal")
    gradients(Notes(verdict, "iteration 1"), ours, theirs, whole=10.0)
    assert verdict.kind == "different"
    assert words in verdict.words[0]
    sound = Verdict("equal")
    gradients(Notes(sound, "iteration 1"), theirs, theirs, whole=10.0)
    assert sound.kind == "equal"


def test_a_campaign_goes_on_and_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for seed, kind in ((0, "different"), (1, "refused"), (0, "equal")):
        results.add(path, results.CaseResult(
            seed=seed, kind=kind, title="llama2_tiny tp2", kinds=["layout: TP"], words=["needs 2 | ranks"],
            furthest={"loss": 0.5}, drawn_again=0, seconds=1.0, date="2026-11-27", commit="abc",
        ))  # fmt: skip
    path.write_text(path.read_text() + '{"seed": 2, "ki')  # cut off
    found = results.read(path)
    assert {seed: one.kind for seed, one in found.items()} == {0: "equal", 1: "refused"}
    text = page(list(found.values()), "python -m tests.oracle --cases 2")
    assert "| 2 | 1 | 1 | 0 | 0 |" in text
    assert "| layout | TP | 1 | 1 | 0 |" in text
    assert "needs 2 \\| ranks" in text
