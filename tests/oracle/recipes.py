"""Random recipes from a seed: family x data x losses x batch x layout x ZeRO x recomputation x schedule."""

import dataclasses
import random
from pathlib import Path
from typing import Any

from models.families import TINY
from models.resolve import resolve
from models.shapes import GPTShape
from tests.oracle.case import Case
from tools.parity.layouts import with_layout
from training.cli import parse
from training.config.incompatible import qk_clip_problems
from training.config.run_config import RunConfig

RECIPE = Path(__file__).resolve().parents[2] / "slurm/recipes/debug.toml"
MOST_RANKS = 8
TRAIN_ITERS = 7
DEPTHS = ("deepseek_v3_tiny", "glm45_tiny", "llama2_tiny", "llama3_tiny", "qwen2_tiny", "qwen3_tiny", "qwen3_moe_tiny")
"""Families with whose blocks transformers' MtpModel can be made."""
FAMILIES = (*TINY, *DEPTHS, "mixtral_tiny", "qwen2_moe_tiny", "gpt_oss_tiny", "gemma2_tiny")
"""Those with more to go wrong more than once."""
ENDS = (0.0, 0.02, 0.1, 0.35, 0.7, 0.97)
VARIATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama2_tiny": ({"add_qkv_bias": True, "attention_out_bias": True}, {"mlp_bias": True}),
    "llama3_tiny": ({"untie_embeddings_and_output_weights": False},),
    "qwen2_tiny": ({"untie_embeddings_and_output_weights": False},),
    "qwen3_tiny": ({"window_size": (10, 0), "window_attn_skip_freq": "2"},),
    "ministral_tiny": ({"window_attn_skip_freq": "[1,0,0,1]"},),
    "granite_tiny": ({"add_bias_linear": True},),
    "mamba2_tiny": ({"untie_embeddings_and_output_weights": False},),
    "qwen3_moe_tiny": ({"moe_router_pre_softmax": True, "moe_layer_freq": "[0,1,0,1]"},),
    "gemma3_tiny": ({"final_logit_softcapping": 3.0},),
    "olmo2_tiny": ({"num_query_groups": 2},),
    "llama4_tiny": ({"moe_layer_freq": "[0,1,0,1]"},),
    "phi4_tiny": ({"rotary_percent": 0.75},),
    "ernie45_moe_tiny": ({"moe_shared_expert_intermediate_size": 0},),
}


def drawn(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    family = draw.choice(FAMILIES)
    shape = TINY[family]
    model, words = _model(draw, family, shape)
    sizes, layout = _layout(draw, shape)
    train, of_batch = _train(draw, sizes, shape)
    data = _data(draw, one_text=bool(model.get("mtp_num_layers")) and draw.random() < 0.8)
    if shape.attention_chunk_size:  # transformers' Llama 4 looks at no positions for its chunks and growing queries
        data["reset_position_ids"] = data["reset_attention_mask"]
    ends = draw.choice(ENDS) if data["eod_mask_loss"] else draw.choice(ENDS[1:4])
    config = parse.load(RECIPE)
    config = dataclasses.replace(
        config,
        nproc=None,
        model=dataclasses.replace(config.model, shape=family, **model),
        train=dataclasses.replace(config.train, train_iters=TRAIN_ITERS, **train),
        data=dataclasses.replace(config.data, **data),
        optimizer=dataclasses.replace(config.optimizer, **_optimizer(draw)),
    )
    config, world_size = with_layout(config, f"{layout}mbs{train['micro_batch_size']}")
    if draw.random() < 0.25:  # drawn last: what was drawn before stays
        apart: dict[str, Any] = {"decoupled_lr": draw.choice((2e-4, 1e-2))}
        apart["decoupled_min_lr"] = draw.choice((None, 2e-5))
        if apart["decoupled_min_lr"] is not None or config.optimizer.min_lr <= apart["decoupled_lr"]:
            config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **apart))
    config, of_later = _later(draw, config, world_size)
    of_data = [name for name, on in data.items() if on]
    words = [*words, *of_batch, *of_data, f"{ends:.0%} ends", *of_later]
    return Case(
        seed=seed, config=config, world_size=world_size, layout=layout or "tp1", ends=ends, words=", ".join(words)
    )


