"""tools.reshard between megatron-core's own checkpoints and ours; torch's reader is the witness."""

import dataclasses
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from campaign import some
from checkpoint_parts import Parts, configuration, on_ranks, sizes
from models.names import checkpoint_key
from parallel.layout import Layout
from program.errors import UserError
from tests.tools.reshard_sources import as_torch_reads, fill_and_save, gpt_on_ranks, save, train_and_save
from tools.reshard.__main__ import main
from tools.reshard.megatron.args import SCHEDULER, with_schedule
from tools.reshard.megatron.args import scheduler as megatron_scheduler
from tools.reshard.megatron.hybrid_files import HybridFiles
from training.checkpoint.format.reader import FileReader
from training.checkpoint.schedule_entry import kept_schedule
from training.checkpoint.state import State
from training.config import recipe
from training.config.run_config import RunConfig
from training.progress import Progress

STATES = ("param", "exp_avg", "exp_avg_sq")
WORDS = {torch.float32: np.uint32, torch.bfloat16: np.uint16}

LLAMA = configuration(sizes(), dtype="bf16", shape="llama2_tiny")
MOE = configuration(sizes(), shape="qwen3_moe_tiny")
MIXED = configuration(sizes(), shape="qwen3_moe_tiny", moe_layer_freq="[0,1,1,0]")


def with_recipe(config: RunConfig, folder: Path) -> list[str]:
    path = folder / "recipe.toml"
    path.write_text(recipe.dump(config))
    return ["--recipe", str(path)]


def words(tensor: torch.Tensor) -> np.ndarray:
    unsigned = {4: torch.uint32, 2: torch.uint16}[tensor.element_size()]
    return tensor.contiguous().view(unsigned).numpy()


