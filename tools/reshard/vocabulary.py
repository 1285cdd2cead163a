"""How many rows the vocabulary gets."""

import dataclasses

from parallel.errors import UserError
from tools.reshard.checkpoint_source import STATE, STATES, CheckpointSource
from tools.reshard.options import ReshardOptions
from training.config.run_config import RunConfig

OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Keys whose first dim is the padded vocabulary; so are the states of their optimizer."""


def is_of_vocabulary(key: str) -> bool:
    """Whether a tensor has a row per token id."""
    return key in OF_VOCABULARY or any(key == f"{STATE}{part}.{name}" for part in STATES for name in OF_VOCABULARY)


def repadded(source: CheckpointSource, options: ReshardOptions) -> RunConfig:
    """The configuration with the vocabulary that is asked for. Raises UserError where real rows would be lost."""
    if not options.repads:
        return source.config
    real = source.real_vocab_size
    wanted = real if options.vocab_size is None else options.vocab_size
    if wanted < real:
        raise UserError(
            f"--vocab_size {wanted}: {source.folder} has {real} token ids, and their rows are not removed. "
            f"Use {real} or more; to change the padding alone, --make_vocab_size_divisible_by."
        )
    multiple = options.make_vocab_size_divisible_by or source.config.model.make_vocab_size_divisible_by
    if multiple < 1:
        raise UserError(f"--make_vocab_size_divisible_by {multiple}: expected 1 or more.")
    model = dataclasses.replace(source.config.model, vocab_size=wanted, make_vocab_size_divisible_by=multiple)
    return dataclasses.replace(source.config, model=model)
