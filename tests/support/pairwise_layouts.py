"""Which rows of the table of layouts every run of the suite tries: as few as have all that may go wrong alone.

That is every pair of two axes or switches of a layout that change the same thing, and every trait of a model on the
axis that splits it: PP what layers and ends have, ZeRO-3 parameters of their own kind, TP what computes each token by
itself, CP the rest. All other rows are a campaign's.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable

from layout_cases import MODELS, Model
from models.families import named
from models.resolve import resolve

Case = tuple[Model, str, tuple[str, ...]]
"""A model, a layout and switches."""
ALL: list[Case] = [
    *((model, layout, ()) for model in MODELS for layout in model.layouts),
    *((model, layout, switches) for model in MODELS for layout, switches in model.switched),
]
SIZES = frozenset("""
    num_layers hidden_size ffn_hidden_size moe_ffn_hidden_size vocab_size make_vocab_size_divisible_by kv_channels
    max_position_embeddings norm_epsilon latent_norm_epsilon init_method_std rotary_base hf_model_type num_query_groups
    num_moe_experts qk_head_dim qk_pos_emb_head_dim v_head_dim mamba_head_dim mamba_num_groups mamba_state_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads
""".split())  # fmt: skip
"""Fields whose value no layout looks at, or that come with another one which it does."""
OF_ONE_NUMBER = re.compile(
    r"activation(?! xielu)|glu_|mup_|\w+_multiplier|\w+_scaling\b|\w+softcapping|clip_qkv|qk_l2|softmax_scale|mscale"
    r"|yarn_|rope_(high|attention|original|scaling_factor)|layernorm_zero|attn_scale|moe_(apply|token|router_(topk|pre|score))"
)
"""Traits without parameters that compute each number by itself, whichever rank has it."""
OF_ONE_TOKEN = re.compile(
    r"activation|add_|mlp_|norm|parallel_|untie|qk_l|kv_|q_lora|plain|moe_(layer|shared|router_(group|num))"
)
"""Traits that compute each token by itself, whichever rank of a context it is on."""
OF_LAYERS_OR_ENDS = frozenset("""
    use_mup untie_embeddings_and_output_weights mtp_num_layers moe_layer_freq window_attn_skip_freq no_rope_freq
    hybrid_layer_pattern linear_attention_freq documents
""".split())  # fmt: skip
"""Traits that a pipeline's stage knows its layers' numbers for, or that its ends have."""
OF_OWN_PARAMETERS = frozenset("softmax_type moe_shared_expert_gate".split())
ALONE = {
    "zero2": "dp auto hsdp", "overlap": "dp", "bucket": "overlap", "account": "pp", "selective": "cp zero3",
    "etp": "tp sp ep dp pp zero3 hsdp allgather", "vpp": "pp dp zero3 ep listed recompute chunks",
    "offload": "zero3 sp pp ep chunks", "recompute": "sp vpp chunks",
}  # fmt: skip
"""Axes that change one thing, and those that change it too: with others they are as what is beside them here."""


def split_by(trait: str) -> str:
    """The axis by which a model with this trait, and not another one, may be computed wrongly."""
    field = trait.split()[0]
    if field in OF_LAYERS_OR_ENDS:
        return "pp"
    return "zero3" if field in OF_OWN_PARAMETERS else "tp" if OF_ONE_TOKEN.match(field) else "cp"


def traits(model: Model) -> frozenset[str]:
    """What its shape has that the debug one has not, and a layout looks at; of words, which."""
    shape, plain = resolve(model.config().model, None), named("debug")
    found = {"documents apart"} if model.documents_apart else set()
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        if field.name not in SIZES and value != getattr(plain, field.name):
            is_word = isinstance(value, str) and field.name not in OF_LAYERS_OR_ENDS
            found.add(f"{field.name} {value}" if is_word else field.name)
    return frozenset(trait for trait in found if not OF_ONE_NUMBER.match(trait))


def axes(layout: str, switches: Iterable[str]) -> frozenset[str]:
    """ "tp2sppp2zero3" -> tp, sp, pp, zero3."""
    without_list, _, stages = layout.partition("[")
    names = re.findall(r"sp|zero\d|overlap|allgather|account|[a-z]+(?=\d)", without_list)
    by_name = [*(["listed"] if stages else []), *(["lone_loss"] if "|L]" in stages else [])]
    return frozenset([*names, *switches, *by_name])


def ranks(layout: str) -> int:
    """Of "tp2pp2vpp2": 4."""
    return math.prod(int(size) for axis, size in re.findall(r"(v?pp|tp|cp|dp)(\d)", layout) if axis != "vpp")


def side_by_side(on: Iterable[str]) -> set[frozenset[str]]:
    """Pairs of axes of a layout that may go wrong as a pair."""
    pairs = map(frozenset, itertools.combinations(on, 2))
    return {pair for pair in pairs if all(one not in ALONE or pair & {*ALONE[one].split()} for one in pair)}


def chosen(cases: list[Case]) -> list[Case]:
    """Whoever has most that none before has, on fewest axes; one whose model is not trained yet costs two trainings."""
    have = {model: traits(model) for model in {model for model, _, _ in cases}}
    pairs = dict[Case, set[object]]()
    for case in cases:
        on = axes(case[1], case[2])
        pairs[case] = {*side_by_side(on), *(trait for trait in have[case[0]] if split_by(trait) in on)}
    missing, found = set().union(*pairs.values()), list[Case]()
    while missing:
        trained = {model for model, _, _ in found}
        new = {case: len(pairs[case] & missing) / (1 if case[0] in trained else 2) for case in pairs}
        best = max(new, key=lambda case: (new[case], -len(axes(*case[1:]))))
        found.append(best)
        missing -= pairs.pop(best)
    return found


SUITE = frozenset(chosen([case for case in ALL if "compile" not in case[2] and ranks(case[1]) <= 4]))
"""Compiling takes half a minute: tests/models/test_compiled.py. Eight ranks on two cores take as long as three rows."""
