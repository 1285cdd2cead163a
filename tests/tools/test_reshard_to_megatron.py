"""--format megatron: what megatron-core's own loader makes of it, in models and in optimizers of other layouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from campaign import some
from checkpoint_parts import (
    Parts,
    assembled,
    configuration,
    differing,
    on_ranks,
    sizes,
)
from models.families import named
from parallel.config import ParallelConfig
from parallel.ddp import unwrap
from tests.tools.reshard_sources import as_torch_reads, gpt_on_ranks, optimizer_states, states
from tools.reshard.__main__ import main
from tools.reshard.megatron.args import problems
from training.checkpoint import optimizer_state
from training.checkpoint.state import read_state
from training.config import recipe
from training.config.run_config import RunConfig


def train_and_save(parts: Parts, folder: Path, toml: str) -> None:
    parts.train(2)
    parts.keep(folder / "checkpoints", texts={"config.toml": toml})
    whole = assembled(parts, folder / "pieces")
    if whole is not None:
        torch.save(whole, folder / "global.pt")


RunOf = Callable[[RunConfig, int], Path]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """A run of a configuration on so many ranks; the same one for all who ask."""
    known: dict[str, Path] = {}

    def run(config: RunConfig, world_size: int) -> Path:
        name = f"{world_size} {recipe.dump(config)}"
        if name not in known:
            known[name] = tmp_path_factory.mktemp("run")
            on_ranks(world_size, config, train_and_save, known[name], recipe.dump(config))
        return known[name]

    return run


def load(parts: Parts, folder: Path) -> dict[str, Any]:
    """As Megatron-LM's load_checkpoint does it: the content's own metadata decides the optimizer's form."""
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    path = str(folder / f"iter_{iteration:07d}")
    content = dist_checkpointing.load_content_metadata(path)
    model = states(parts)
    wanted = model | {"optimizer": optimizer_states(parts, model, content, is_loading=True)}
    found: dict[str, Any] = dist_checkpointing.load(wanted, path)
    return found


@torch.no_grad()
def load_and_go_on(parts: Parts, folder: Path, source: Path, pieces: Path) -> None:
    found = load(parts, folder)
    assert found["iteration"] == 2
    for number, chunk in enumerate(parts.chunks):
        unwrap(chunk).load_state_dict(found[f"model{number}" if len(parts.chunks) > 1 else "model"])
    parts.optimizer.load_state_dict(found["optimizer"])
    whole = assembled(parts, pieces)
    if whole is not None:
        assert differing(whole, torch.load(source / "global.pt")) == []
    assert {group["step"] for group in parts.optimizer.param_groups} == {2}


LAYOUTS: dict[str, tuple[dict[str, Any], ParallelConfig, int, ParallelConfig, int, list[str]]] = {
    "dense": ({"shape": "llama2_tiny"}, sizes(), 1, sizes(pp=2, vpp=2), 2, []),
    "bf16": ({"shape": "llama2_tiny", "dtype": "bf16"}, sizes(), 2, sizes(2), 2, []),
    "EP1 to EP2": ({"shape": "qwen3_moe_tiny"}, sizes(), 1, sizes(expert_model_parallel_size=2), 2,
                   ["--expert_model_parallel_size", "2"]),
    "biases of experts, learned softmax logits": (
        {"shape": "gpt_oss_tiny", "num_layers": 2}, sizes(), 1, sizes(expert_model_parallel_size=2), 2,
        ["--expert_model_parallel_size", "2"],
    ),
    "EP2 to EP1": ({"shape": "deepseek_v3_tiny"}, sizes(expert_model_parallel_size=2), 2, sizes(), 1, []),
}  # fmt: skip


@pytest.mark.parametrize("name", some(LAYOUTS, ["dense", "biases of experts, learned softmax logits"]))
def test_megatron_core_loads_it_whole_in_another_layout(name: str, run_of: RunOf, tmp_path: Path) -> None:
    model, written, writers, read, readers, more = LAYOUTS[name]
    source = run_of(configuration(written, **model), writers)
    assert main([str(source), str(tmp_path / "theirs"), "--format", "megatron", "--verify", *more]) == 0
    on_ranks(readers, configuration(read, **model), load_and_go_on, tmp_path / "theirs", source, tmp_path / "pieces")


