"""The model of another program's checkpoint: a recipe, or the config.json of a Hugging Face folder."""

import dataclasses
from pathlib import Path

from models.config import ModelConfig
from models.hf.files import read_configuration
from models.hf.shapes import read_shape
from models.shapes import GPTShape
from parallel.errors import UserError
from tools.convert.tokenizer import STAND_IN, choose
from tools.reshard.checkpoint_source import real_vocab_size
from tools.reshard.options import ReshardOptions
from training.config.recipe import load
from training.config.run_config import RunConfig

LONGEST = 4096
"""Tokens of a sample, of a config.json that allows more."""


def model_recipe(options: ReshardOptions, folder: Path, program: str) -> tuple[RunConfig, int]:
    """The configuration, and how many token ids there are. Raises UserError where none is given."""
    path = options.recipe
    if path is None and (folder / "config.json").is_file():
        path = folder / "config.json"  # as Trainer's and Accelerate's own folders have it
    if path is None:
        raise UserError(
            f"{folder}: {program} does not say enough of its model. Give the model as a recipe, --recipe RECIPE.toml, "
            "or as its Hugging Face configuration, --recipe config.json."
        )
    if path.suffix != ".json":
        config = load(path)
        return config, real_vocab_size(config, path.parent)
    values = read_configuration(path.parent)
    _, shape = read_shape(values)
    config, found = _of_shape(shape), choose(path.parent, values, shape.vocab_size)
    if found.name != STAND_IN:
        data = dataclasses.replace(config.data, tokenizer=str(path.parent / found.name), eod_token=found.eod_token)
        config = dataclasses.replace(config, data=data)
    return config, shape.vocab_size


def is_recipe(options: ReshardOptions) -> bool:
    """Whether the model is given with how it is trained."""
    return options.recipe is not None and options.recipe.suffix != ".json"


def with_vocab_size(config: RunConfig, vocab_size: int) -> RunConfig:
    """The configuration with a vocabulary that no tokenizer has to tell."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def _of_shape(shape: GPTShape) -> RunConfig:
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    length = min(LONGEST, shape.max_position_embeddings)
    return dataclasses.replace(RunConfig(), model=ModelConfig(seq_length=length, **fields))
