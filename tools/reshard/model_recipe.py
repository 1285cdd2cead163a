"""The model of another program's checkpoint: a recipe, or the config.json of a Hugging Face folder; and its tokenizer's
files, which a checkpoint takes with it in every direction.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.tokenizers import base
from models.config import ModelConfig
from models.hf.files import CARRIED, read_configuration
from models.hf.shapes import read_shape, write_config
from models.resolve import resolve
from models.shapes import GPTShape
from program.durable import replace_file
from program.errors import UserError
from tools.reshard.checkpoint_source import CheckpointSource, real_vocab_size
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import ReshardPlan
from tools.reshard.tensors import SourceRows, Tensors
from tools.shared.carried_tokenizer import STAND_IN, choose
from training.checkpoint import folders
from training.checkpoint.imported import STAND_INS
from training.checkpoint.state import State
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.run_dir.tokenizer_files import tokenizer_files

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


FOLDER = "tokenizer"
"""In a Megatron checkpoint of one iteration, as Megatron-Bridge has it."""


@dataclass(frozen=True)
class CarriedFiles:
    """What a checkpoint of Triplane's carries of a tokenizer."""

    name: str | None = None
    """What data.tokenizer names in the checkpoint; None: what it names already."""
    copies: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def carried_files(config: RunConfig, folder: Path) -> CarriedFiles:
    """Of the recipe's tokenizer; of a stand-in's, of the one that another program's checkpoint carries."""
    own = folder / FOLDER
    name = str(own) if config.data.tokenizer in STAND_INS and own.is_dir() else config.data.tokenizer
    if name in STAND_INS or not base.exists(name):
        return CarriedFiles()
    try:
        opened = base.open_named(name, config.data.eod_token)
    except UserError:  # the run says so; the checkpoint's numbers do not depend on it
        path = Path(name)
        return CarriedFiles(copies={path.name: path} if path.is_file() else {})
    kept = base.carried(opened)
    return CarriedFiles(kept.name, tokenizer_files(opened.path, kept, licenses=False), kept.texts)


def foreign_source(
    folder: Path,
    files: Tensors,
    origins: Mapping[str, SourceRows],
    state: State,
    config: RunConfig,
    program: str,
    fingerprint: Any,
    notes: Sequence[str] = (),
) -> CheckpointSource:
    """Another program's checkpoint, and its tokenizer's files. config: with the vocabulary's size."""
    carried = carried_files(config, folder)
    return CheckpointSource(
        folder=folder,
        files=files,
        origins=origins,
        state=state,
        config=config,
        about={"source": program, "iteration": state.progress.iteration, "layout": str(state.layout)},
        carried=carried.copies,
        texts=carried.texts,
        tokenizer=carried.name,
        pads_as_configured=False,
        notes=tuple(notes),
        fingerprint=fingerprint,
    )


def write_into(folder: Path, source: CheckpointSource) -> list[str]:
    """Those of a source's files that Hugging Face keeps beside weights: their names."""
    copies = {name: path for name, path in source.carried.items() if name in CARRIED}
    if copies or source.texts:
        folder.mkdir(exist_ok=True)
    for name, path in copies.items():
        folders.copy(path, folder / name)
    for name, text in source.texts.items():
        replace_file(folder / name, text.encode())
    return [*copies, *source.texts]


def write_config_json(folder: Path, source: CheckpointSource, plan: ReshardPlan) -> None:
    """The model as transformers' configuration, over a carried one: such a folder says what it is."""
    _, values = write_config(resolve(plan.config.model, source.real_vocab_size))
    kept = read_configuration(folder) if (folder / "config.json").is_file() else {}
    text = json.dumps({"pad_token_id": None, **kept, **values}, indent=2)
    replace_file(folder / "config.json", f"{text}\n".encode())


def with_tokenizer(config: RunConfig, name: str | None) -> RunConfig:
    """A tokenizer that went along, by its bare name: the folder can be moved."""
    if name is None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=name))
