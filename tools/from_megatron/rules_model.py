"""The model section."""

from models.frequencies import parse_freq
from tools.from_megatron.arguments import Arguments
from tools.from_megatron.draft import DEFAULT, Draft
from tools.from_megatron.flags_translated import (
    EXPERT_FIELDS,
    EXPERT_SWITCHES,
    LATENT_FIELDS,
    LINEAR_FIELDS,
    MAMBA_FIELDS,
    MUP_FIELDS,
    PREDICTION_FIELDS,
)


def model(draft: Draft) -> None:
    """Every field that a plain GPT has, and those of experts, latents and depths where they are on."""
    _sizes(draft)
    _activation(draft)
    _positions(draft)
    _rope_scaling(draft)
    _windows(draft)
    _experts(draft)
    _hybrid(draft)
    _linear_attention(draft)
    _prediction(draft)
    draft.only_with("multi-latent-attention", LATENT_FIELDS, draft.arguments.switch("multi-latent-attention"))
    if draft.arguments.switch("multi-latent-attention"):
        draft.fields(LATENT_FIELDS)
    draft.only_with("use-mup", MUP_FIELDS, draft.arguments.switch("use-mup"))
    if draft.arguments.switch("use-mup"):
        draft.put("model.use_mup", True, "--use-mup")
        draft.fields(MUP_FIELDS)


def _sizes(draft: Draft) -> None:
    arguments = draft.arguments
    hidden, heads = arguments.required("hidden-size"), arguments.required("num-attention-heads")
    seq_length = arguments.required("seq-length", "encoder-seq-length")
    pattern = _pattern(arguments)
    draft.put("model.num_layers", num_layers(arguments), "the pattern's letters" if pattern else "--num-layers")
    draft.put("model.hidden_size", hidden, "--hidden-size")
    draft.put("model.seq_length", seq_length, "--seq-length")
    ffn = arguments.whole("ffn-hidden-size")
    gated = 4 * hidden * 2 // 3 // 64 * 64
    default = (gated, "two thirds of 4 x hidden") if arguments.switch("swiglu") else (4 * hidden, "4 x hidden")
    draft.put("model.ffn_hidden_size", *((ffn, "--ffn-hidden-size") if ffn else default))
    channels = arguments.whole("kv-channels")
    quotient = None if heads < 1 or hidden % heads else hidden // heads  # our own check names sizes that divide
    draft.put("model.kv_channels", channels or quotient, "--kv-channels" if channels else "hidden / heads")
    groups, grouped = arguments.whole("num-query-groups", 1), arguments.switch("group-query-attention")
    draft.put("model.num_query_groups", groups if grouped else heads, "--num-query-groups" if grouped else "every head")
    draft.only_with("group-query-attention", ["num-query-groups"], grouped)
    positions = arguments.whole("max-position-embeddings")
    source = "--max-position-embeddings" if positions else "--seq-length"
    draft.put("model.max_position_embeddings", positions or seq_length, source)
    epsilon = arguments.real("norm-epsilon", arguments.real("layernorm-epsilon"))
    draft.put("model.norm_epsilon", epsilon or 1e-5, "--norm-epsilon" if epsilon else DEFAULT)


def _activation(draft: Draft) -> None:
    arguments = draft.arguments
    unfused = arguments.switch("no-bias-gelu-fusion")
    given = [name for name in ("swiglu", "squared-relu", "quick-geglu", "xielu") if arguments.switch(name)]
    if given:
        draft.put("model.activation", given[0].replace("-", "_"), f"--{given[0]}")
    elif unfused or arguments.switch("disable-bias-linear"):  # torch's own, by erf; the fused kernel approximates
        draft.put("model.activation", "gelu_exact", f"--{'no-bias-gelu-fusion' if unfused else 'disable-bias-linear'}")
    else:
        draft.put("model.activation", "gelu", DEFAULT)
    if given and unfused:
        draft.irrelevant.append(f"--no-bias-gelu-fusion: a choice of kernel for GELU; the activation is {given[0]}")
    if arguments.switch("openai-gelu"):
        _openai_gelu(draft)


def _openai_gelu(draft: Draft) -> None:
    """megatron/training/argument_utils.py does not read it; the legacy models' GELU was then the approximation."""
    if draft.values["model.activation"] != "gelu_exact":
        draft.irrelevant.append("--openai-gelu: the tanh approximation of GELU is what the recipe has, or no GELU")
        return
    draft.unsupported.append(
        "--openai-gelu: megatron-core's models ignore it and compute GELU by erf, as the recipe does; Megatron-LM's "
        'legacy models compute the tanh approximation. For these set model.activation = "gelu".'
    )


