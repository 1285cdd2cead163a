"""Phi-3's RoPE: of a part of a head's channels, stretched by a factor of its own for each pair of them (LongRoPE)."""

import math
from typing import Any

from models.hf import rope
from models.hf.keys import Config, Unsupported, pop_number
from models.shapes import GPTShape
from models.spans import FACTOR, MOST_TOKENS, Span

ORIGINAL = Span(2, MOST_TOKENS, whole=True)
LONG, SHORT = "long_factor", "short_factor"


def read_phi_rope(left: Config, fields: dict[str, Any]) -> None:
    """``rope_scaling`` of older files lacks the original context, which is a key beside it; "su" is longrope's name
    before that."""
    original = pop_number(left, "original_max_position_embeddings", 4096, ORIGINAL)
    found = left.get("rope_parameters") or left.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type")) if isinstance(found, dict) else None
    if kind not in ("longrope", "su", "yarn"):
        fields |= rope.read(left, share=1.0)
        return
    values = {**found}
    left.pop("rope_scaling", None)
    left.pop("rope_parameters", None)
    factors = {key: values.pop(key, None) for key in (LONG, SHORT)}
    original = values.pop("original_max_position_embeddings", None) or original
    factor, attention = values.pop("factor", None), values.pop("attention_factor", None)
    plain = {key: value for key, value in values.items() if key not in ("rope_type", "type")}
    own = {**plain_keys(left), "rope_parameters": plain}
    fields |= rope.read(own, share=1.0)
    for key in ("rope_theta", "partial_rotary_factor"):
        left.pop(key, None)
    left |= own  # what was not read
    turned = int(fields["kv_channels"] * fields["rotary_percent"]) // 2
    for key, value in factors.items():
        if not isinstance(value, list) or len(value) != turned or any(FACTOR.problem(key, one) for one in value):
            raise Unsupported(f"rope_scaling.{key}", value, f"{turned} numbers, one for each pair of turned channels")
    if ORIGINAL.problem("original_max_position_embeddings", original):
        raise Unsupported("original_max_position_embeddings", original, str(ORIGINAL))
    for key, value in (("factor", factor), ("attention_factor", attention)):
        if value is not None and FACTOR.problem(key, value):
            raise Unsupported(f"rope_scaling.{key}", value, str(FACTOR))
    fields |= {
        "rope_scaling": "longrope",
        "rope_short_factor": tuple(float(one) for one in factors[SHORT] or ()),
        "rope_long_factor": tuple(float(one) for one in factors[LONG] or ()),
        "rope_original_max_position_embeddings": original,
        "rope_scaling_factor": float(factor or fields["max_position_embeddings"] / original),
    }
    if attention is not None and not math.isclose(attention, longrope_attention(fields), rel_tol=1e-9):
        fields["rope_attention_factor"] = float(attention)


def plain_keys(left: Config) -> Config:
    """RoPE's keys beside the parameters."""
    return {key: left[key] for key in ("rope_theta", "partial_rotary_factor") if left.get(key) is not None}


def longrope_attention(fields: dict[str, Any]) -> float:
    """As ``models.rope.attention_factor``."""
    factor, original = fields["rope_scaling_factor"], fields["rope_original_max_position_embeddings"]
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def write_phi_rope(shape: GPTShape) -> Config:
    """In both ways."""
    share = {"partial_rotary_factor": shape.rotary_percent}
    if shape.rope_scaling != "longrope":
        written = rope.write(shape)
        written["rope_parameters"] |= share
        return written | share
    original = shape.rope_original_max_position_embeddings
    scaling: Config = {
        "rope_type": "longrope",
        SHORT: list(shape.rope_short_factor),
        LONG: list(shape.rope_long_factor),
        "original_max_position_embeddings": original,
    }
    if shape.rope_scaling_factor != shape.max_position_embeddings / original:
        scaling["factor"] = shape.rope_scaling_factor
    if shape.rope_attention_factor:
        scaling["attention_factor"] = shape.rope_attention_factor
    theta = float(shape.rotary_base)
    return {
        "rope_parameters": {"rope_theta": theta, **share, **scaling},
        "rope_theta": theta,
        "rope_scaling": None,
        "original_max_position_embeddings": original,
        **share,
    }
