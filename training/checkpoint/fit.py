"""Whether a checkpoint is one of this model: known from names and shapes before a parameter is touched."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from models.names import shown_name
from parallel.groups import Ranks
from program.errors import SharedMistake
from training.checkpoint import model_state, optimizer_state, rng

Shapes = Mapping[str, tuple[int, ...]]

_BLOCK = re.compile(r"(layers|mtp)\.\d+\.")
_NUMBER_OF_BLOCKS = {"layers": "model.num_layers", "mtp": "model.mtp_num_layers"}

_VOCABULARY = "the tokenizer, model.vocab_size or model.make_vocab_size_divisible_by"
_HEADS = "model.num_attention_heads, model.num_query_groups or model.kv_channels"
_NORM = "model.normalization"
_WIDTH = "model.ffn_hidden_size"
_GATE = "model.activation"  # a gated one makes fc1 twice as high
_EXPERTS, _EXPERT_WIDTH = "model.num_moe_experts", "model.moe_ffn_hidden_size"
_MIXTURES = "model.num_moe_experts or model.moe_layer_freq"
_SHARED_WIDTH = "model.moe_shared_expert_intermediate_size"
_LATENT_HEADS = "model.num_attention_heads, model.qk_head_dim, model.qk_pos_emb_head_dim or model.v_head_dim"
_MAMBA = "model.mamba_num_heads, model.mamba_head_dim, model.mamba_num_groups or model.mamba_state_dim"
_DELTA = (
    "model.linear_num_key_heads, model.linear_num_value_heads, model.linear_key_head_dim or model.linear_value_head_dim"
)
_OF_MIXER: Mapping[str, tuple[str, ...]] = {
    "in_proj.weight": ("model.hidden_size",), "conv1d.weight": ("the convolution's taps",), "conv1d.bias": (),
    "dt_bias": (), "A_log": (), "D": (), "norm.weight": (),
}  # fmt: skip
# End of a parameter's name -> the fields that its dims come from. The first fits.
_DIMS: Mapping[str, tuple[str, ...]] = {
    "word_embeddings.weight": (_VOCABULARY, "model.hidden_size"),
    "position_embeddings.weight": ("model.max_position_embeddings", "model.hidden_size"),
    "output_layer.weight": (_VOCABULARY, "model.hidden_size"),
    "mlp.router.weight": (_EXPERTS, "model.hidden_size"),
    "mlp.router.expert_bias": (_EXPERTS,),
    "mlp.experts.linear_fc1.weight": (_EXPERTS, f"{_EXPERT_WIDTH} or {_GATE}", "model.hidden_size"),
    "mlp.experts.linear_fc2.weight": (_EXPERTS, "model.hidden_size", _EXPERT_WIDTH),
    "mlp.shared_experts.linear_fc1.weight": (f"{_SHARED_WIDTH} or {_GATE}", "model.hidden_size"),
    "mlp.shared_experts.linear_fc2.weight": ("model.hidden_size", _SHARED_WIDTH),
    "linear_q_proj.weight": (_LATENT_HEADS, "model.hidden_size"),
    "linear_q_down_proj.weight": ("model.q_lora_rank", "model.hidden_size"),
    "linear_q_up_proj.weight": (_LATENT_HEADS, "model.q_lora_rank"),
    "linear_q_up_proj.layer_norm_weight": ("model.q_lora_rank",),
    "linear_kv_down_proj.weight": ("model.kv_lora_rank or model.qk_pos_emb_head_dim", "model.hidden_size"),
    "linear_kv_up_proj.weight": (_LATENT_HEADS, "model.kv_lora_rank"),
    "linear_kv_up_proj.layer_norm_weight": ("model.kv_lora_rank",),
    "linear_qkv.weight": (_HEADS, "model.hidden_size"),
    "linear_qkv.bias": (_HEADS,),
    "q_layernorm.weight": ("model.kv_channels or model.qk_layernorm_full_width",),
    "k_layernorm.weight": ("model.kv_channels or model.qk_layernorm_full_width",),
    "linear_proj.weight": ("model.hidden_size", _HEADS),
    "linear_fc1.weight": (f"{_WIDTH} or {_GATE}", "model.hidden_size"),
    "linear_fc1.bias": (f"{_WIDTH} or {_GATE}",),
    "linear_fc2.weight": ("model.hidden_size", _WIDTH),
    **{f"mixer.{name}": (_MAMBA, *more) for name, more in _OF_MIXER.items()},
    **{f"self_attention.{name}": (_DELTA, *more) for name, more in _OF_MIXER.items()},
    "mixer.out_proj.weight": ("model.hidden_size", _MAMBA),
    "self_attention.out_proj.weight": ("model.hidden_size", _DELTA),
    "self_attention.out_norm.weight": ("model.linear_value_head_dim",),
}
# A part of the name of a parameter that only one of the two has -> the field that decides it. The first fits.
_PRESENCE: Sequence[tuple[str, str]] = (
    (r"post_layernorm\.", "model.norm_placement"),
    (r"activation_func\.", _GATE),
    (r"shared_experts\.", _SHARED_WIDTH),
    (r"router\.expert_bias$", "model.moe_router_enable_expert_bias"),
    (r"router\.|experts\.|pre_mlp_layernorm\.|mlp\.linear_fc[12]\.(layer_norm_)?weight$", _MIXTURES),
    (r"linear_q_(down|up)_proj|linear_q_proj", "model.multi_latent_attention or model.q_lora_rank"),
    (r"linear_kv_(down|up)_proj|input_layernorm\.|linear_qkv\.(layer_norm_)?weight$", "model.multi_latent_attention"),
    (r"mixer\.", "model.hybrid_layer_pattern"),
    (r"self_attention\.(in_proj|conv1d|out_norm|out_proj|A_log|dt_bias)", "model.linear_attention_freq"),
    (r"position_embeddings\.weight$", "model.position_embedding_type"),
    (r"output_layer\.weight$", "model.untie_embeddings_and_output_weights"),
    (r"q_layernorm\.weight$", "model.qk_layernorm"),
    (r"k_layernorm\.weight$", "model.qk_layernorm"),
    (r"norm_bias$", _NORM),
    (r"norm\.bias$", _NORM),
    (r"linear_qkv\.bias$", "model.add_qkv_bias or model.add_bias_linear"),
    (r"linear_proj\.bias$", "model.attention_out_bias or model.add_bias_linear"),
    (r"mlp\.linear_fc[12]\.bias$", "model.mlp_bias or model.add_bias_linear"),
    (r"\.bias$", "model.add_bias_linear"),
    ("", "model.num_layers"),
)


def check(path: Path, saved: Shapes, own: Shapes, ranks: Ranks) -> None:
    """Raises SharedMistake, the same on every rank, unless ``saved`` has what all ranks need.

    own: what this rank's stage needs, or its weights alone. Stages exchange their names and shapes once.
    """
    needed = _all_stages(own, ranks)
    model = {key: shape for key, shape in needed.items() if not key.startswith(optimizer_state.PREFIX)}
    found = weights_in(saved)
    if problem := _difference(found, model):
        where = f"Its own configuration is {path / 'config.toml'}."
        raise SharedMistake(f"checkpoint {path} does not fit this model: {problem} {where}")
    state = needed.keys() - model.keys()
    missing = sorted(key for key in state if saved.get(key) != needed[key])
    if missing:
        another = _of_another(saved, missing[0])
        raise SharedMistake(
            f"checkpoint {path} lacks the optimizer's state of this model (first: {missing[0]}).{another} "
            "Use --checkpoint.no_load_optim, or --checkpoint.finetune to start fresh from its weights."
        )


def _of_another(saved: Shapes, missing: str) -> str:
    """What is kept of the same parameter otherwise."""
    parameter = missing.removeprefix(optimizer_state.PREFIX).partition(".")[2]
    states = {key.removeprefix(optimizer_state.PREFIX) for key in saved if key.startswith(optimizer_state.PREFIX)}
    others = sorted(key.removesuffix(f".{parameter}") for key in states if key.endswith(f".{parameter}"))
    kept = [name for name in others if "." not in name and name != "param"]
    return f" It has another optimizer's, {' and '.join(kept)}." if kept else ""


def weights_in(saved: Shapes) -> dict[str, tuple[int, ...]]:
    """The weights of a checkpoint, saved as such or as the optimizer's fp32 ones."""
    others = (optimizer_state.PREFIX, rng.PREFIX, model_state.FP8_PREFIX)
    plain = {key: shape for key, shape in saved.items() if not key.startswith(others)}
    masters = {key: shape for key, shape in saved.items() if key.startswith(optimizer_state.MASTER)}
    return {key.removeprefix(optimizer_state.MASTER): shape for key, shape in masters.items()} | plain


