"""Whether what must be the same on several ranks still is: weights of replicas, random numbers, place in the data.

A rank whose weights have drifted from its replicas' trains on, silently, into something that no one run would be.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from models.layers.fp8_weights import values
from parallel.ddp import Chunks, held
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from parallel.regions import HeldTensor, Region
from program.errors import SharedFault
from training.checkpoint.agreement import from_rank
from training.health.names import host_of, name_of
from training.progress import Progress

NOTHING = torch.iinfo(torch.int64).min
"""What a rank says of tensors that it does not hold: any checksum is larger."""
MOST_RANKS = 8
"""Named in one message."""


Details = list[tuple[str, tuple[int, ...]]]
"""Names, and their checksums, of what a row sums up."""


class ReplicatedTensor(NamedTuple):
    """A tensor of this rank that others hold too, and which row of the comparison is of all those."""

    row: int
    name: str
    tensor: Tensor


class Replicas:
    """Compares them. Which ranks hold the same tensor is known from megatron-core's description for checkpoints.

    One reduction, of four numbers for each (stage, TP rank), (stage), (stage, expert rank) and TP rank, and of each
    shard, tells every rank whether something differs; only then do more details travel, of two ranks. Of a shard there
    are replicas where TP ranks, HSDP's instances, or stages with tied embeddings hold the same weights.
    """

    def __init__(self, chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> None:
        self.optimizer, self.ranks = optimizer, ranks
        own = [one for chunk in chunks for one in held(chunk)]
        # The same on every rank: stages without experts have the rows of those with.
        sharded = isinstance(chunks[0], FullyShardedChunk)
        shards = max(ranks.pgs.intra_dp_cp.size(), ranks.pgs.intra_expt_dp.size()) if sharded else 1
        self.rows = ComparisonRows(ranks, shards)
        self.held = [
            ReplicatedTensor(self.rows.row_of(one), name_of(one.regions[0]), one.tensor)
            for one in own
            if one.tensor.numel()
        ]

    def check(self, progress: Progress) -> None:
        """Raises SharedFault, on every rank, that names what differs and where. Every data rank's weights are gathered.

        Costs a pass over the weights, and waits for the device once.
        """
        groups = _grouped(self.held).items()
        device = self.ranks.device  # shards may lie on the host
        own = {row: combined(checksum(values(one.tensor)).to(device) for one in group) for row, group in groups}
        facts = self.facts(progress)
        own[self.rows.everywhere] = _digest(facts, self.ranks)
        if differing := self._differing(own):
            raise self._fault(differing[0], len(differing) - 1, own.get(differing[0]), progress, facts)

    def facts(self, progress: Progress) -> dict[str, Any]:
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
        table[self.rows.random, :2], table[self.rows.random, 2:] = self._random_differs(), 0
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        same = (table[:, :2] == -table[:, 2:]).all(dim=1)
        absent = (table == NOTHING).all(dim=1)
        return (~(same | absent)).nonzero().flatten().tolist()

    def _random_differs(self) -> Tensor:
        """int64 [], 0 where TP ranks drop the same elements of what they all hold, else 1; not waited for.

        One reduction of 16 bytes where there are several. A generator's state lies in the host's memory.
        """
        if self.ranks.layout.tp == 1:
            return torch.zeros((), dtype=torch.int64, device=self.ranks.device)
        state = (
            torch.cuda.get_rng_state(self.ranks.device) if self.ranks.device.type == "cuda" else torch.get_rng_state()
        )
        number = _number(state.numpy().tobytes())
        pair = torch.tensor([number, -number], device=self.ranks.device)
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=self.ranks.pgs.tp)
        return (pair[0] != -pair[1]).long()

    def _fault(self, row: int, more: int, own: Tensor | None, progress: Progress, facts: dict[str, Any]) -> SharedFault:
        """What differs in ``row``, in words; ``more`` rows differ too. Collective: three numbers from each rank."""
        after = f"after iteration {progress.iteration}: "
        if row == self.rows.random:
            return SharedFault(f"{after}the random numbers of TP ranks differ. {STOPPED}")
        sides = sides_of(self._sums(own))
        here = _digests(facts) if row == self.rows.everywhere else [
            (one.name, tuple(checksum(values(one.tensor)).tolist())) for one in self.held if one.row == row
        ]  # fmt: skip
        names = _unlike(*(from_rank(here, rank, self.ranks) for rank in (sides.odd[0], sides.other)))
        hosts = sorted({host_of(rank, self.ranks) for rank in sides.odd[:MOST_RANKS]})
        others = f" (and {len(names) - 1 + more} more)" if len(names) - 1 + more else ""
        blamed = hosts[0] if sides.majority and len(hosts) == 1 else None
        return SharedFault(f"{after}{sides.text(names[0], hosts)}{others}. {STOPPED}", rank=sides.odd[0], host=blamed)

    def _sums(self, own: Tensor | None) -> dict[int, tuple[int, int]]:
        """Every holder's checksum of a row, by rank; ``own`` is None on ranks that hold nothing of it."""
        mine = torch.zeros(3, dtype=torch.int64, device=self.ranks.device)
        if own is not None:
            mine[0], mine[1:] = 1, own
        table = torch.empty(self.ranks.identity.world_size * 3, dtype=torch.int64, device=self.ranks.device)
        dist.all_gather_into_tensor(table, mine)
        rows = enumerate(table.view(-1, 3).tolist())
        return {rank: (first, second) for rank, (holds, first, second) in rows if holds}