def test_what_megatron_has_no_argument_for_is_refused(run_of: RunOf, tmp_path: Path, capsys: Any) -> None:
    assert not problems(named("gpt_oss_20b")) and not problems(named("deepseek_v3"))
    assert problems(named("ernie45_21b_a3b")) == ["model.moe_router_enable_expert_bias with softmax scores"]
    source = run_of(configuration(sizes(), shape="llama2_tiny", attn_logit_softcapping=30.0), 1)
    assert main([str(source), str(tmp_path / "theirs"), "--format", "megatron"]) == 2
    assert "has no argument for model.attn_logit_softcapping = 30.0" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


@torch.no_grad()
def load_gpt(parts: Parts, folder: Path, source: Path) -> None:
    """Block i of GPTModel has our sublayers 2 i and 2 i + 1."""
    found = load(parts, folder)
    unwrap(parts.chunks[0]).load_state_dict(found["model"])
    parts.optimizer.load_state_dict(found["optimizer"])
    saved = torch.load(source / "global.pt")
    held = dict(optimizer_state.held_slices(parts.optimizer))
    names = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    count = 0
    for name, param in unwrap(parts.chunks[0]).named_parameters():
        if not name.startswith("decoder.layers."):
            continue
        block, rest = name.removeprefix("decoder.layers.").split(".", 1)
        ours = f"layers.{block}.{names.get(rest, rest)}"
        assert torch.equal(param, saved[ours]), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[param].tensors[state], saved[f"{state} of {ours}"].view(-1)), name
        count += 1
    assert count == 4 * 6


def test_gpt_model_loads_stacked_blocks(run_of: RunOf, tmp_path: Path) -> None:
    source = run_of(configuration(sizes(), shape="llama2_tiny"), 1)
    assert main([str(source), str(tmp_path / "theirs"), "--format", "megatron", "--keys", "stacked", "--verify"]) == 0
    theirs = as_torch_reads(tmp_path / "theirs" / "iter_0000002")
    assert theirs["decoder.layers.mlp.linear_fc1.weight"].shape == (4, 352, 64)
    gpt_on_ranks(1, configuration(sizes(), shape="llama2_tiny"), load_gpt, tmp_path / "theirs", source)


def test_the_loss_scale_of_fp16_goes_along_and_back(run_of: RunOf, tmp_path: Path) -> None:
    config = configuration(sizes(), shape="llama2_tiny", num_layers=2, dtype="fp16")
    source = run_of(config, 1)
    (tmp_path / "recipe.toml").write_text(recipe.dump(config))
    assert main([str(source), str(tmp_path / "theirs"), "--format", "megatron"]) == 0
    on_ranks(1, config, load_and_go_on, tmp_path / "theirs", source, tmp_path / "pieces")
    assert main([str(tmp_path / "theirs"), str(tmp_path / "back"), "--recipe", str(tmp_path / "recipe.toml")]) == 0
    saved, back = (read_state(folder).optimizer for folder in (source / "checkpoints/iter_0000002", tmp_path / "back"))
    assert saved["grad_scaler"] == back["grad_scaler"]
    assert isinstance(saved["grad_scaler"], dict)


def test_there_and_back_is_the_same(run_of: RunOf, tmp_path: Path) -> None:
    """Ours to stacked experts of Megatron's and back, by torch's reader and by ours."""
    from tests.tools.test_reshard import same, tensors

    config = configuration(sizes(), shape="qwen3_moe_tiny", num_layers=2)
    source = run_of(config, 1)
    (tmp_path / "recipe.toml").write_text(recipe.dump(config))
    form = ["--format", "megatron", "--keys", "stacked", "--max_file_size", "300KB"]
    assert main([str(source), str(tmp_path / "theirs"), *form, "--verify"]) == 0
    back = [str(tmp_path / "theirs"), str(tmp_path / "back"), "--recipe", str(tmp_path / "recipe.toml"), "--verify"]
    assert main(back) == 0
    first = {key: words for key, words in tensors(source / "checkpoints/iter_0000002").items() if "rng." not in key}
    assert same(first, tensors(tmp_path / "back"))


def test_blocks_that_differ_are_not_stacked(run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration(sizes(), shape="qwen3_moe_tiny", num_layers=2, moe_layer_freq="[0,1]")
    source = run_of(config, 1)
    form = [str(source), str(tmp_path / "theirs"), "--format", "megatron"]
    assert main([*form, "--keys", "stacked"]) == 2
    assert "--keys per_block" in capsys.readouterr().err
    assert main([*form, "--keys", "per_block", "--verify"]) == 0
