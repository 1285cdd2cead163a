"""A checkpoint by parameter names, of transformers' modules or torchtitan's, under our keys: weights and AdamW states.

Which prefix the names have (``model.``, ``state.model.``, none) and which naming they follow is found: that of which
most is there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from models.shapes import GPTShape
from program.errors import UserError
from program.printing import some
from tools.reshard.checkpoint_source import MASTER, STATE
from tools.reshard.named_weights import MappedOrigin, NamedWeight, Naming, RowRun, SourceTensor
from tools.reshard.naming import known_name, namings
from tools.reshard.tensors import Info, Origin

STATES = ("exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq", "param")
"""AdamW's, and fp32 weights where the model's are rounded."""
NO_WEIGHTS = ("inv_freq", "freqs_cis", "cos_cached", "sin_cached", "tokens_per_expert", "rope.cache", "rope_cache",
              "attn.bias", "attn.masked_bias", "causal_mask", "tokens_per_expert_E")  # fmt: skip
"""Ends of the names of buffers that are no weights."""
KEEPS = ("router.expert_bias",)
_FLAT = re.compile(r"(^|\.)_?flat_param(_\d+)?(\.|$)")


@dataclass(frozen=True)
class NamedTensors:
    """Which of a checkpoint's keys is what."""

    naming: Naming
    weights: Mapping[str, str]
    """Their name -> key."""
    states: Mapping[str, Mapping[str, str]]
    """State -> their name -> key."""


def matched(tensors: Mapping[str, Info], shape: GPTShape, folder: Path) -> NamedTensors:
    """Raises UserError where no naming has all of the model's weights, with what the nearest lacks."""
    if flat := [key for key in tensors if _FLAT.search(key)]:
        raise UserError(
            f"{folder}: {flat[0]}: a flat parameter, as FSDP1 saves with LOCAL_STATE_DICT ({len(flat)} here): no "
            "weight in it has a name. Save again in the program that trains: with StateDictType.SHARDED_STATE_DICT, "
            "with torch.distributed.checkpoint.state_dict.get_state_dict, or as FSDP2 (fully_shard); or the "
            "weights alone with FULL_STATE_DICT as a Hugging Face folder, for python -m tools.convert import."
        )
    parsed = [(key, *_split(key)) for key in tensors]
    best: tuple[int, NamedTensors] | None = None
    for naming in namings(shape):
        found = _match(parsed, naming)
        fits = sum(_fits(tensors[key].shape, name, naming) for name, key in found.weights.items())
        if best is None or fits > best[0]:
            best = fits, found
        if fits == len(naming.shapes):
            break
    if best is None or not best[0]:
        names = sorted(tensors)[:5]
        raise UserError(
            f"{folder}: no weights by the names of transformers or torchtitan; it has {', '.join(names) or 'none'}."
        )
    _check(tensors, best[1], folder)
    return best[1]


def _split(key: str) -> tuple[str, str]:
    """A key without wrappers, and without the name of the optimizer's state that it is of; and that name."""
    head, _, last = key.rpartition(".")
    return (known_name(head), last) if last in STATES else (known_name(key), "")


def _match(parsed: list[tuple[str, str, str]], naming: Naming) -> NamedTensors:
    """The weights under one prefix, and the states under one each."""
    places: dict[str, dict[str, dict[str, str]]] = {}
    wanted = {*naming.shapes, *naming.copies}
    for key, name, state in parsed:
        segments = name.split(".")
        for at in range(len(segments)):
            tail = ".".join(segments[at:])
            if tail in wanted:
                places.setdefault(state, {}).setdefault(".".join(segments[:at]), {}).setdefault(tail, key)
                break
    chosen = {state: max(found.values(), key=len) for state, found in places.items()}
    return NamedTensors(naming, chosen.get("", {}), {state: chosen[state] for state in STATES if state in chosen})


def _fits(found: tuple[int, ...], name: str, naming: Naming) -> bool:
    wanted = naming.shapes.get(name)
    if wanted is None:
        return False
    return found == wanted or (name in naming.padded and found[1:] == wanted[1:] and found[0] >= wanted[0])


