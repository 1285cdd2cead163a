"""A torch_dist folder of a hybrid: megatron-core cuts projections and convolutions of its mixers into tensors.

    decoder.layers.0.mixer.in_proj.weight.z, .x, .B, .C, .dt                       Mamba-2
    decoder.layers.0.self_attention.in_proj.weight.query, ... .beta, .alpha        gated delta nets
    decoder.layers.0.mixer.conv1d.weight.x, .B, .C                                 [channels, 1, taps]

Here each is one tensor, its parts one below the other, whose rows are Triplane's.
"""

import re
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from program.errors import UserError
from tools.reshard.megatron.files import TorchDist, TorchDistTensor

_PART = re.compile(r"^(.+\.(in_proj|conv1d)\.(?:weight|bias))\.(\w+)$")
_ORDERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "in_proj": (("z", "x", "B", "C", "dt"), ("query", "key", "value", "z", "beta", "alpha")),
    "conv1d": (("x", "B", "C"), ("query", "key", "value")),
}
"""megatron/core/ssm/mamba_mixer.py and gated_delta_net/common.py."""


def is_cut(keys: Collection[str]) -> bool:
    """Whether a folder has tensors that are parts of one of Triplane's."""
    return any(map(_PART.match, keys))


class HybridFiles(TorchDist):
    """Tensors by Megatron's keys, those that it cuts as one. Close it: it keeps files open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cut = TorchDist(folder)

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """A tensor's key -> its parts' in order. Raises UserError for parts that are not all there."""
        names: dict[str, dict[str, str]] = {}
        kinds: dict[str, str] = {}
        for key in self._cut.tensors:
            if match := _PART.match(key):
                names.setdefault(match[1], {})[match[3]] = key
                kinds[match[1]] = match[2]
        found: dict[str, list[str]] = {}
        for whole, parts in names.items():
            order = next((each for each in _ORDERS[kinds[whole]] if set(each) == parts.keys()), None)
            if order is None:
                expected = " or ".join(", ".join(each) for each in _ORDERS[kinds[whole]])
                raise UserError(f"{self.folder}: {whole} is cut into {', '.join(parts)}; expected {expected}.")
            found[whole] = [parts[name] for name in order]
        return found

    @cached_property
    def tensors(self) -> Mapping[str, TorchDistTensor]:
        """Every tensor."""
        cut = {part for parts in self._parts.values() for part in parts}
        found = {key: info for key, info in self._cut.tensors.items() if key not in cut}
        for whole, parts in self._parts.items():
            infos = [self._cut.tensors[part] for part in parts]
            rows = sum(info.shape[0] for info in infos)
            columns = infos[0].shape[-1:] if len(infos[0].shape) > 1 else ()
            found[whole] = TorchDistTensor(infos[0].dtype, (rows, *columns), ())
        return found

    def read(self, key: str, offset: tuple[int, ...], into: np.ndarray) -> None:
        """As ``TorchDist.read``."""
        if key not in self._parts:
            self._cut.read(key, offset, into)
            return
        first = 0
        for part in self._parts[key]:
            shape = self._cut.tensors[part].shape
            low, high = max(offset[0], first), min(offset[0] + len(into), first + shape[0])
            if high > low:
                rows = into[low - offset[0] : high - offset[0]]
                ones = len(shape) - rows.ndim
                at = (low - first, *(0 for _ in range(ones)), *offset[1:])
                self._cut.read(part, at, rows.reshape(len(rows), *(1 for _ in range(ones)), *rows.shape[1:]))
            first += shape[0]

    def check(self, keys: Collection[str]) -> None:
        """As ``TorchDist.check``."""
        self._cut.check([part for key in keys for part in self._parts.get(key, [key])])

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._cut.close()
