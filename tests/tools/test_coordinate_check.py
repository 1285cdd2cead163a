"""python -m tools.parity coordinate_check: flat with muP, growing without it or without a part of it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from models.layers import scaling
from tools.parity.__main__ import main
from tools.parity.coordinate_check import at_width, slope
from training.cli import parse

MUP = '[model]\nshape = "debug"\nuse_mup = true\n'
MUON = f'{MUP}[optimizer]\noptimizer = "muon"\nmuon_scale_mode = "unit_rms_norm"\n'
MIXTURE = MUP.replace("debug", "mixtral_tiny")


def checked(text: str, folder: Path, *flags: str) -> int:
    (folder / "recipe.toml").write_text(text)
    words = ["coordinate_check", str(folder / "recipe.toml"), "--output", str(folder / "picture.svg")]
    return main([*words, "--widths", "64", "192", "--iterations", "3", *flags])


def test_flat_with_mup_and_growing_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(MUP, tmp_path) == 0
    assert "nothing grows with width" in capsys.readouterr().out
    picture = ElementTree.fromstring((tmp_path / "picture.svg").read_text())
    assert picture.tag.endswith("svg") and any("layers.1.mlp" in (one.text or "") for one in picture.iter())
    assert checked(MUP.replace("true", "false"), tmp_path) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("GROWS: ") and "output_layer" in said and said.endswith("model.use_mup is off.")


@pytest.mark.campaign
@pytest.mark.parametrize(("text", "code"), [(MUON, 0), (MUON.replace("unit_rms_norm", "spectral"), 1), (MIXTURE, 0)])
def test_other_optimizers_and_models(text: str, code: int, tmp_path: Path) -> None:
    assert checked(text, tmp_path) == code


@pytest.mark.campaign
def test_latent_attention_mixtures_and_depths_are_flat(tmp_path: Path) -> None:
    """At width 64 alone its first block happens to move little."""
    recipe = MUP.replace("debug", "deepseek_v3_tiny")
    assert checked(recipe, tmp_path, "--widths", "64", "128", "256", "512", "--iterations", "4") == 0
    assert checked(recipe.replace("true", "false"), tmp_path, "--widths", "64", "128", "256") == 1


def test_one_odd_width_is_no_growth() -> None:
    """Figures of a deepseek_v3_tiny with muP, and of one without."""
    assert slope({64: 0.136, 128: 0.674, 256: 0.568, 512: 0.571}) < 0.4
    assert slope({64: 0.173, 128: 0.71, 256: 4.74}) > 2


@pytest.mark.campaign
def test_a_missing_part_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without_rates:
        without_rates.setattr("training.optimizer._mup_overrides", lambda *_: {})
        assert checked(MUP, tmp_path) == 1
    monkeypatch.setattr(scaling, "scale_logits", lambda *_: None)
    assert checked(MUP, tmp_path) == 1


def test_widths_that_heads_do_not_divide_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for widths in (("64",), ("64", "100")):
        assert checked(MUP, tmp_path, "--widths", *widths) == 2
        assert f"expected two or more multiples of 64, found {' '.join(widths)}" in capsys.readouterr().err


def test_a_file_that_is_not_its_own_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "picture.svg").write_text("mine")
    assert checked(MUP, tmp_path) == 2
    assert "is not a file that this tool writes" in capsys.readouterr().err
    assert (tmp_path / "picture.svg").read_text() == "mine"
    assert checked(MUP, tmp_path, "--output", str(tmp_path / "nowhere/picture.svg")) == 2


def test_a_wider_model_is_the_same_but_for_its_width(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(MUP.replace("debug", "deepseek_v3_tiny"))
    wide = at_width(parse.load(tmp_path / "recipe.toml"), 256, 64, 3, 0.01).model
    assert (wide.hidden_size, wide.mup_base_hidden_size, wide.num_attention_heads) == (256, 64, 16)
    assert (wide.kv_lora_rank, wide.qk_head_dim, wide.moe_ffn_hidden_size, wide.num_moe_experts) == (128, 16, 256, 8)


def test_slope() -> None:
    assert slope({64: 3.0, 128: 6.0, 256: 12.0}) == pytest.approx(1.0)
    assert slope({64: 3.0, 128: float("nan")}) == float("inf")
