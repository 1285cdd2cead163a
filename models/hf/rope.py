"""RoPE in ``config.json`` <-> fields of ``GPTShape``.

Older files have ``rope_theta`` and ``rope_scaling``; transformers 5 writes both into ``rope_parameters``.
"""

import dataclasses
import math
from typing import Any

from models.hf.keys import Unsupported, is_one_of
from models.shapes import GPTShape
from models.spans import FACTOR as POSITIVE
from models.spans import MOST_TOKENS, PART, Span, is_number

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
SPANS: dict[str, Span] = {
    "rope_scaling_factor": Span(1, 1e6),
    "rope_original_max_position_embeddings": Span(1, MOST_TOKENS, whole=True),
    "mscale_all_dim": Span(0, 1e6),
}
"""What parameters may be, by our field; the others: POSITIVE."""

ROUNDED = "yarn_correction_range_round_to_int"
LONGROPE = {
    "rope_short_factor", "rope_long_factor", "rope_original_max_position_embeddings", "rope_scaling_factor",
    "rope_attention_factor",
}  # fmt: skip
SCALES = ("attention_factor", "mscale", "mscale_all_dim")
"""What yarn's queries and keys are multiplied by; of another type, which would not be, 1 is nothing."""
FIELDS = {field for kind in [*KINDS.values(), LATENT] for field, _ in kind.values()} | {ROUNDED} | LONGROPE

WHOLE = {"rope_original_max_position_embeddings"}
"""Fields that are whole numbers."""


def read(
    config: dict[str, Any], *, latent: bool = False, theta: float = 10000.0, share: float | None = None
) -> dict[str, Any]:
    """Takes RoPE's keys from a configuration: our fields. Raises Unsupported.

    theta: what rope_theta is where it is left out. share: likewise partial_rotary_factor, None: it may be 1 only.
    """
    where, values = _gather(config)
    top = config.pop("partial_rotary_factor", None)
    if top is not None and values.setdefault("partial_rotary_factor", top) != top:
        raise Unsupported("partial_rotary_factor", top, f"{values['partial_rotary_factor']}, which {where} says")
    return read_values(where, values, config, latent=latent, theta=theta, share=share)


