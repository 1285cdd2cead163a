"""Checkpoints on ranks: precisions, what is loaded of them, what does not fit, and saves that do not end."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from campaign import some
from checkpoint_parts import (
    OWN,
    SAVED_AT,
    Parts,
    assembled,
    configuration,
    deepseek_on,
    on_ranks,
    restore_bits,
    save_and_go_on,
    sizes,
)  # fmt: skip
from models.names import canonical
from parallel.ddp import held
from parallel.layout import Layout
from parallel.regions import boxes_of
from program.errors import UserError
from training import checkpoint
from training.checkpoint import folders, optimizer_state, saving, storage
from training.checkpoint.format.tables import IncompleteError
from training.checkpoint.model_state import model_boxes
from training.config.checkpoint_config import CheckpointConfig

# ---- precisions


def restore_in_another_dtype(parts: Parts, folder: Path, dtype: torch.dtype) -> None:
    """The weights come from the optimizer's fp32 ones, not from the rounded ones of the bf16 model."""
    parts.restore(folder / "checkpoints")
    saved = torch.load(folder / "global.pt")
    for box in boxes_of(held(parts.chunks[0])):
        place = tuple(slice(at, at + size) for at, size in zip(box.offset, box.data.shape, strict=True))
        assert torch.equal(box.data, saved[f"param of {canonical(box.key)}"][place].to(dtype))


@pytest.mark.parametrize("zero", some([True, False], [True]))
def test_bf16_weights_and_their_fp32_originals_restore(zero: bool, tmp_path: Path) -> None:
    source, target = (configuration(sizes(use_distributed_optimizer=on), dtype="bf16") for on in (zero, not zero))
    on_ranks(2, source, save_and_go_on, tmp_path, SAVED_AT)
    on_ranks(2, target, restore_bits, tmp_path, tmp_path, tmp_path / "x")
    on_ranks(1, configuration(sizes()), restore_in_another_dtype, tmp_path, torch.float32)
    on_ranks(1, configuration(sizes(), dtype="fp16"), restore_in_another_dtype, tmp_path, torch.float16)


def overflow_and_save(parts: Parts, root: Path) -> None:
    first = float(parts.optimizer.get_loss_scale())
    parts.train(4)
    assert float(parts.optimizer.get_loss_scale()) < first
    parts.keep(root)


def restore_loss_scale(parts: Parts, root: Path) -> None:
    parts.restore(root)
    saved = json.loads((root / "iter_0000004/state.json").read_text())["optimizer"]
    (part,) = optimizer_state.parts(parts.optimizer)
    assert float(parts.optimizer.get_loss_scale()) == saved["grad_scaler"]["scale"] == 2.0**30
    assert part.grad_scaler._hysteresis_tracker == saved["grad_scaler"]["hysteresis_tracker"]
    assert {group["step"] for group in parts.optimizer.param_groups} == {saved["step"]} == {0}


def test_fp16_loss_scale_restores_also_before_any_update(tmp_path: Path) -> None:
    config = configuration(sizes(), dtype="fp16")
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, initial_loss_scale=2.0**33))
    on_ranks(1, config, overflow_and_save, tmp_path)
    on_ranks(1, config, restore_loss_scale, tmp_path)


# ---- --checkpoint.load and what of it


def moments(parts: Parts) -> list[torch.Tensor]:
    boxes = optimizer_state.optimizer_boxes(parts.chunks, parts.optimizer, parts.ranks)
    return [box.data for box in boxes if ".exp_avg." in box.key]


