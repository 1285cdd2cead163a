"""Run folders and checkpoints that earlier versions wrote, with names of fields that they had (written_by_*/)."""

import json
import shutil
from pathlib import Path

import pytest

from campaign import some
from programs import Program
from training.config.deprecated import OLD_FIELDS
from training.config.recipe import load
from training.config.run_config import RunConfig

LOSS_AT_4 = {"0_1": 5.549631118774414, "d67c147e": 5.549925804138184}
"""Of iteration 4, by that version on its recipe in one go: 0.1.0 (commit 279ab4e, 2 cores, 2026-11-23), and a commit of
0.2.0 before its release (2 cores, 2026-11-28)."""


@pytest.fixture(params=LOSS_AT_4)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copy(tmp_path: Path, version: str) -> Path:
    return Path(shutil.copytree(Path(__file__).with_name(f"written_by_{version}"), tmp_path / "copy"))


def train(copy: Path, *arguments: object) -> tuple[str, float]:
    """What was printed, stdout before stderr, and the last loss."""
    paths = ("--data.paths", copy / "corpus.jsonl", "--data.cache_dir", copy / "cache")
    program = Program([str(each) for each in (*arguments, *paths)], copy / "console")
    out, err = program.communicate()
    assert program.returncode == 0, out + err
    run = Path(str(arguments[arguments.index("--run_dir") + 1]))
    return out + err, json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def test_its_run_goes_on_with_one_warning(copy: Path, version: str) -> None:
    saved = copy / "run/config.toml"
    assert any(name.partition(".")[2] in saved.read_text() for name in OLD_FIELDS)
    text, loss = train(copy, saved, "--run_dir", copy / "run")
    assert "at           iteration 2, 4 samples" in text
    changed = next(line for line in text.splitlines() if line.startswith("  changed "))
    assert not any(name in changed for name in OLD_FIELDS)
    assert loss == pytest.approx(LOSS_AT_4[version], rel=1e-5)
    [warning] = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(f"warning: {saved}: ") and "accepted until version 0.3.0" in warning
    keys = {line.partition(" = ")[0] for line in saved.read_text().splitlines()}
    assert not keys & {name.partition(".")[2] for name in OLD_FIELDS}


@pytest.mark.parametrize("version", some(LOSS_AT_4, ("0_1",)))
def test_its_checkpoint_starts_another_run(copy: Path, version: str, tmp_path: Path) -> None:
    flags = ("--run_dir", tmp_path / "other", "--checkpoint.load", copy / "run/checkpoints/iter_0000002")
    text, loss = train(copy, copy / "recipe.toml", *flags)
    assert loss == pytest.approx(LOSS_AT_4[version], rel=1e-5), text


@pytest.mark.parametrize("version", ["0_1"])
def test_what_its_names_said_is_kept(copy: Path, version: str) -> None:
    config = load(copy / "recipe.toml")
    assert config.parallel.elastic and config.data.allow_data_change and config.data.reset_attention_mask
    assert load(copy / "run/config.toml").parallel.elastic


@pytest.mark.parametrize("version", ["d67c147e"])
def test_what_a_later_ones_names_said_is_kept(copy: Path, version: str) -> None:
    for path in (copy / "recipe.toml", copy / "run/config.toml", copy / "run/checkpoints/iter_0000002/config.toml"):
        config, default = load(path), RunConfig()
        assert config.model.megatron == ("min_offloaded_tensor_size=2", "activation_offload_fraction=0.5")
        assert config.train.recompute == "full:uniform:1" and config.train.cpu_offloading_num_layers == 1
        assert config.kernels.off == ("bias_activation_fusion", "moe_permute_fusion")
        assert config.fault.watch_interval == 0
        assert config.optimizer.megatron == ("overlap_cpu_optimizer_d2h_h2d=True",)
        assert (config.parallel, config.precision) == (default.parallel, default.precision)
