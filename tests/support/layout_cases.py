"""Which models are tried on which layouts: the first half of docs/layouts.md as data."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.parity.layouts import shrink, with_layout
from training.cli import parse
from training.config.run_config import RunConfig

RECIPE = Path(__file__).resolve().parents[2] / "slurm/recipes/debug.toml"
MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
DELTA: dict[str, Any] = {
    "attention_output_gate": True,
    "linear_attention_freq": "2",
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
SWITCHES: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full:uniform:1"},
    "selective": {"recompute": "selective:core_attn,mlp"},
    "offload": {"cpu_offloading_num_layers": 1},
    "chunks": {"cross_entropy_chunk_tokens": 16},
    "auto": {"recompute": "auto:4.5MiB"},
    "compile": {"compile": True},
}
"""Fields of the section train that hold less, or compute by other kernels."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One architecture, and the layouts on which it must train as one rank does."""

    name: str
    layouts: tuple[str, ...]
    shape: str = "debug"
    num_layers: int = 4
    global_batch_size: int = 2
    overrides: tuple[tuple[str, Any], ...] = ()
    documents_apart: bool = False
    switches: str = ""
    """Layouts on which it is tried with some of ``SWITCHES``, besides: "tp2sp+offload+chunks"."""

    @property
    def switched(self) -> list[tuple[str, tuple[str, ...]]]:
        """Each layout, with its switches."""
        cases = [case.split("+") for case in self.switches.split()]
        return [(layout, tuple(names)) for layout, *names in cases]

    def config(self, switches: Sequence[str] = ()) -> RunConfig:
        """Laptop-sized, one rank."""
        config = shrink(parse.load(RECIPE), num_layers=self.num_layers)
        model = dataclasses.replace(config.model, shape=self.shape, **dict(self.overrides))
        on = {key: value for name in switches for key, value in SWITCHES[name].items()}
        train = dataclasses.replace(config.train, global_batch_size=self.global_batch_size, **on)
        changed = dataclasses.replace(config, model=model, train=train)
        apart = dict.fromkeys(("reset_attention_mask", "reset_position_ids"), self.documents_apart)
        return dataclasses.replace(changed, data=dataclasses.replace(config.data, **apart))


def model(name: str, layouts: str, *, num_layers: int = 2, **rest: Any) -> Model:
    """A model whose fields beyond ``Model``'s own are those of the model section."""
    own = {field.name for field in dataclasses.fields(Model)}
    overrides = tuple((key, value) for key, value in rest.items() if key not in own)
    fields = {key: value for key, value in rest.items() if key in own}
    return Model(name=name, layouts=tuple(layouts.split()), num_layers=num_layers, overrides=overrides, **fields)


def both(layouts: str) -> str:
    """Each with gradients in shards, and with weights in shards."""
    return " ".join(f"{layout}{zero}" for layout in layouts.split() for zero in ("zero2", "zero3"))


