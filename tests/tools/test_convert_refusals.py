"""What tools.convert does not know, it refuses by name and writes nothing."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from models.families import TINY
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main
from training.checkpoint.format.manifest import read_manifest, write_manifest

LLAMA, QWEN2, GPT2 = (TINY[f"{name}_tiny"] for name in ("llama3", "qwen2", "gpt2"))
MOE, V2, V3 = (TINY[f"{name}_tiny"] for name in ("qwen3_moe", "deepseek_v2", "deepseek_v3"))
QWEN35 = TINY["qwen35_moe_tiny"]
TIED = dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False)
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 64}

CONFIGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "model type": (LLAMA, {"model_type": "gemma3n"}, "model_type 'gemma3n' is not supported"),
    "rope type": (LLAMA, {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "rope parameter": (
        LLAMA,
        {"rope_scaling": None, "rope_parameters": {**LLAMA3_ROPE, "factor": 8.0, "low_freq_factor": 1.0,
                                                   "high_freq_factor": 4.0, "attention_factor": 1.5}},
        "rope_parameters.attention_factor = 1.5",
    ),
    "rope parameter missing": (
        LLAMA, {"rope_scaling": None, "rope_parameters": LLAMA3_ROPE}, "rope_parameters.factor = None"
    ),
    "partial rope": (
        LLAMA,
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    "rope that is a list": (LLAMA, {"rope_parameters": [1]}, "rope_parameters = [1]: expected parameters by name"),
    "older rope that is text": (LLAMA, {"rope_parameters": None, "rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
    "rope type that is a list": (LLAMA, {"rope_scaling": None, "rope_parameters": {"rope_type": [1]}}, "e = [1]"),
    "rope factor that is text": (
        LLAMA,
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": "two"}},
        "rope_parameters.factor = 'two': expected a number",
    ),
    "rope base that is not a number": (
        LLAMA, {"rope_scaling": None, "rope_theta": float("nan"), "rope_parameters": None}, "rope_theta = nan: expected"
    ),
    "two rope bases": (LLAMA, {"rope_theta": 7.0}, "rope_theta = 7.0"),
    "attention bias": (LLAMA, {"attention_bias": 1}, "attention_bias = 1: expected true or false"),
    "MLP bias": (TINY["phi3_tiny"], {"mlp_bias": True}, "mlp_bias = True: expected None or False"),
    "activation": (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu': expected 'silu'"),
    "soft cap": (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: unknown"),
    "quantised": (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "missing number": (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    "no heads": (LLAMA, {"num_attention_heads": 0}, "num_attention_heads = 0: expected a whole number from 1"),
    "no heads in GPT-2": (GPT2, {"n_head": 0}, "n_head = 0: expected a whole number from 1 to 65,536"),
    "no key-value heads": (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads = 0: expected a whole number"),
    "half a block": (MOE, {"num_hidden_layers": 3.5}, "num_hidden_layers = 3.5: expected a whole number"),
    "head width that is text": (LLAMA, {"head_dim": "64"}, "head_dim = '64': expected a whole number"),
    "every 0th block": (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: expected a whole number"),
    "one dense block": (MOE, {"mlp_only_layers": 1}, "mlp_only_layers = 1: expected a list"),
    "loss that is text": (V2, {"aux_loss_alpha": "0.1"}, "aux_loss_alpha = '0.1': expected a number"),
    "model type that is a list": (LLAMA, {"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    "fp8 that is text": (V3, {"quantization_config": "fp8"}, "quantization_config = 'fp8': expected {"),
    "windows in experts' models": (
        MOE, {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types = ['full_attention', 'sliding_attention', 'full_attention', 'sliding_attention']: expected one",
    ),
    "layer types without the switch": (
        QWEN2, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "use_sliding_window = False: expected true"
    ),
    "layer types of fewer blocks": (
        QWEN2, {"layer_types": ["full_attention"] * 3}, "layer_types = ['full_attention', 'full_attention', 'full"
    ),
    "layer types of another kind": (
        TINY["gemma3_tiny"], {"layer_types": ["linear_attention"] * 4}, "layer_types = ['linear_attention',"
    ),
    "windows without a width": (TINY["gemma2_tiny"], {"sliding_window": None}, "sliding_window = None: expected a num"),
    "soft cap of scores that transformers leaves out": (
        TINY["gemma3_tiny"], {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: expected null"
    ),
    "stretched windows": (
        TINY["olmo3_tiny"],
        {"rope_parameters": {"full_attention": {"rope_type": "default"},
                             "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
         "rope_theta": None, "rope_scaling": None},
        "sliding_attention.rope_type = 'linear': expected 'default'",
    ),
    "no factors of longrope": (
        TINY["phi4_tiny"],
        {"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
        "long_factor = [1.0]: expected 8 numbers",
    ),
    "factor of longrope that is text": (
        TINY["phi4_tiny"],
        {"rope_scaling": None, "rope_theta": None, "rope_parameters": {
            "rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "attention_factor": "2"}},
        "rope_scaling.attention_factor = '2': expected a number above 0",
    ),
    "dropouts that differ": (TINY["phi3_tiny"], {"embd_pdrop": 0.5}, "embd_pdrop = 0.5: expected 0"),
    "an activation of another name": (TINY["pythia_tiny"], {"hidden_act": "relu"}, "hidden_act = 'relu': expected"),
    "blocks with and without RoPE": (TINY["smollm3_tiny"], {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers = [1, 2"),
    "a bidirectional model": (TINY["gemma3_tiny"], {"use_bidirectional_attention": True}, "bidirectional_attention ="),
    "head width": (MOE, {"head_dim": None}, "head_dim = None: expected a number"),
    "experts twice": (MOE, {"num_local_experts": 8}, "num_experts = 4: expected 8"),
    "router noise": (TINY["mixtral_tiny"], {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    "window": (TINY["mistral_tiny"], {"sliding_window": -3}, "sliding_window = -3"),
    "choice of experts": (V2, {"topk_method": "sinkhorn"}, "topk_method = 'sinkhorn'"),
    "normed choice": (V2, {"norm_topk_prob": True}, "norm_topk_prob = True"),
    "scores": (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax': expected 'sigmoid'"),
    "rotation order": (V3, {"rope_interleave": False}, "rope_interleave = False"),
    "key-value heads": (V3, {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    "fp8 of another block": (
        V3, {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}}, "[64, 64]"
    ),
    "cross attention": (GPT2, {"add_cross_attention": True}, "add_cross_attention = True"),
    "attention scale": (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    "embedding dropout": (GPT2, {"embd_pdrop": 0.3}, "embd_pdrop = 0.3"),
}  # fmt: skip

WIDE = torch.zeros(3, 64)
TENSORS: dict[str, tuple[Any, dict[str, torch.Tensor | None], str]] = {
    "bias in the files only": (
        LLAMA, {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)},
        "no place here for model.layers.1.self_attn.q_proj.bias",
    ),
    "adapter": (LLAMA, {"model.layers.0.self_attn.q_proj.lora_A.weight": WIDE}, "lora_A"),
    "missing tensor": (LLAMA, {"model.layers.2.mlp.up_proj.weight": None}, "lacks model.layers.2.mlp.up_proj.weight"),
    "other shape": (LLAMA, {"model.norm.weight": torch.zeros(65)}, "model.norm.weight [65], expected [64]"),
    "untied without output": (LLAMA, {"lm_head.weight": None}, "lacks lm_head.weight"),
    "tied with another output": (TIED, {"lm_head.weight": torch.zeros(257, 64)}, "lm_head.weight differs from"),
    "one expert too many": (MOE, {"model.layers.0.mlp.experts.4.up_proj.weight": WIDE}, "experts.4.up_proj"),
    "vision": (QWEN35, {"model.visual.pos_embed.weight": WIDE}, "has no place here for model.visual.pos_embed.weight"),
    "multi-token prediction apart": (QWEN35, {"mtp.fc.weight": WIDE}, "has no place here for mtp.fc.weight"),
    "one tensor by two names": (
        QWEN35, {"model.language_model.norm.weight": torch.zeros(64)}, "are the same tensor. Remove one of the two."
    ),
    "an expert by two names": (
        QWEN35, {"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 64, 64)},
        "model.layers.0.mlp.experts.0.down_proj.weight is there twice",
    ),
    "fused experts of another shape": (
        QWEN35, {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 127, 64)},
        "has no place here for model.layers.0.mlp.experts.gate_up_proj",
    ),
    "mixed dtypes": (
        LLAMA, {"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 64)}, "bfloat16 and float32. Choose one"
    ),
    "whole numbers": (LLAMA, {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "model.norm.weight is I8"),
}  # fmt: skip


FP8_MATRIX = torch.zeros(64, 64).to(torch.float8_e4m3fn)
Q, SCALES = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight_scale_inv"
FP8_TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no scales": (
        {Q: FP8_MATRIX},
        f"{SCALES}: expected scales [1, 1], one for each 128 x 128 block of {Q} [64, 64]; found none",
    ),
    "too many scales": (
        {Q: FP8_MATRIX, SCALES: torch.ones(7, 9)},
        f"{SCALES}: expected scales [1, 1], one for each 128 x 128 block of {Q} [64, 64]; found [7, 9]",
    ),
    "scales of bf16": (
        {SCALES: torch.ones(1, 1)}, f"{SCALES}: expected scales of an fp8 matrix, but {Q} is bfloat16, which has none"
    ),
    "scales in fp8": (
        {Q: FP8_MATRIX, SCALES: FP8_MATRIX[:1, :1].clone()},
        f"{SCALES}: expected one of float64, float32, float16, bfloat16; found float8_e4m3fn",
    ),
    "a norm": ({"model.norm.weight": FP8_MATRIX[0].clone()}, "model.norm.weight [64]: expected fp8 in matrices only"),
    "a copy without scales": (
        {"lm_head.weight": torch.zeros(257, 64).to(torch.float8_e4m3fn)}, "lm_head.weight_scale_inv: expected scales"
    ),
}  # fmt: skip


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said when hf is refused."""
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint"), *flags]) == 2
    assert not (tmp_path / "checkpoint").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, config, expected = CONFIGS[kind]
    write_folder(tmp_path / "hf", shape, config=config)
    assert expected in refused(tmp_path, capsys)


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_are_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, tensors, expected = TENSORS[kind]
    write_folder(tmp_path / "hf", shape, tensors=tensors)
    assert expected in refused(tmp_path, capsys)


