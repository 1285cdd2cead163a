"""One of the models that ``--against`` compares: a checkpoint, a recipe's initial weights, or a Hugging Face folder.

What it is and the weights in its files; ``outputs`` computes with it.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.hf.tables import entries
from models.names import checkpoint_key
from models.resolve import resolve
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from program.errors import UserError
from tools.shared.dtypes import to_numbers
from tools.shared.held_checkpoint import HeldCheckpoint
from tools.shared.hf_folder.row_blocks import RowBlock, read_block
from tools.shared.hf_folder.source import HfFolder, architecture, names_in
from tools.shared.opened_checkpoint import ModelFlags, open_checkpoint
from training.checkpoint.folders import is_complete
from training.checkpoint.format.reader import FileReader
from training.checkpoint.imported import IMPORTED
from training.cli import dry_run
from training.config.recipe import load
from training.config.run_config import RunConfig

MASTER = "optimizer.state.param."


@dataclass(kw_only=True, slots=True, frozen=True)
class ComparedModel:
    """A model, and where its weights are."""

    path: Path
    """As it was given."""
    what: str
    """In words."""
    shape: GPTShape
    config: RunConfig | None
    """To compute with on one rank in fp32; None of a Hugging Face folder."""
    checkpoint: HeldCheckpoint | None = None
    """Triplane's, with its weights; None: initial ones, or Hugging Face's."""
    model_type: str = ""
    """Of a Hugging Face folder."""
    dtype: str = "float32"
    """That its files hold weights in."""

    @property
    def is_ours(self) -> bool:
        """Triplane's model computes it."""
        return self.config is not None

    def weight(self, name: str) -> np.ndarray | None:
        """A parameter by its canonical name, in fp32; None where no file holds it."""
        if self.checkpoint is not None:
            return _of_checkpoint(self.checkpoint.files, name)
        return None if self.is_ours else _of_hf_folder(self.path, name)


def open_model(path: Path) -> ComparedModel:
    """A recipe (.toml), a Hugging Face folder (config.json), a run's folder or a checkpoint.

    Raises UserError for anything else, and for what cannot be read.
    """
    if path.suffix == ".toml":
        return _of_recipe(path)
    if (path / "config.json").is_file() and not is_complete(path):  # an imported checkpoint carries one, too
        with HfFolder(path) as source:
            model_type, shape = architecture(source)
            embedding = next(iter(next(entries(model_type, shape)).their_shapes()))
            dtype = source.dtype(names_in(source, model_type)[embedding])
        what = f"Hugging Face, {model_type}, {dtype}"
        return ComparedModel(path=path, what=what, shape=shape, config=None, model_type=model_type, dtype=dtype)
    opened = open_checkpoint(ModelFlags(checkpoint=path, device="cpu", dtype="fp32"))
    imported = opened.entries.get(IMPORTED)
    what = f"imported from {imported.get('source')}" if isinstance(imported, dict) else opened.folder.name
    return ComparedModel(
        path=path,
        what=f"Triplane, {what}",
        shape=opened.shape,
        config=opened.config,
        checkpoint=opened.held,
        dtype=_dtype_of(opened.held),
    )


def _of_recipe(path: Path) -> ComparedModel:
    """With the weights of its checkpoint.load, or its initial ones."""
    recipe = load(path)
    checkpoint = None if recipe.checkpoint.load is None else HeldCheckpoint.of(Path(recipe.checkpoint.load))
    shape = resolve(recipe.model, dry_run.vocabulary_size(recipe))
    config = RunConfig(
        device="cpu",
        parallel=ParallelConfig(),
        model=recipe.model,
        precision=PrecisionConfig(dtype="fp32"),
        train=dataclasses.replace(RunConfig().train, seed=recipe.train.seed),
    )
    what = f"initial weights, seed {recipe.train.seed}" if checkpoint is None else f"with {checkpoint.folder.name}"
    dtype = "float32" if checkpoint is None else _dtype_of(checkpoint)
    return ComparedModel(
        path=path, what=f"Triplane, {what}", shape=shape, config=config, checkpoint=checkpoint, dtype=dtype
    )


def _dtype_of(held: HeldCheckpoint) -> str:
    """That of the word embedding."""
    key = checkpoint_key("word_embeddings.weight")
    with held.reading() as files, FileReader(files) as reader:
        return next((reader.tensors[one].dtype for one in (MASTER + key, key) if one in reader.tensors), "float32")


def _of_checkpoint(folder: Path, name: str) -> np.ndarray | None:
    key = checkpoint_key(name)
    with FileReader(folder) as reader:
        stored = next((one for one in (MASTER + key, key) if one in reader.tensors), None)
        return None if stored is None else to_numbers(reader.whole(stored), reader.tensors[stored].dtype)


def _of_hf_folder(folder: Path, name: str) -> np.ndarray | None:
    with HfFolder(folder) as source:
        model_type, shape = architecture(source)
        entry = next((one for one in entries(model_type, shape) if one.name == name), None)
        if entry is None:
            return None
        words = read_block(RowBlock(entry, "float32", 0, entry.rows), source, names_in(source, model_type))
        return to_numbers(words, "float32").reshape(entry.shape)


def check_comparable(one: ComparedModel, other: ComparedModel) -> list[str]:
    """What differs between the two configurations, in words. Raises UserError where their outputs have other sizes."""
    idle = _WITHOUT_EFFECT | ({"ffn_hidden_size"} if all((*one.shape.moe_blocks, *other.shape.moe_blocks)) else set())
    fields = [field.name for field in dataclasses.fields(GPTShape) if field.name not in idle]
    found = [
        f"{name} {getattr(one.shape, name)} and {getattr(other.shape, name)}"
        for name in fields
        if getattr(one.shape, name) != getattr(other.shape, name)
    ]
    if one.shape.moe_blocks != other.shape.moe_blocks:
        found.append(f"moe_layer_freq {one.shape.moe_layer_freq} and {other.shape.moe_layer_freq}")
    sizes = [text for text in found if text.split()[0] in ("num_layers", "hidden_size")]
    if sizes:
        raise UserError(f"{one.path} and {other.path} are models of other sizes: {', '.join(sizes)}.")
    return found


_WITHOUT_EFFECT = {
    "hidden_dropout", "attention_dropout", "init_method_std", "make_vocab_size_divisible_by",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_router_load_balancing_type",
    "max_position_embeddings", "mtp_loss_scaling_factor", "mtp_num_layers", "moe_layer_freq",
    "hf_model_type",
}  # fmt: skip
"""On what a trained model computes from its weights; moe_layer_freq is compared by the blocks that it means."""