STOPPED = (
    "Replicas have drifted apart: a fault of memory or network, as a rule. Nothing of this state is saved; started "
    "again, the run continues from its newest checkpoint."
)


class ComparisonRows:
    """Numbers of the rows: which ranks a tensor is compared over."""

    def __init__(self, ranks: Ranks, shards: int = 1) -> None:
        """shards: the most that any parameter is cut into; each has rows of its own."""
        at, layout = ranks.at, ranks.layout
        experts = layout.ep * layout.etp
        own = ranks.pgs.ep.rank() * layout.etp + ranks.pgs.expt_tp.rank() if experts > 1 else 0
        sizes = [layout.pp * layout.tp, layout.pp, layout.pp * experts, layout.tp]
        first = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.shards = shards
        self.tp = layout.tp
        self.sharded, self.whole = first[0] + at.pp * layout.tp + at.tp, first[1] + at.pp
        self.experts, self.tied = first[2] + at.pp * experts + own, first[3] + at.tp
        self.buffers = first[4] * shards + at.pp
        self.everywhere = first[4] * shards + layout.pp
        self.random, self.number = self.everywhere + 1, self.everywhere + 2

    def row_of(self, one: HeldTensor) -> int:
        """Megatron marks experts, and embeddings that two stages share; what is whole is the same for all TP ranks."""
        if self.shards > 1 and one.shards is None:
            return self.buffers  # all data ranks have them, whole
        return self._kind(one.tensor, one.regions[0]) * self.shards + one.shard

    def _kind(self, param: Tensor, region: Region) -> int:
        if not getattr(param, "allreduce", True):
            return self.experts
        if getattr(param, "shared_embedding", False):
            return self.tied
        return self.whole if region.shape == region.global_shape else self.sharded


def _grouped(held: Sequence[ReplicatedTensor]) -> dict[int, list[ReplicatedTensor]]:
    groups = defaultdict[int, list[ReplicatedTensor]](list)
    for one in held:
        groups[one.row].append(one)
    return groups


class Sides(NamedTuple):
    """Who has another value than the most; in a tie all have: it is unknown which is right."""

    odd: list[int]
    other: int
    """A rank whose value is not that of the first odd one."""
    majority: int
    """How many agree; 0: no more than some others do."""

    def text(self, name: str, hosts: Sequence[str]) -> str:
        """That ``name`` differs; ``hosts``: of the odd ranks."""
        numbers = ", ".join(map(str, self.odd[:MOST_RANKS])) + (", …" if len(self.odd) > MOST_RANKS else "")
        if self.majority:
            return f"{name} of rank {numbers} ({', '.join(hosts)}) differs from that of {self.majority} others"
        return f"{name} differs between ranks {numbers} ({', '.join(hosts)}), and no majority tells who is right"


def sides_of(by_rank: Mapping[int, Any]) -> Sides:
    """Sort ranks by what the most have. At least two of the values differ."""
    (usual, most), (_, next_most), *_ = Counter(by_rank.values()).most_common()
    odd = [rank for rank, value in by_rank.items() if value != usual or most == next_most]
    other = next(rank for rank, value in by_rank.items() if value != by_rank[odd[0]])
    return Sides(odd, other, most if most > next_most else 0)


def _unlike(one: Details, other: Details) -> list[str]:
    """The names of what differs, in the order of the model; tied weights may have two names."""
    return [name for (name, value), (_, its) in zip(one, other, strict=False) if value != its] or ["a weight"]


def _digests(facts: Mapping[str, Any]) -> Details:
    return [(f"the {name}", (_number(str(value).encode()), 0)) for name, value in facts.items()]


def _digest(facts: Mapping[str, Any], ranks: Ranks) -> Tensor:
    number = _number(json.dumps(facts, sort_keys=True).encode())
    return torch.tensor([number, number], dtype=torch.int64, device=ranks.device)


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


COLUMNS = 256
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """int64 [2]: the sum of the elements' bits, and the same weighted by position modulo COLUMNS; both modulo 2^64.

    One element more or less by any bit changes the first; elements of other columns that changed places, the second.
    Costs one pass over the memory. Any dtype of 1 to 8 bytes, contiguous.
    """
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])
    whole = bits.numel() // COLUMNS * COLUMNS
    columns = bits[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    rest = bits[whole:]
    columns[: rest.numel()] += rest
    weights = torch.arange(1, 2 * COLUMNS, 2, dtype=torch.int64, device=bits.device)
    return torch.stack([columns.sum(), (columns * weights).sum()])


def combined(checksums: Iterable[Tensor]) -> Tensor:
    """One checksum of several, int64 [2]: each weighted by its place among them."""
    stacked = torch.stack(list(checksums))
    weights = torch.arange(1, 2 * len(stacked), 2, dtype=torch.int64, device=stacked.device)
    return (stacked * weights[:, None]).sum(0)
