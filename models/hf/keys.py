"""What keys of a ``config.json`` hold, and how each kind of model's are read and written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.shapes import GPTShape

Config = dict[str, Any]
Read = Callable[[Config, dict[str, Any]], None]
"""Takes keys from a configuration and puts fields into the shape's. Raises Unsupported."""
Write = Callable[[GPTShape], Config]


MOST_SHOWN = 200
"""Characters of a value that a message shows."""


class Unsupported(Exception):
    """A key of a configuration whose value means a model that we do not have."""

    def __init__(self, key: str, found: object, expected: str) -> None:
        super().__init__(f"{key} = {shown(found)}: expected {expected}")


def shown(value: object) -> str:
    """A value as Python writes it, cut short."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


@dataclass(slots=True, frozen=True, kw_only=True)
class Architecture:
    """How one model_type's configuration is read and written."""

    model_class: str
    """Transformers' class, as ``architectures`` has it."""
    numbers: Mapping[str, str]
    """Their key -> our field, the same number."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a key means that is left out, as their configuration classes have it."""
    switches: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Their key -> its supported values; the first is written."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that every such model has."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key -> the key, as ``attribute_map`` of their configuration class has it."""
    parts: tuple[tuple[Read, Write], ...] = ()
    """What is not one number for one number."""


MOST_BLOCKS, MOST_HEADS, MOST_EXPERTS, MOST_WIDTH, MOST_TOKENS = 10_000, 1 << 16, 1 << 16, 1 << 24, (1 << 31) - 1
"""Bounds far above any model's, so that what a file claims cannot make reading it endless."""


@dataclass(slots=True, frozen=True)
class Span:
    """Numbers from ``least`` to ``most``, both included unless ``above``: then least is not."""

    least: float
    most: float
    whole: bool = False
    above: bool = False

    def problem(self, key: str, value: object) -> str | None:
        """What is wrong with ``value``; None where it is one of these numbers."""
        fits = is_number(value) and (not self.whole or isinstance(value, int))
        if fits and (self.least < value if self.above else self.least <= value) and value <= self.most:  # type: ignore[operator]
            return None
        return str(Unsupported(key, value, str(self)))

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {self.least:,} to {self.most:,}"
        return f"a number {'above' if self.above else 'from'} {self.least:g}, at most {self.most:g}"


WIDTH, HEADS, EXPERTS = (Span(1, most, whole=True) for most in (MOST_WIDTH, MOST_HEADS, MOST_EXPERTS))
SHARE = Span(0, 1)
MULTIPLIER = Span(0, 1e6, above=True)
SPANS: Mapping[str, Span] = {
    "num_layers": Span(1, MOST_BLOCKS, whole=True),
    "vocab_size": Span(1, MOST_TOKENS, whole=True),
    "max_position_embeddings": Span(1, MOST_TOKENS, whole=True),
    "hidden_size": WIDTH,
    "ffn_hidden_size": WIDTH,
    "moe_ffn_hidden_size": WIDTH,
    "moe_shared_expert_intermediate_size": WIDTH,
    "activation_func_clamp_value": Span(0, 1e6, above=True),
    "kv_lora_rank": WIDTH,
    "num_attention_heads": HEADS,
    "mamba_state_dim": HEADS,
    "mamba_head_dim": HEADS,
    "mamba_num_groups": HEADS,
    "mamba_num_heads": HEADS,
    "linear_key_head_dim": HEADS,
    "linear_value_head_dim": HEADS,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "qk_head_dim": HEADS,
    "qk_pos_emb_head_dim": HEADS,
    "v_head_dim": HEADS,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": EXPERTS,
    "norm_epsilon": Span(0, 1, above=True),
    "attention_dropout": SHARE,
    "hidden_dropout": SHARE,
    "init_method_std": Span(0, 1e3),
    "moe_aux_loss_coeff": Span(0, 1e3),
    "moe_router_topk_scaling_factor": Span(0, 1e6, above=True),
    "residual_multiplier": MULTIPLIER,
    "embedding_multiplier": MULTIPLIER,
    "logits_scaling": MULTIPLIER,
    "softmax_scale": MULTIPLIER,
}
"""What the numbers of ``Architecture.numbers`` may be, by our field."""


def is_number(value: object) -> bool:
    """Finite, and neither a truth value nor text; a whole one may have any size."""
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def pop_number(left: Config, key: str, default: int, span: Span) -> int:
    """A whole number that may be left out or null. Raises Unsupported for anything else, or one out of ``span``."""
    value = left.pop(key, None)
    if value is None:
        return default
    if span.problem(key, value) is not None:
        raise Unsupported(key, value, str(span))
    return int(value)


def take_bool(left: Config, key: str, default: bool) -> bool:
    """true or false, which may be left out. Raises Unsupported for anything else."""
    value = left.pop(key, default)
    if not isinstance(value, bool):
        raise Unsupported(key, value, "true or false")
    return value


def take_list(left: Config, key: str) -> list[Any]:
    """A list that may be left out or null. Raises Unsupported for anything else."""
    value = left.pop(key, None)
    if value is not None and not isinstance(value, list):
        raise Unsupported(key, value, "a list")
    return value or []


def is_one_of(value: object, choices: tuple[Any, ...]) -> bool:
    """Whether ``value`` is one of these; 1 is no true, and 0 no false."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)
