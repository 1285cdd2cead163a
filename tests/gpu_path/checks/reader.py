"""The thread that reads tokens ahead uses its rank's device, and takes no context on another."""

import ctypes

import numpy as np
import torch

from data.loader import Prefetcher, Ring


class Source:
    """Tokens that say which sample they are."""

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        return np.repeat(sample_indices[:, None].astype(np.int32), 9, axis=1)


def used_devices() -> list[int]:
    """Those that this process has a context on."""
    contexts = (ctypes.c_int * 8).in_dll(ctypes.CDLL(None), "emulated_cuda_active")
    return [index for index, used in enumerate(contexts) if used]


device = torch.device("cuda", 1)
torch.cuda.set_device(device)
reader = Prefetcher(Source(), iter(np.arange(12).reshape(6, 2)), 2, Ring(4))
for expected, tokens in enumerate(reader):
    assert tokens.to(device, non_blocking=True)[:, 0].tolist() == [2 * expected, 2 * expected + 1]
reader.close()
assert used_devices() == [1], used_devices()

torch.empty(1, device="cuda:0")  # a context that this check would have seen
assert used_devices() == [0, 1]