@pytest.mark.parametrize("flags", [(), ("--dtype", "bfloat16")])
@pytest.mark.parametrize("kind", FP8_TENSORS)
def test_fp8_without_its_scales_is_refused(
    kind: str, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, whatever dtype is asked for: numbers without their scales are other numbers."""
    tensors, expected = FP8_TENSORS[kind]
    write_folder(tmp_path / "hf", TIED, tensors=dict(tensors))
    assert expected in refused(tmp_path, capsys, *flags)
    assert not list(tmp_path.glob("checkpoint*"))


def test_scales_of_128_blocks_mean_the_same_without_a_configuration(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "hf", TIED, tensors={Q: torch.ones(64, 64).to(torch.float8_e4m3fn), SCALES: WIDE[:1, :1] + 3}
    )
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint"), "--verify"]) == 0
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "again")]) == 0
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor(Q), torch.full((64, 64), 3, dtype=torch.bfloat16))


def test_a_file_cut_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", LLAMA)
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "cut short" in refused(tmp_path, capsys)


def test_pickled_weights_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", LLAMA)
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    assert "Pickled weights are not read" in refused(tmp_path, capsys)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", LLAMA)
    (tmp_path / "checkpoint").mkdir()
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 2
    assert "already there" in capsys.readouterr().err
    assert list((tmp_path / "checkpoint").iterdir()) == []


@pytest.mark.parametrize("flags", [("--max_file_size", "5 apples"), ("--workers", "0")])
def test_bad_flags_are_refused(flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", LLAMA)
    assert flags[1] in refused(tmp_path, capsys, *flags)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"activation": "geglu"}, "model.activation 'geglu'"),
        ({"rotary_percent": 0.5}, "model.rotary_percent 0.5"),
        ({"parallel_residual": "true"}, "model.parallel_residual True"),
        ({"mtp_num_layers": 1}, "model.mtp_num_layers 1"),
    ],
)
def test_a_model_that_transformers_lacks_is_not_exported(
    change: dict[str, Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "hf", LLAMA)
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    path, (name, value) = tmp_path / "checkpoint" / "config.toml", next(iter(change.items()))
    lines = [f'{name} = "{value}"' if isinstance(value, str) and value != "true" else f"{name} = {value}"]
    lines = [lines[0] if line.startswith(f"{name} = ") else line for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    files = read_manifest(path.parent).files
    write_manifest(path.parent, {name: facts for name, facts in files.items() if name.endswith(".bin")}, {})
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "again")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_configuration_to_take_along_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    write_folder(tmp_path / "hf", LLAMA)
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    like = tmp_path / "like"
    like.mkdir()
    (like / "tokenizer.json").write_text("{}")
    (like / "config.json").write_text(text)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "again"), "--like", str(like)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tools.convert: {like / 'config.json'}: ")
    assert not list(tmp_path.glob("again*"))