def _positions(draft: Draft) -> None:
    arguments = draft.arguments
    rotary, none = arguments.switch("use-rotary-position-embeddings"), arguments.switch("no-position-embedding")
    kind = arguments.text("position-embedding-type")
    source = "--position-embedding-type" if kind else DEFAULT
    if rotary:
        kind, source = "rope", "--use-rotary-position-embeddings"
    kind = kind or "learned_absolute"
    if kind not in ("rope", "learned_absolute", "none", "yarn"):
        draft.other_model.append(f"--position-embedding-type {kind}: Triplane has rope, learned_absolute and none.")
        return
    if none and kind == "learned_absolute":
        kind, source = "none", "--no-position-embedding"
    elif none:
        draft.irrelevant.append(f"--no-position-embedding: there is no table of positions with {kind} anyway")
    if kind == "yarn":
        draft.other_model.append(
            "--position-embedding-type yarn: Megatron-LM 0.19 has no flag for its factor. It became RoPE with "
            'rope_scaling = "yarn": set model.rope_scaling_factor yourself.'
        )
    draft.put("model.position_embedding_type", "rope" if kind == "yarn" else kind, source)


def _rope_scaling(draft: Draft) -> None:
    arguments = draft.arguments
    latent = arguments.switch("multi-latent-attention")
    kind = arguments.text("rope-type", "yarn")
    yarn_position = arguments.text("position-embedding-type") == "yarn"
    llama3, linear = arguments.switch("use-rope-scaling"), arguments.real("rotary-seq-len-interpolation-factor")
    factor = arguments.real("rope-scaling-factor", 8.0)
    stretch = arguments.real("rotary-scaling-factor", 1.0) or 1.0
    fast, slow = arguments.real("yarn-beta-fast", 32.0), arguments.real("yarn-beta-slow", 1.0)
    original = arguments.whole("yarn-original-max-position-embeddings", 4096)
    draft.only_with("multi-latent-attention", ["rotary-scaling-factor", "rope-type"], latent)
    yarn_names = ["yarn-beta-fast", "yarn-beta-slow", "yarn-original-max-position-embeddings"]
    draft.only_with("position-embedding-type yarn", yarn_names, yarn_position and not latent)
    draft.only_with("use-rope-scaling", ["rope-scaling-factor"], llama3 and not latent)
    if latent and kind == "yarn" and stretch != 1.0:
        _yarn(draft, stretch, "--rotary-scaling-factor", 4096, 32.0, 1.0)
    elif yarn_position and not latent:
        _yarn(draft, None, "--position-embedding-type yarn", original, fast, slow)
    elif llama3 and not latent:
        draft.put("model.rope_scaling", "llama3", "--use-rope-scaling")
        draft.put("model.rope_scaling_factor", factor, "--rope-scaling-factor")
        draft.put("model.rope_low_freq_factor", 1.0, DEFAULT)
        draft.put("model.rope_high_freq_factor", 4.0, DEFAULT)
        draft.put("model.rope_original_max_position_embeddings", 8192, DEFAULT)
    elif linear and not latent:
        draft.put("model.rope_scaling", "linear", "--rotary-seq-len-interpolation-factor")
        draft.put("model.rope_scaling_factor", linear, "--rotary-seq-len-interpolation-factor")
    else:
        draft.put("model.rope_scaling", "none", DEFAULT)


def _yarn(
    draft: Draft, factor: float | None, source: str, original: int | None, fast: float | None, slow: float | None
) -> None:
    draft.put("model.rope_scaling", "yarn", source)
    draft.put("model.rope_scaling_factor", factor, source)
    draft.put("model.rope_original_max_position_embeddings", original, DEFAULT if original == 4096 else source)
    draft.put("model.yarn_beta_fast", fast, DEFAULT)
    draft.put("model.yarn_beta_slow", slow, DEFAULT)


def _windows(draft: Draft) -> None:
    window = draft.arguments.text("window-size")
    if window is not None:
        sizes = [draft.convert("window-size", part.strip(), int) for part in window.strip("() ").split(",")]
        draft.put("model.window_size", sizes, "--window-size")
    for flag in ("window-attn-skip-freq", "no-rope-freq"):
        text = draft.arguments.text(flag)
        if text is not None:
            parse_freq(text)
            draft.put(f"model.{flag.replace('-', '_')}", text, f"--{flag}")


