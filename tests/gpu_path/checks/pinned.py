"""Memory that checkpoints are copied into: registered once, given back, and a refusal that no later kernel raises."""

import torch

from tests.gpu_path.counters import Count, counts
from training.checkpoint.background.saver import BackgroundWriter, pin, unpin


def registered() -> int:
    """Ranges."""
    return counts()[Count.REGISTERED]


torch.cuda.init()
writer = BackgroundWriter(0)
for size in (1 << 20, 1 << 22):
    writer.reserve(size, pinned=True)
    assert registered() == 1 and writer.is_pinned, size
writer.close()
assert registered() == 0

memory = torch.zeros(4096, dtype=torch.uint8)
assert pin(memory) and not pin(memory)
assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]
unpin(memory)
assert registered() == 0
