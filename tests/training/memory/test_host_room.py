"""Nodes whose memory is less than what their ranks offload, or than is safe."""

from pathlib import Path

import pytest

from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from program import host_memory
from ranks import run_ranks
from training.config.run_config import RunConfig
from training.memory.host_room import RankShare, check_host_room, lacking
from training.memory.planned import bytes_on_cpus


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


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_cpu_ranks_that_need_more_than_is_available_are_warned_of(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks of this machine add up."""
    config = RunConfig()
    shape = resolve(config.model, 257)
    needed = bytes_on_cpus(config, 2, shape)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: share * needed)

    def rank(identity: Identity) -> None:
        with (tmp_path / "console").open("ab") as console:
            fd = None if identity.rank else console.fileno()
            with groups.start(config.layout(2), identity, device="cpu", seed=7, console_fd=fd) as ranks:
                check_host_room(config, shape, ranks)

    run_ranks(2, rank)
    assert ("the kernel's OOM killer may end them" in (tmp_path / "console").read_text()) == (share < 1)
