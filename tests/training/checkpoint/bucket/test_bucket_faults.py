"""A few cases of the campaign of tests/faults/bucket.py, by its own functions."""

from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once)
from tests.faults import bucket
from tests.faults.results import Store


@pytest.mark.campaign
@pytest.mark.parametrize("chain", [0, bucket.RUNS_EACH - 1])
def test_kills_and_failing_servers_lose_nothing(tmp_path: Path, chain: int) -> None:
    """Uploads; and whole runs, continued from the bucket alone."""
    store = Store(path=tmp_path / "results.jsonl", seed=3, commit="", date="")
    (tmp_path / "scratch").mkdir()
    cases = [f"chain {chain}, fault {number}" for number in range(4)]
    bucket.run(cases, store, tmp_path / "scratch", lambda: None)
    found = store.results(bucket.CAMPAIGN)
    assert [result.problem for result in found] == [""] * len(cases)
