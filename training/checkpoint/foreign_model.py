"""Whether another program's checkpoint is of the recipe's model, by the config.json in its folder: before any work."""

from models.costs.parameters import parameters
from models.hf.files import read_configuration
from models.hf.shapes import differing_fields, read_shape
from models.resolve import resolve
from models.shapes import GPTShape
from program.errors import UserError
from training.checkpoint.foreign import ForeignFolder
from training.checkpoint.imported import refuse_stand_in
from training.config.recipe import whole
from training.config.run_config import RunConfig

MOST = 8
"""Fields in a message."""


def check_before(foreign: ForeignFolder, config: RunConfig) -> str:
    """A warning of what the recipe's model computes otherwise; "" for the same model, or where no config.json is.

    Raises UserError where its parameters are others, for a config.json that is not supported, and where raw text would
    train Hugging Face's weights on ids that are not theirs.
    """
    if foreign.kind == "hf":
        refuse_stand_in(config, f"{foreign.path} are a published model's")
    if not (foreign.path / "config.json").is_file():
        return ""
    try:
        _, theirs = read_shape(read_configuration(foreign.path))
    except UserError as error:
        raise UserError(f"checkpoint.load {foreign.path}: {error}") from None
    ours = resolve(config.model, None)
    fields = [
        f"model.{name} {whole(found[0])!r} there, {whole(found[1])!r} here"
        for name, found in differing_fields(theirs, ours)
        if name != "vocab_size" or config.model.vocab_size is not None
    ]
    more = f" and {len(fields) - MOST} more" if len(fields) > MOST else ""
    listed = f"{'; '.join(fields[:MOST])}{more}"
    where = f"checkpoint.load {foreign.path}: its config.json"
    if _matrices(theirs) != _matrices(ours):
        raise UserError(
            f"{where} is another model than the recipe's: {listed}. Mend the recipe; or "
            f"python -m tools.convert import {foreign.path} CHECKPOINT, and train with CHECKPOINT/config.toml, its own."
        )
    if fields:
        return f"warning: {where} computes otherwise than the recipe, with the same weights: {listed}"
    return ""


def _matrices(shape: GPTShape) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape; of the vocabulary's, which a tokenizer may decide, the columns."""
    of_vocabulary = ("word_embeddings.weight", "output_layer.weight")
    found = ((each.name, each.shape) for each in parameters(shape))
    return {name: size[1:] if name in of_vocabulary else size for name, size in found}
