"""Who made the first number that is none: each rank's evidence, and what all of it says together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class NonfinitePlace(NamedTuple):
    """Where something went wrong first on a rank. The smaller of two places is the earlier one."""

    microbatch: int
    """Of this rank's, counted from 0; -1 where only their sum is known."""
    depth: int
    """Chunks of the model that the data had passed before, over all stages: forward, or backward."""
    order: int
    """How many modules, or gradients, this rank had seen before."""
    name: str


@dataclass(kw_only=True, slots=True)
class Evidence:
    """What one rank found of its own work."""

    rank: int
    host: str
    stage: int
    data_rank: int
    weights: list[str] = field(default_factory=list)
    """Parameters that are not finite themselves."""
    forward: NonfinitePlace | None = None
    backward: NonfinitePlace | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class NonfiniteOrigin:
    """The earliest place of all ranks', and whose it is: of one rank, or of several that nothing tells apart."""

    what: str
    microbatch: int | None
    ranks: tuple[Evidence, ...]

    def __str__(self) -> str:
        hosts = sorted({one.host for one in self.ranks})
        numbers = " or ".join(str(one.rank) for one in self.ranks)
        stages = " or ".join(str(stage) for stage in sorted({one.stage for one in self.ranks}))
        where = f"rank {numbers} ({', '.join(hosts)}), pipeline stage {stages}"
        return self.what + ("" if self.microbatch is None else f", microbatch {self.microbatch}") + f", on {where}"

    def as_json(self) -> dict[str, Any]:
        """What ``found.json`` has of it."""
        return asdict(self)


MOST_RANKS = 8
"""Named in one message."""


def locate(found: Sequence[Evidence]) -> NonfiniteOrigin | None:
    """What came first: a weight that is not finite, else the earliest output, else the earliest gradient.

    Forward, NaN travels with a microbatch from stage to stage; backward, from the last stage to the first: the rank
    where it was earliest has made it. None where no rank found any.
    """
    if weights := [one for one in found if one.weights]:
        return NonfiniteOrigin(
            what=f"the weight {weights[0].weights[0]}", microbatch=None, ranks=tuple(weights[:MOST_RANKS])
        )
    for side in ("forward", "backward"):
        places = {one.rank: getattr(one, side) for one in found if getattr(one, side) is not None}
        if places:
            first = min(places.values())
            guilty = tuple(one for one in found if one.rank in places and places[one.rank] == first)
            known = first.microbatch if first.microbatch >= 0 else None
            return NonfiniteOrigin(what=first.name, microbatch=known, ranks=guilty[:MOST_RANKS])
    return None
