"""What stands on this machine for an object in a bucket: the mark beside it says which."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from program.buckets.client import ObjectFacts
from program.durable import replace_file
from program.errors import UserError
from program.untrusted import InputError, read_json


def mark_path(path: Path) -> Path:
    """`.X.bin.object` beside `X.bin`."""
    return path.with_name(f".{path.name}.object")


def mark(path: Path, of: ObjectFacts) -> None:
    """Say which object ``path`` stands for."""
    replace_file(mark_path(path), json.dumps(asdict(of)).encode(), suffix=f".{os.getpid()}", durable=False)


def marked(path: Path) -> ObjectFacts | None:
    """The object that ``path`` stands for; None for a file of its own, and where it is not there as marked."""
    try:
        found: ObjectFacts = read_json(mark_path(path), ObjectFacts)
        return found if path.stat().st_size == found.size else None
    except (OSError, InputError):
        return None


def stands_for(path: Path) -> ObjectFacts:
    """The object that a copy stands for when a shard is opened: its tokens are read of that one. Raises UserError where
    it has no mark, as while another start downloads it again."""
    found = marked(path)
    if found is None:
        raise UserError(f"data: {path} is being fetched by another start. Start again.")
    return found


def check_is_no_hole(path: Path) -> None:
    """Raises UserError for a `.bin` that stands for an object, where it is to be read itself."""
    if found := marked(path):
        raise UserError(f"{path} stands for {found.url}, of which it holds the ends alone. Copy that object to a disk.")
