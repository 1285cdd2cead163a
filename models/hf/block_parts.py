"""What differs between blocks, and between the linear layers of a block: windows, RoPE, biases, multipliers."""

from typing import Any

from models.hf import rope
from models.hf.config_parts import TOKENS, WHOLE, WINDOWED, pop_window, skip_freq, window_of, write_window_types
from models.hf.keys import Config, Read, Unsupported, Write, is_one_of, pop_number, take_bool, take_list
from models.shapes import GPTShape
from models.spans import FACTOR, Span

PARTS = tuple[Read, Write]


def layer_windows(default: int | None, pattern: int = 0, pattern_key: str | None = None) -> PARTS:
    """``layer_types`` says which blocks see ``sliding_window`` only (Gemma, OLMo-3, Ministral).

    default: of sliding_window. pattern: where layer_types is left out, every pattern-th block sees everything; 0: none
    does. pattern_key: the older key that says so.
    """

    def read(left: Config, fields: dict[str, Any]) -> None:
        window = pop_window(left, default)
        every = pop_number(left, pattern_key, pattern, TOKENS) if pattern_key else pattern
        plain = [window is not None and not (every and (block + 1) % every == 0) for block in range(count(fields))]
        put_windows(fields, window, pop_layer_types(left, fields, plain))

    def write(shape: GPTShape) -> Config:
        # transformers makes the mask of windows for models without one, too
        return {"sliding_window": window_of(shape) or default, "layer_types": write_window_types(shape)}

    return read, write


def switched_windows(everywhere: bool = False) -> PARTS:
    """Qwen's: ``use_sliding_window`` turns them on, from block ``max_window_layers`` on or as layer_types says.

    everywhere: in all blocks, whatever these say, as transformers' Qwen3-MoE has it.
    """

    def read(left: Config, fields: dict[str, Any]) -> None:
        on = take_bool(left, "use_sliding_window", False)
        first = pop_number(left, "max_window_layers", 28, COUNTS)
        window = pop_window(left, 4096) if on else None
        left.pop("sliding_window", None)  # off, it may be 0
        plain = [window is not None and (everywhere or block >= first) for block in range(count(fields))]
        windowed = pop_layer_types(left, fields, plain)
        if everywhere and len(set(windowed)) > 1:
            raise Unsupported("layer_types", [WINDOWED if one else WHOLE for one in windowed], "one kind in all blocks")
        if window is None and any(windowed):
            raise Unsupported("use_sliding_window", on, f'true: layer_types has "{WINDOWED}"')
        put_windows(fields, window, windowed)

    def write(shape: GPTShape) -> Config:
        blocks = shape.window_blocks
        if not any(blocks):
            return {"use_sliding_window": False, "sliding_window": None}
        return {
            "use_sliding_window": True,
            "sliding_window": window_of(shape),
            "max_window_layers": blocks.index(True),
            "layer_types": write_window_types(shape),
        }

    return read, write


def no_windows() -> PARTS:
    """Of a model whose windows are not converted: off by a switch of its own, whatever the other keys say."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        if take_bool(left, "use_sliding_window", False):
            raise Unsupported("use_sliding_window", True, "false, as published models have it")
        left.pop("sliding_window", None)
        left.pop("max_window_layers", None)
        kinds = take_list(left, "layer_types")
        if any(kind != WHOLE for kind in kinds):
            raise Unsupported("layer_types", kinds, f'"{WHOLE}" in every block')

    return read, lambda _: {"use_sliding_window": False, "sliding_window": None}


COUNTS = Span(0, 10_000, whole=True)


def count(fields: dict[str, Any]) -> int:
    """Of blocks."""
    return int(fields["num_layers"])


def pop_layer_types(left: Config, fields: dict[str, Any], plain: list[bool]) -> list[bool]:
    """Whether each block is windowed. plain: what it means where ``layer_types`` is left out."""
    kinds = take_list(left, "layer_types")
    if not kinds:
        return plain
    if len(kinds) != count(fields) or any(kind not in (WHOLE, WINDOWED) for kind in kinds):
        raise Unsupported("layer_types", kinds, f'"{WHOLE}" or "{WINDOWED}" for each of {count(fields)} blocks')
    return [kind == WINDOWED for kind in kinds]


def put_windows(fields: dict[str, Any], window: int | None, windowed: list[bool]) -> None:
    """Our fields. Raises Unsupported for windowed blocks without a window."""
    if not any(windowed):
        fields["window_size"] = (-1, 0)
        return
    if window is None:
        raise Unsupported("sliding_window", None, f'a number: layer_types has "{WINDOWED}"')
    fields |= {"window_size": (window - 1, 0), "window_attn_skip_freq": skip_freq(windowed)}


def rotary(theta: float = 10000.0, share: float | None = None) -> PARTS:
    """One RoPE for all blocks. theta: where rope_theta is left out. share: likewise partial_rotary_factor, of a model
    that has it."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        fields |= rope.read(left, theta=theta, share=share)

    def write(shape: GPTShape) -> Config:
        written = rope.write(shape)
        if share is not None:
            written["rope_parameters"]["partial_rotary_factor"] = shape.rotary_percent
            written["partial_rotary_factor"] = shape.rotary_percent
        return written

    return read, write


