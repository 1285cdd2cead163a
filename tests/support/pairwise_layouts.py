"""Which rows of the table of layouts every run of the suite tries: as few as have every pair of what all of them have.

A pair is a trait of a model and an axis or switch of a layout, or two of the latter. The others are a campaign's.
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
    without_list, stages, _ = layout.partition("[")
    names = re.findall(r"sp|zero\d|overlap|allgather|account|[a-z]+(?=\d)", without_list)
    return frozenset([*names, *switches, *(["stages by name"] if stages else [])])


def chosen(cases: list[Case]) -> list[Case]:
    """Whoever has most pairs that none before has; one whose model is not trained yet costs two trainings."""
    have = {model: traits(model) for model in {model for model, _, _ in cases}}
    pairs = {
        case: {*itertools.product(have[case[0]], on), *map(frozenset, itertools.combinations(on, 2))}
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
