"""What a rank and its writer process say to each other: JSON, a line each."""

import contextlib
import dataclasses
import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from program.durable import replace_file
from program.schema import Infinite, Text
from program.untrusted import if_readable, parse_json, read_text
from training.checkpoint.committing import FilledFolder
from training.checkpoint.format.pieces import TensorGroup

FAILED = ".failed"
"""Ending of the file by which a writer tells the committer that its data file will not come."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PieceInMemory:
    """A piece whose bytes lie, tensor after tensor, in the shared memory, in the order of the file."""

    group: int
    """Index into ``Write.groups``."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(slots=True, frozen=True, kw_only=True)
class Write:
    """Write ``folder/name.bin`` from the first bytes of the shared memory."""

    folder: Text
    name: str
    groups: tuple[TensorGroup, ...]
    pieces: tuple[PieceInMemory, ...]
    total_bytes: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Commit:
    """When the files of all writers are there, make a checkpoint of them."""

    filled: FilledFolder
    timeout_s: Annotated[float, Infinite]
    """How long to wait for the slowest writer."""
    run_dir: Text | None = None
    attempt: str | None = None
    """Whose run it must still be; None: not checked."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    """What came of a ``Write`` or a ``Commit``."""

    what: str
    """The name of the message's class."""
    folder: Text
    seconds: float
    bytes: int = 0
    error: Text | None = None
    path: Text | None = None
    """Of a committed checkpoint."""
    lost: bool = False
    """Whether the run's folder belongs to another start since: then this one must stop."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Envelope:
    """A line: one message, by the name of its class."""

    write: Write | None = None
    commit: Commit | None = None
    outcome: Outcome | None = None

    @property
    def message(self) -> Write | Commit | Outcome | None:
        """The one that is there."""
        return self.write or self.commit or self.outcome


@dataclass(slots=True)
class MessageSocket:
    """Messages over a socket. Not a stream of Python objects: what arrives is data."""

    channel: socket.socket
    rest: bytes = field(default=b"")

    def send(self, message: Write | Commit | Outcome) -> None:
        """Raises OSError where the other side has gone."""
        values = {type(message).__name__.lower(): dataclasses.asdict(message)}
        self.channel.sendall(json.dumps(values).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Write | Commit | Outcome | None:
        """The next message; None where there is none within ``timeout_s``. Raises EOFError when the other side left."""
        self.channel.settimeout(timeout_s)
        while b"\n" not in self.rest:
            try:
                data = self.channel.recv(1 << 20)
            except (TimeoutError, BlockingIOError):
                return None
            finally:
                self.channel.settimeout(None)
            if not data:
                raise EOFError
            self.rest += data
            self.channel.settimeout(timeout_s)
        self.channel.settimeout(None)
        line, _, self.rest = self.rest.partition(b"\n")
        envelope: Envelope = parse_json(line, Envelope)
        return envelope.message


def mark_failed(folder: Path, rank_file: str, text: str) -> None:
    """Tell the committer that a data file will not come, as far as the disk takes it. It reads all of the text."""
    with contextlib.suppress(OSError):
        (folder / f"{rank_file}.bin").unlink(missing_ok=True)  # makes room for the word about it
        replace_file(folder / f"{rank_file}{FAILED}", text.encode(), durable=False)


def failure_of(folder: Path, name: str) -> str | None:
    """What a writer that failed left word of."""
    return if_readable(read_text, folder / f"{name}{FAILED}")