def read_values(
    where: str,
    values: dict[str, Any],
    unread: dict[str, Any],
    *,
    latent: bool = False,
    theta: float = 10000.0,
    share: float | None = None,
) -> dict[str, Any]:
    """As ``read``, of the parameters alone, which ``where`` names. unread: where to put those that the rope type has no
    use for, which transformers warns of, and ignores."""
    values = dict(values)
    values.setdefault("rope_theta", theta)
    kind = values.pop("rope_type", values.pop("type", None)) or "default"
    values.pop("type", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise Unsupported(f"{where}.rope_type", kind, " or ".join(map(repr, KINDS)))
    fields: dict[str, Any] = {"rope_scaling": "none" if kind == "default" else kind}
    fields["rotary_base"] = _number(f"{where}.rope_theta", values.pop("rope_theta"), THETA, whole=False)
    found = values.pop("partial_rotary_factor", None)
    if share is not None:
        turned = share if found is None else found
        fields["rotary_percent"] = _number(f"{where}.partial_rotary_factor", turned, PART, whole=False)
    elif not is_one_of(found, (1.0, None)):
        raise Unsupported(f"{where}.partial_rotary_factor", found, "1.0")
    if kind == "yarn":
        fields[ROUNDED] = _truth(f"{where}.truncate", values.pop("truncate", True))
    _read_factor(where, values, fields, kind, latent)
    given = {name for name, value in values.items() if value}
    for name, (ours, default) in _known(kind, latent).items():
        value = values.pop(name, default)
        if value is None:
            raise Unsupported(f"{where}.{name}", None, f"a number, which rope_type {kind!r} needs")
        fields[ours] = _number(f"{where}.{name}", value, SPANS.get(ours, POSITIVE), whole=ours in WHOLE)
    if kind == "yarn" and latent:
        _check_mscales(where, fields, given)
    for name, value in values.items():
        if value is not None and name in SCALES and (kind == "yarn" or value != 1):
            known = ", ".join(_known(kind, latent))
            raise Unsupported(f"{where}.{name}", value, f"none: rope_type {kind!r} has {known}")
        unread[f"{where}.{name}"] = value
    return fields


def _read_factor(where: str, values: dict[str, Any], fields: dict[str, Any], kind: str, latent: bool) -> None:
    """Of queries and keys; transformers has keys for it, or makes it of both mscales."""
    if kind != "yarn" or latent:
        return
    factor = values.get("factor") or 1.0
    if (given := values.pop("attention_factor", None)) is None:
        scales = [values.pop(name, None) for name in ("mscale", "mscale_all_dim")]
        if all(scales) and all(POSITIVE.problem("", scale) is None for scale in [*scales, factor]):
            given = yarn_mscale(factor, scales[0]) / yarn_mscale(factor, scales[1])
        elif any(scales):
            raise Unsupported(f"{where}.mscale", scales, "mscale and mscale_all_dim, as transformers uses both or none")
    if given is None:
        return
    fields["rope_attention_factor"] = _number(f"{where}.attention_factor", given, POSITIVE, whole=False)
    if is_number(factor) and math.isclose(fields["rope_attention_factor"], yarn_mscale(factor, 1.0), rel_tol=1e-9):
        del fields["rope_attention_factor"]


def yarn_mscale(factor: float, scale: float) -> float:
    """arXiv:2309.00071, equation 22."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write(shape: GPTShape) -> dict[str, Any]:
    """``rope_parameters``, as transformers 5 has it, and for readers before it ``rope_theta`` and ``rope_scaling``."""
    kind = "default" if shape.rope_scaling in ("none", "longrope") else shape.rope_scaling  # phi_rope.py has longrope
    known = _known(kind, shape.multi_latent_attention)
    scaling = {"rope_type": kind} | {name: getattr(shape, ours) for name, (ours, _) in known.items()}
    if shape.rope_attention_factor and kind == "yarn":
        scaling["attention_factor"] = shape.rope_attention_factor
    if kind == "yarn" and not shape.yarn_correction_range_round_to_int:
        scaling["truncate"] = False
    theta = float(shape.rotary_base)
    return {
        "rope_parameters": {"rope_theta": theta, **scaling},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else scaling,
    }


WINDOWED, WHOLE_SEQUENCE = "sliding_attention", "full_attention"


def read_by_window(config: dict[str, Any], theta: float, local: float) -> dict[str, Any]:
    """Of models whose windowed blocks have a plain RoPE of their own. Raises Unsupported.

    transformers 5 keeps both in rope_parameters, by kind of block; older files have rope_local_base_freq for the
    windowed ones. theta, local: the others' base, and theirs, where they are left out.
    """
    both = config.get("rope_parameters")
    nested = isinstance(both, dict) and {WINDOWED, WHOLE_SEQUENCE} & both.keys()
    base = config.pop("rope_local_base_freq", None)
    if not nested:
        fields = read(config, theta=theta)
        plain = {"rope_theta": local if base is None else base}
    else:
        assert isinstance(both, dict)
        config.pop("rope_parameters")
        for kind in both.keys() - {WINDOWED, WHOLE_SEQUENCE}:
            raise Unsupported(f"rope_parameters.{kind}", both[kind], f"{WINDOWED} or {WHOLE_SEQUENCE}")
        kinds = {kind: both.get(kind) or {} for kind in (WINDOWED, WHOLE_SEQUENCE)}
        for kind, values in kinds.items():
            if not isinstance(values, dict):
                raise Unsupported(f"rope_parameters.{kind}", values, "parameters by name, an object in braces")
        flat, old = config.pop("rope_theta", None), config.pop("rope_scaling", None)
        whole = {**kinds[WHOLE_SEQUENCE]}
        if flat is not None and whole.setdefault("rope_theta", flat) != flat:
            raise Unsupported("rope_theta", flat, f"{whole['rope_theta']}, which rope_parameters says")
        if old is not None and (not isinstance(old, dict) or {**whole, **old} != whole):
            raise Unsupported("rope_scaling", old, "what rope_parameters says")
        fields = read_values(f"rope_parameters.{WHOLE_SEQUENCE}", whole, config, theta=theta)
        plain = {"rope_theta": local if base is None else base, **kinds[WINDOWED]}
    where = f"rope_parameters.{WINDOWED}"
    of_windows = read_values(where, plain, config, theta=theta)
    if of_windows["rope_scaling"] != "none":
        raise Unsupported(f"{where}.rope_type", of_windows["rope_scaling"], "'default'")
    return fields | {"rotary_base_local": of_windows["rotary_base"]}


def write_by_window(shape: GPTShape, *, with_local_key: bool) -> dict[str, Any]:
    """As transformers 5 has it, and as files before it do. with_local_key: they had rope_local_base_freq."""
    written = write(shape)
    base = float(shape.rotary_base_local if shape.has_local_rope else shape.rotary_base)
    written["rope_parameters"] = {
        WHOLE_SEQUENCE: written["rope_parameters"],
        WINDOWED: {"rope_type": "default", "rope_theta": base},
    }
    return written | ({"rope_local_base_freq": base} if with_local_key else {})


def fields_of(shape: GPTShape) -> set[str]:
    """The fields that this shape's rope type reads."""
    if shape.rope_scaling == "longrope":
        return LONGROPE
    kind = "default" if shape.rope_scaling == "none" else shape.rope_scaling
    found = {ours for ours, _ in _known(kind, shape.multi_latent_attention).values()}
    return found | {ROUNDED, "rope_attention_factor"} if kind == "yarn" else found


def _known(kind: str, latent: bool) -> Known:
    return KINDS[kind] | (LATENT if kind == "yarn" and latent else {})


def _check_mscales(where: str, fields: dict[str, Any], given: set[str]) -> None:
    """transformers' ``_compute_yarn_parameters`` reads both mscales or neither; megatron-core divides one by the
    other, whatever they are. Raises Unsupported where that differs."""
    both = {"mscale", "mscale_all_dim"} <= given
    if not both and (fields["mscale"], fields["mscale_all_dim"]) != (1.0, 0.0):
        missing = "mscale" if "mscale_all_dim" in given else "mscale_all_dim"
        raise Unsupported(f"{where}.{missing}", None, "a number, as transformers uses both mscales or none")


def _gather(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The keys in one place, and its name. rope_theta beside rope_parameters must say the same."""
    new, old = _parameters(config, "rope_parameters"), _parameters(config, "rope_scaling")
    theta = config.pop("rope_theta", None)
    where, values = ("rope_parameters", new) if new is not None else ("rope_scaling", old or {})
    values = dict(values)
    if theta is not None and (said := values.setdefault("rope_theta", theta)) is not theta and said != theta:
        raise Unsupported("rope_theta", theta, f"{values['rope_theta']}, which {where} says")
    if new is not None and old is not None and {**old, "rope_theta": None} != {**new, "rope_theta": None}:
        raise Unsupported("rope_scaling", old, "what rope_parameters says")
    return where, values


def _parameters(config: dict[str, Any], key: str) -> dict[str, Any] | None:
    found = config.pop(key, None)
    if found is not None and not isinstance(found, dict):
        raise Unsupported(key, found, "parameters by name, an object in braces")
    return found


def _truth(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unsupported(key, value, "true or false")
    return value


def _number(key: str, value: Any, span: Span, *, whole: bool) -> float | int:
    """whole: 10000.0 will do."""
    plain = dataclasses.replace(span, whole=False)
    if plain.problem(key, value) is not None:
        raise Unsupported(key, value, str(span))
    if whole and not float(value).is_integer():
        raise Unsupported(key, value, "a whole number")
    return int(value) if whole else float(value)
