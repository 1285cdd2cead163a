"""What nodes say through the run's folder, where the network fails.

The first node writes a ``question`` with a number of its own choice; the others answer in RANK-NODE.json, which repeats
it: so what an earlier examination has left there is known as such. Nothing here may stop an examination.
"""

import contextlib
import json
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from parallel.durable import replace_file
from parallel.schema import JSON
from parallel.untrusted import InputError, read_json, read_text
from tools.doctor.deadline import within
from tools.doctor.run_dir import folder_of

LIMIT_S = 5.0


class Mailbox:
    """``run_dir``/doctor; without a folder everything stays empty."""

    def __init__(self, run_dir: Path | None) -> None:
        self.folder = None if run_dir is None else folder_of(run_dir)
        self.nonce = secrets.token_hex(8)

    def ask(self) -> None:
        """The first node: let the others know today's number."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                path = self.folder / "question"
                within(LIMIT_S, lambda: replace_file(path, self.nonce.encode()))

    def asked(self) -> str:
        """Another node: the first node's number; "" where it is not seen."""
        if self.folder is not None:
            with contextlib.suppress(OSError, InputError):
                return within(LIMIT_S, partial(read_text, self.folder / "question"))
        return ""

    def put(self, rank: int, node: str, reported: dict[str, Any]) -> None:
        """Another node's answer."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                path = self.folder / f"{rank:05d}-{node.replace('/', '_')}.json"
                text = json.dumps({**reported, "nonce": self.asked()}, indent=1)
                within(LIMIT_S, lambda: replace_file(path, text.encode()))

    def answers(self) -> dict[int, dict[str, Any]]:
        """The first node: today's answers by rank."""
        if self.folder is None:
            return {}
        with contextlib.suppress(OSError, InputError, KeyError):
            return within(LIMIT_S, self._read)
        return {}

    def _read(self) -> dict[int, dict[str, Any]]:
        assert self.folder is not None
        reported = [read_json(path, dict[str, JSON]) for path in self.folder.glob("[0-9]*-*.json")]
        return {one["rank"]: one for one in reported if one.get("nonce") == self.nonce and one["rank"]}

    def clear(self) -> None:
        """The first node: what only the examination needed goes; the nodes' files stay for reading."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                for pattern in ("question*", "token-*", "race-*", "lock-*"):
                    for path in self.folder.glob(pattern):
                        path.unlink(missing_ok=True)
