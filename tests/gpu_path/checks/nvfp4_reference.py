"""The emulated nvfp4 kernels against Transformer Engine's own reference in Python (custom_recipes/reference_nvfp4.py):
both copies' bytes, scales and largest values. Run by te/test_nvfp4.py."""

import torch
import transformer_engine.pytorch  # noqa: F401  (the extension)
import transformer_engine_torch as tex  # type: ignore[import-not-found]
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from tests.gpu_path.te.gemm import _product

generator = torch.Generator().manual_seed(1)


def random(rows: int, columns: int) -> torch.Tensor:
    exponents = torch.randint(-6, 6, (rows, 1), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * 2.0**exponents).bfloat16().cuda()


def compare(values: torch.Tensor, square: bool) -> None:
    own = tex.quantize(values, NVFP4Quantizer(with_rht=not square, with_post_rht_amax=not square,
                                              with_2d_quantization=square))  # fmt: skip
    theirs = NVFP4QuantizerRef(
        dtype=Fp4Formats.E2M1, quant_tile_shape=(16, 16) if square else (1, 16), with_rht=not square
    ).quantize(values)
    for way, data, scale, amax in (
        ("rowwise", theirs.data, theirs.scale, theirs.global_amax_row),
        ("columnwise", theirs.data_t, theirs.scale_t, theirs.global_amax_col),
    ):
        scales = getattr(own, f"_{way}_scale_inv")[: scale.shape[0], : scale.shape[1]]
        assert torch.equal(getattr(own, f"_amax_{way}"), amax), way
        assert torch.equal(scales.view(torch.float8_e4m3fn).float(), scale.float()), way
        different = (getattr(own, f"_{way}_data") != data).float().mean().item()
        assert different == 0, f"{way}: {different:.2%} of the bytes differ"


def compare_products() -> None:
    """Forward, of a weight in squares by rows, and its gradient, of both factors by columns, which are turned: near
    the exact ones, as four bits are, and not nearer."""
    weight, given, grad = random(64, 96), random(128, 96), random(128, 64)
    square = NVFP4Quantizer(with_2d_quantization=True)
    turned = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    given4, grad4 = tex.quantize(given, turned), tex.quantize(grad, turned)
    for found, exact in (
        (_product(tex.quantize(weight, square), True, given4, False), given.float() @ weight.float().t()),
        (_product(given4, False, grad4, True), grad.float().t() @ given.float()),
    ):
        error = (found - exact).norm() / exact.norm()
        assert 0.02 < error < 0.2, error


for is_square in (False, True):
    for shape in ((16, 32), (128, 256), (48, 80)):
        compare(random(*shape), is_square)
    compare(torch.zeros(32, 32, dtype=torch.bfloat16, device="cuda"), is_square)
compare_products()
print("as the reference")
