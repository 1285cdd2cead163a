"""A tokenizer travels with its checkpoint, in every direction that tools.reshard has."""

import json
from pathlib import Path

import torch

from data.tokenizers.base import open_named
from tests.tools.hf_folders import write_folder
from tests.tools.test_convert_training import SHAPE
from tests.tools.test_doors import write_pair
from tools.convert.__main__ import main as convert
from tools.reshard.__main__ import main as reshard
from training.checkpoint.folders import name_of
from training.config.recipe import load

BESIDE = {"tokenizer_config.json"}


def same_tokenizer(checkpoint: Path, fingerprint: str) -> None:
    """The one that the checkpoint's own configuration names, in its folder."""
    config = load(checkpoint / "config.toml")
    assert Path(config.data.tokenizer).parent == checkpoint
    assert open_named(config.data.tokenizer, config.data.eod_token).fingerprint == fingerprint
    assert {path.name for path in checkpoint.iterdir()} >= BESIDE


def test_a_tokenizer_goes_there_and_back(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    write_folder(hf, SHAPE, config={"bos_token_id": 0, "eos_token_id": 0}, dtype=torch.float32)
    write_pair(hf, SHAPE)
    fingerprint = open_named(str(hf), None).fingerprint
    assert convert(["import", str(hf), str(tmp_path / "imported"), "--no_logits"]) == 0
    dcp, megatron = tmp_path / "dcp", tmp_path / "megatron"
    assert reshard([str(tmp_path / "imported"), str(dcp), "--format", "dcp"]) == 0
    assert open_named(str(dcp), None).fingerprint == fingerprint
    assert json.loads((dcp / "config.json").read_text())["model_type"] == "llama"
    assert reshard([str(dcp), str(tmp_path / "of_dcp")]) == 0  # its own config.json tells the model
    same_tokenizer(tmp_path / "of_dcp", fingerprint)
    assert reshard([str(tmp_path / "of_dcp"), str(megatron), "--format", "megatron", "--drop_optimizer"]) == 0
    assert open_named(str(megatron / name_of(0) / "tokenizer"), None).fingerprint == fingerprint
    model = "[model]\n" + (tmp_path / "imported/config.toml").read_text().split("[model]\n")[1].split("[precision]")[0]
    (tmp_path / "recipe.toml").write_text(model)
    recipe = ["--recipe", str(tmp_path / "recipe.toml")]
    assert reshard([str(megatron), str(tmp_path / "of_megatron"), *recipe]) == 0
    same_tokenizer(tmp_path / "of_megatron", fingerprint)
    (tmp_path / "recipe.toml").write_text(f'{model}\n[data]\ntokenizer = "{hf}"\n')  # a folder as the Hub has it
    assert reshard([str(megatron), str(tmp_path / "of_folder"), *recipe]) == 0
    same_tokenizer(tmp_path / "of_folder", fingerprint)
