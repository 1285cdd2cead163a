"""Nodes whose memory is less than what their ranks offload, or than is safe."""

import pytest

from training.memory.host_room import RankShare, lacking


@pytest.mark.parametrize(
    "each, found",
    [
        (40.0, None),  # 80 of 200, and of 150
        (50.0, RankShare("b", 100.0, 150.0)),
        (90.0, RankShare("b", 180.0, 150.0)),
    ],
)
def test_the_node_with_the_least_room_is_named(each: float, found: RankShare | None) -> None:
    """Ranks of a node add up; of their limits the lowest counts."""
    shares = [RankShare("a", each, 200.0), RankShare("b", each, 150.0)] * 2
    assert lacking([*shares, RankShare("b", 0.0, 190.0)]) == found
