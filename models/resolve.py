"""From the ``model`` section to an architecture with nothing left open."""

import dataclasses

from models.config import ModelConfig
from models.families import named
from models.shapes import GPTShape
from program.errors import UserError


def resolve(config: ModelConfig, tokenizer_vocab_size: int | None) -> GPTShape:
    """The named shape with the fields that the configuration sets put over it.

    ``num_layers`` is as many as hybrid_layer_pattern has letters, where only that is set. ``kv_channels`` becomes
    hidden_size / num_attention_heads where one of these two is set and it is not.
    The vocabulary is model.vocab_size, else the tokenizer's, else (no tokenizer at hand: a dry run) the
    published one. Raises UserError for an unknown name and for a tokenizer with ids beyond model.vocab_size.
    """
    base = named(config.shape)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(GPTShape)}
    changes = {name: value for name, value in values.items() if value is not None}
    if config.vocab_size is None and tokenizer_vocab_size is not None:
        changes["vocab_size"] = tokenizer_vocab_size
    if config.vocab_size is not None and config.vocab_size < (tokenizer_vocab_size or 0):
        raise UserError(
            f"model.vocab_size is {config.vocab_size}, but the tokenizer has {tokenizer_vocab_size} ids. "
            f"Use model.vocab_size = {tokenizer_vocab_size} or more, or leave it out."
        )
    if "kv_channels" not in changes and ("hidden_size" in changes or "num_attention_heads" in changes):
        heads = changes.get("num_attention_heads", base.num_attention_heads)
        changes["kv_channels"] = changes.get("hidden_size", base.hidden_size) // heads
    if changes.get("hybrid_layer_pattern") and "num_layers" not in changes:
        changes["num_layers"] = len(changes["hybrid_layer_pattern"])
    return dataclasses.replace(base, **changes)
