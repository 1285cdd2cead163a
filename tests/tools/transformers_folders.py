"""Hugging Face folders as the installed transformers writes them: its own classes, defaults and tokenizer."""

from pathlib import Path
from typing import Any

from models.families import ARCHITECTURES

SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""What is given to every class, whether it has such a key or not: it keeps it all the same."""
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}

_LISTED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("ministral", "ministral3", "qwen3", "seed_oss", "gemma", "gemma2", "gemma3_text", "ernie4_5", "glm", "glm4",
         "helium"),
        _HEAD),
    "qwen2 windows": _WINDOWS,
    "qwen3 tied": _HEAD | {"tie_word_embeddings": True},
    "mixtral": _LOCAL,
    "gpt_oss": _HEAD | _LOCAL,
    "minimax_m2": _HEAD | _LOCAL,
    "llama4_text": _HEAD | {"num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
    "olmoe": _EXPERTS,
    "qwen2_moe": _SHARED | {"decoder_sparse_step": 2},
    "qwen3_moe": _HEAD | _EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_next": _HEAD | _SHARED | _DELTA,
    "qwen3_5_text": _HEAD | _DELTA,
    "qwen3_5_moe_text": _HEAD | _SHARED | _DELTA,
    "deepseek_v2": _LATENT | _ROUTED,
    "deepseek_v3": _LATENT | _ROUTED | {"n_group": 1, "topk_group": 1},
    "glm4_moe": _HEAD | _ROUTED,
    "ernie4_5_moe": _HEAD | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24},
    "mamba2": {"num_heads": 16, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "nemotron_h": _HEAD | {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 16, "mamba_head_dim": 8,
        "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16,
    },
}  # fmt: skip
MODELS = {name: {} for name in sorted(ARCHITECTURES.keys() - _LISTED.keys() - {"kimi_k2"})} | _LISTED
"""The model_type, before a blank, and what is not as in SMALL. transformers has no class of Kimi K2's."""


def save_model(folder: Path, name: str, **more: Any) -> None:
    """One of MODELS, random, by ``save_pretrained``, and a tokenizer of bytes beside it."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(configured(name, **more)).save_pretrained(folder)
    save_tokenizer(folder)


def configured(name: str, **more: Any) -> Any:
    """The configuration of one of MODELS."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name.split()[0]](**{**SMALL, **MODELS[name], **more})


def save_tokenizer(folder: Path) -> None:
    """By ``save_pretrained``, with what that writes of itself, such as the 10^30 of model_max_length."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
