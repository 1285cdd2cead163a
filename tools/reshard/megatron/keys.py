"""Megatron's keys <-> ours, which are HybridModel's: a key for each sublayer.

    decoder.layers.self_attention...      GPTModel: all blocks stacked, [blocks, ...]; block i is index i
    decoder.layers.3.self_attention...    GPTModel with non_homogeneous_layers: block 3 has attention and MLP
    decoder.layers.6.self_attention...    HybridModel, and ours: sublayer 6 is the attention of block 3

Local (not Transformer Engine's) GPT specs call the norm before experts mlp.linear_fc1.layer_norm_weight; it is
pre_mlp_layernorm here.
"""

import re
from collections.abc import Collection, Iterator
from typing import Literal

from models.names import canonical, checkpoint_key

Style = Literal["stacked", "per_block", "per_layer"]

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_STACK = re.compile(r"^decoder\.layers\.(?!\d)(.+)$")
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.transformer_layer\.(.+)$")
_LOCAL_NORM = re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$")
_ON_DISK, _CANONICAL = "mlp.experts.experts.", "mlp.experts."


def style_of(keys: Collection[str]) -> Style:
    """How a checkpoint's decoder is written."""
    if any(_STACK.match(key) for key in keys):
        return "stacked"
    kinds: dict[str, set[str]] = {}
    for match in filter(None, map(_LAYER.match, keys)):
        kinds.setdefault(match[1], set()).add(match[2].partition(".")[0])  # norms may stand alone in either
    return "per_block" if any({"self_attention", "mlp"} <= found for found in kinds.values()) else "per_layer"


def ours(key: str, style: Style, blocks: int, moe: Collection[int | None]) -> Iterator[tuple[str, int | None]]:
    """Our keys of a Megatron key, each with its index in the stack, if it is one.

    blocks: how many a stack holds. moe: blocks with experts, by number, or None in a stack of such. Raises KeyError
    for a key that is no GPT's.
    """
    if style == "stacked" and (match := _STACK.match(key)) and not match[1].startswith(("final_",)):
        for block in range(blocks):
            yield _of_block(block, match[1], None in moe), block
        return
    if style == "per_block" and (match := _LAYER.match(key)):
        yield _of_block(int(match[1]), match[2], int(match[1]) in moe), None
        return
    if match := _MTP.match(key):
        yield checkpoint_key(f"mtp.{match[1]}.{_canonical(match[2])}"), None
        return
    key = key.replace("decoder.final_layernorm.", "decoder.final_norm.")
    yield checkpoint_key(canonical(key)), None


def theirs(key: str, style: Style) -> tuple[str, int | None]:
    """Inverse of ``ours``: Megatron's key, and the block's index where it is one of a stack."""
    if style == "per_layer":
        return key, None
    if key.startswith("decoder.final_norm."):
        return key.replace("final_norm", "final_layernorm"), None
    name = canonical(key)
    kind, _, rest = name.partition(".")
    if kind == "layers":
        block, _, rest = rest.partition(".")
        rest = rest.replace(_CANONICAL, _ON_DISK)
        return (
            (f"decoder.layers.{rest}", int(block)) if style == "stacked" else (f"decoder.layers.{block}.{rest}", None)
        )
    if kind == "mtp" and ".mtp_model_layer." in key:
        depth, _, rest = rest.partition(".")
        return f"mtp.layers.{depth}.transformer_layer.{rest.replace(_CANONICAL, _ON_DISK)}", None
    return key, None


def moe_blocks(keys: Collection[str], style: Style) -> set[int | None]:
    """Blocks with a router, by number, or None in a stack of such."""
    pattern = _STACK if style == "stacked" else _LAYER
    found = [
        match for key in keys if (match := pattern.match(key)) and match[match.lastindex or 1] == "mlp.router.weight"
    ]
    return {None if style == "stacked" else int(match[1]) for match in found}


def _of_block(block: int, rest: str, is_moe: bool) -> str:
    if is_moe:
        rest = _LOCAL_NORM.sub(r"pre_mlp_layernorm.\1", rest)
    return checkpoint_key(f"layers.{block}.{_canonical(rest)}")


def _canonical(rest: str) -> str:
    return rest.replace(_ON_DISK, _CANONICAL)
