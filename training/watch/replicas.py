"""Whether what must be the same on several ranks still is: weights of replicas, random numbers, place in the data.

A rank whose weights have drifted from its replicas' trains on, silently, into something that no one run would be.
"""

import hashlib
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from parallel.errors import SharedFault
from parallel.groups import Ranks
from parallel.replicas import unwrap
from training.checkpoint.boxes import Region
from training.checkpoint.model_state import Chunks, regions
from training.checkpoint.progress import Progress
from training.watch.checksums import checksum, combined
from training.watch.names import name_of

NOTHING = torch.iinfo(torch.int64).min
"""What a rank says of tensors that it does not hold: any checksum is larger."""
MOST_RANKS = 8
"""Named in one message."""


class Held(NamedTuple):
    """A tensor of this rank that others hold too, and which row of the comparison is of all those."""

    row: int
    name: str
    tensor: Tensor


class Replicas:
    """Compares them. Which ranks hold the same tensor is known from megatron-core's description for checkpoints.

    One reduction, of four numbers for each (stage, TP rank), (stage), (stage, expert rank) and TP rank, tells every
    rank whether something differs; only then do more details travel.
    """

    def __init__(self, chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> None:
        self.optimizer, self.ranks = optimizer, ranks
        self.rows = Rows(ranks)
        self.held = [
            Held(self.rows.of(param, found[0]), name_of(found[0]), param)
            for chunk in chunks
            for param, found in regions(unwrap(chunk))
        ]

    def check(self, progress: Progress) -> None:
        """Raises SharedFault, on every rank, that names what differs and where. Every data rank's weights are gathered.

        Costs a pass over the weights, and waits for the device once.
        """
        own = {row: combined(checksum(one.tensor) for one in group) for row, group in _grouped(self.held).items()}
        told = self.told(progress)
        own[self.rows.everywhere] = _digest(told, self.ranks)
        if differing := self._differing(own):
            raise SharedFault(self._verdict(differing, progress, told))

    def told(self, progress: Progress) -> dict[str, Any]:
        """What all ranks must know alike."""
        groups = self.optimizer.param_groups
        return {
            "iteration": progress.iteration,
            "consumed samples": progress.consumed_samples,
            "learning rate": sorted({group["lr"] for group in groups}),
        }

    def _differing(self, own: Mapping[int, Tensor]) -> list[int]:
        """The rows in which ranks that should agree do not; the same on every rank."""
        table = torch.full((self.rows.number, 4), NOTHING, dtype=torch.int64, device=self.ranks.device)
        for row, pair in own.items():
            table[row, :2], table[row, 2:] = pair, -pair  # the largest of the negatives is the smallest
        table[self.rows.random] = torch.tensor([0, 0, 0, 0] if self._random_agrees() else [1, 1, 0, 0])
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        same = (table[:, :2] == -table[:, 2:]).all(dim=1)
        nobody = (table == NOTHING).all(dim=1)
        return (~(same | nobody)).nonzero().flatten().tolist()

    def _random_agrees(self) -> bool:
        """TP ranks drop the same elements of what they all hold. One reduction of 16 bytes where there are any."""
        if self.ranks.layout.tp == 1:
            return True
        state = (
            torch.cuda.get_rng_state(self.ranks.device) if self.ranks.device.type == "cuda" else torch.get_rng_state()
        )
        number = _number(state.numpy().tobytes())
        pair = torch.tensor([number, -number], device=self.ranks.device)
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=self.ranks.pgs.tp)
        return bool(pair[0] == -pair[1])

    def _verdict(self, differing: Sequence[int], progress: Progress, told: dict[str, Any]) -> str:
        details: dict[str, Any] = {
            f"{one.row} {one.name}": tuple(checksum(one.tensor).tolist()) for one in self.held if one.row in differing
        }
        if self.rows.everywhere in differing:
            details |= {f"{self.rows.everywhere} the {name}": str(value) for name, value in told.items()}
        everybody: list[tuple[str, dict[str, Any]]] = [("", {})] * self.ranks.identity.world_size
        dist.all_gather_object(everybody, (socket.gethostname(), details))
        found = _differences(everybody)
        if not found:
            return f"after iteration {progress.iteration}: the random numbers of TP ranks differ. {STOPPED}"
        first, more = found[0], len(found) - 1
        others = f" (and {more} more)" if more else ""
        return f"after iteration {progress.iteration}: {first}{others}. {STOPPED}"


STOPPED = (
    "Replicas have drifted apart: a fault of memory or network, as a rule. Nothing of this state is saved; started "
    "again, the run continues from its newest checkpoint."
)


class Rows:
    """Numbers of the rows: which ranks a tensor is compared over."""

    def __init__(self, ranks: Ranks) -> None:
        at, layout = ranks.at, ranks.layout
        experts = layout.ep * layout.etp
        own = ranks.pgs.ep.rank() * layout.etp + ranks.pgs.expt_tp.rank() if experts > 1 else 0
        sizes = [layout.pp * layout.tp, layout.pp, layout.pp * experts, layout.tp]
        first = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.tp = layout.tp
        self.sharded, self.whole = first[0] + at.pp * layout.tp + at.tp, first[1] + at.pp
        self.experts, self.tied = first[2] + at.pp * experts + own, first[3] + at.tp
        self.everywhere, self.random, self.number = first[4], first[4] + 1, first[4] + 2

    def of(self, param: Tensor, region: Region) -> int:
        """Megatron marks experts, and embeddings that two stages share; what is whole is the same for all TP ranks."""
        if not getattr(param, "allreduce", True):
            return self.experts
        if getattr(param, "shared_embedding", False):
            return self.tied
        return self.whole if region.shape == region.global_shape else self.sharded


def _grouped(held: Sequence[Held]) -> dict[int, list[Held]]:
    groups = defaultdict[int, list[Held]](list)
    for one in held:
        groups[one.row].append(one)
    return groups


def _differences(everybody: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """In words, for each thing that differs: who has what the most do not."""
    values = defaultdict[str, dict[int, Any]](dict)
    for rank, (_, details) in enumerate(everybody):
        for key, value in details.items():
            values[key][rank] = value
    said = []
    for key, by_rank in values.items():
        counts = Counter(by_rank.values()).most_common()
        if len(counts) > 1:
            name = key.partition(" ")[2]
            tie = counts[0][1] == counts[1][1]
            odd = [rank for rank, value in by_rank.items() if tie or value != counts[0][0]]
            hosts = ", ".join(sorted({everybody[rank][0] for rank in odd}))
            numbers = ", ".join(map(str, odd[:MOST_RANKS])) + (", …" if len(odd) > MOST_RANKS else "")
            if tie:
                said.append(f"{name} differs between ranks {numbers} ({hosts}), and no majority tells who is right")
            else:
                said.append(f"{name} of rank {numbers} ({hosts}) differs from that of {counts[0][1]} others")
    return said


def _digest(told: Mapping[str, Any], ranks: Ranks) -> Tensor:
    number = _number(json.dumps(told, sort_keys=True).encode())
    return torch.tensor([number, number], dtype=torch.int64, device=ranks.device)


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