def rotary_by_window(theta: float, local: float, *, local_key: bool = True) -> PARTS:
    """A RoPE for windowed blocks, plain, and one for the others, stretched: Gemma-3's, OLMo-3's.

    theta, local: the others' base, and theirs, where files leave them out. local_key: older files had a key for theirs.
    """

    def read(left: Config, fields: dict[str, Any]) -> None:
        fields |= rope.read_by_window(left, theta, local)
        plain = fields["rope_scaling"] == "none" and fields["rotary_base_local"] == fields["rotary_base"]
        if plain or fields.get("window_size", (-1, 0))[0] < 0:
            fields["rotary_base_local"] = 0

    return read, lambda shape: rope.write_by_window(shape, with_local_key=local_key)


def bias_switches(
    attention: str | None, out: str | None = None, mlp: str | None = None, defaults: Config | None = None
) -> PARTS:
    """Their keys of biases: attention's, of the output projection too unless ``out`` is another key; the MLP's.

    defaults: what keys mean that are left out; false, unless this says otherwise.
    """
    keys = {attention: ("add_qkv_bias",) if out else ("add_qkv_bias", "attention_out_bias"), mlp: ("mlp_bias",)}
    keys |= {out: ("attention_out_bias",)} if out else {}

    def read(left: Config, fields: dict[str, Any]) -> None:
        for key, ours in keys.items():
            if key is not None:
                fields |= dict.fromkeys(ours, take_bool(left, key, (defaults or {}).get(key, False)))

    def write(shape: GPTShape) -> Config:
        found = {attention: shape.qkv_bias, out: shape.proj_bias, mlp: shape.fc_bias}
        return {key: value for key, value in found.items() if key is not None}

    return read, write


def activation(key: str, known: dict[str, str]) -> PARTS:
    """known: their name -> ours."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        found = left.pop(key, next(iter(known)))
        if not isinstance(found, str) or found not in known:
            raise Unsupported(key, found, " or ".join(map(repr, known)))
        fields["activation"] = known[found]

    def write(shape: GPTShape) -> Config:
        return {key: next((theirs for theirs, ours in known.items() if ours == shape.activation), next(iter(known)))}

    return read, write


def equal_dropouts(key: str, others: tuple[str, ...], default: float) -> PARTS:
    """Our one dropout of hidden states: ``key``, and others that have to be equal."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        found = left.pop(key, default)
        if Span(0, 1).problem(key, found):
            raise Unsupported(key, found, "a number from 0 to 1")
        fields["hidden_dropout"] = found
        for other in others:
            if not is_one_of(value := left.pop(other, default), (found,)):
                raise Unsupported(other, value, f"{found}, the same as {key}")

    return read, lambda shape: dict.fromkeys((key, *others), shape.hidden_dropout)


def read_softcap(left: Config, key: str, default: float | None) -> float:
    """null is none."""
    cap = left.pop(key, default)
    if cap is None:
        return 0.0
    if FACTOR.problem(key, cap):
        raise Unsupported(key, cap, f"{FACTOR}, or null")
    return float(cap)
