"""Canonical parameter names, which outlive mcore's model classes: global block numbers, Transformer Engine's words.

``layers.3.mlp.linear_fc1.weight`` is block 3 (attention + MLP), whatever mcore's HybridModel counts.
"""

import re

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.(?:mtp_model_layer\.layers\.\d+\.)?")
_EXPERTS_ON_DISK, _EXPERTS = "mlp.experts.experts.", "mlp.experts."
_MTP_OWN = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")
_WHOLE = {
    "embedding.word_embeddings.weight": "word_embeddings.weight",
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    "output_layer.weight": "output_layer.weight",
    "decoder.final_norm.weight": "final_layernorm.weight",
    "decoder.final_norm.bias": "final_layernorm.bias",
}


def canonical(key: str) -> str:
    """Our name of a HybridModel checkpoint key with global sublayer numbers. Raises KeyError for one we do not know."""
    if key in _WHOLE:
        return _WHOLE[key]
    if match := _LAYER.match(key):
        return f"layers.{int(match[1]) // 2}.{key[match.end() :].replace(_EXPERTS_ON_DISK, _EXPERTS)}"
    if match := _MTP.match(key):
        return f"mtp.{match[1]}.{key[match.end() :].replace(_EXPERTS_ON_DISK, _EXPERTS)}"
    raise KeyError(f"no canonical name for {key}")


def shown_name(key: str) -> str:
    """``canonical``, or the key itself of what we do not name yet."""
    try:
        return canonical(key)
    except KeyError:
        return key


def checkpoint_key(name: str) -> str:
    """Inverse of ``canonical``: attention is sublayer 2 i, the MLP or the experts 2 i + 1."""
    for key, whole in _WHOLE.items():
        if whole == name:
            return key
    kind, block, rest = name.split(".", 2)
    sublayer = rest.startswith(("mlp.", "pre_mlp_layernorm."))
    rest = rest.replace(_EXPERTS, _EXPERTS_ON_DISK)
    if kind == "layers":
        return f"decoder.layers.{2 * int(block) + sublayer}.{rest}"
    own = rest.startswith(_MTP_OWN)
    return f"mtp.layers.{block}.{rest}" if own else f"mtp.layers.{block}.mtp_model_layer.layers.{int(sublayer)}.{rest}"