MODELS = [
    model(
        "Llama: RMSNorm, SwiGLU, RoPE, 2 query groups",
        "tp2 tp4 tp2sp pp2 pp4 pp2vpp2 dp2 dp4overlapbucket20000 dp2zero0 tp2sppp2dp2 tp2pp2vpp2dp2 cp2 cp4 "
        "cp2tp2sppp2 mbs2 mbs4 pp4[Et|tt|t|L] pp2vpp2[Et|t|t|tL] "
        + both("dp2 dp4 tp2spdp2 pp2dp2 pp2vpp2dp2 cp2dp2 dp4hsdp2 tp2spdp4hsdp2"),
        num_layers=4,
        global_batch_size=4,
        switches="tp2sp+offload+chunks pp2vpp2+recompute+chunks cp2+selective+chunks dp2zero3+selective+offload "
        "dp2zero2+auto tp2sp+compile dp2zero3+compile+chunks",
    ),
    model("Qwen3: norms of queries and keys", "tp2sp dp2", shape="qwen3_tiny"),
    model("Qwen2: biases of queries, keys and values", "tp2 pp2", shape="qwen2_tiny"),
    model("Llama of 6 layers: uneven stages", "pp4first1last1 pp4account", num_layers=6),
    model("Llama: shards of unequal size", both("dp3"), global_batch_size=3),
    model("MoE: a shard of the router without an element", both("dp3"), global_batch_size=3, **MOE),
    model("Llama: copies of shards, two microbatches", both("dp4hsdp2") + " pp2dp4hsdp2zero3", global_batch_size=8),
    model("MoE: copies of experts' shards, two microbatches", "tp2spdp4ep2etp1hsdp2zero3", global_batch_size=8, **MOE),
    model(
        "GPT-2: LayerNorm, biases, learned positions, tied",
        "tp2 pp2 cp2 tp2sppp2dp2 " + both("dp2 pp2dp2 tp2spdp2"),
        shape="gpt2_tiny",
        switches="tp2+recompute+chunks",
    ),
    model("sliding window in every other block", "tp2 pp2 cp2", window_size=(10, 0), window_attn_skip_freq="2"),
    model(
        "OLMo-3: norms behind, over all heads, two RoPEs", "tp2 tp2sp pp2 cp2", shape="olmo3_tiny", softmax_scale=1.0
    ),
    model(
        "Ministral 3: queries that grow in every block, YaRN", "tp2sp pp2 cp2", shape="ministral3_tiny", floor_scale=8
    ),
    model("Pythia: parallel residual, partial RoPE", "tp2sp pp2 cp2", shape="pythia_tiny"),
    model(
        "muP: GPT-2 of four times the base width, tied",
        "tp2sp pp2 dp2 dp2zero3 tp2sppp2dp2",
        shape="gpt2_tiny",
        use_mup=True,
        mup_base_hidden_size=16,
        mup_embedding_mult=3.0,
        mup_base_head_dim=4.0,
        switches="tp2sp+chunks",
    ),
    model(
        "muP: latent attention, experts, multi-token prediction",
        "tp2spep2etp1 pp2 dp2zero2",
        shape="deepseek_v3_tiny",
        num_layers=4,
        num_query_groups=4,
        use_mup=True,
        mup_base_hidden_size=16,
    ),
    model("Granite: multipliers", "tp2sp pp2 cp2", shape="granite_tiny"),
    model("Phi-3, Phi-4: RoPE of a part of the channels", "tp2sp pp2 cp2", shape="phi4_tiny", rotary_percent=0.75),
    model("StarCoder2: LayerNorm, biases, windows, GELU", "tp2sp pp2 cp2", shape="starcoder2_tiny"),
    model("Seed-OSS: biases of queries, keys and values, heads of their own width", "tp2sp pp2", shape="seed_oss_tiny"),
    model("OLMo-2: norms behind attention and MLP", "tp2sp pp2 cp2", shape="olmo2_tiny"),
    model("Ministral, Mistral: windows", "tp2sp pp2 cp2", shape="ministral_tiny"),
    model("Gemma: GeGLU, scaled embeddings, one key head", "tp2sp pp2", shape="gemma_tiny"),
    model("ERNIE-4.5, dense: interleaved RoPE, tied", "tp2sp pp2 cp2", shape="ernie45_tiny"),
    model(
        "SmolLM3, Seed-OSS: biases in some layers",
        "tp2sp pp2 cp2",
        shape="smollm3_tiny",
        add_qkv_bias=True,
        mlp_bias=True,
    ),
    model("Gemma-2: both norms, 1 + weight, soft caps, GeGLU", "tp2sp pp2 cp2 dp2zero3", shape="gemma2_tiny"),
    model("Gemma-3: two RoPEs, windows", "tp2sp pp2 cp2", shape="gemma3_tiny", window_attn_skip_freq="2"),
    model("Nemotron: LayerNorm1P, squared ReLU", "tp2sp pp2", shape="nemotron_tiny"),
    model("Apertus: xIELU, norms of queries and keys", "tp2sp pp2 cp2", shape="apertus_tiny"),
    model("GLM-4: RoPE of neighbouring channels", "tp2sp pp2 cp2", shape="glm4_tiny"),
    model(
        "Mamba-2: mixers of 8 heads in 2 groups",
        "tp2 tp2sp pp2 cp2 cp4 tp2spcp2 tp2sppp2dp2 " + both("dp2 tp2spdp2"),
        shape="mamba2_tiny",
        num_layers=4,
    ),
    model(
        "Mamba-2, attention and MLPs: a pattern of single layers, uneven stages",
        "tp2sp pp4first1last1 pp2vpp2[Et|tt|t|ttL] cp2 dp2zero3",
        shape="mamba2_tiny",
        num_layers=6,
        hybrid_layer_pattern="M-M*-M",
    ),
    model(
        "Nemotron-H: Mamba-2, attention without positions, squared ReLU",
        "tp2sp pp2 cp2 tp2sppp2dp2",
        shape="nemotron_h_tiny",
        num_layers=4,
        switches="tp2sp+recompute+offload+chunks",
    ),
    model(
        "Nemotron 3: Mamba-2, attention, experts beside a shared one, a sigmoid router with bias",
        "ep2 tp2spep2etp1 cp2ep2 ep2pp2 dp2ep2zero3",
        shape="nemotron3_tiny",
        num_layers=4,
    ),
    model(
        "Qwen3-Next: gated delta nets, gated attention, experts beside a gated shared one, norms around 1",
        "tp2spep2etp1 cp2ep2 pp2",
        shape="qwen3_next_tiny",
        num_layers=4,
    ),
    model(
        "Qwen3.5: gated delta nets, gated attention, dense MLPs, norms around 1",
        "tp2sp pp2 cp2 dp2zero3",
        shape="qwen35_tiny",
        num_layers=4,
    ),
    model(
        "gated delta nets, gated attention in every other block",
        "tp2 tp2sp pp2 cp2 tp2spcp2 dp2zero3",
        num_layers=4,
        **DELTA,
    ),
    model(
        "a pattern of gated delta nets, latent attention, MLPs and experts",
        "tp2spep2etp1 cp2ep2 pp2",
        num_layers=4,
        hybrid_layer_pattern="G-+E",
        **MLA | MOE | DELTA | {"linear_attention_freq": None, "attention_output_gate": False},
    ),
    model("packed documents", "tp2sp pp2 cp2 dp2zero3", documents_apart=True),
    model(
        "packed documents, Mamba-2", "tp2sp cp2 dp2zero3", documents_apart=True, shape="nemotron_h_tiny", num_layers=4
    ),
    model("packed documents, gated delta nets", "tp2sp cp2", documents_apart=True, **DELTA),
    model("packed documents and a window", "cp2tp2", documents_apart=True, window_size=(10, 0)),
    model("no RoPE in every other block", "pp2", no_rope_freq="2"),
    model("MoE: all-gather dispatcher", "dp2ep2allgather tp2spep2etp2allgather", **MOE),
    model(
        "MoE: balancing and z loss, shared expert",
        "dp2 cp2 ep2 ep4 tp2spep2etp1 tp2spep2etp2 dp2ep2pp2 ep2pp2vpp2 dp4ep2overlap "
        + both("dp4ep2 dp4ep2hsdp2 tp2spep2etp1 ep2pp2"),
        num_layers=4,
        global_batch_size=4,
        **MOE,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.05,
        moe_z_loss_coeff=1e-3,
        moe_shared_expert_intermediate_size=64,
        switches="tp2spep2etp1+recompute+offload ep2pp2+chunks+offload",
    ),
    model(
        "MoE: sequence-wise balancing loss",
        "dp2 tp2spep2etp1",
        **MOE,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.05,
    ),
    model(
        "MoE: global balancing loss",
        "tp2sp pp2",
        **MOE,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=0.05,
    ),
    model(
        "MoE: sigmoid router with expert bias, dense first block, shared expert",
        "ep2 tp2spep2etp1 ep2pp2 cp2ep2",
        **MOE,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        moe_layer_freq="[0,1]",
        moe_shared_expert_intermediate_size=64,
    ),
    model(
        "MoE: group-limited routing",
        "ep4 tp2sp",
        global_batch_size=4,
        **MOE | {"num_moe_experts": 8},
        moe_router_num_groups=4,
        moe_router_group_topk=2,
    ),
    model(
        "MoE: capacity factor, dropping by position",
        "ep2 dp2ep2pp2",
        **MOE,
        moe_expert_capacity_factor=0.75,
        moe_token_drop_policy="position",
    ),
    model("MLA with query latents", "tp2 tp2sp pp2 cp2", **MLA, q_lora_rank=32, qk_layernorm=True),
    model(
        "MLA without query latents, YaRN",
        "tp2sp cp2tp2",
        **MLA,
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_original_max_position_embeddings=32,
        mscale=0.707,
        mscale_all_dim=0.707,
    ),
    model(
        "DeepSeek-V2: MLA, YaRN, group-limited softmax router",
        "tp2spep2etp1",
        shape="deepseek_v2_tiny",
        num_query_groups=4,
        moe_layer_freq="[0,1]",
    ),
    model(
        "Moonlight: DeepSeek-V3 without groups, latents normed with an epsilon of their own",
        "tp2spep2etp1 pp2",
        shape="moonlight_tiny",
        num_query_groups=4,
        moe_layer_freq="[0,1]",
    ),
    model(
        "gpt-oss: learned softmax logits, biases of experts, clamped gates, windows, YaRN",
        "tp2spep2etp1 pp2 cp2 dp2ep2zero3",
        shape="gpt_oss_tiny",
        window_attn_skip_freq="2",
    ),
    model(
        "GLM-4.5: partial RoPE, biases of queries, sigmoid router, shared expert, dense first, MTP",
        "tp2spep2etp1 pp2 cp2",
        shape="glm45_tiny",
        moe_layer_freq="[0,1]",
        kv_channels=32,
    ),
    model(
        "MiniMax-M2: experts behind a norm over all heads, partial RoPE",
        "tp2spep2etp1 pp2",
        shape="minimax_m2_tiny",
        kv_channels=32,
    ),
    model(
        "ERNIE-4.5: softmax router with expert bias, interleaved RoPE, tied",
        "tp2spep2etp1 pp2",
        shape="ernie45_moe_tiny",
        moe_layer_freq="[0,1]",
    ),
    model(
        "Llama 4: chunks, no RoPE and growing queries in every other block, one expert, weighed inputs",
        "tp2spep2etp1 pp2 cp2",
        shape="llama4_tiny",
        no_rope_freq="2",
    ),
    model(
        "chunks and growing queries, packed documents",
        "cp2",
        documents_apart=True,
        attention_chunk_size=12,
        no_rope_freq="2",
        attn_scale=0.5,
        floor_scale=8,
    ),
    model("learned softmax logits, packed documents", "cp2 tp2", documents_apart=True, softmax_type="learnable"),
    model("Qwen3-MoE: experts, norms of queries and keys", "tp2spep2etp1 pp2 cp2", shape="qwen3_moe_tiny"),
    model("OLMoE: experts, norms over all heads", "tp2spep2etp1 pp2", shape="olmoe_tiny", clip_qkv=0.5),
    model(
        "Kimi K2: MLA, sigmoid router without groups, dense first",
        "tp2spep2etp1 pp2",
        shape="kimi_k2_tiny",
        num_query_groups=4,
        moe_layer_freq="[0,1]",
    ),
    model("Qwen2-MoE: a gated shared expert", "tp2spep2etp1 pp2 cp2 dp2zero3", shape="qwen2_moe_tiny"),
    model("MTP, one depth", "tp2 tp2sp pp2 cp2 dp2 " + both("dp2"), mtp_num_layers=1),
    model("MTP, two depths", "pp2vpp2", num_layers=4, mtp_num_layers=2),
    model("MTP, tied embeddings", "pp2 " + both("pp2dp2"), mtp_num_layers=1, untie_embeddings_and_output_weights=False),
    model(
        "DeepSeek-V3: MLA, sigmoid router with bias, shared expert, dense first, MTP",
        "tp2spetp1ep2pp2 cp2ep2 " + both("dp4ep2"),
        global_batch_size=4,
        **MLA | MOE,
        q_lora_rank=32,
        qk_layernorm=True,
        moe_layer_freq="[0,1]",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_shared_expert_intermediate_size=64,
        mtp_num_layers=1,
    ),
]


