"""--format megatron --optimizer_format dp_reshardable: what megatron-core's own loader makes of it, and ours."""

import re
from pathlib import Path
from typing import Any

import pytest

from campaign import some
from checkpoint_parts import configuration, on_ranks, sizes
from models.resolve import resolve
from parallel.config import ParallelConfig
from tests.tools.reshard_sources import as_torch_reads, gpt_on_ranks
from tests.tools.test_reshard import same, tensors
from tests.tools.test_reshard_to_megatron import load_and_go_on, load_gpt, train_and_save
from tools.reshard.__main__ import main
from tools.reshard.megatron.buckets import chunk_sites
from tools.reshard.megatron.job import MegatronJob
from training.config import recipe

FORM = ["--format", "megatron", "--optimizer_format", "dp_reshardable", "--transformer_impl", "local", "--verify"]
TP, PP, EP = "--tensor_model_parallel_size", "--pipeline_model_parallel_size", "--expert_model_parallel_size"
BUCKETS = ["--overlap_grad_reduce", "--ddp_bucket_size", "20000"]
OF_BUCKETS: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 20000}

CASES: dict[str, tuple[dict[str, Any], ParallelConfig, int, list[str]]] = {
    "bf16, TP2 DP2, buckets": (
        {"shape": "llama2_tiny", "dtype": "bf16"}, sizes(2, **OF_BUCKETS), 4, [TP, "2", *BUCKETS],
    ),
    "tied, biases, PP2, buckets": ({"shape": "gpt2_tiny"}, sizes(pp=2, **OF_BUCKETS), 2, [PP, "2", *BUCKETS]),
    "VPP2": (
        {"shape": "llama2_tiny"}, sizes(pp=2, vpp=2), 2, [PP, "2", "--virtual_pipeline_model_parallel_size", "2"],
    ),
    "EP2, bf16": (
        {"shape": "qwen3_moe_tiny", "dtype": "bf16"}, sizes(expert_model_parallel_size=2), 2, [EP, "2"],
    ),
    "latent attention, experts, MTP, PP2": ({"shape": "deepseek_v3_tiny"}, sizes(pp=2), 2, [PP, "2"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of two steps on one rank, by the model and dtype; the same one for all who ask."""
    return {}


def run_of(model: dict[str, Any], runs: dict[str, Path], folder: Path) -> Path:
    name = str(sorted(model.items()))
    if name not in runs:
        config = configuration(sizes(), **model)
        on_ranks(1, config, train_and_save, folder / "run", recipe.dump(config))
        runs[name] = folder / "run"
    return runs[name]


@pytest.mark.parametrize("name", some(CASES, [name for name in CASES if not name.startswith(("latent", "EP2"))]))
def test_megatron_core_loads_flat_memory(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    """Weights, fp32 weights and both moments are the run's, bit by bit; and the same come back to our form."""
    model, parallel, readers, more = CASES[name]
    source = run_of(model, runs, tmp_path)
    assert main([str(source), str(tmp_path / "theirs"), *FORM, *more]) == 0
    written = as_torch_reads(tmp_path / "theirs" / "iter_0000002")
    assert not [key for key in written if key.startswith("optimizer.state.")]
    on_ranks(readers, configuration(parallel, **model), load_and_go_on, tmp_path / "theirs", source, tmp_path / "all")
    (tmp_path / "recipe.toml").write_text(recipe.dump(configuration(sizes(), **model)))
    back = [str(tmp_path / "theirs"), str(tmp_path / "back"), "--recipe", str(tmp_path / "recipe.toml"), "--verify"]
    assert main(back) == 0
    first = {key: words for key, words in tensors(source / "checkpoints/iter_0000002").items() if "rng." not in key}
    assert same(first, tensors(tmp_path / "back"))


def test_gpt_model_loads_flat_memory_beside_stacked_blocks(runs: dict[str, Path], tmp_path: Path) -> None:
    model = {"shape": "llama2_tiny"}
    source = run_of(model, runs, tmp_path)
    assert main([str(source), str(tmp_path / "theirs"), *FORM, "--keys", "stacked"]) == 0
    gpt_on_ranks(1, configuration(sizes(), **model), load_gpt, tmp_path / "theirs", source)
    (tmp_path / "recipe.toml").write_text(recipe.dump(configuration(sizes(), **model)))
    back = [str(tmp_path / "theirs"), str(tmp_path / "back"), "--recipe", str(tmp_path / "recipe.toml"), "--verify"]
    assert main(back) == 0


def test_transformer_engine_orders_its_own_way() -> None:
    """Norms inside the linear layers behind them; grouped experts by layer (sources: ``megatron/params.py``)."""
    shape = resolve(configuration(sizes(), shape="qwen3_moe_tiny").model, 257)
    names = {
        form: [f"{name.removeprefix('layers.0.')} {expert or 0}" for name, expert in chunk_sites(job, shape, 0)[1:17]]
        for form, job in (
            ("local", MegatronJob(transformer_impl="local", moe_grouped_gemm=True)),
            ("te", MegatronJob()),
            ("grouped", MegatronJob(moe_grouped_gemm=True)),
        )
    }
    norm, projection = "self_attention.linear_qkv.layer_norm_weight 0", "self_attention.linear_proj.weight 0"
    assert names["local"][:2] == [norm, projection]
    assert names["te"][:3] == [projection, norm, "self_attention.linear_qkv.weight 0"]
    experts = {form: [name for name in found if "experts" in name] for form, found in names.items()}
    assert (
        experts["te"]
        == experts["local"]
        == [f"mlp.experts.linear_fc{layer}.weight {expert}" for expert in range(4) for layer in (1, 2)]
    )
    assert experts["grouped"] == [
        f"mlp.experts.linear_fc{layer}.weight {expert}" for layer in (1, 2) for expert in range(4)
    ]


# ---- what is refused

MISTAKES: dict[str, tuple[list[str], str]] = {
    "stages": ([*FORM, PP, "3"], r"num_layers 4 is not a multiple of PP 3"),
    "slices": ([*FORM, TP, "3"], r"cannot be cut for TP 3"),
    "experts": ([*FORM, EP, "2"], r"the model has 0 experts"),
    "ranks": ([*FORM, EP, "4", "--data_parallel_size", "2"], r"EP 4 x ETP 1 = 4 ranks"),
    "no ranks": ([*FORM, "--data_parallel_size", "0"], r"--data_parallel_size 0: expected 1 or more"),
    "ours": ([TP, "2"], r"a job's sizes are for --format megatron alone"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_one_message(
    name: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, message = MISTAKES[name]
    source = run_of({"shape": "llama2_tiny"}, runs, tmp_path)
    assert main([str(source), str(tmp_path / "out"), *more]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_weights_alone_have_no_flat_memory(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run_of({"shape": "llama2_tiny"}, runs, tmp_path)
    assert main([str(source), str(tmp_path / "weights"), "--drop_optimizer"]) == 0
    assert main([str(tmp_path / "weights"), str(tmp_path / "out"), *FORM]) == 2
    assert "has no optimizer's state of" in capsys.readouterr().err
