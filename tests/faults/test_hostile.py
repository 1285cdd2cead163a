"""The hostile campaign: 10 cases of 10 targets and a surrounding; and its judge, which must be able to fail."""

from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from programs import Program
from tests.faults import hostile_values
from tests.faults.hostile_judge import MOST_LINES, Reference, judge
from tests.faults.hostile_mutations import Mutation, mutate
from tests.faults.hostile_process import EndedProgram
from tests.faults.hostile_scenes import RECIPE
from tests.faults.hostile_targets import Target, ignored, recipe_in_force

MUTATION = Mutation(kind="JSON: other value", file="state.json", text="", names=("progress", "iteration"))
BEFORE = {"run/state.json": b"{}", "run/other.bin": b"tensors", "run/metrics.jsonl": b'{"iteration": 1}\n'}
AFTER = {**BEFORE, "run/metrics.jsonl": b'{"iteration": 1}\n{"iteration": 2}\n'}
USUAL = Reference(0, "iteration 2 | loss 5.1\n", {"last loss": "5.1"}, BEFORE, AFTER)
LINE = "pretrain_gpt.py: run/checkpoints: "


def classed(
    folder: Path,
    code: int | None,
    said: str,
    after: Mapping[str, bytes] = AFTER,
    loss: str = "5.1",
    ignored: str = "",
) -> str:
    """What the judge calls a case that ended so."""
    for name, content in after.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    target = Target(
        name="t", scene="run", words=(("x",),), results=lambda *_: {"last loss": loss},
        honours=(lambda *_: ignored) if ignored else None,
    )  # fmt: skip
    before = {**BEFORE, "run/state.json": b'{"a": 1}'}
    return judge(target, USUAL, MUTATION, folder / "run/state.json", before, folder, EndedProgram(code, said)).name


def without(name: str) -> dict[str, bytes]:
    return {key: content for key, content in AFTER.items() if key != name}


def test_what_is_handled(tmp_path: Path) -> None:
    assert classed(tmp_path, 0, USUAL.said) == "handled"
    assert classed(tmp_path, 2, f"{LINE}state.json: expected a table, found a list.\n") == "handled"
    assert classed(tmp_path, 2, f"{LINE}iteration: expected a whole number, found true.\n") == "handled"
    assert classed(tmp_path, 0, f"state.json is damaged\n{USUAL.said}", loss="5.2") == "handled"
    moved = without("run/other.bin") | {"run/other.bin.damaged": b"tensors"}
    assert classed(tmp_path, 0, USUAL.said, moved) == "handled"


def test_what_is_poor(tmp_path: Path) -> None:
    assert classed(tmp_path, 2, f"{LINE}something is wrong.\n") == "poor"
    assert classed(tmp_path, 2, f"{LINE}state.json: wrong.\n" * (MOST_LINES + 1)) == "poor"
    assert classed(tmp_path, 1, f"{LINE}state.json: wrong.\n") == "poor"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n"),
        (1, "pretrain_gpt.py: fault: KeyError: 'state.json'\n"),
        (2, f"{LINE}state.json: found \x1b[31mred\n"),
        (0, f"{USUAL.said}\x00"),
        (2, f"{LINE}state.json: found \x9b1m\n"),
        (-11, ""),
    ],
)
def test_what_is_a_traceback(tmp_path: Path, code: int, said: str) -> None:
    assert classed(tmp_path, code, said) == "traceback"


def test_what_is_silent(tmp_path: Path) -> None:
    assert classed(tmp_path, 0, USUAL.said, loss="5.2") == "silent"
    assert classed(tmp_path, 0, USUAL.said, ignored="seed = 1 was asked for") == "silent"


def test_what_hangs(tmp_path: Path) -> None:
    assert classed(tmp_path, None, "") == "hang"


def test_what_is_a_loss(tmp_path: Path) -> None:
    assert classed(tmp_path / "a", 0, USUAL.said, without("run/other.bin")) == "loss"
    assert classed(tmp_path / "b", 2, LINE, AFTER | {"run/other.bin": b"tensorz"}) == "loss"
    assert classed(tmp_path / "c", 0, USUAL.said, AFTER | {"run/metrics.jsonl": b'{"iteration": 2}\n'}) == "loss"


def test_values_that_a_recipe_asks_for_must_be_in_force(tmp_path: Path) -> None:
    assert ignored({"train.seed": 1}, {"train.seed": 1, "model.x": 2}) == ""
    assert "train.seed = '1' was asked for, '2' is in force" in ignored({"train.seed": 1}, {"train.seed": 2})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("1234", "4321"))
    said = "run_dir = 'run'\n" + RECIPE
    assert "train.seed" in recipe_in_force(recipe, tmp_path, said)
    recipe.write_text("x = [")
    assert "it is no TOML" in recipe_in_force(recipe, tmp_path, said)


@pytest.mark.parametrize("name", ["recipe.toml", "state.json", "pieces.jsonl", "table.bin", "words.txt"])
def test_a_change_is_a_change_and_its_number_repeats_it(tmp_path: Path, name: str) -> None:
    contents = {"recipe.toml": RECIPE.encode(), "state.json": b'{"a": [1, {"bcd": "x"}]}', "table.bin": bytes(500),
                "pieces.jsonl": b'{"abc": 1}\n[1, 2]\n', "words.txt": b"1 shards/a 2 shards/b"}  # fmt: skip
    path = tmp_path / name
    kinds = set()
    for number in range(40):
        found = []
        for _ in range(2):
            path.write_bytes(contents[name])
            mutation = mutate(path, Random(number))
            found.append((mutation, path.read_bytes()))
        assert found[0] == found[1]
        assert found[0][1] != contents[name]
        kinds.add(found[0][0].kind)
    assert len(kinds) >= 7


def test_values_of_hypothesis_follow_from_a_number() -> None:
    drawn = [[repr(hostile_values.draw_from(hostile_values.TREES, number)) for number in range(20)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 10


@pytest.mark.campaign
def test_ten_cases_and_a_surrounding(tmp_path: Path) -> None:
    flags = ["--only", "hostile", "--count", "11", "--seed", "14", "--results", str(tmp_path / "results.jsonl")]
    command = Program([*flags, "--output", str(tmp_path / "faults.md")], tmp_path / "said", module="tests.faults")
    said, errors = command.communicate(timeout=230)
    assert command.returncode == 0, errors
    assert "hostile: 11 cases, 0 not as they must be" in said
    assert "| all | 11 | 11 | 0 | 0 | 0 | 0 | 0 |" in (tmp_path / "faults.md").read_text()
