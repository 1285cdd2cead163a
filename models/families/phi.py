"""Phi-3, Phi-4 and Phi-4-mini, whose queries, keys and values are one tensor, and whose gate and up projection."""

import dataclasses

from models.families.base import ATTENTION, LLAMA_HEADS, LLAMA_WHOLE, MLP, like_llama, llama, tiny
from models.hf.block_parts import equal_dropouts
from models.hf.config_parts import tied, window
from models.hf.keys import Architecture
from models.hf.phi_rope import read_phi_rope, write_phi_rope
from models.hf.row_layouts import Table, fused_by_group, same
from models.shapes import GPTShape

_PHI4_MINI_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283,
    20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7,
    32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/microsoft/Phi-3-mini-4k-instruct; "Phi-3 Technical Report" (arXiv:2404.14219), section 2
    "phi3_mini": dataclasses.replace(
        llama(32, 3072, 8192, 32, 32), vocab_size=32064, window_size=(2046, 0), hf_model_type="phi3"
    ),
    # https://huggingface.co/microsoft/phi-4; "Phi-4 Technical Report" (arXiv:2412.08905)
    "phi4": dataclasses.replace(
        llama(40, 5120, 17920, 40, 10),
        vocab_size=100352,
        rotary_base=250_000,
        max_position_embeddings=16384,
        hf_model_type="phi3",
    ),
    # https://huggingface.co/microsoft/Phi-4-mini-instruct; "Phi-4-Mini Technical Report" (arXiv:2503.01743). Its window
    # of 262,144 tokens is beyond its context, and left out.
    "phi4_mini": dataclasses.replace(
        llama(32, 3072, 8192, 24, 8),
        vocab_size=200064,
        rotary_percent=0.75,
        rope_scaling="longrope",
        rope_scaling_factor=32.0,
        rope_original_max_position_embeddings=4096,
        rope_short_factor=(1.0,) * 48,
        rope_long_factor=_PHI4_MINI_LONG,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=False,
        hf_model_type="phi3",
    ),
}

TINY: dict[str, GPTShape] = {
    "phi3_tiny": tiny(PUBLISHED["phi3_mini"], window_size=(15, 0)),
    "phi4_tiny": tiny(PUBLISHED["phi4"]),
}


ARCHITECTURES: dict[str, Architecture] = {
    "phi3": like_llama(
        "Phi3ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        switches={"attention_bias": (False,), "mlp_bias": (None, False), "lm_head_bias": (None, False)}
        | {"full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
        without=("hidden_dropout",),
        parts=(
            LLAMA_HEADS,
            (read_phi_rope, write_phi_rope),
            tied(False),
            window(None),
            equal_dropouts("resid_pdrop", ("embd_pdrop",), 0.0),
        ),
    ),
}

FUSED = {
    "self_attention.linear_qkv.weight": fused_by_group("self_attn.qkv_proj.weight"),
    "mlp.linear_fc1.weight": same("mlp.gate_up_proj.weight"),
}

TABLES: dict[str, Table] = {"phi3": Table(LLAMA_WHOLE, ATTENTION | MLP | FUSED)}
