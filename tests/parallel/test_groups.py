"""Groups on the grid, the CPU backend, and the comparison of all ranks at the start."""

import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import local_ranks, mcore_patches
from parallel.cpu import cuda_redirect
from parallel.launch import Identity
from parallel.layout import Coordinates, Layout
from ranks import run_ranks

LAYOUT = Layout(tp=2, pp=2, dp=2)


def test_coordinates_are_megatrons_rank_order() -> None:
    assert [LAYOUT.coordinates(rank) for rank in (0, 1, 2, 4, 7)] == [
        Coordinates(dp=0, pp=0, cp=0, tp=0),
        Coordinates(dp=0, pp=0, cp=0, tp=1),
        Coordinates(dp=1, pp=0, cp=0, tp=0),
        Coordinates(dp=0, pp=1, cp=0, tp=0),
        Coordinates(dp=1, pp=1, cp=0, tp=1),
    ]
    layout = Layout(tp=2, cp=3, pp=5, dp=7)
    assert [layout.rank(layout.coordinates(rank)) for rank in range(210)] == list(range(210))


def _groups(identity: Identity) -> None:
    from parallel import groups

    with groups.start(LAYOUT, identity, device="cpu", seed=1) as ranks:
        assert (ranks.pgs.tp.rank(), ranks.pgs.pp.rank(), ranks.pgs.dp.rank()) == (
            ranks.at.tp,
            ranks.at.pp,
            ranks.at.dp,
        )
        assert torch.ones(2, device="cuda").device.type == "cpu"
        assert type(torch.empty(1).type()) is str
        assert torch.empty(1).type() == "torch.cuda.FloatTensor"


def test_groups_match_coordinates_and_cuda_is_redirected() -> None:
    run_ranks(8, _groups)


def _slow_to_connect(identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 still needs rank 0's store when rank 0 is through the last barrier, as gloo does when it connects late."""
    from parallel import groups

    barrier = dist.barrier

    def then_ask_the_store() -> None:
        barrier()
        time.sleep(1.0)
        dist.distributed_c10d._get_default_store().add("asked", 1)

    with groups.start(Layout(dp=2), identity, device="cpu", seed=1):
        if identity.rank == 1:
            monkeypatch.setattr(dist, "barrier", then_ask_the_store)


def test_rank_0_stays_until_no_rank_needs_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(2, _slow_to_connect, monkeypatch)


def _disagree(identity: Identity) -> None:
    from parallel import groups

    facts = {"the code": "same", "the version of torch": "2.13" if identity.rank != 1 else "2.12"}
    with groups.start(Layout(dp=3), identity, device="cpu", seed=1, meeting=groups.Meeting(facts=facts)):
        pass


def test_a_rank_that_differs_is_named() -> None:
    expected = r"ranks do not agree on the version of torch: rank 0 .* has 2.13, but rank 1 .* has 2.12"
    with pytest.raises(AssertionError, match=expected):
        run_ranks(3, _disagree)


def _other_layout(identity: Identity) -> None:
    from parallel import groups

    layout = Layout(tp=2) if identity.rank == 1 else Layout(dp=2)
    facts = {"the configuration": f"nproc = 2\ntensor_model_parallel_size = {layout.tp}"}
    with groups.start(layout, identity, device="cpu", seed=1, meeting=groups.Meeting(facts=facts)):
        pass


def test_ranks_with_different_layouts_do_not_wait_for_each_other() -> None:
    """What differs is named by its lines, and before any group is built."""
    expected = r"rank 0 .* has tensor_model_parallel_size = 1, but rank 1 .* has tensor_model_parallel_size = 2"
    with pytest.raises(AssertionError, match=expected):
        run_ranks(2, _other_layout)


def test_dropout_differs_over_all_but_tp() -> None:
    from parallel.groups import dropout_seed

    layout = Layout(tp=2, cp=2, pp=2, dp=2)
    seeds = [dropout_seed(7, layout, layout.coordinates(rank)) for rank in range(16)]
    assert len(set(seeds)) == 8
    assert all(seeds[rank] == seeds[rank + 1] for rank in range(0, 16, 2))


def _snapshot() -> dict[str, Any]:
    owners = {
        "torch": torch,
        "torch.cuda": torch.cuda,
        "torch.cuda.nvtx": torch.cuda.nvtx,
        "torch.cuda.random": torch.cuda.random,
        "torch.Tensor": torch.Tensor,
        "torch.nn.Module": torch.nn.Module,
    }
    return {f"{owner}.{name}": value for owner, holder in owners.items() for name, value in vars(holder).items()}


def _closed_list(_: Identity) -> None:
    before = _snapshot()
    cuda_redirect.install()
    after = _snapshot()
    changed = {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}
    allowed = {f"torch.{name}" for name in cuda_redirect.FACTORIES} | {
        f"torch.cuda.{name}" for name in cuda_redirect.cuda_names()
    }
    allowed |= {"torch.cuda.random.get_rng_state", "torch.cuda.random.set_rng_state", "torch.nn.Module.cuda"}
    allowed |= {f"torch.cuda.nvtx.{name}" for name in ("range", "range_push", "range_pop")}
    allowed |= {f"torch.Tensor.{name}" for name in ("cuda", "pin_memory", "record_stream", "to", "type")}
    assert changed <= allowed, changed - allowed


def test_what_is_redirected_is_a_closed_list() -> None:
    run_ranks(1, _closed_list)


@pytest.mark.parametrize("spot", list(mcore_patches.PROBES))
def test_a_private_spot_that_moved_is_named(spot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mcore_patches, "PROBES", {name: [lambda name=name: name != spot] for name in mcore_patches.PROBES}
    )
    with pytest.raises(RuntimeError, match="megatron-core") as raised:
        mcore_patches.check()
    assert spot in str(raised.value)


def test_probes_notice_a_changed_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.tensor_parallel import random as mcore_random

    mcore_patches.check()
    monkeypatch.setattr(mcore_random, "_set_cuda_rng_state", lambda state: None)
    monkeypatch.setattr(HybridDeviceOptimizer, "_sync_sub_optimizers_state_to_hdo", lambda: None)
    with pytest.raises(RuntimeError, match=r"random\._set/_get_cuda_rng_state, HybridDeviceOptimizer"):
        mcore_patches.check()


def _start_as_torchruns_only_rank(identity: Identity) -> int:
    from parallel import groups

    alone = Identity(launcher="torchrun")
    with groups.start(Layout(tp=1, pp=1, dp=1), alone, device="cpu", seed=1):
        return 0


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        port = str(other_job.getsockname()[1])
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("RANK", "0"), ("WORLD_SIZE", "1")):
            monkeypatch.setenv(name, value)
        code, failure = local_ranks.fork_ranks(1, _start_as_torchruns_only_rank)
    assert code == 1 and failure is not None and failure.shared is not None  # one message, and worth another start
    assert failure.text.startswith(f"MASTER_PORT {port}, where the ranks meet, is in use on ")