def check_states(target: Path, expected: Callable[[str, str], torch.Tensor]) -> int:
    """That the target's optimizer has, for each state and key, what ``expected`` says: how many there are."""
    count = 0
    with FileReader(target) as reader:
        for key in reader.tensors:
            if match := re.match(r"optimizer\.state\.(\w+)\.(.+)", key):
                assert np.array_equal(reader.whole(key), words(expected(match[1], match[2]))), key
                count += 1
    return count


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HybridModel in bf16 at TP2 DP2, as Megatron-LM leaves it: iter_N and the text file beside it."""
    root = tmp_path_factory.mktemp("hybrid")
    config = configuration(sizes(2), dtype="bf16", shape="llama2_tiny")
    on_ranks(4, config, train_and_save, root / "iter_0000002", "fully_reshardable")
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    return root


@pytest.mark.campaign
def test_a_hybrid_models_checkpoint_becomes_ours(hybrid: Path, tmp_path: Path) -> None:
    assert main([str(hybrid), str(tmp_path / "ours"), "--verify", *with_recipe(LLAMA, tmp_path)]) == 0
    theirs = as_torch_reads(hybrid / "iter_0000002")
    count = check_states(tmp_path / "ours", lambda state, key: theirs[f"optimizer.state.{state}.{key}"])
    assert count == len([key for key in theirs if key.startswith("optimizer.state.")]) > 60


def test_weights_alone_are_the_saved_ones(hybrid: Path, tmp_path: Path) -> None:
    assert main([str(hybrid), str(tmp_path / "ours"), "--drop_optimizer", *with_recipe(LLAMA, tmp_path)]) == 0
    theirs = as_torch_reads(hybrid / "iter_0000002")
    with FileReader(tmp_path / "ours") as reader:
        assert len(reader.tensors) > 20
        for key, info in reader.tensors.items():
            assert info.dtype == "bfloat16"
            assert np.array_equal(reader.whole(key), words(theirs[key]))


@pytest.mark.parametrize("ep", some([1, 2], [2]))
def test_stacked_blocks_of_experts_become_sublayers(ep: int, tmp_path: Path) -> None:
    """GPTModel of local modules: everything stacked over blocks, and the norm before the experts under another name."""
    config = configuration(sizes(expert_model_parallel_size=ep), shape="qwen3_moe_tiny")
    gpt_on_ranks(2, config, fill_and_save, tmp_path / "theirs", "fully_reshardable")
    theirs = as_torch_reads(tmp_path / "theirs")
    assert any(key.startswith("chained_0.") for key in theirs) == (ep == 2)
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--verify", *with_recipe(MOE, tmp_path)]) == 0
    plain = {re.sub(r"^chained_\d\.", "", key): tensor for key, tensor in theirs.items()}
    stacked = {
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
        "mlp.experts.linear_fc1.weight": "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.linear_fc2.weight": "mlp.experts.experts.linear_fc2.weight",
    }
    stacked |= {name: name for name in (
        "self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight", "mlp.router.weight",
        "self_attention.linear_proj.weight", "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight",
    )}  # fmt: skip
    rest = {
        "word_embeddings.weight": "embedding.word_embeddings.weight",
        "final_layernorm.weight": "decoder.final_layernorm.weight",
        "output_layer.weight": "output_layer.weight",
    }
    wanted: dict[str, Callable[[str], torch.Tensor]] = {}
    for name, key in rest.items():
        wanted[checkpoint_key(name)] = lambda state, key=key: plain[f"optimizer.state.{state}.{key}"]
    for block in range(4):
        for name, key in stacked.items():
            wanted[checkpoint_key(f"layers.{block}.{name}")] = lambda state, key=key, block=block: plain[
                f"optimizer.state.{state}.decoder.layers.{key}"
            ][block]
    assert check_states(tmp_path / "ours", lambda state, key: wanted[key](state)) == 3 * len(wanted)


def test_blocks_that_differ_have_keys_by_block(tmp_path: Path) -> None:
    config = configuration(sizes(2), shape="qwen3_moe_tiny", moe_layer_freq="[0,1,1,0]")
    gpt_on_ranks(2, config, fill_and_save, tmp_path / "theirs", "fully_reshardable")
    theirs = as_torch_reads(tmp_path / "theirs")
    assert "decoder.layers.3.mlp.linear_fc1.layer_norm_weight" in theirs
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--verify", *with_recipe(MIXED, tmp_path)]) == 0
    of_block_3, of_block_2 = "decoder.layers.3.mlp.linear_fc1.", "decoder.layers.2.mlp.linear_fc1."
    with FileReader(tmp_path / "ours") as reader:
        for key, of in (
            ("decoder.layers.7.mlp.linear_fc1.layer_norm_weight", of_block_3 + "layer_norm_weight"),
            ("decoder.layers.5.pre_mlp_layernorm.weight", of_block_2 + "layer_norm_weight"),
            ("decoder.layers.7.mlp.linear_fc1.weight", of_block_3 + "weight"),
        ):
            for state in STATES:
                found = reader.whole(f"optimizer.state.{state}.{key}")
                assert np.array_equal(found, words(theirs[f"optimizer.state.{state}.{of}"]))


# ---- what is refused


def refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], target: Path) -> None:
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not target.exists()


def test_an_optimizer_that_megatron_core_has_written_wrongly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tied embeddings, biases, a padded bucket before another: megatron-core itself saves what is not the state."""
    parallel = sizes(pp=2, overlap_grad_reduce=True, ddp_bucket_size=20000)
    config = configuration(parallel, shape="gpt2_tiny")
    on_ranks(2, config, train_and_save, tmp_path / "theirs", "fully_reshardable")
    arguments = [str(tmp_path / "theirs"), str(tmp_path / "ours"), *with_recipe(config, tmp_path)]
    theirs = as_torch_reads(tmp_path / "theirs")
    prefix = "optimizer.state.param."
    masters = {key.removeprefix(prefix): tensor for key, tensor in theirs.items() if key.startswith(prefix)}
    wrong = [key for key, master in masters.items() if not torch.equal(master, theirs[key])]
    assert "embedding.word_embeddings.weight" in wrong
    assert main(arguments) == 2
    said = capsys.readouterr().err
    named = re.search(r"optimizer\.state\.param of (.*) and (\d+) more does not round", said)
    assert named
    assert set(named[1].split(", ")) <= set(wrong)
    assert int(named[2]) + 5 == len(wrong)
    assert not (tmp_path / "ours").exists()
    assert main([*arguments, "--drop_optimizer", "--verify"]) == 0


MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "another depth": ({"num_layers": 3}, r"has no place for decoder\.layers\.6"),
    "another width": ({"ffn_hidden_size": 64}, r"differs in decoder\.layers\.1\.mlp\.linear_fc1\.weight \[352, 64\]"),
    "tied": ({"untie_embeddings_and_output_weights": False}, r"has no place for output_layer\.weight"),
    "with biases": ({"add_qkv_bias": True}, r"lacks layers\.0\.self_attention\.linear_qkv\.bias"),
    "more ids": ({"vocab_size": 500}, r"has 384 rows, but the model 500 token ids"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_recipe_of_another_model(name: str, hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = MISFITS[name]
    config = configuration(sizes(), dtype="bf16", shape="llama2_tiny", **changes)
    arguments = [str(hybrid), str(tmp_path / "ours"), *with_recipe(config, tmp_path)]
    refused(arguments, message, capsys, tmp_path / "ours")


def test_without_a_recipe(hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused([str(hybrid), str(tmp_path / "ours")], "--recipe", capsys, tmp_path / "ours")


# ---- mixers, which megatron-core cuts


MIXERS = {"nemotron_h_tiny": {"hybrid_layer_pattern": "M*"}, "qwen35_tiny": {"linear_attention_freq": "2"}}
"""Two layers or blocks of each."""


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.campaign
def test_a_mixers_parts_are_one_tensor(name: str, tmp_path: Path) -> None:
    """On TP2, as megatron-core itself writes it: weights and moments are those of our own layers' state."""

    def save_both(parts: Parts) -> None:
        from models.layers import gated_delta_net, mamba

        parts.train(1)
        save(parts, tmp_path / "whole", "fully_reshardable")
        mamba.one_tensor_each = gated_delta_net.one_tensor_each = lambda found: found
        save(parts, tmp_path / "cut", "fully_reshardable")

    model: dict[str, Any] = {"shape": name, "num_layers": 2, **MIXERS[name]}
    on_ranks(2, configuration(sizes(2), **model), save_both)
    recipe = with_recipe(configuration(sizes(), **model), tmp_path)
    cut = [key for key in as_torch_reads(tmp_path / "cut") if re.search(r"\.(in_proj|conv1d)\.weight\.\w+$", key)]
    assert len(cut) > 10
    for form in ("whole", "cut"):
        assert main([str(tmp_path / form), str(tmp_path / f"{form}_ours"), *recipe, "--verify"]) == 0
    with FileReader(tmp_path / "whole_ours") as one, FileReader(tmp_path / "cut_ours") as other:
        assert one.tensors.keys() == other.tensors.keys()
        assert [key for key in one.tensors if not np.array_equal(one.whole(key), other.whole(key))] == []


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save(
        {f"decoder.layers.0.mixer.in_proj.weight.{part}": torch.zeros(2, 2) for part in ("z", "x")},
        checkpoint_id=tmp_path, no_dist=True,
    )  # fmt: skip
    files = HybridFiles(tmp_path)
    with pytest.raises(UserError, match=r"in_proj\.weight is cut into z, x; expected z, x, B, C, dt or query"):
        _ = files.tensors
    files.close()


def test_megatrons_schedule_goes_on_where_its_own_scheduler_would(hybrid: Path, tmp_path: Path) -> None:
    """In our entry, and back; WSD's last part is the recipe's, since Megatron-LM saves none."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = OptimizerParamScheduler(
        types.SimpleNamespace(param_groups=[]), init_lr=0.0, max_lr=2e-3, min_lr=1e-4, lr_warmup_steps=24,
        lr_decay_steps=160, lr_decay_style="linear", start_wd=0.1, end_wd=0.2, wd_incr_steps=160,
        wd_incr_style="cosine",
    )  # fmt: skip
    said = {**scheduler.state_dict(), "lr_warmup_steps": 24.0}
    state = with_schedule(State(progress=Progress(), layout=Layout(), device="cpu", entries={SCHEDULER: said}), LLAMA)
    ours = kept_schedule(state.entries)
    assert ours is not None
    for samples in (0, 8, 24, 25, 80, 159, 160, 161, 500):
        scheduler.num_steps = samples
        group = {"max_lr": 2e-3, "min_lr": 1e-4}
        assert ours.learning_rate(samples) == pytest.approx(scheduler.get_lr(group), rel=1e-12)
        assert ours.weight_decay(samples) == pytest.approx(scheduler.get_wd(), rel=1e-12)
    back = megatron_scheduler(LLAMA, Progress(consumed_samples=8), None, ours)
    assert back == {**scheduler.state_dict(), "num_steps": 8}
    # one that has waited, in iterations without an update
    behind = dataclasses.replace(
        state, progress=Progress(consumed_samples=100), entries={SCHEDULER: {**said, "num_steps": 80}}
    )
    waited = kept_schedule(with_schedule(behind, LLAMA).entries)
    assert waited is not None and waited.learning_rate(100) == ours.learning_rate(80)
    assert megatron_scheduler(LLAMA, Progress(consumed_samples=108), None, waited)["num_steps"] == 88
    for value in (float("nan"), -1, "x", None):
        broken = dataclasses.replace(state, entries={SCHEDULER: {**said, "lr_decay_steps": value}})
        assert with_schedule(broken, LLAMA) == broken
