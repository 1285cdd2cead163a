"""Packed documents by a kernel for rows of unequal lengths: what it is given, and that a wrong one is not used."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.families import named
from models.layers import packed
from models.layers.blockwise_attention import AttentionMask, Softmax, attend_in_blocks
from models.layers.documents import Documents
from parallel.config import ParallelConfig
from parallel.layout import layout_of

CPU = torch.device("cpu")
HEADS = packed.HeadSizes(heads=4, groups=2, width=16, value_width=16)
STARTS = torch.tensor([[0, 0, 0, 3, 4, 4], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 5]])


def each_alone(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
               *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:  # fmt: skip
    """varlen_attn as its documentation has it, one row of [tokens, heads, width] after another."""
    assert cu_seq_q is cu_seq_k and cu_seq_q.dtype == torch.int32 and window_size[1] == 0
    bounds = cu_seq_q.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(query))
    found = []
    for start, end in pairwise(bounds):
        assert end - start <= min(max_q, max_k)
        at = torch.arange(end - start)
        seen = at <= at[:, None]
        if window_size[0] >= 0:
            seen &= at >= at[:, None] - window_size[0]
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        found.append(out.transpose(0, 1))
    return torch.cat(found)


def test_cu_seqlens_are_the_documents_of_all_samples_in_one_row() -> None:
    found = Documents(STARTS, torch.arange(STARTS.shape[1]) - STARTS).cu_seqlens
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 3, 4, 6, 12, 13, 17, 18]


@pytest.mark.parametrize("left", [None, 0, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_kernel_is_given_what_blocks_are(groups: int, left: int | None) -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn((6, 3, heads, 8), generator=draw, dtype=torch.float64) for heads in (4, groups, groups)
    )
    documents = Documents(STARTS, torch.arange(STARTS.shape[1]) - STARTS)
    for scale in (None, 0.7):
        found = packed.attend_packed(query, key, value, documents, left, scale, each_alone)
        expected = attend_in_blocks(
            query, key, value, AttentionMask(left=left, documents=documents), Softmax(scale=scale)
        )
        assert (found - expected).abs().max().item() < 1e-12


def wrong_window(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> Tensor:
    return each_alone(*args, window_size=(window_size[0] - 1, 0), **kwargs)


def one_document(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    whole = bounds[[0, -1]]
    return each_alone(query, key, value, whole, whole, len(query), len(query), **kwargs)


def wrong_gradient(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return each_alone(query, key.detach() + 0 * key, value, *args, **kwargs)


def not_a_number(*args: Any, **kwargs: Any) -> Tensor:
    return each_alone(*args, **kwargs) * float("nan")


def unsupported(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


def older(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
          is_causal: bool = False, scale: float | None = None) -> Tensor:  # fmt: skip
    """The arguments of an earlier torch's."""
    raise AssertionError


@pytest.mark.parametrize(("kernel", "left", "said"), [
    (each_alone, None, ""), (each_alone, 20, ""),
    (wrong_window, 20, "the kernel's output is off by"), (one_document, None, "the kernel's output is off by"),
    (wrong_gradient, None, "the kernel's gradient of keys is off by"), (not_a_number, None, "output is off by nan"),
    (unsupported, None, "the kernel failed: RuntimeError: FlashAttention only supports Ampere GPUs or newer."),
    (older, None, "the kernel failed: TypeError"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_is_used_where_it_is_right(kernel: packed.Kernel, left: int | None, said: str,
                                           dtype: torch.dtype) -> None:  # fmt: skip
    found = packed.disproof(CPU, dtype, HEADS, left, kernel)
    assert said in found and bool(said) == bool(found)


def test_torchs_kernel_is_left_out_where_it_does_not_run() -> None:
    """The real one: on a CPU it fails, and that is its reason."""
    assert packed.disproof(CPU, torch.bfloat16, HEADS, None).startswith("the kernel failed: ")


@pytest.mark.parametrize(("shape", "device", "cp", "reason"), [
    ("llama3_8b", "cpu", 1, "the kernel needs CUDA, this is cpu"),
    ("llama3_8b", "cuda", 2, "documents that lie on several context ranks need each key's position"),
    ("deepseek_v3", "cuda", 1, "keys are 192 wide and values 128"),
])  # fmt: skip
def test_a_run_says_why_it_takes_blocks(shape: str, device: str, cp: int, reason: str) -> None:
    layout = layout_of(ParallelConfig(context_parallel_size=cp), cp)
    assert packed.how(named(shape), torch.device(device), torch.bfloat16, layout) == f"in blocks of queries ({reason})"


def test_a_run_says_so_of_windowed_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel is right without a window and wrong with one. Its device is this CPU here."""
    monkeypatch.setattr(packed, "why_not", lambda device, dtype, sizes, left, *_:
                        packed.disproof(CPU, dtype, sizes, left, wrong_window))  # fmt: skip
    found = packed.how(named("mistral_tiny"), CPU, torch.bfloat16, layout_of(ParallelConfig(), 1))
    assert found.startswith("by torch's flash kernel for rows of unequal lengths; in windowed layers in blocks of")
    assert "the kernel's output is off by" in found


@pytest.mark.parametrize(("kwargs", "reason"), [
    ({"dtype": torch.float32}, "needs 16 bits, this is float32"), ({"dropout": 0.1}, "no dropout"),
    ({"context_parallel_size": 2}, "several context ranks"),
    ({"sizes": dataclasses.replace(HEADS, value_width=32)}, "16 wide and values 32"),
])  # fmt: skip
def test_what_the_kernel_cannot_do_is_not_asked_of_it(kwargs: dict[str, Any], reason: str) -> None:
    given = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "sizes": HEADS, "left": None}
    assert reason in packed.why_not(**(given | kwargs))
