"""Processes of a real run killed around saving: a few of the campaign in docs/faults.md."""

import shutil
from pathlib import Path
from random import Random

import pytest

import ranks  # noqa: F401  (imports torch and megatron once: runs are forked from this process)
from campaign import some
from data.prepared import Prepared
from tests.faults import kills, program

SEED = 5


@pytest.fixture(scope="module")
def undisturbed(prepared: Prepared, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run."""
    program.import_once(cache_dir)
    return kills.reference(tmp_path_factory.mktemp("undisturbed"), cache_dir, (), iterations=21)


def chain(tmp_path: Path, cache_dir: Path, undisturbed: list[float], background: bool) -> kills.Chain:
    return kills.Chain(
        run_dir=tmp_path, cache_dir=cache_dir, background=background, layout=(), undisturbed=undisturbed,
        draw=Random(f"{SEED} {background}"),
    )  # fmt: skip


VICTIMS = (True, ("rank 0",)), (True, ("writer 1",)), (False, ("the launcher", "all processes"))


# A killed writer: test_callback.py; one that outlives its rank: test_background.py.
@pytest.mark.parametrize(("background", "victims"), some(VICTIMS, VICTIMS[:1]))
def test_a_killed_run_has_its_checkpoints_and_goes_on(
    background: bool, victims: tuple[str, ...], tmp_path: Path, cache_dir: Path, undisturbed: list[float]
) -> None:
    run = chain(tmp_path, cache_dir, undisturbed, background)
    for victim in victims:
        _, problems = kills.one(run, victim)
        assert problems == [], victim
    assert kills.to_its_end(run) == []
    assert len(kills.losses(tmp_path)) > 3


@pytest.mark.campaign
def test_a_killed_run_with_weights_in_shards_goes_on(
    prepared: Prepared, cache_dir: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    whole = kills.reference(tmp_path / "undisturbed", cache_dir, kills.SHARDS, iterations=25)
    assert whole[: len(undisturbed)] == pytest.approx(undisturbed, rel=1e-4)
    (tmp_path / "run").mkdir()
    run = chain(tmp_path / "run", cache_dir, whole, background=True)
    run.layout = kills.SHARDS
    for victim in ("rank 1", "writer 0", "all processes"):
        _, problems = kills.one(run, victim)
        assert problems == [], victim
    assert kills.to_its_end(run) == []
    assert len(kills.losses(run.run_dir)) > 3


def test_what_is_not_whole_is_found(tmp_path: Path, cache_dir: Path, undisturbed: list[float]) -> None:
    """The judge: a visible folder without manifest, a damaged one, one that was lost, and other losses."""
    run = chain(tmp_path, cache_dir, undisturbed, background=False)
    assert kills.to_its_end(run) == []
    seven = kills.KillObservation(committed=7, temporary=frozenset())
    assert kills.wrong(run, seven) == []
    assert (
        "iteration 8 was committed, now the newest is 7" in kills.wrong(run, kills.KillObservation(8, frozenset()))[0]
    )
    (run.root / "iter_0000009").mkdir()
    assert kills.wrong(run, seven) == ["iter_0000009 is visible without its manifest"]
    (run.root / "iter_0000009").rmdir()
    run.undisturbed = [0.5, *undisturbed[1:]]
    assert "iteration 1 has the loss" in kills.wrong(run, seven)[0]
    run.undisturbed = undisturbed
    (run.root / "iter_0000006/rank_00001.bin").write_bytes(b"")
    assert "iter_0000006 is visible and not whole" in kills.wrong(run, seven)[0]
    shutil.rmtree(run.root)
    assert kills.wrong(run, seven) == ["iteration 7 was committed, now the newest is 0"]
