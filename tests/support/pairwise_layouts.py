"""Which rows of the table of layouts every run of the suite tries: as few as have every pair that may go wrong.

A pair is two axes or switches of a layout, or an axis and a trait of a model that it looks at: TP cuts all of them, CP
those that see other tokens, PP those of single layers and of the ends, ZeRO-3 parameters of their own kind. All other
rows are a campaign's.
"""

import dataclasses
import itertools
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
    num_layers hidden_size ffn_hidden_size vocab_size make_vocab_size_divisible_by max_position_embeddings norm_epsilon
    init_method_std rotary_base hf_model_type
""".split())  # fmt: skip
"""Fields whose value no layout looks at."""


OF_ONE_TOKEN = re.compile(
    r"activation|glu_|add_|mlp_|norm|layernorm|residual|embedding_|logits_|final_|parallel_|untie|qk_l|clip_qkv|latent_"
    r"|num_(query|moe)|kv_|q_lora|plain|moe_(apply|ffn|layer|shared)|moe_router_(group|num|pre|score|topk)"
)
"""Traits that compute each token by itself, whichever rank of a context it is on."""
OF_LAYERS_OR_ENDS = frozenset("""
    untie_embeddings_and_output_weights mtp_num_layers moe_layer_freq window_attn_skip_freq no_rope_freq
    hybrid_layer_pattern linear_attention_freq documents position_embedding_type embedding_multiplier
""".split())  # fmt: skip
"""Traits that a pipeline's stage knows its layers' numbers for, or that its ends have."""
OF_OWN_PARAMETERS = frozenset("mamba_num_heads linear_num_value_heads softmax_type moe_shared_expert_gate".split())


ELSEWHERE = {frozenset(pair) for pair in (("tp", "compile"), ("sp", "compile"))}
"""Half a minute of compiling: tests/models/test_compiled.py has them in its campaign."""


def meet(trait: str, axis: str) -> bool:
    """Whether an axis may compute a model with this trait, and not another one, wrongly."""
    field = trait.split()[0]
    return {
        "tp": True, "cp": not OF_ONE_TOKEN.match(field), "pp": field in OF_LAYERS_OR_ENDS,
        "zero3": field in OF_OWN_PARAMETERS,
    }.get(axis, False)  # fmt: skip


def traits(model: Model) -> frozenset[str]:
    """What its shape has that the debug one has not; of words, which."""
    shape, plain = resolve(model.config().model, None), named("debug")
    found = {"documents apart"} if model.documents_apart else set()
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        if field.name not in SIZES and value != getattr(plain, field.name):
            found.add(f"{field.name} {value}" if isinstance(value, str) else field.name)
    return frozenset(found or {"plain"})


def axes(layout: str, switches: Iterable[str]) -> frozenset[str]:
    """ "tp2sppp2zero3" -> tp, sp, pp, zero3."""
    without_list, _, stages = layout.partition("[")
    names = re.findall(r"sp|zero\d|overlap|allgather|account|[a-z]+(?=\d)", without_list)
    by_name = [*(["stages by name"] if stages else []), *(["the loss alone"] if "|L]" in stages else [])]
    return frozenset([*names, *switches, *by_name])


def chosen(cases: list[Case]) -> list[Case]:
    """Whoever has most pairs that none before has; one whose model is not trained yet costs two trainings."""
    have = {model: traits(model) for model in {model for model, _, _ in cases}}
    pairs = {
        case: {
            *(pair for pair in itertools.product(have[case[0]], on) if meet(*pair)),
            *({*map(frozenset, itertools.combinations(on, 2))} - ELSEWHERE),
        }
        for case in cases
        for on in [axes(case[1], case[2])]
    }
    missing, found = set().union(*pairs.values()), list[Case]()
    while missing:
        trained = {model for model, _, _ in found}
        best = max(pairs, key=lambda case: len(pairs[case] & missing) / (1 if case[0] in trained else 2))
        found.append(best)
        missing -= pairs.pop(best)
    return found


SUITE = frozenset(chosen(ALL))
