"""What does not fit together in model.hybrid_layer_pattern, and in the mixers that only it, or its like, asks for."""

from collections.abc import Iterator

from models.shapes import GPTShape
from models.symbols import SYMBOLS
from program.errors import UserError


def pattern_problems(shape: GPTShape) -> Iterator[str]:
    """Letters that there are not, or that ask for what other fields deny; their number."""
    pattern = shape.hybrid_layer_pattern
    if not pattern:
        return
    name = f'model.hybrid_layer_pattern "{pattern[:200]}"'
    if unknown := "".join(dict.fromkeys(letter for letter in pattern if letter not in SYMBOLS)):
        letters = ", ".join(f"{letter} ({what})" for letter, what in SYMBOLS.items())
        hint = ""
        if set(unknown) & set("|/"):
            hint = (
                " Stages are cut by the section parallel (no |), depths of prediction are model.mtp_num_layers (no /)."
            )
        yield f'{name} has "{unknown[:20]}"; its letters are {letters}.{hint}'
        return
    if len(pattern) != shape.num_layers:
        yield (
            f"{name} has {len(pattern)} letters, one a layer, but model.num_layers is {shape.num_layers}. Make them "
            "equal, or leave model.num_layers out."
        )
    latent, other = ("+", "*") if shape.multi_latent_attention else ("*", "+")
    if other in pattern:
        yield (
            f'{name} has "{other}" ({SYMBOLS[other]}), but model.multi_latent_attention is '
            f'{str(shape.multi_latent_attention).lower()}. Use "{latent}", or change that field.'
        )
    if ("E" in pattern) != (shape.num_moe_experts > 0):
        yield (
            f'{name} and model.num_moe_experts {shape.num_moe_experts}: there are experts where the pattern has "E", '
            "and nowhere else. Change one of the two."
        )
    if shape.mtp_num_layers:
        yield (
            f"{name} cannot be combined with model.mtp_num_layers {shape.mtp_num_layers}: which layers a depth of "
            "prediction would have, it does not say. Set model.mtp_num_layers = 0."
        )


def mixer_problems(shape: GPTShape) -> Iterator[str]:
    """What Mamba-2 mixers and gated delta nets are without."""
    if "M" not in shape.hybrid_layer_pattern and not any(shape.linear_blocks):
        return
    plain = {"norm_placement": "pre", "parallel_residual": False, "residual_multiplier": 1.0}
    for name, value in plain.items():
        if (found := getattr(shape, name)) != value:
            yield f"model.{name} {found!r} is not supported with Mamba-2 mixers or gated delta nets. Use {value!r}."


def linear_attention_problems(shape: GPTShape) -> Iterator[str]:
    """Gated delta nets, and attention with an output gate."""
    if shape.attention_output_gate and shape.multi_latent_attention:
        yield "model.attention_output_gate is not supported with model.multi_latent_attention. Set one of them false."
    try:
        linear = shape.linear_blocks
    except UserError as error:
        yield f"model.linear_attention_freq: {error}"
        return
    if not any(linear):
        return
    keys, values = shape.linear_num_key_heads, shape.linear_num_value_heads
    if values % keys:
        yield (
            f"model.linear_num_value_heads {values} is not divisible by model.linear_num_key_heads {keys}: each key "
            "belongs to equally many values. Use a multiple."
        )
    if shape.mtp_num_layers:
        yield (
            f"model.linear_attention_freq cannot be combined with model.mtp_num_layers {shape.mtp_num_layers}: set "
            "it to 0."
        )


def mamba_problems(shape: GPTShape) -> Iterator[str]:
    """Heads of Mamba-2 mixers."""
    if "M" not in shape.hybrid_layer_pattern:
        return
    heads, groups = shape.mamba_heads, shape.mamba_num_groups
    if not shape.mamba_num_heads and 2 * shape.hidden_size % shape.mamba_head_dim:
        yield (
            f"model.mamba_num_heads 0 means 2 x model.hidden_size {shape.hidden_size} / model.mamba_head_dim "
            f"{shape.mamba_head_dim}, which is not whole. Set model.mamba_num_heads."
        )
    elif heads % groups:
        fits = [size for size in range(1, heads + 1) if heads % size == 0]
        yield (
            f"model.mamba_num_heads {heads} is not divisible by model.mamba_num_groups {groups}. Groups that divide "
            f"{heads} heads: {', '.join(map(str, fits))}."
        )
