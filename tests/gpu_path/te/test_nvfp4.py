"""nvfp4 against its definition, and against Transformer Engine's own reference of it."""

import itertools
import types
from typing import Any

import pytest
import torch

from tests.gpu_path.emulator import Emulation
from tests.gpu_path.te import e2m1, nvfp4
from tests.gpu_path.trainings import WarmDevice

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def hadamard() -> torch.Tensor:
    """Sylvester's, of 16, with signs: orthogonal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < nvfp4.BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.diag(torch.tensor(SIGNS, dtype=torch.float32)) @ matrix / 4


def quantizer(**settings: bool) -> Any:
    """What cast and turn read of one."""
    known = {"with_2d_quantization": False, "stochastic_rounding": False, "rht_matrix": hadamard().bfloat16()}
    return types.SimpleNamespace(**known | settings)


def back(matrix: torch.Tensor, amax: torch.Tensor, how: Any) -> torch.Tensor:
    data, scales = nvfp4.cast(matrix, amax, how)
    return nvfp4.uncast(data, scales, amax)


def test_each_code_is_its_number() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert e2m1.numbers(codes).tolist() == NUMBERS + [-number for number in NUMBERS]
    assert torch.signbit(e2m1.numbers(codes))[8:].all()
    assert (e2m1.nearest(e2m1.numbers(codes)) == codes).all()
    assert (e2m1.unpack(e2m1.pack(codes.view(1, 16))) == codes).all()
    assert e2m1.pack(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x21


def test_of_two_equally_near_numbers_the_even_code_is_taken() -> None:
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(NUMBERS)])
    assert e2m1.numbers(e2m1.nearest(middles)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert (e2m1.numbers(e2m1.nearest(-middles)) == -e2m1.numbers(e2m1.nearest(middles))).all()
    values = torch.linspace(-7, 7, 1401)
    distance = (values.clamp(-6, 6).unsqueeze(1) - torch.tensor(NUMBERS + [-n for n in NUMBERS])).abs()
    lost = (e2m1.numbers(e2m1.nearest(values)) - values.clamp(-6, 6)).abs()
    torch.testing.assert_close(lost, distance.amin(1))


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(1)
    for value in (0.1, -0.6, 1.2, 2.6, -4.5, 6.0):
        found = e2m1.numbers(e2m1.stochastic(torch.full((40_000,), value)))
        assert abs(found.mean().item() - value) < 0.02
        assert set(found.abs().tolist()) <= set(NUMBERS) and len(set(found.tolist())) <= 2
    assert e2m1.numbers(e2m1.nearest(torch.full((9,), 2.6))).mean() == 3


@pytest.mark.parametrize("square", [False, True])
def test_scales_take_the_largest_of_a_block_to_6(square: bool) -> None:
    """To E4M3's precision; and nothing is further off than half the step, 1, that E2M1 has above 4."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 96, generator=generator) * 2.0 ** torch.randint(-5, 5, (64, 1), generator=generator)
    amax, how = values.abs().max(), quantizer(with_2d_quantization=square)
    data, scales = nvfp4.cast(values, amax, how)
    blocks = values.view(4, 16, 6, 16).abs().amax((1, 3)) if square else values.view(64, 6, 16).abs().amax(2)
    exact = blocks.repeat_interleave(16 if square else 1, 0) / amax * 448
    # E4M3 has 3 bits of mantissa: half a step is 1/16; below 2**-6 it is subnormal, of steps of 2**-9
    assert ((scales.float() - exact).abs() <= (exact / 16).clamp(min=2.0**-10) * 1.0001).all()
    assert scales.float().max() == 448
    assert not square or (scales.float().view(4, 16, 6) == scales.float()[::16].view(4, 1, 6)).all()
    found = nvfp4.uncast(data, scales, amax)
    step = (scales.float() * amax / nvfp4.LARGEST).repeat_interleave(16, 1)
    clipped = (exact.repeat_interleave(16, 1) * amax / 448 - 6 * step).clamp(min=0)  # a scale that was rounded down
    assert ((found - values).abs() <= step * 1.0001 + clipped).all()
    assert (found != values).any()


def test_nothing_is_made_of_zeros() -> None:
    assert (back(torch.zeros(16, 32), torch.zeros(()), quantizer()) == 0).all()


def test_turning_both_factors_leaves_their_product() -> None:
    matrix = hadamard()
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(16))
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(8, 48, generator=generator).bfloat16().float() for _ in range(2))
    product = nvfp4.turn(left, quantizer()) @ nvfp4.turn(right, quantizer()).t()
    torch.testing.assert_close(product, left @ right.t(), atol=0.15, rtol=0)  # each is rounded to bf16
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 40
    assert (nvfp4.turn(outlier, quantizer()).abs() == 10).all()  # what it is for


@pytest.mark.campaign
def test_the_kernels_agree_with_transformer_engines_reference(te_device: WarmDevice) -> None:
    """Its Python of both copies, and of a product: inputs turned, weights in squares (checks/nvfp4_reference.py)."""
    found = te_device.check("nvfp4_reference", emulation=Emulation(capability=100))
    assert found.returncode == 0 and "as the reference" in found.stdout, found.stdout + found.stderr
