"""What is refused before anything starts, and what only a GPU can show: the second half of docs/layouts.md as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """A combination that cannot be, the flags that ask for it, and words of the answer."""

    what: str
    world_size: int
    flags: str
    words: str


MOE_FLAGS = "--model.num_moe_experts 4 --model.moe_ffn_hidden_size 64 "
MLA_FLAGS = "--model.multi_latent_attention True --model.num_query_groups 4 "
REFUSED = [
    Refused("experts on ranks, of a model without", 2, "--parallel.expert_model_parallel_size 2", "need a model with"),
    Refused("4 experts on EP 3", 3, MOE_FLAGS + "--parallel.expert_model_parallel_size 3", "not divisible by"),
    Refused(
        "EP x ETP does not divide TP x CP x DP",
        6,
        MOE_FLAGS + "--parallel.expert_model_parallel_size 4",
        "cannot be split into replicas of the experts",
    ),
    Refused(
        "an expert's width by ETP",
        3,
        MOE_FLAGS + "--parallel.expert_tensor_parallel_size 3",
        "model.moe_ffn_hidden_size 64 is not divisible",
    ),
    Refused(
        "experts and TP without sequence parallelism",
        2,
        MOE_FLAGS + "--parallel.tensor_model_parallel_size 2",
        "needs parallel.sequence_parallel",
    ),
    Refused("DeepEP on a CPU", 1, MOE_FLAGS + "--device cpu --parallel.moe_token_dispatcher_type flex", "needs GPUs"),
    Refused(
        "DeepEP with nowhere to send tokens",
        1,
        MOE_FLAGS + "--device cuda --parallel.moe_token_dispatcher_type flex",
        "above 1, found 1",
    ),
    Refused(
        "Transformer Engine: windows passed around context ranks (p2p)",
        2,
        "--device cuda --model.window_size 8 0 --parallel.context_parallel_size 2",
        'Use "all_gather" or "a2a"',
    ),
    Refused(
        "Transformer Engine: latent attention with other exchanges than p2p",
        2,
        MLA_FLAGS + "--device cuda --parallel.context_parallel_size 2 --parallel.cp_comm_type all_gather",
        'Use "p2p"',
    ),
    Refused(
        "recomputation of `moe_act`, `layernorm`, `mla_up_proj` on a CPU",
        1,
        "--device cpu --train.recompute selective:layernorm",
        "needs Transformer Engine",
    ),
    Refused(
        "recomputation of `mlp` where it has biases",
        1,
        "--model.shape gpt2_tiny --train.recompute selective:mlp",
        "its backward pass would never end",
    ),
    Refused("MLA and a window", 1, MLA_FLAGS + "--model.window_size 8 0", "is not supported with it. Use (-1, 0)"),
    Refused(
        "MLA and RoPE scaling other than YaRN",
        1,
        MLA_FLAGS + "--model.rope_scaling linear",
        'is not supported with it. Use "none" or "yarn"',
    ),
    Refused(
        "MLA and learned positions",
        1,
        MLA_FLAGS + "--model.position_embedding_type learned_absolute",
        'it needs position_embedding_type "rope"',
    ),
    Refused("MLA and biases of queries", 1, MLA_FLAGS + "--model.add_qkv_bias True", "has no biases on queries"),
    Refused(
        "shared experts and biases",
        1,
        MOE_FLAGS + "--model.add_bias_linear True --model.moe_shared_expert_intermediate_size 64",
        "model.add_bias_linear is not",
    ),
    Refused(
        "experts' matrices split over ranks, and biases",
        2,
        MOE_FLAGS + "--model.add_bias_linear True --parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel",
        "Set parallel.expert_tensor_parallel_size = 1",
    ),
    Refused(
        "an expert bias of a softmax router with groups",
        1,
        MOE_FLAGS + "--model.moe_router_enable_expert_bias True --model.moe_router_num_groups 2 "
        "--model.moe_router_group_topk 2",
        "model.moe_router_enable_expert_bias",
    ),
    Refused(
        "MTP and learned positions",
        1,
        "--model.mtp_num_layers 1 --model.position_embedding_type learned_absolute",
        "model.mtp_num_layers",
    ),
    Refused(
        "counting the embedding as a layer, and stating the first stage's layers",
        2,
        "--parallel.pipeline_model_parallel_size 2 --parallel.num_layers_in_first_pipeline_stage 1 "
        "--parallel.account_for_embedding_in_pipeline_split True",
        "account_for_embedding_in_pipeline_split",
    ),
    Refused(
        "MTP and packed documents",
        1,
        "--model.mtp_num_layers 1 --data.reset_attention_mask --data.reset_position_ids",
        "model.mtp_num_layers cannot be combined with data.reset_attention_mask",
    ),
    Refused(
        "MTP and windows that differ between the first and the last block",
        1,
        "--model.mtp_num_layers 1 --model.window_size 8 0 --model.window_attn_skip_freq 2",
        "model.mtp_num_layers",
    ),
    Refused(
        "MLA's latents by TP",
        4,
        MLA_FLAGS + "--model.kv_lora_rank 30 --parallel.tensor_model_parallel_size 4",
        "model.kv_lora_rank 30",
    ),
    Refused(
        "exchange of heads (a2a) over more context ranks than there are",
        8,
        "--parallel.tensor_model_parallel_size 2 --parallel.context_parallel_size 4 --parallel.cp_comm_type a2a",
        "a2a",
    ),
    Refused("heads by TP", 3, "--parallel.tensor_model_parallel_size 3", "num_attention_heads 4 is not divisible"),
    Refused(
        "Mamba groups by TP",
        4,
        "--model.shape mamba2_tiny --parallel.tensor_model_parallel_size 4",
        "model.mamba_num_groups 2 is not divisible",
    ),
    Refused(
        "a pattern's letters and layers",
        1,
        "--model.hybrid_layer_pattern M-M* --model.num_layers 2",
        "has 4 letters",
    ),
    Refused("the sequence by 2 x CP", 3, "--parallel.context_parallel_size 3", "not divisible by 2 x CP 3"),
    Refused(
        "layers by PP x VPP",
        2,
        "--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 4",
        "not a multiple of PP 2 x VPP 4",
    ),
    Refused(
        "MTP in front of the last stage",
        2,
        "--parallel.pipeline_model_parallel_size 2 --parallel.pipeline_model_parallel_layout Etm|tttL "
        "--model.mtp_num_layers 1",
        "right before L",
    ),
]

GPU_ONLY = [
    (
        "Transformer Engine's attention: `cp_comm_type` p2p, a2a, all_gather",
        "on a CPU keys and values are all-gathered",
    ),
    ('`moe_token_dispatcher_type = "flex"` (DeepEP)', "its kernels are CUDA"),
    ("one grouped matrix product for all experts of a rank", "Transformer Engine's"),
    ("fp8", "Transformer Engine's"),
    (
        "packed documents among Transformer Engine's modules",
        "attention is ours there too: proven on a CPU, unrun on CUDA",
    ),
    (
        "recomputation of `layernorm`, `mla_up_proj`, `moe_act`",
        "megatron-core asks Transformer Engine for its fp8 state there",
    ),
]
