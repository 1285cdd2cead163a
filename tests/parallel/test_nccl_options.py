"""Options of NCCL's: refused where they cannot be; names are Megatron's."""

import inspect
import re
import typing
from pathlib import Path

import pytest
from megatron.core import parallel_state

from parallel import ddp
from parallel.config import ParallelConfig, PrecisionConfig, StreamGroup
from parallel.launch import Identity
from parallel.layout import Layout
from parallel.nccl_options import allocator_problems, nccl_problems, sharp_problems
from ranks import run_ranks

PRIORITY = ParallelConfig(megatron=("high_priority_stream_groups=['dp_cp', 'ep']",))


def test_they_need_gpus() -> None:
    assert nccl_problems(PRIORITY, cuda=True) == [] == nccl_problems(ParallelConfig(), cuda=False)
    assert nccl_problems(PRIORITY, cuda=False) == [
        "parallel.megatron: high_priority_stream_groups cannot be: it needs GPUs. Leave it out."
    ]


@pytest.mark.parametrize(
    "local_world_size, sharp, words",
    [(8, "1", "all ranks are on one node"), (4, "unset", "is unset, expected 1"), (4, "0", "is 0, expected 1")],
)
def test_sharp_needs_several_nodes_and_its_variable(local_world_size: int, sharp: str, words: str) -> None:
    identity = Identity(world_size=8, local_world_size=local_world_size)
    asked = ParallelConfig(megatron=("use_sharp=True",))
    (problem,) = sharp_problems(asked, identity, sharp)
    assert words in problem
    assert sharp_problems(ParallelConfig(), identity, sharp) == []
    assert sharp_problems(asked, Identity(world_size=8, local_world_size=4), "1") == []


def test_nccls_allocator_needs_a_cuda_toolkit(tmp_path: Path) -> None:
    asked = ParallelConfig(megatron=("nccl_ub=True",))
    assert f"this node has no {tmp_path}/include/cuda_runtime.h" in allocator_problems(asked, str(tmp_path))[0]
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert allocator_problems(asked, str(tmp_path)) == [] == allocator_problems(ParallelConfig(), None)


def test_nccl_ub_reaches_megatrons_ddp() -> None:
    for on in (False, True):
        assert ddp.ddp_config(ParallelConfig(megatron=(f"nccl_ub={on}",)), PrecisionConfig()).nccl_ub is on


def _start_on_the_cpu(identity: Identity) -> None:
    from parallel import groups

    with groups.start(Layout(), identity, device="cpu", seed=1, parallel=PRIORITY):
        pass


def test_a_rank_on_the_cpu_refuses() -> None:
    with pytest.raises(AssertionError, match=r"high_priority_stream_groups cannot be: it needs GPUs"):
        run_ranks(1, _start_on_the_cpu)


def test_each_group_is_one_that_megatron_makes() -> None:
    """Of another name it would take no notice."""
    made = re.findall(r'get_nccl_options\("(\w+)"', inspect.getsource(parallel_state))
    assert set(typing.get_args(StreamGroup)) <= set(made)
