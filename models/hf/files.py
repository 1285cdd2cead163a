"""Files of a Hugging Face folder that are carried with its weights, into checkpoints and back.

Nothing that could be executed is among them.
"""

import os
from pathlib import Path
from typing import Any

from program.untrusted import InputError, open_regular, read_foreign

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken", "vocab.json")
"""What a tokenizer is opened from here."""

BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "tekken.json",
)  # fmt: skip
"""What says how its ids are made, and which of them begin and end a text."""

LICENSES = ("LICENSE", "LICENSE.txt", "NOTICE")

CARRIED = (*BESIDE, "tokenizer.tiktoken", *LICENSES)
"""Files of a Hugging Face folder, weights aside, that an import or export copies."""

CARRIED_BYTES = 512 << 20
"""Of one of them at most."""


def read_configuration(folder: Path) -> dict[str, Any]:
    """A Hugging Face folder's ``config.json``. Raises UserError where it cannot be read."""
    path = folder / "config.json"
    try:
        return dict(read_foreign(path))
    except OSError as error:
        raise InputError(path, f"expected the configuration of a model; {error.strerror}.") from None


def present(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """Those of the names that are in a folder, with their paths. Raises UserError for what is no regular file."""
    found = {name: folder / name for name in names if os.path.lexists(folder / name)}
    for path in found.values():
        open_regular(path).close()
    return found


def beside(tokenizer: Path, *, licenses: bool) -> dict[str, Path]:
    """What lies beside a tokenizer's file and belongs to it, by name: it has to have the name that Hugging Face gives
    such files, since a folder may hold several others. licenses: those, too. Raises UserError as ``present`` does."""
    if tokenizer.name not in BESIDE:
        return {}
    return present(tokenizer.parent, BESIDE + (LICENSES if licenses else ()))
