"""Weights that came from a Hugging Face folder: their own tokenizer's ids are what they mean."""

from collections.abc import Mapping
from pathlib import Path

from data.config import DataConfig
from data.sources import inputs_of, named
from program.buckets.names import is_url
from program.errors import UserError
from training.checkpoint.folders import candidates, checkpoints, find
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.state import JSON, read_state
from training.config.run_config import RunConfig

IMPORTED = "imported"
"""The entry of ``state.json`` that says where weights came from; every checkpoint made from them has it, too."""

STAND_INS = ("byte", "builtin")
"""Values of data.tokenizer that are no published model's own."""


def kept(entries: Mapping[str, JSON]) -> dict[str, JSON]:
    """What of a checkpoint's entries goes into all that are made from it."""
    return {IMPORTED: entries[IMPORTED]} if IMPORTED in entries else {}


def check_tokenizer(config: RunConfig) -> None:
    """Raises UserError where imported weights would train on raw text in ids that are not theirs."""
    if config.data.tokenizer not in STAND_INS or not _reads_raw_text(config.data):
        return
    for folder in _starts(config):
        try:
            entries = read_state(folder).entries
        except (UserError, DamagedError, OSError):
            continue  # restoring says so, or takes an older one
        if IMPORTED in entries:
            origin = entries[IMPORTED]
            source = origin.get("source", "") if isinstance(origin, Mapping) else ""
            refuse_stand_in(config, f"{folder} were imported from {source}")
        return


def refuse_stand_in(config: RunConfig, whose: str) -> None:
    """Raises UserError where weights with a tokenizer of their own would train on raw text in a stand-in's ids."""
    if config.data.tokenizer in STAND_INS and _reads_raw_text(config.data):
        raise UserError(
            f'data.tokenizer = "{config.data.tokenizer}": the weights of {whose}, and raw text would train them on ids '
            "that mean something else to them. Give --data.tokenizer PATH of the model's own tokenizer, or in "
            "data.paths shards that were tokenised with it."
        )


def _starts(config: RunConfig) -> list[Path]:
    """The checkpoints that a start would take, the best first."""
    own = candidates(checkpoints(Path(config.run_dir or "runs/run")))
    load = config.checkpoint.load
    return own or (find(load) if load is not None and not is_url(load) else [])


def _reads_raw_text(data: DataConfig) -> bool:
    """Whether anything is tokenised here; without data.paths it is the built-in corpus."""
    if data.streamed:
        return True
    given = [inputs_of(source, data) for source in named(data)]
    return any(one.raw_files or not one.prefixes for one in given)
