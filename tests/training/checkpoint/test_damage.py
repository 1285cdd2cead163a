"""Damaged checkpoints, loaded by ranks: a few of the campaign in docs/faults.md."""

import json
import random
from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once: ranks are forked from this process)
from campaign import some
from tests.faults import damages, injection
from tests.faults.results import Store
from training.checkpoint import folders
from training.checkpoint.committing import FilledFolder, commit
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.writer import FileWriter

SEED = 4


@pytest.mark.parametrize("world_size", some(damages.WORLD_SIZES, (2,)))
def test_damage_is_named_and_the_older_checkpoint_taken(world_size: int, tmp_path: Path) -> None:
    """Each kind."""
    store = Store(path=tmp_path / "results.jsonl", seed=SEED, commit="", date="")
    both = damages.cases(2 * len(injection.KINDS))
    cases = [case for case in both if case.startswith(f"{world_size} ")]
    damages.run(cases, store, tmp_path, lambda: None)
    results = store.results(damages.CAMPAIGN)
    assert sorted(result.case for result in results) == sorted(cases)
    assert [(result.case, result.problem) for result in results if result.problem] == []
    seen = {result.kind for result in results}
    assert len(seen) == len(injection.KINDS)


def test_a_load_that_says_nothing_or_the_wrong_thing_fails_the_campaign() -> None:
    """The judge: without it the campaign would be green whatever a load does."""
    world = Named("new", "old", Path("/x"))
    damage = injection.Injection(
        kind="bit flip", text="", named=("rank_00000.bin",), tensors=("layer.weight",), content_only=True
    )
    said = "checkpoint /x/new is damaged: /x/new/rank_00000.bin: expected hash 1, found 2 (in layer.weight)"
    said += "\nfalling back to /x/old"
    good = {"path": "old", "error": None, "as_saved": True, "alike": True, "said": said, "seconds": 0.0}
    assert damages.wrong(damage, "hashes", good, world) == []  # type: ignore[arg-type]
    for change in (
        {"path": "new"},
        {"as_saved": False},
        {"alike": False},
        {"said": said.replace("/x/new/rank_00000.bin", "/x/new/rank_00001.bin")},
        {"said": said.replace("(in layer.weight)", "")},
        {"said": said.replace("expected", "")},
        {"said": said.partition("\n")[0]},
    ):
        assert damages.wrong(damage, "hashes", good | change, world) != [], change  # type: ignore[arg-type]
    assert damages.wrong(damage, "sizes", good | {"path": "new", "said": ""}, world) == []  # type: ignore[arg-type]


class Named:
    """What the judge asks a world for."""

    def __init__(self, newest: str, older: str, damaged: Path) -> None:
        self.newest, self.older, self.damaged = newest, older, damaged


@pytest.mark.parametrize("number", range(len(injection.KINDS)))
def test_the_same_seed_makes_the_same_damage(number: int, tmp_path: Path) -> None:
    made = []
    for attempt in ("a", "b"):
        root = tmp_path / attempt
        for number_of in (1, 2):
            folder = folders.begin_unfinished(root, number_of, "1a2b")
            with FileWriter(folder, "rank_00000") as file:
                words = random.Random(number_of).randbytes(40_000)
                file.add(TensorGroup(("w",), "float32", (10_000,)), (0,), (10_000,), [memoryview(words)])
            texts = {"state.json": json.dumps({"iteration": number_of})}
            commit(FilledFolder(folder=str(folder), writers=("rank_00000",), texts=texts, about={}, keep=9))
        newest, older = root / "iter_0000002", root / "iter_0000001"
        done = injection.inject(number, newest, older, "seed")
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        made.append((done, files))
    assert made[0] == made[1]
