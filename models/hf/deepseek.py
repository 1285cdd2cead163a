"""DeepSeek-V2 and V3: latent attention, groups of experts, multi-token prediction, fp8."""

from typing import Any

from models.hf.config_parts import COUNT, freq
from models.hf.keys import Config, Read, Unsupported, Write, is_one_of, pop_number, take_bool
from models.shape_fields import SPANS
from models.shapes import GPTShape
from models.spans import MOST_WIDTH, Span

LATENT_EPSILON = 1e-6
"""Of the norms of latents in transformers' DeepseekV2Attention and DeepseekV3Attention, and in DeepSeek's own code."""


def read_latent(left: Config, fields: dict[str, Any]) -> None:
    """Latent attention, whose keys and values are as many as its queries."""
    if fields["norm_epsilon"] != LATENT_EPSILON:
        fields["latent_norm_epsilon"] = LATENT_EPSILON
    heads = fields["num_query_groups"] = fields["num_attention_heads"]
    groups = left.pop("num_key_value_heads", heads)
    if not is_one_of(groups, (heads, None)):
        raise Unsupported("num_key_value_heads", groups, f"{heads}, num_attention_heads")
    nope, rotary = fields["qk_head_dim"], fields["qk_pos_emb_head_dim"]
    for key, value in (("head_dim", rotary), ("qk_head_dim", nope + rotary)):  # sums and copies of the others
        if not is_one_of(found := left.pop(key, None), (value, None)):
            raise Unsupported(key, found, f"{value}, as the other numbers have it")
    left.setdefault("q_lora_rank", 1536)  # left out is another thing than null, which is none
    fields["q_lora_rank"] = pop_number(left, "q_lora_rank", 0, Span(0, MOST_WIDTH, whole=True))
    fields["kv_channels"] = fields["qk_head_dim"]


def write_latent(shape: GPTShape) -> Config:
    """As ``read_latent``."""
    return {"num_key_value_heads": shape.num_query_groups, "q_lora_rank": shape.q_lora_rank or None}


def read_deepseek_experts(left: Config, fields: dict[str, Any]) -> None:
    """Experts, those that all tokens meet, the dense blocks before them, and groups."""
    shared = pop_number(left, "n_shared_experts", 0, COUNT)
    fields["moe_shared_expert_intermediate_size"] = shared * fields["moe_ffn_hidden_size"]
    dense, blocks = pop_number(left, "first_k_dense_replace", 0, COUNT), fields["num_layers"]
    if dense >= blocks:
        raise Unsupported("first_k_dense_replace", dense, f"fewer than the {blocks} blocks: one has to have experts")
    fields["moe_layer_freq"] = freq([block >= dense for block in range(blocks)])
    groups, chosen = pop_number(left, "n_group", 1, COUNT) or 1, pop_number(left, "topk_group", 1, COUNT) or 1
    fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {}
    coefficient = left.pop("aux_loss_alpha", None)
    if coefficient is not None and SPANS["moe_aux_loss_coeff"].problem("aux_loss_alpha", coefficient):
        raise Unsupported("aux_loss_alpha", coefficient, str(SPANS["moe_aux_loss_coeff"]))
    fields |= {"moe_aux_loss_coeff": coefficient} if coefficient is not None else {}
    if not take_bool(left, "seq_aux", True):
        fields["moe_router_load_balancing_type"] = "aux_loss"


def write_deepseek_experts(shape: GPTShape) -> Config:
    """As ``read_deepseek_experts``."""
    width = shape.expert_ffn_hidden_size
    dense = shape.moe_blocks.index(True) if True in shape.moe_blocks else shape.num_layers
    return {
        "n_shared_experts": shape.moe_shared_expert_intermediate_size // width,
        "moe_intermediate_size": width,
        "first_k_dense_replace": dense,
        "n_group": shape.moe_router_num_groups or 1,
        "topk_group": shape.moe_router_group_topk or 1,
    }


V2_DEFAULTS = {"n_shared_experts": 2}
V3_DEFAULTS = {"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
"""What experts' keys mean that are left out, as their configuration classes have it; null is another thing."""


def deepseek_experts(defaults: Config) -> tuple[Read, Write]:
    """defaults: what their keys mean where they are left out."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        for key, value in defaults.items():
            left.setdefault(key, value)
        read_deepseek_experts(left, fields)

    return read, write_deepseek_experts


def read_v3_choice(left: Config, fields: dict[str, Any]) -> None:
    """Refuses where transformers' DeepseekV3TopkRouter and megatron-core's router choose, or weigh, other experts. All
    groups are none: no expert is out of reach then."""
    if fields.get("moe_router_num_groups", 0) == fields.get("moe_router_group_topk", 0):
        fields |= {"moe_router_num_groups": 0, "moe_router_group_topk": 0}
    topk, group_topk = fields["moe_router_topk"], fields.get("moe_router_group_topk", 0)
    if topk == 1:
        what = "2 or more: transformers weighs a single expert by 1, megatron-core by its score"
        raise Unsupported("num_experts_per_tok", topk, what)
    if group_topk and topk // group_topk != 2:
        raise Unsupported(
            "topk_group",
            group_topk,
            f"half of num_experts_per_tok {topk}: transformers rates a group by the sum of its best 2 experts, "
            f"megatron-core by that of its best {topk // group_topk} (num_experts_per_tok / topk_group)",
        )


def read_v2_choice(left: Config, fields: dict[str, Any]) -> None:
    """``greedy`` ignores groups, whatever n_group says."""
    method = left.pop("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported("topk_method", method, "'greedy' or 'group_limited_greedy'")
    if method == "greedy":
        fields |= {"moe_router_num_groups": 0, "moe_router_group_topk": 0}


def write_v2_choice(shape: GPTShape) -> Config:
    """As ``read_v2_choice``."""
    return {"topk_method": "group_limited_greedy" if shape.moe_router_num_groups else "greedy"}


def read_mtp(left: Config, fields: dict[str, Any]) -> None:
    """Absent, it is 1 in transformers' class, but the files decide: the importer leaves out what they lack."""
    fields["mtp_num_layers"] = pop_number(left, "num_nextn_predict_layers", 0, Span(0, 64, whole=True))


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def read_quantization(left: Config, fields: dict[str, Any]) -> None:
    """DeepSeek-V3's own: fp8 matrices with a scale for each 128 x 128 block. How activations are rounded is no
    matter of the weights."""
    found = left.pop("quantization_config", None)
    if found is None:
        return
    if not isinstance(found, dict):
        raise Unsupported("quantization_config", found, f"{FP8}")
    differing = {key: found.get(key) for key, value in FP8.items() if found.get(key) != value}
    unknown = {key: value for key, value in found.items() if key not in {*FP8, "activation_scheme"}}
    if differing or unknown:
        raise Unsupported("quantization_config", differing | unknown, f"{FP8}")
