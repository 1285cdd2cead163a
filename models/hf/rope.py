"""RoPE in ``config.json`` <-> fields of ``GPTShape``.

Older files have ``rope_theta`` and ``rope_scaling``; transformers 5 writes both into ``rope_parameters``.
"""

import dataclasses
from typing import Any

from models.hf.keys import MOST_TOKENS, Span, is_one_of
from models.shapes import GPTShape

Known = dict[str, tuple[str, float | None]]
"""Parameters of a rope type: our field, and what it is where it is left out (None: it must be there)."""

FACTOR: tuple[str, float | None] = ("rope_scaling_factor", None)
ORIGINAL: tuple[str, float | None] = ("rope_original_max_position_embeddings", None)

KINDS: dict[str, Known] = {
    "default": {},
    "linear": {"factor": FACTOR},
    "llama3": {
        "factor": FACTOR,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": ("rope_low_freq_factor", None),
        "high_freq_factor": ("rope_high_freq_factor", None),
    },
    "yarn": {
        "factor": FACTOR,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": ("yarn_beta_fast", 32.0),
        "beta_slow": ("yarn_beta_slow", 1.0),
    },
}
"""Of each rope type."""

LATENT: Known = {"mscale": ("mscale", 1.0), "mscale_all_dim": ("mscale_all_dim", 0.0)}
"""More of yarn's with latent attention."""

THETA = Span(2, 1e15)
FACTORS = Span(0, 1e6, above=True)
SPANS: dict[str, Span] = {
    "rope_scaling_factor": Span(1, 1e6),
    "rope_original_max_position_embeddings": Span(1, MOST_TOKENS, whole=True),
    "mscale_all_dim": Span(0, 1e6),
}
"""What parameters may be, by our field; the others: FACTORS."""

ROUNDED = "yarn_correction_range_round_to_int"
FIELDS = {field for kind in [*KINDS.values(), LATENT] for field, _ in kind.values()} | {ROUNDED}

WHOLE = {"rope_original_max_position_embeddings"}
"""Fields that are whole numbers."""


class RopeError(Exception):
    """A rope type or parameter that we do not have."""

    def __init__(self, key: str, found: object, expected: str) -> None:
        super().__init__(key)
        self.key, self.found, self.expected = key, found, expected


def read(config: dict[str, Any], *, latent: bool) -> dict[str, Any]:
    """Takes RoPE's keys from a configuration: our fields. Raises RopeError."""
    where, values = _gather(config)
    values.setdefault("rope_theta", 10000.0)
    kind = values.pop("rope_type", values.pop("type", None)) or "default"
    values.pop("type", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise RopeError(f"{where}.rope_type", kind, " or ".join(map(repr, KINDS)))
    fields: dict[str, Any] = {"rope_scaling": "none" if kind == "default" else kind}
    fields["rotary_base"] = _number(f"{where}.rope_theta", values.pop("rope_theta"), THETA, whole=True)
    if not is_one_of(share := values.pop("partial_rotary_factor", 1.0), (1.0, None)):
        raise RopeError(f"{where}.partial_rotary_factor", share, "1.0")
    if kind == "yarn":
        fields[ROUNDED] = _truth(f"{where}.truncate", values.pop("truncate", True))
    given = {name for name, value in values.items() if value}
    for name, (ours, default) in _known(kind, latent).items():
        value = values.pop(name, default)
        if value is None:
            raise RopeError(f"{where}.{name}", None, f"a number, which rope_type {kind!r} needs")
        fields[ours] = _number(f"{where}.{name}", value, SPANS.get(ours, FACTORS), whole=ours in WHOLE)
    if kind == "yarn" and latent:
        _check_mscales(where, fields, given)
    for name, value in values.items():
        if value is not None:
            raise RopeError(f"{where}.{name}", value, f"none: rope_type {kind!r} has {', '.join(_known(kind, latent))}")
    return fields


def write(shape: GPTShape) -> dict[str, Any]:
    """``rope_parameters``, as transformers 5 has it, and for readers before it ``rope_theta`` and ``rope_scaling``."""
    kind = "default" if shape.rope_scaling == "none" else shape.rope_scaling
    known = _known(kind, shape.multi_latent_attention)
    scaling = {"rope_type": kind} | {name: getattr(shape, ours) for name, (ours, _) in known.items()}
    if kind == "yarn" and not shape.yarn_correction_range_round_to_int:
        scaling["truncate"] = False
    theta = float(shape.rotary_base)
    return {
        "rope_parameters": {"rope_theta": theta, **scaling},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else scaling,
    }


def fields_of(shape: GPTShape) -> set[str]:
    """The fields that this shape's rope type reads."""
    kind = "default" if shape.rope_scaling == "none" else shape.rope_scaling
    found = {ours for ours, _ in _known(kind, shape.multi_latent_attention).values()}
    return found | {ROUNDED} if kind == "yarn" else found


def _known(kind: str, latent: bool) -> Known:
    return KINDS[kind] | (LATENT if kind == "yarn" and latent else {})


def _check_mscales(where: str, fields: dict[str, Any], given: set[str]) -> None:
    """transformers' ``_compute_yarn_parameters`` reads both mscales or neither; megatron-core divides one by the
    other, whatever they are. Raises RopeError where that differs."""
    both = {"mscale", "mscale_all_dim"} <= given
    if not both and (fields["mscale"], fields["mscale_all_dim"]) != (1.0, 0.0):
        missing = "mscale" if "mscale_all_dim" in given else "mscale_all_dim"
        raise RopeError(f"{where}.{missing}", None, "a number, as transformers uses both mscales or none")


def _gather(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The keys in one place, and its name. rope_theta beside rope_parameters must say the same."""
    new, old = _parameters(config, "rope_parameters"), _parameters(config, "rope_scaling")
    theta = config.pop("rope_theta", None)
    where, values = ("rope_parameters", new) if new is not None else ("rope_scaling", old or {})
    values = dict(values)
    if theta is not None and values.setdefault("rope_theta", theta) != theta:
        raise RopeError("rope_theta", theta, f"{values['rope_theta']}, which {where} says")
    if new is not None and old is not None and {**old, "rope_theta": None} != {**new, "rope_theta": None}:
        raise RopeError("rope_scaling", old, "what rope_parameters says")
    return where, values


def _parameters(config: dict[str, Any], key: str) -> dict[str, Any] | None:
    found = config.pop(key, None)
    if found is not None and not isinstance(found, dict):
        raise RopeError(key, found, "parameters by name, an object in braces")
    return found


def _truth(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RopeError(key, value, "true or false")
    return value


def _number(key: str, value: Any, span: Span, *, whole: bool) -> float | int:
    """whole: 10000.0 will do, since rope_theta is written so."""
    plain = dataclasses.replace(span, whole=False)
    if plain.problem(key, value) is not None:
        raise RopeError(key, value, str(span))
    if whole and not float(value).is_integer():
        raise RopeError(key, value, "a whole number")
    return int(value) if whole else float(value)
