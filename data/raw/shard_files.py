"""Token shards that lie among inputs, as where tools.preprocess writes into a folder that it reads: no documents."""

import os
import re
from pathlib import Path

from data.manifest import is_manifest

WORK_SUFFIX = ".preprocess"
"""Ends the name of the folder in which tools.preprocess keeps its plan, and what it makes the shards of."""
WORK_MARKS = ("plan.json", "plan.lock")
"""Either is there from the first moment on, while --overwrite clears the folder too."""
OURS = re.compile(r".+(-\d{5,}-of-\d{5,}|_.+_document)\.(bin|idx|json|empty\.json)(\.tmp-.+)?")
"""Names that tools.preprocess gives, to what a killed process had not finished too."""
OTHER_HALF = {".bin": ".idx", ".idx": ".bin"}


def is_made(path: Path) -> bool:
    """Whether a file or folder is a preprocessing's own, or in its work folder."""
    return is_shard_file(path) or any(map(is_work_folder, (path, *path.parents)))


def is_work_folder(path: Path) -> bool:
    """Whether it is `PREFIX.preprocess`; of the name alone another folder may be."""
    return path.name.endswith(WORK_SUFFIX) and any(map(_is_there, (path / mark for mark in WORK_MARKS)))


def is_shard_file(path: Path) -> bool:
    """Whether a file is of a shard, by any program, or one that tools.preprocess had begun.

    Raw inputs may be named like manifests (`train-00000-of-00002.json`): of those the content tells. No other file is
    opened: of a million .json files that would take a while.
    """
    is_ours = OURS.fullmatch(path.name) is not None
    if path.suffix == ".json":
        return (is_ours or any(_is_there(path.with_suffix(half)) for half in OTHER_HALF)) and is_manifest(path)
    return is_ours or (path.suffix in OTHER_HALF and _is_there(path.with_suffix(OTHER_HALF[path.suffix])))


def _is_there(path: Path) -> bool:
    """Also where a folder may not be looked into: what is read later says so."""
    return os.access(path, os.F_OK)