def load_weights_only(parts: Parts, folder: Path, pieces: Path, config: CheckpointConfig) -> None:
    restored = parts.restore(pieces / "own", config)
    assert not restored.optimizer_restored
    assert restored.progress.iteration == (0 if config.finetune else SAVED_AT)
    assert not any(bool(moment.any()) for moment in moments(parts))
    whole, saved = assembled(parts, pieces), torch.load(folder / "global.pt")
    assert whole is not None
    for name in (name for name in saved if " of " not in name):
        assert torch.equal(whole[name], saved[name]), name
        assert torch.equal(whole[f"param of {name}"].to(whole[name].dtype), whole[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("option", ["finetune", "no_load_optim"])
def test_weights_alone(option: str, dtype: str, llama: Path, tmp_path: Path) -> None:
    config = CheckpointConfig(load=str(llama), **{option: True})  # type: ignore[arg-type]
    if dtype == "fp32":
        on_ranks(1, configuration(sizes()), load_weights_only, llama, tmp_path, config)
    else:
        on_ranks(1, configuration(sizes(), dtype="bf16"), finetune_in_bf16, llama, tmp_path, config)


def finetune_in_bf16(parts: Parts, folder: Path, pieces: Path, config: CheckpointConfig) -> None:
    """The optimizer's fp32 weights are those of the model, so the first update does not undo the load."""
    parts.restore(pieces / "own", config)
    whole, saved = assembled(parts, pieces), torch.load(folder / "global.pt")
    assert whole is not None
    for name in (name for name in saved if " of " not in name):
        assert torch.equal(whole[name], saved[name].bfloat16())
        assert torch.equal(whole[f"param of {name}"], whole[name].float())


def own_checkpoint_wins(parts: Parts, root: Path) -> None:
    config = CheckpointConfig(load=str(root / "other"), finetune=True)
    assert checkpoint.restore(root / "own", OWN, parts.chunks, parts.optimizer, parts.ranks) is None
    parts.train(1)
    parts.keep(root / "other")
    assert parts.restore(root / "own", config).progress.iteration == 0
    parts.train(2)
    parts.keep(root / "own")
    restored = parts.restore(root / "own", config)
    assert (restored.progress.iteration, restored.optimizer_restored, restored.rng_restored) == (
        2,
        True,
        True,
    )
    assert restored.path == root / "own/iter_0000002"
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert parts.restore(root / "none", CheckpointConfig(load=str(root / "own"))).rng_restored
    assert torch.equal(torch.get_rng_state(), state)
    assert not parts.restore(root / "none", CheckpointConfig(load=str(root / "own"), no_load_rng=True)).rng_restored


def test_a_run_continues_its_own_checkpoint_whole_whatever_it_started_from(tmp_path: Path) -> None:
    on_ranks(1, configuration(sizes()), own_checkpoint_wins, tmp_path)


# ---- what does not fit


def refuse(parts: Parts, folder: Path, expected: list[str]) -> None:
    before = [param.detach().clone() for chunk in parts.chunks for param in chunk.parameters()]
    with pytest.raises(UserError) as caught:
        parts.restore(folder / "checkpoints")
    for text in [str(folder), *expected]:
        assert text in str(caught.value)
    after = [param for chunk in parts.chunks for param in chunk.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "hidden size": (
        {"hidden_size": 128},
        ["[64, 64] in the checkpoint and [128, 128] here", "model.hidden_size"],
    ),
    "padding": (
        {"make_vocab_size_divisible_by": 512},
        [
            "word_embeddings.weight is [384, 64] in the checkpoint and [512, 64] here",
            "make_vocab_size_divisible_by",
        ],
    ),
    "fewer layers": (
        {"num_layers": 2},
        [
            "The checkpoint has layers.2.",
            "which this model lacks (and 11 more)",
            "Probably different: model.num_layers",
        ],
    ),
    "biases": (
        {"add_bias_linear": True},
        ["The checkpoint lacks layers.0.", ".bias", "model.add_bias_linear"],
    ),
    "tied": ({"untie_embeddings_and_output_weights": False}, ["has output_layer.weight", "untie_embeddings"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_another_model_is_refused_by_every_rank_before_a_parameter_is_touched(name: str, llama: Path) -> None:
    model, expected = MISFITS[name]
    on_ranks(2, configuration(sizes(pp=2), **model), refuse, llama, expected)


EXPERT_MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "experts": ({"num_moe_experts": 4}, ["Probably different: model.num_moe_experts."]),
    "width of experts": ({"moe_ffn_hidden_size": 64}, ["Probably different: model.moe_ffn_hidden_size"]),
    "latents": ({"kv_lora_rank": 16}, ["Probably different: model.kv_lora_rank"]),
    "depths": ({"mtp_num_layers": 0}, ["has mtp.0.", "Probably different: model.mtp_num_layers."]),
    "no shared expert": (
        {"moe_shared_expert_intermediate_size": 0},
        ["shared_experts.linear_fc", "Probably different: model.moe_shared_expert_intermediate_size."],
    ),
    "dense": (
        {"moe_layer_freq": "[0]*2+[1]*2"},
        ["Probably different: model.num_moe_experts or model.moe_layer_freq;"],
    ),
    "fewer layers": (
        {"num_layers": 2, "moe_layer_freq": "[0,1]"},
        ["has layers.2.", "Probably different: model.num_layers."],
    ),
}


def keep_one(parts: Parts, folder: Path) -> None:
    parts.train(1)
    parts.keep(folder / "checkpoints")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    on_ranks(1, deepseek_on(sizes()), keep_one, folder)
    return folder


@pytest.mark.parametrize("name", some(EXPERT_MISFITS, ("experts", "depths", "no shared expert", "dense")))
def test_another_mixture_is_refused_with_the_field_that_differs(name: str, mixture: Path) -> None:
    model, expected = EXPERT_MISFITS[name]
    on_ranks(1, configuration(sizes(), **{"shape": "deepseek_v3_tiny", **model}), refuse, mixture, expected)


def without_optimizer(parts: Parts, root: Path) -> None:
    complete = saving.saved_boxes
    saving.saved_boxes = lambda chunks, optimizer, ranks: model_boxes(chunks, ranks)  # as tools.convert leaves them
    parts.keep(root / "weights")
    saving.saved_boxes = complete
    with pytest.raises(UserError, match="lacks the optimizer's state of this model"):
        parts.restore(root / "weights")
    before = [param.detach().clone() for chunk in parts.chunks for param in chunk.parameters()]
    parts.train(1)
    parts.restore(root / "none", CheckpointConfig(load=str(root / "weights"), no_load_optim=True))
    after = [param for chunk in parts.chunks for param in chunk.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_checkpoint_of_weights_alone_says_how_to_load_it(tmp_path: Path) -> None:
    on_ranks(1, configuration(sizes()), without_optimizer, tmp_path)


def lose_boxes(parts: Parts, root: Path) -> None:
    """An optimizer's slices that do not add up to its tensors are noticed before the commit."""
    complete = optimizer_state.held_slices
    optimizer_state.held_slices = (
        lambda optimizer: (  # type: ignore[assignment]
            (param, held._replace(tensors={name: tensor[:-1] for name, tensor in held.tensors.items()}))
            for param, held in complete(optimizer)
        )
    )
    with pytest.raises(IncompleteError, match=r"optimizer\.state\..* do not hold each element once"):
        parts.keep(root)
    optimizer_state.held_slices = complete
    assert folders.complete(root) == []


def test_a_checkpoint_with_holes_is_never_committed(tmp_path: Path) -> None:
    on_ranks(1, configuration(sizes()), lose_boxes, tmp_path)


# ---- a save that does not come to its end, and what is kept


def die_before_the_name(parts: Parts, root: Path) -> None:
    for until in (1, 2, 3, 4):
        parts.train(until)
        parts.keep(root, keep=2)
    parts.train(5)
    folders.give_name = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    parts.keep(root, keep=2)


def go_on(parts: Parts, root: Path) -> None:
    assert parts.restore(root).progress.iteration == 4
    parts.train(5)
    parts.keep(root, keep=2)


def names(root: Path) -> list[str]:
    """But for the file that only Megatron's scripts read."""
    return sorted(path.name for path in root.iterdir() if path.name != folders.LATEST_OF_MEGATRON)


def test_killed_before_its_end_a_save_leaves_the_one_before_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError):
        on_ranks(1, configuration(sizes()), die_before_the_name, tmp_path)
    *rest, unfinished, latest = names(tmp_path)
    assert [*rest, latest] == ["iter_0000003", "iter_0000004", "latest"]
    assert unfinished.startswith("iter_0000005.tmp-")
    assert (tmp_path / unfinished / "manifest.json").exists()
    assert folders.latest(tmp_path) == tmp_path / "iter_0000004"
    on_ranks(1, configuration(sizes()), go_on, tmp_path)
    assert names(tmp_path) == ["iter_0000004", "iter_0000005", "latest"]


def fail_to_write(parts: Parts, root: Path) -> None:
    with pytest.raises(OSError, match="Not a directory"):
        parts.keep(root)


def test_a_save_that_rank_0_cannot_begin_fails_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    on_ranks(2, configuration(sizes()), fail_to_write, tmp_path / "file/checkpoints")


# ---- the format


def look_inside(parts: Parts, folder: Path) -> None:
    with storage.TensorReader(folder / "checkpoints/iter_0000002") as reader:
        shapes = reader.shapes
    (chunk,) = parts.chunks
    weights = {box.key for box in boxes_of(held(chunk))}
    assert not weights & shapes.keys()  # they are the optimizer's, rounded
    assert {key for key in shapes if key.startswith("optimizer.")} == {
        f"optimizer.state.{state}.{key}" for state in ("param", "exp_avg", "exp_avg_sq") for key in weights
    }
    assert {key for key in shapes if key.startswith("rng.")} == {
        "rng.torch",
        "rng.python",
        "rng.numpy",
        "rng.megatron.model-parallel-rng",
        "rng.megatron.data-parallel-rng",
        "rng.megatron.expert-parallel-rng",
    }
    assert shapes["rng.torch"][0] == 8


def test_what_lies_in_the_folder(llama: Path) -> None:
    folder = llama / "checkpoints/iter_0000002"
    assert names(folder) == sorted(
        [
            "config.toml",
            "index.json",
            "manifest.json",
            "pieces.jsonl",
            "state.json",
            *(f"rank_{rank:05d}.bin" for rank in range(8)),
        ]
    )
    assert (folder / "config.toml").read_text() == "x = 1\n"
    assert (folder.parent / "latest").read_text() == "iter_0000002\n"
    state = json.loads((folder / "state.json").read_text())
    assert state["format"] == 1
    assert state["progress"] == {"iteration": 2, "consumed_samples": 16}
    assert Layout(**state["layout"]) == Layout(tp=2, pp=2, dp=2, etp=2)
    assert state["optimizer"]["step"] == 2
    on_ranks(1, configuration(sizes()), look_inside, llama)
