"""A run folder and a checkpoint that version 0.1.0 wrote, with names of fields that it had (written_by_0_1/)."""

import json
import shutil
from pathlib import Path

import pytest

from parallel.errors import UserError
from programs import Program
from training.config.deprecated import RENAMED
from training.config.recipe import load

WRITTEN = Path(__file__).with_name("written_by_0_1")
LOSS_AT_4 = 5.549631118774414
"""Of iteration 4, by version 0.1.0 on this recipe in one go (commit 279ab4e, 2 cores, 2026-11-23)."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN, tmp_path / "copy"))


def train(copy: Path, *arguments: object) -> tuple[str, float]:
    """What was printed, stdout before stderr, and the last loss."""
    paths = ("--data.paths", copy / "corpus.jsonl", "--data.cache_dir", copy / "cache")
    program = Program([str(each) for each in (*arguments, *paths)], copy / "console")
    out, err = program.communicate()
    assert program.returncode == 0, out + err
    run = Path(str(arguments[arguments.index("--run_dir") + 1]))
    return out + err, json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def test_its_run_goes_on_with_one_warning(copy: Path) -> None:
    text, loss = train(copy, copy / "run/config.toml", "--run_dir", copy / "run")
    assert "at           iteration 2, 4 samples" in text
    assert loss == pytest.approx(LOSS_AT_4, rel=1e-5)
    warnings = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and all(name in warnings[0] for name in RENAMED)
    assert all(
        name.partition(".")[2] in (copy / "run/config.toml").read_text() for new in RENAMED.values() for name in new
    )
    assert load(copy / "run/config.toml").parallel.elastic


def test_its_checkpoint_starts_another_run(copy: Path, tmp_path: Path) -> None:
    flags = ("--run_dir", tmp_path / "other", "--checkpoint.load", copy / "run/checkpoints/iter_0000002")
    text, loss = train(copy, copy / "recipe.toml", *flags)
    assert loss == pytest.approx(LOSS_AT_4, rel=1e-5), text


def test_an_old_and_its_new_name_are_not_both_taken(copy: Path) -> None:
    (copy / "recipe.toml").write_text("[data]\naccept_change = true\nallow_data_change = false\n")
    with pytest.raises(UserError, match=r"data\.accept_change and data\.allow_data_change are both there"):
        load(copy / "recipe.toml")


def test_a_value_that_the_old_field_did_not_have_is_refused(copy: Path) -> None:
    (copy / "recipe.toml").write_text('[data]\nreset = "positions"\n')
    with pytest.raises(UserError, match=r"data\.reset_attention_mask: expected true or false, found \"positions\""):
        load(copy / "recipe.toml")