DRAWN_RANKS = 4
DRAWN_MODELS = [
    model("dense", "", num_layers=4, global_batch_size=4),
    model("tied, biases, learned positions", "", num_layers=4, global_batch_size=4, shape="gpt2_tiny"),
    model("experts", "", num_layers=4, global_batch_size=4, **MOE),
    model("depths of prediction", "", num_layers=4, global_batch_size=4, mtp_num_layers=1),
]


def drawn(seed: int) -> tuple[Model, str]:
    """A model and a layout of four ranks that RunConfig.problems accepts."""
    draw = random.Random(seed)
    while True:
        chosen = draw.choice(DRAWN_MODELS)
        sizes = {name: draw.choice((1, 1, 2, 4)) for name in ("tp", "pp", "cp", "dp")}
        if sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"] != DRAWN_RANKS:
            continue
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += ["sp"] if sizes["tp"] > 1 and draw.random() < 0.7 else []
        words += ["vpp2"] if sizes["pp"] == 2 and draw.random() < 0.5 else []
        words += [draw.choice(("ep2", "ep4", "ep2etp1"))] if chosen.name == "experts" and draw.random() < 0.8 else []
        words += [draw.choice(("zero0", "zero2", "zero3", "zero3", "zero3", "overlap"))]
        words += ["hsdp2"] if words[-1] in ("zero2", "zero3") and draw.random() < 0.3 else []
        layout = "".join(words)
        config, world_size = with_layout(chosen.config(), layout)
        if world_size == DRAWN_RANKS and not config.problems(DRAWN_RANKS):
            return chosen, layout
