"""tools.reshard reads and writes PyTorch DCP folders: of FSDP2 with transformers, of Accelerate, of torchtitan."""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from campaign import some
from models.families import TINY
from models.hf.shapes import write_config
from models.hf.tables import Entry, constants
from parallel.launch import Identity
from program.errors import UserError
from ranks import run_ranks
from tests.tools.dcp_folders import load_and_compare, on_fsdp_ranks, save_as_accelerate, save_as_titan, save_nested
from tests.tools.hf_folders import write_folder
from tests.tools.reshard_sources import as_torch_reads
from tests.tools.test_reshard_untrusted import ATTACKS, entries
from tools.convert.__main__ import main as convert
from tools.reshard.__main__ import main
from training.checkpoint.format.reader import FileReader
from training.checkpoint.state import read_state

LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3 tied": LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": False},
    "qwen3_moe": LLAMA | {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 300, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64},
}  # fmt: skip


def weights_and_states(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """By transformers' names, as torch itself reads them."""
    found = as_torch_reads(folder)
    weights = {key.removeprefix("model."): value for key, value in found.items() if key.startswith("model.")}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in found.items():
        if match := re.match(r"optimizer\.state\.(.+)\.(exp_avg|exp_avg_sq|step)$", key):
            states.setdefault(match[1], {})[match[2]] = value
    return weights, states


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model, trained for two steps on two ranks with FSDP2; config.json beside it, as Trainer leaves it."""
    root = tmp_path_factory.mktemp("fsdp")
    on_fsdp_ranks(save_nested, *((config, root / name) for name, config in MODELS.items()))
    for name, config in MODELS.items():
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def imported(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What tools.convert makes of such tensors, by our keys: it is compared with transformers' logits elsewhere."""
    from safetensors.torch import save_file

    saved = {}
    for name, tensor in weights.items():
        if name.endswith("gate_up_proj"):
            for expert, rows in enumerate(tensor):
                prefix = name.replace("gate_up_proj", str(expert))
                gate, up = rows.chunk(2)
                saved |= {f"{prefix}.gate_proj.weight": gate.clone(), f"{prefix}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(tensor):
                saved[name.replace("down_proj", f"{expert}.down_proj.weight")] = rows.clone()
        elif not (config.get("tie_word_embeddings", True) and name == "lm_head.weight"):
            saved[name] = tensor.clone()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(saved, folder / "model.safetensors")
    target = folder.with_name(f"{folder.name}_imported")
    assert convert(["import", str(folder), str(target), "--no_logits"]) == 0
    with FileReader(target) as reader:
        return {key: reader.whole(key) for key in reader.tensors}


def test_all_that_a_table_says_of_a_weight_is_known_here() -> None:
    """Whoever adds a field to Entry has to say in tools/reshard/naming.py what it means for rows."""
    known = "name key shape strips transposed unsqueezed padded keeps_dtype all_experts"
    assert {field.name for field in dataclasses.fields(Entry)} == set(known.split())


@pytest.mark.parametrize("name", some(MODELS, ["llama", "qwen3_moe", "gpt2"]))
def test_fsdps_checkpoint_becomes_ours(name: str, fsdp: Path, tmp_path: Path) -> None:
    """Weights and moments are what tools.convert makes of the same tensors."""
    weights, states = weights_and_states(fsdp / name)
    assert main([str(fsdp / name), str(tmp_path / "ours"), "--verify"]) == 0
    expected = {"param": imported(tmp_path / "w", weights, MODELS[name])}
    for state in ("exp_avg", "exp_avg_sq"):
        tensors = {key: each[state] for key, each in states.items()}
        expected[state] = imported(tmp_path / state, tensors, MODELS[name])
    with FileReader(tmp_path / "ours") as reader:
        assert len(reader.tensors) == 3 * len(expected["param"])
        for state, tensors in expected.items():
            for key, words in tensors.items():
                assert np.array_equal(reader.whole(f"optimizer.state.{state}.{key}"), words), (state, key)
    assert read_state(tmp_path / "ours").optimizer["step"] == 2


@pytest.mark.parametrize(
    ("name", "is_old"),
    some(itertools.product(list(MODELS)[:3], (False, True)), [("llama", False), ("qwen3 tied", True)]),
)
def test_torchtitans_names_and_rows(name: str, is_old: bool, fsdp: Path, tmp_path: Path) -> None:
    """The same model under torchtitan's names, Llama's heads rotated its way, is the same checkpoint."""
    weights, states = weights_and_states(fsdp / name)
    save_as_titan(weights, states, MODELS[name], tmp_path / "titan/step-2", is_old=is_old)
    recipe = ["--recipe", str(fsdp / name / "config.json")]
    assert main([str(tmp_path / "titan"), str(tmp_path / "from_titan"), "--verify", *recipe]) == 0
    assert main([str(fsdp / name), str(tmp_path / "from_fsdp")]) == 0
    same_checkpoint(tmp_path / "from_titan", tmp_path / "from_fsdp")
    assert read_state(tmp_path / "from_titan").progress.iteration == 2


def same_checkpoint(first: Path, second: Path) -> None:
    with FileReader(first) as one, FileReader(second) as other:
        assert one.tensors.keys() == other.tensors.keys()
        assert [key for key in one.tensors if not np.array_equal(one.whole(key), other.whole(key))] == []
        assert len(one.tensors) > 30


def test_accelerates_two_folders(fsdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_fsdp_ranks(save_as_accelerate, (LLAMA, tmp_path / "run/checkpoint-2"))
    (tmp_path / "run/checkpoint-2/config.json").write_text(json.dumps(LLAMA))
    assert main([str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    assert "iteration 2 counts as 16 samples, of train.global_batch_size 8" in capsys.readouterr().err
    assert main([str(fsdp / "llama"), str(tmp_path / "from_fsdp")]) == 0
    same_checkpoint(tmp_path / "ours", tmp_path / "from_fsdp")


# ---- what is refused


def test_a_model_of_another_size(fsdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, message in (
        ({"num_hidden_layers": 4}, "as transformers' llama: lacks model.layers.3"),
        ({"num_hidden_layers": 2}, "has no place for model.model.layers.2"),
        ({"intermediate_size": 96}, "differs in model.model.layers.0.mlp.gate_proj.weight [80, 48], expected [96, 48]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        given = [str(fsdp / "llama"), str(tmp_path / "ours"), "--recipe", str(tmp_path / "config.json")]
        assert main(given) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "ours").exists()


def test_states_without_names(fsdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """optimizer.state_dict() itself has numbers, which mean nothing to another program."""
    weights, states = weights_and_states(fsdp / "llama")
    numbered = {str(number): each for number, each in enumerate(states.values())}
    dcp.save({"model": weights, "optimizer": {"state": numbered}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    given = [str(tmp_path / "dcp"), str(tmp_path / "ours"), "--recipe", str(fsdp / "llama/config.json")]
    assert main(given) == 2
    assert "--drop_optimizer" in capsys.readouterr().err
    assert main([*given, "--drop_optimizer"]) == 0


def test_flat_parameters_are_refused_by_name(fsdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key is FSDP1's own, of LOCAL_STATE_DICT (torch 2.13)."""
    dcp.save({"model": {"_flat_param": torch.zeros(8)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    given = [str(tmp_path / "dcp"), str(tmp_path / "ours"), "--recipe", str(fsdp / "llama/config.json")]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "model._flat_param: a flat parameter, as FSDP1 saves with LOCAL_STATE_DICT (1 here)" in said
    assert "StateDictType.SHARDED_STATE_DICT" in said


def test_a_flipped_bit(fsdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(fsdp / "llama", tmp_path / "dcp")
    index, place = next(
        (index, place) for index, place in entries(tmp_path / "dcp").storage_data.items() if "mlp" in index.fqn
    )
    path = tmp_path / "dcp" / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    path.write_bytes(data)
    assert main([str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 2
    assert re.search(rf"{re.escape(index.fqn)} at .* is damaged", capsys.readouterr().err)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("attack", ATTACKS[:5], ids=lambda attack: attack.__name__)
def test_nothing_is_executed(attack: Any, fsdp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(fsdp / "llama", tmp_path / "dcp")
    attack(tmp_path / "dcp", tmp_path / "executed")
    assert main([str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 2
    assert "refused, nothing was run" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "ours").exists()


# ---- written


@pytest.mark.parametrize("name", some(MODELS, ["qwen3_moe", "gpt2"]))
def test_fsdp_goes_on_from_what_is_written(name: str, fsdp: Path, tmp_path: Path) -> None:
    """There and back are the same tensors; and torch's own load_state_dict takes them into a sharded model."""
    assert main([str(fsdp / name), str(tmp_path / "ours")]) == 0
    assert main([str(tmp_path / "ours"), str(tmp_path / "dcp"), "--format", "dcp", "--verify"]) == 0
    theirs, back = as_torch_reads(fsdp / name), as_torch_reads(tmp_path / "dcp")
    tied = {"model.lm_head.weight"} if MODELS[name].get("tie_word_embeddings", True) else set()
    assert theirs.keys() - back.keys() == tied
    assert back.keys() <= theirs.keys()
    assert [key for key in back if not torch.equal(back[key], theirs[key])] == []


@pytest.mark.campaign
def test_a_sharded_model_loads_it(fsdp: Path, tmp_path: Path) -> None:
    assert main([str(fsdp / "llama"), str(tmp_path / "ours")]) == 0
    assert main([str(tmp_path / "ours"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    on_fsdp_ranks(load_and_compare, (LLAMA, tmp_path / "dcp"))


@pytest.mark.parametrize("name", some(list(MODELS)[:3], ["qwen3_moe"]))
def test_torchtitans_form_there_and_back(name: str, fsdp: Path, tmp_path: Path) -> None:
    weights, states = weights_and_states(fsdp / name)
    save_as_titan(weights, states, MODELS[name], tmp_path / "titan/step-2")
    assert main([str(fsdp / name), str(tmp_path / "ours")]) == 0
    given = [str(tmp_path / "ours"), str(tmp_path / "dcp"), "--format", "dcp", "--names", "torchtitan", "--verify"]
    assert main(given) == 0
    theirs, back = as_torch_reads(tmp_path / "titan/step-2"), as_torch_reads(tmp_path / "dcp")
    tied = {"lm_head.weight", "optimizer.state.lm_head.weight.step"} if "tied" in name else set()
    assert theirs.keys() - back.keys() <= tied | {"train_state.step"}
    assert back.keys() <= theirs.keys()
    assert [key for key in back if not torch.equal(back[key], theirs[key])] == []


def test_padding_goes_and_comes_back(fsdp: Path, tmp_path: Path) -> None:
    """Ours is padded for TP; theirs has the 300 ids; a rounded copy has weights in bf16 and moments in fp32."""
    assert main([str(fsdp / "llama"), str(tmp_path / "ours")]) == 0
    with FileReader(tmp_path / "ours") as reader:
        assert reader.tensors["optimizer.state.param.output_layer.weight"].shape[0] == 384
    rounded = [str(tmp_path / "ours"), str(tmp_path / "dcp"), "--format", "dcp", "--dtype", "bfloat16", "--verify"]
    assert main(rounded) == 0
    found = as_torch_reads(tmp_path / "dcp")
    assert found["model.lm_head.weight"].shape == (300, 48)
    assert found["model.lm_head.weight"].dtype == torch.bfloat16
    assert found["optimizer.state.lm_head.weight.exp_avg"].dtype == torch.float32


# ---- every family of the tables


QUICK = {"gpt_oss_tiny", "qwen35_tiny"}
"""Fused experts in columns that take turns; convolutions and names of their own."""
UNPADDED = {"pad_token_id": None}
"""Some classes have one that is beyond a tiny vocabulary."""


def exported_shapes() -> list[Any]:
    """Those that transformers has a class for; ``make test-all`` has all of them."""
    found = []
    for name, shape in TINY.items():
        with contextlib.suppress(UserError):
            write_config(shape)
            found.append(name)
    return some(found, QUICK)


@pytest.mark.parametrize("name", exported_shapes())
def test_each_familys_names(name: str, tmp_path: Path) -> None:
    """By the names of files and of modules, a DCP folder is what tools.convert makes; and back, what modules hold."""
    numbers = {key: torch.tensor(value) for key, value in constants(write_config(TINY[name])[0], TINY[name]).items()}
    weights = write_folder(tmp_path / "hf", TINY[name], dtype=torch.float32, config=UNPADDED, tensors={**numbers})
    assert convert(["import", str(tmp_path / "hf"), str(tmp_path / "imported"), "--no_logits"]) == 0
    dcp.save({"state": {"model": weights}}, checkpoint_id=tmp_path / "files", no_dist=True)
    recipe = ["--recipe", str(tmp_path / "hf/config.json")]
    assert main([str(tmp_path / "files"), str(tmp_path / "ours"), "--verify", *recipe]) == 0
    same_tensors(tmp_path / "imported", tmp_path / "ours")
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--format", "dcp", "--verify"]) == 0
    back = as_torch_reads(tmp_path / "back")
    modules = module_tensors(tmp_path / "hf", tmp_path / "modules")
    assert modules.keys() - back.keys() == ({"model.lm_head.weight"} if TINY[name].tied else set())
    assert [key for key in modules.keys() & back.keys() if not torch.equal(modules[key], back[key])] == []
    assert all(key.startswith(f"model.model.layers.{TINY[name].num_layers}.") for key in back.keys() - modules.keys())
    assert main([str(tmp_path / "back"), str(tmp_path / "again"), *recipe]) == 0
    same_tensors(tmp_path / "ours", tmp_path / "again")
    if not TINY[name].mtp_num_layers:  # which their modules leave out
        assert main([str(tmp_path / "modules"), str(tmp_path / "of_modules"), *recipe]) == 0
        same_tensors(tmp_path / "ours", tmp_path / "of_modules")


def same_tensors(first: Path, second: Path) -> None:
    with FileReader(first) as one, FileReader(second) as other:
        assert one.tensors.keys() == other.tensors.keys()
        assert [key for key in one.tensors if not np.array_equal(one.whole(key), other.whole(key))] == []


def module_tensors(folder: Path, saved: Path) -> dict[str, torch.Tensor]:
    """What transformers' own class holds of a folder, saved by torch, too."""

    def save(_: Identity) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        dcp.save({"model": model.state_dict()}, checkpoint_id=saved, no_dist=True)

    run_ranks(1, save)
    return as_torch_reads(saved)