def _all_stages(own: Shapes, ranks: Ranks) -> dict[str, tuple[int, ...]]:
    """Union over the pipeline group. It is the whole model: TP peers and data ranks have the same keys."""
    gathered: list[Shapes] = [{} for _ in range(ranks.layout.pp)]
    dist.all_gather_object(gathered, own, group=ranks.pgs.pp)
    return {key: shape for stage in gathered for key, shape in stage.items()}


def _difference(saved: Shapes, model: Shapes) -> str | None:
    """What differs, and which fields decide about it; None where nothing does."""
    reshaped = [key for key in sorted(model.keys() & saved.keys()) if model[key] != saved[key]]
    reshaped.sort(key=lambda key: -len(model[key]))  # matrices first: they tell more
    missing, extra = sorted(model.keys() - saved.keys()), sorted(saved.keys() - model.keys())
    sentences = []
    if reshaped:
        key = reshaped[0]
        shapes = f"{list(saved[key])} in the checkpoint and {list(model[key])} here"
        sentences.append(f"{shown_name(key)} is {shapes}{_more(reshaped)}.")
    if missing:
        sentences.append(f"The checkpoint lacks {shown_name(missing[0])}{_more(missing)}.")
    if extra:
        sentences.append(f"The checkpoint has {shown_name(extra[0])}, which this model lacks{_more(extra)}.")
    if not sentences:
        return None
    blocks = _blocks(saved) & _blocks(model)
    fields = Counter(field for key in reshaped for field in _fields(shown_name(key), saved[key], model[key]))
    if _WIDTH in fields:
        del fields[f"{_WIDTH} or {_GATE}"]
    for key in missing + extra:
        fields[_deciding(shown_name(key), blocks)] += 1
    return f"{' '.join(sentences)} Probably different: {'; '.join(field for field, _ in fields.most_common())}."


def _blocks(shapes: Shapes) -> set[str]:
    """``layers.3.``, ``mtp.0.``, ... of every block that has parameters."""
    return {match[0] for key in shapes if (match := _BLOCK.match(shown_name(key)))}


def _deciding(name: str, blocks_of_both: set[str]) -> str:
    """The field that decides whether a model has the parameter ``name``."""
    if (block := _BLOCK.match(name)) and block[0] not in blocks_of_both:
        return _NUMBER_OF_BLOCKS[block[1]]
    return next(field for part, field in _PRESENCE if re.search(part, name))


def _fields(name: str, saved: tuple[int, ...], here: tuple[int, ...]) -> list[str]:
    """The configuration's fields behind the dims in which two shapes differ."""
    dims = next((dims for end, dims in _DIMS.items() if name.endswith(end)), ("model.hidden_size",))
    return [field for field, old, new in zip(dims, saved, here, strict=False) if old != new]


def _more(keys: Sequence[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
