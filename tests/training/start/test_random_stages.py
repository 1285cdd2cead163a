"""Random plans of stages, killed at random moments: a few of the campaign in docs/faults.md.

Another seed: python -m tests.faults --only stages --seed N.
"""

from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once: runs are forked from this process)
from campaign import some
from data.prepared import Prepared
from tests.faults import stages
from tests.faults.stage_plans import write_texts

SEEDS = ("52", "1", "2", "3")


@pytest.mark.timeout(480)
@pytest.mark.parametrize("seed", some(SEEDS, SEEDS[:1]))
def test_a_random_plan_that_is_killed_takes_the_same_samples(prepared: Prepared, tmp_path: Path, seed: str) -> None:
    write_texts(tmp_path)
    found = stages.one(seed, seed, tmp_path, tmp_path / "plan", most=2 if seed == SEEDS[0] else 4)
    assert not found.problem, f"seed {seed}, {found.kind}: {found.problem}"