def _model(draw: random.Random, family: str, shape: GPTShape) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {"seq_length": draw.choice((32, 48, 64))}
    if family in VARIATIONS and draw.random() < 0.4:
        fields |= draw.choice(VARIATIONS[family])
    if any(shape.linear_blocks):
        fields["norm_epsilon"] = 1e-2  # with less, a delta net's norm makes much of what is nearly 0, rounding too
    words = [f"{name} {value}" for name, value in fields.items()]
    if family in DEPTHS:
        fields["mtp_num_layers"] = draw.choice((0, 1, 1, 2) if shape.mtp_num_layers else (0, 0, 1, 2))
        fields["mtp_loss_scaling_factor"] = draw.choice((0.1, 0.3, 1.0))
        words.append(f"MTP {fields['mtp_num_layers']}")
    if shape.num_moe_experts:
        kind = draw.choice(("none", "aux_loss", "aux_loss", "seq_aux_loss", "seq_aux_loss", "global_aux_loss"))
        coefficient, z = draw.choice((0.01, 0.3)), draw.choice((0.0, 0.01, 0.1))
        fields |= {"moe_router_load_balancing_type": kind, "moe_z_loss_coeff": z}
        fields["moe_aux_loss_coeff"] = 0.0 if kind == "none" else coefficient
        words += [kind] * (kind != "none") + ["z loss"] * (z > 0)
    return fields, words


def _layout(draw: random.Random, shape: GPTShape) -> tuple[dict[str, int], str]:
    """Sizes, and a name of tools.parity.layouts."""
    ranks = draw.choice((1, 2, 2, 3, 4, 4, 4, 4, 4, MOST_RANKS))
    while True:
        sizes = {name: draw.choice((1, 1, 2, 2, 4)) for name in ("tp", "pp", "cp")} | {"dp": draw.choice((1, 2, 3, 4))}
        if sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"] == ranks:
            break
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    words += ["sp"] if sizes["tp"] > 1 and (shape.num_moe_experts or draw.random() < 0.6) else []
    if sizes["pp"] == 2:
        split = draw.choice(("", "", "vpp2", "vpp2", "first1"))
        words += [split] if split else []
        sizes["vpp"] = 2 if split == "vpp2" else 1
    if shape.num_moe_experts:
        words += _experts(draw, sizes)
    zero = draw.choice(("", "", "zero0", "zero2", "zero3", "zero3", "overlap"))
    words += [zero] if zero else []
    if zero in ("zero2", "zero3") and sizes["dp"] * sizes["cp"] % 2 == 0 and draw.random() < 0.2:
        words.append("hsdp2")
    return sizes, "".join(words)


def _experts(draw: random.Random, sizes: dict[str, int]) -> list[str]:
    replicas = sizes["cp"] * sizes["dp"]
    fitting = ["ep2"] * (replicas % 2 == 0) + ["ep4"] * (replicas % 4 == 0)
    fitting += ["ep2etp1"] * (replicas * sizes["tp"] % 2 == 0)
    words = [draw.choice(fitting)] if fitting and draw.random() < 0.8 else []
    return words + ["allgather"] * (draw.random() < 0.15)


def _train(draw: random.Random, sizes: dict[str, int], shape: GPTShape) -> tuple[dict[str, Any], list[str]]:
    pieces = sizes["dp"] * (sizes["pp"] if sizes.get("vpp") == 2 or draw.random() < 0.5 else 1)
    micro = draw.choice((1, 1, 2, 4) if pieces <= 2 else (1, 1, 2))
    unit = micro * pieces
    batch = unit * draw.choice((1, 1, 2, 3) if unit <= 4 else (1, 2))
    fields: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": batch}
    if draw.random() < 0.25:
        steps = draw.choice((1, 2) if unit <= 4 else (1,))
        fields["global_batch_size"] = batch = unit * (1 + steps)
        fields["rampup_batch_size"] = (unit, unit, draw.randrange(unit, 3 * batch))
    memory, words = _memory(draw, shape)
    return fields | memory, [f"batch {batch} in {micro}", *["ramp"] * ("rampup_batch_size" in fields), *words]


def _memory(draw: random.Random, shape: GPTShape) -> tuple[dict[str, Any], list[str]]:
    recompute = draw.choice(("", "", "", "uniform", "block", "selective", "auto"))
    fields: dict[str, Any] = {}
    if recompute in ("uniform", "block"):
        layers = draw.choice((1, 1, 2))
        fields["recompute"] = f"full:{recompute}:{layers}"
    elif recompute == "selective":
        modules = ["core_attn", "mlp"] + ["moe"] * bool(shape.num_moe_experts)
        modules = ["core_attn"] if shape.fc_bias else draw.sample(modules, 2)
        fields["recompute"] = f"selective:{','.join(modules)}"
    elif recompute == "auto":
        fields["recompute"] = "auto:8MiB"
    words = [f"recompute {recompute}"] if recompute else []
    if draw.random() < 0.1 and recompute != "auto":
        fields["cpu_offloading_num_layers"] = 1
        words.append("offload")
    if draw.random() < 0.3:
        fields["cross_entropy_chunk_tokens"] = draw.choice((7, 16))
        words.append("chunks")
    return fields, words