def _experts(draft: Draft) -> None:
    arguments = draft.arguments
    experts = arguments.whole("num-experts", 0) or 0
    losses, weights = arguments.texts("moe-router-load-balancing-type"), arguments.texts("moe-aux-loss-coeff")
    names = [*EXPERT_FIELDS, *EXPERT_SWITCHES, "moe-router-load-balancing-type", "moe-aux-loss-coeff"]
    draft.only_with("num-experts", names, experts > 0)
    if not experts:
        return
    draft.put("model.num_moe_experts", experts, "--num-experts")
    draft.fields(EXPERT_FIELDS)
    if arguments.text("moe-ffn-hidden-size") is None:
        draft.put("model.moe_ffn_hidden_size", draft.values["model.ffn_hidden_size"], "as ffn_hidden_size")
    if draft.values.get("model.moe_router_topk_scaling_factor") == 0:  # megatron-core: no factor
        draft.put("model.moe_router_topk_scaling_factor", 1.0, "--moe-router-topk-scaling-factor 0")
    draft.switches(EXPERT_SWITCHES)
    if max(len(losses), len(weights)) > 1:
        draft.other_model.append(
            f"--moe-router-load-balancing-type {' '.join(losses)}: several balancing losses at once. Triplane has one "
            "and takes the first: choose in the recipe."
        )
    loss, weight = (losses or ["aux_loss"])[0], (weights or ["0"])[0]
    known = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
    if loss not in known:
        draft.other_model.append(f"--moe-router-load-balancing-type {loss}: Triplane knows {', '.join(known)}.")
        loss = "none"
    draft.put("model.moe_router_load_balancing_type", loss, "--moe-router-load-balancing-type" if losses else DEFAULT)
    value = 0.0 if loss == "none" else draft.convert("moe-aux-loss-coeff", weight, float)
    draft.put("model.moe_aux_loss_coeff", value, "--moe-aux-loss-coeff" if weights else DEFAULT)


def num_layers(arguments: Arguments) -> int:
    """Blocks, or the letters of a pattern: those of a hybrid are layers by themselves."""
    letters = _pattern(arguments).partition("/")[0].replace("|", "")
    return len(letters) or arguments.required("num-layers", "encoder-num-layers")


def _pattern(arguments: Arguments) -> str:
    return arguments.text("hybrid-layer-pattern") or arguments.text("hybrid-override-pattern") or ""


def _hybrid(draft: Draft) -> None:
    """One letter a layer; "|" cuts pipeline stages, "/" begins depths of multi-token prediction."""
    pattern = _pattern(draft.arguments)
    draft.only_with("hybrid-layer-pattern", MAMBA_FIELDS, bool(pattern))
    if not pattern:
        return
    source = "--hybrid-layer-pattern" if draft.arguments.text("hybrid-layer-pattern") else "--hybrid-override-pattern"
    letters, _, depths = pattern.partition("/")
    if depths:
        draft.other_model.append(f"{source} {pattern}: depths of multi-token prediction in a hybrid (/).")
    if "|" in letters:
        draft.irrelevant.append(f"{source}: | cuts stages, which Triplane cuts by itself: parallel has the fields")
    if unknown := sorted(set(letters) - set("M*+-EG|")):
        draft.other_model.append(f"{source} {pattern}: Triplane has no layer {' '.join(unknown)}.")
        return
    draft.put("model.hybrid_layer_pattern", letters.replace("|", ""), source)
    draft.fields(MAMBA_FIELDS)


def _linear_attention(draft: Draft) -> None:
    arguments = draft.arguments
    variant = arguments.text("experimental-attention-variant")
    names = [*LINEAR_FIELDS, "linear-attention-freq", "linear-conv-kernel-dim"]
    draft.only_with("experimental-attention-variant", names, variant is not None)
    if variant is None:
        return
    kernel = arguments.whole("linear-conv-kernel-dim", 4)
    if variant != "gated_delta_net" or kernel != 4:
        what = f"--experimental-attention-variant {variant}" if kernel == 4 else f"--linear-conv-kernel-dim {kernel}"
        draft.other_model.append(f"{what}: Triplane has gated_delta_net with a convolution of 4 tokens.")
        return
    freq = arguments.text("linear-attention-freq")
    if freq is None:
        draft.other_model.append("--experimental-attention-variant gated_delta_net without --linear-attention-freq.")
        return
    parse_freq(freq)
    draft.put("model.linear_attention_freq", freq, "--linear-attention-freq")
    draft.fields(LINEAR_FIELDS)


def _prediction(draft: Draft) -> None:
    depths = draft.arguments.whole("mtp-num-layers", 0) or 0
    draft.only_with("mtp-num-layers", PREDICTION_FIELDS, depths > 0)
    if depths:
        draft.put("model.mtp_num_layers", depths, "--mtp-num-layers")
        draft.fields(PREDICTION_FIELDS)
