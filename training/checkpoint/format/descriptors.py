"""A folder's files, opened when they are first wanted."""

import os
from pathlib import Path

from program.untrusted import regular_descriptor

AT_ONCE = 256
"""Files that are open at most: a checkpoint of thousands of ranks has more than a process may open."""


class Descriptors:
    """Files of one folder by their bare names. Close it: it keeps them open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def get(self, name: str) -> int:
        """A file's descriptor, to be used at once: it may be closed when another file is asked for.

        Raises ValueError for a name that leads out of the folder, InputError for what is no regular file, and OSError
        where the file cannot be opened.
        """
        if Path(name).name != name:
            raise ValueError(f"{name!r}, which is no file of this folder")
        if name not in self._open:
            if len(self._open) >= AT_ONCE:
                self.close()
            self._open[name] = regular_descriptor(self._folder / name)
        return self._open[name]

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
