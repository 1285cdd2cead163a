"""Canonical parameter names, which outlive mcore's model classes: global block numbers, Transformer Engine's words.

``layers.3.mlp.linear_fc1.weight`` is block 3 (attention + MLP), whatever mcore's HybridModel counts.
"""

import re

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
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
    match = _LAYER.match(key)
    if match is None:
        raise KeyError(f"no canonical name for {key}")
    return f"layers.{int(match[1]) // 2}.{key[match.end() :]}"


def checkpoint_key(name: str) -> str:
    """Inverse of ``canonical``: attention is sublayer 2 i, the MLP 2 i + 1."""
    for key, whole in _WHOLE.items():
        if whole == name:
            return key
    _, block, rest = name.split(".", 2)
    return f"decoder.layers.{2 * int(block) + rest.startswith('mlp.')}.{rest}"
