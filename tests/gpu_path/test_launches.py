"""What the planner takes a microbatch to launch is what our program launches on the emulated device."""

from collections.abc import Iterator

import pytest

from tests.gpu_path.launches import COMPILE, FP8, JIT_FUSED, LaunchCase, counted, recomputing
from tests.gpu_path.trainings import EXTENSION, WarmDevice, warm_device
from tools.plan.cost import launches
from tools.plan.cost.launches import COMPILED, ENGINE, OWN, SPLIT, WHOLE, Launches, Program

DENSE = "llama3_tiny"
pytestmark = pytest.mark.campaign
"""In the suite, golden/ pins what a step launches (test_step.py)."""


@pytest.fixture(scope="module", params=[OWN, ENGINE], ids=["own", "engine"])
def program(request: pytest.FixtureRequest) -> Iterator[tuple[Program, WarmDevice]]:
    hooks = (EXTENSION,) if request.param is ENGINE else ()
    with warm_device(*hooks, JIT_FUSED) as device:
        yield request.param, device


def test_a_block_and_the_head(program: tuple[Program, WarmDevice]) -> None:
    """The head is what is missing at the ends of a pipeline's first stage."""
    expected, device = program
    found, stage = (counted(device, LaunchCase(shape=DENSE, layout=f"pp{n}", stages=n)) for n in (1, 2))
    assert (found.forward.launches, found.backward.launches) == expected.gated
    ends = [one.launches - other.launches for one, other in zip(found[2:4], stage[2:4], strict=True)]
    assert tuple(ends) == expected.head


@pytest.mark.parametrize(
    "shape, kind", [("gpt3_tiny", "plain"), ("mixtral_tiny", "experts"), ("deepseek_v3_tiny", "latent")]
)
def test_other_blocks(program: tuple[Program, WarmDevice], shape: str, kind: str) -> None:
    expected, device = program
    found = counted(device, LaunchCase(shape=shape))
    assert (found.forward.launches, found.backward.launches) == getattr(expected, kind)


@pytest.mark.parametrize("layout, expected", [("tp2", WHOLE), ("tp2sp", SPLIT)])
def test_collectives_of_tensor_ranks(program: tuple[Program, WarmDevice], layout: str, expected: Launches) -> None:
    """Full recomputation repeats those of the forward pass."""
    found, again = (counted(program[1], LaunchCase(shape=DENSE, layout=layout, flags=f)) for f in ((), recomputing()))
    assert (found.forward.collectives, found.backward.collectives) == expected
    assert again.backward.collectives == expected.backward + expected.forward


def test_what_is_recomputed(program: tuple[Program, WarmDevice]) -> None:
    expected, device = program
    kept = expected.gated.backward
    for modules, again in (
        ((), expected.gated.forward), (("core_attn",), expected.core_attention), (("mlp",), expected.mlp),
    ):  # fmt: skip
        found = counted(device, LaunchCase(shape=DENSE, flags=recomputing(*modules)))
        assert found.backward.launches - kept == again, modules


def test_compiled_blocks() -> None:
    """Of Transformer Engine's modules: Megatron has fused by itself what torch.compile would fuse."""
    kinds = {"plain": "gpt3_tiny", "gated": DENSE, "experts": "mixtral_tiny", "latent": "deepseek_v3_tiny"}
    with warm_device(EXTENSION, JIT_FUSED) as device:
        for kind, shape in kinds.items():
            found = counted(device, LaunchCase(shape=shape, flags=COMPILE))
            assert (found.forward.launches, found.backward.launches) == getattr(COMPILED, kind), kind
        for module in ("core_attn", "mlp"):
            again = counted(device, LaunchCase(shape=DENSE, flags=(*COMPILE, *recomputing(module)))).backward.launches
            assert again - COMPILED.gated.backward == getattr(COMPILED, module.replace("core_attn", "core_attention"))


@pytest.mark.parametrize("layout, gathers", [("dp2zero3", 2), ("dp2zero2", 0.5)])
def test_units_of_shards(layout: str, gathers: float) -> None:
    """ZeRO-3 gathers a block twice a microbatch, ZeRO-2 once for the two microbatches of a step."""
    with warm_device(EXTENSION, JIT_FUSED) as device:
        found = counted(device, LaunchCase(shape=DENSE, layout=layout, replicas=2))
    kernels, collectives = (sum(own) for own in zip(found.forward, found.backward, strict=True))
    assert kernels - sum(ENGINE.gated) == gathers * launches.GATHER + launches.REDUCE
    assert collectives == gathers + 1


def test_casts_to_fp8() -> None:
    with warm_device(EXTENSION, JIT_FUSED) as device:
        found = counted(device, LaunchCase(shape=DENSE, flags=FP8))
    more = found.forward.launches - ENGINE.gated.forward, found.backward.launches - ENGINE.gated.backward
    assert more == launches.FP8