def _check(tensors: Mapping[str, Info], found: NamedTensors, folder: Path) -> None:
    naming, weights = found.naming, found.weights
    missing = [name for name in naming.shapes if name not in weights]
    reshaped = [
        f"{key} {list(tensors[key].shape)}, expected {list(naming.shapes[name])}"
        for name, key in weights.items()
        if name in naming.shapes and not _fits(tensors[key].shape, name, naming)
    ]
    extra = list(_extra(tensors, found))
    for what, names in (("lacks", missing), ("differs in", reshaped), ("has no place for", extra)):
        if names:
            text = f"the model of --recipe {what} {some(names)}"
            if what == "lacks":
                text = f"lacks {some(names)}, which the model of --recipe has"
            raise UserError(f"{folder}: as {naming.label}: {text}. Mend the recipe.")


def _extra(tensors: Mapping[str, Info], found: NamedTensors) -> Iterator[str]:
    """Tensors beside the weights, under the same prefix, that are none of the model's."""
    name, key = next(iter(found.weights.items()))
    prefix = known_name(key).removesuffix(name)
    heads = {name.partition(".")[0] for name in found.naming.shapes}
    used = set(found.weights.values())
    for key in tensors:
        plain = known_name(key)
        if key in used or not plain.startswith(prefix) or plain.rpartition(".")[2] in STATES:
            continue
        rest = plain.removeprefix(prefix)
        is_weight = not rest.endswith(NO_WEIGHTS) and not found.naming.computed.search(rest)
        if is_weight and rest.partition(".")[0] in heads:
            yield key


def origins(
    tensors: Mapping[str, Info], found: NamedTensors, folder: Path, *, weights_alone: bool
) -> dict[str, MappedOrigin]:
    """Every weight by our key, and the optimizer's state of it. Raises UserError for a state that is there in part."""
    made: dict[str, MappedOrigin] = {}
    there = any(key.endswith((".exp_avg", ".exp_avg_sq")) for key in tensors)
    if there and not weights_alone and not found.states.get("exp_avg"):
        raise UserError(
            f"{folder}: the optimizer's states have no parameters' names (torch's get_optimizer_state_dict gives them "
            "these). Take the weights alone: --drop_optimizer."
        )
    has_states = there and not weights_alone
    for weight in found.naming.weights:
        plain = partial(_origin, weight, found.naming, tensors)
        made[weight.key] = plain(found.weights)
        if not has_states or weight.key.endswith(KEEPS):
            continue
        for state in ("exp_avg", "exp_avg_sq"):
            lacking = [run.name for run in weight.runs if run.name not in found.states.get(state, {})]
            if lacking:
                raise UserError(f"{folder}: lacks {state} of {lacking[0]}. Take the weights alone: --drop_optimizer.")
            made[f"{STATE}{state}.{weight.key}"] = plain(found.states[state], dtype="float32")
        masters = found.states.get("param") or found.weights
        made[MASTER + weight.key] = plain(masters, dtype="float32")
    return made


def _origin(
    weight: NamedWeight, naming: Naming, tensors: Mapping[str, Info], keys: Mapping[str, str], dtype: str | None = None
) -> MappedOrigin:
    """A weight's rows. dtype: that it is read in; None: that of the source."""
    sources: dict[str, SourceTensor] = {}
    for run in weight.runs:
        if run.name not in sources:
            info = tensors[keys[run.name]]
            sources[run.name] = SourceTensor(info.shape, Origin(keys[run.name], info.dtype, info.shape))
    first = next(iter(sources.values()))
    runs, shape = weight.runs, weight.shape
    if weight.padded and len(runs) == 1:  # all rows that they have
        axis = 1 if weight.geometry.transposed else 0
        runs = (RowRun(runs[0].name, 0, 0, first.shape[axis]),)
        shape = (first.shape[axis], *shape[1:])
    dtypes = {source.origin.dtype for source in sources.values()}
    own = dtype or (dtypes.pop() if len(dtypes) == 1 else "float32")
    return MappedOrigin(own, shape, runs, sources, weight.geometry)


def check_numbers(tensors: Mapping[str, Info], found: NamedTensors, folder: Path) -> None:
    """Raises UserError for weights of a dtype that is not trained in, as quantised ones are."""
    known = ("float64", "float32", "bfloat16", "float16")
    wrong = [key for key in found.weights.values() if tensors[key].dtype not in known]
    if wrong:
        raise UserError(f"{folder}: {wrong[0]} is {tensors[wrong[0]].dtype}; expected one of {', '.join(known)}.")
