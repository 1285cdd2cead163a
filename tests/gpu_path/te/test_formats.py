"""fp8 formats: what a value loses in each, and scales that keep all of a block within the format."""

import pytest
import torch

from tests.gpu_path.te import formats

FORMATS = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""Half a unit in the last place, relative: of 3 bits and of 2."""


def wide(rows: int = 256, columns: int = 384) -> torch.Tensor:
    """Magnitudes over ten powers of two."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-5, 5, (rows, 1), generator=generator)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_tensor_with_one_scale(format: torch.dtype, power_of_2: bool) -> None:
    values = wide()
    scale = formats.scale_from_amax(values.abs().max(), format, power_of_2=power_of_2)
    assert not power_of_2 or scale.log2() == scale.log2().round()
    found = formats.uncast(formats.cast(values, scale, format), scale.reciprocal(), format)
    lost = (found - values).abs()
    subnormal = torch.finfo(format).smallest_normal / scale
    assert (lost <= FORMATS[format] * values.abs().clamp(min=subnormal) * (1 + 1e-6)).all()
    assert lost.max() > 0


def test_nothing_is_lost_where_there_is_nothing() -> None:
    scale = formats.scale_from_amax(torch.zeros(()), torch.float8_e4m3fn)
    assert scale == 1
    assert (
        formats.uncast(formats.cast(torch.zeros(4), scale, torch.float8_e4m3fn), 1 / scale, torch.float8_e4m3fn) == 0
    ).all()


@pytest.mark.parametrize("shape", [(1, 32), (32, 1)])
def test_32_elements_share_a_power_of_two(shape: tuple[int, int]) -> None:
    """The largest of each block comes to more than half of the format's largest number, and never beyond it."""
    values, format = wide(), torch.float8_e4m3fn
    amax = formats.blocks_amax(values, *shape)
    exponents = formats.mx_exponents(amax, format)
    scaled = amax * formats.powers_of_2(exponents, inverse=True)
    assert (scaled <= 448).all() and (scaled > 224).all()
    assert (formats.powers_of_2(exponents) * formats.powers_of_2(exponents, inverse=True) == 1).all()
    spread = formats.spread(formats.powers_of_2(exponents, inverse=True), *shape, (256, 384))
    assert (values * spread).abs().max() <= 448


def test_blocks_at_an_edge_are_smaller() -> None:
    values = torch.arange(6.0).view(2, 3)
    amax = formats.blocks_amax(values, 1, 2)
    assert amax.tolist() == [[1, 2], [4, 5]]
    assert formats.spread(amax, 1, 2, (2, 3)).tolist() == [[1, 1, 2], [4, 4, 5]]