def _data(draw: random.Random, *, one_text: bool) -> dict[str, Any]:
    """one_text: documents see one another, as multi-token prediction wants it."""
    apart, restart = draw.choice(((False, False),) * 4 + ((True, True),) * 2 + ((True, False), (False, True)))
    apart, masked = apart and not one_text, draw.random() < 0.6
    return {"reset_attention_mask": apart, "reset_position_ids": restart, "eod_mask_loss": masked}


def _optimizer(draw: random.Random) -> dict[str, Any]:
    style = draw.choice(("constant", "linear", "cosine", "WSD", "inverse-square-root"))
    fields: dict[str, Any] = {
        "lr": draw.choice((1e-3, 3e-3)),
        "min_lr": draw.choice((0.0, 1e-4)),
        "lr_decay_style": style,
        "lr_warmup_iters": draw.choice((0, 0, 1, 2)),
        "lr_decay_iters": draw.choice((None, 3, 5)),
        "weight_decay": draw.choice((0.0, 0.1)),
        "clip_grad": draw.choice((0.0, 0.1, 1.0, 100.0)),
        "adam_beta1": draw.choice((0.9, 0.8)),
        "adam_beta2": draw.choice((0.95, 0.999)),
        "adam_eps": draw.choice((1e-8, 1e-5)),
    }
    if style == "WSD":
        fields["lr_wsd_decay_style"] = draw.choice(("linear", "cosine", "exponential", "minus_sqrt"))
    if draw.random() < 0.3:
        ramp = draw.choice(("linear", "cosine"))
        fields |= {"start_weight_decay": 0.02, "end_weight_decay": 0.2, "weight_decay_incr_style": ramp}
    return fields


def _later(draw: random.Random, config: RunConfig, world_size: int) -> tuple[RunConfig, list[str]]:
    """What the generator learned after its first thousand cases, drawn last of all."""
    words, optimizer, train = [], dict[str, Any](), config.train
    if draw.random() < 0.25:
        optimizer = _muon(draw, TINY[config.model.shape])
        words.append("muon")
    if draw.random() < 0.15:
        optimizer["lr_decay_style"] = style = draw.choice(("power", "minus-square-root"))
        optimizer |= {"lr_decay_power": draw.choice((0.5, 2.0))} if style == "power" else {}
        words.append(style)
    if draw.random() < 0.15 and train.rampup_batch_size is None:
        layout, last = config.layout(world_size), train.global_batch_size
        least = train.micro_batch_size * layout.dp * (layout.pp if layout.vpp > 1 else 1)
        first = draw.choice((2 * last, least))
        if first != last:
            steps = f"0:{first} {first * config.model.seq_length * draw.choice((1, 2))}:{last}"
            train = dataclasses.replace(train, step_batch_size_schedule=steps)
            words.append(f"steps {steps}")
    if draw.random() < 0.25:
        clip: dict[str, Any] = {"qk_clip": True, "qk_clip_threshold": draw.choice((0.3, 0.7, 1.2))}
        clip["qk_clip_alpha"] = draw.choice((0.5, 0.3))
        shape = resolve(config.model, None)
        if not qk_clip_problems(shape, dataclasses.replace(config.optimizer, **clip), config.kernels, {}):
            optimizer |= clip
            words.append(f"QK-clip {clip['qk_clip_threshold']}")
    return dataclasses.replace(config, train=train, optimizer=dataclasses.replace(config.optimizer, **optimizer)), words


def _muon(draw: random.Random, shape: GPTShape) -> dict[str, Any]:
    """With products in fp32: what bf16 rounds is another number on each layout."""
    mixers = any(shape.linear_blocks) or "M" in shape.hybrid_layer_pattern  # their parts are not in the oracle
    return {
        "optimizer": "muon",
        "muon_fp32_matmul_prec": "highest",
        "muon_momentum": draw.choice((0.95, 0.8)),
        "muon_nesterov": draw.random() < 0.5,
        "muon_split_qkv": draw.random() < 0.7,
        "muon_split_fused": draw.random() < 0.3 and not mixers,
        "muon_coefficient_type": draw.choice(("quintic", "simple")),
        "muon_num_ns_steps": draw.choice((5, 5, 3)),
        "muon_scale_mode": draw.choice(("spectral", "unit_rms_norm", "shape_scaling")),
        "muon_extra_scale_factor": draw.choice((1.0, 0.2)),
    }
