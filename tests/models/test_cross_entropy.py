"""Cross entropy over vocabularies split over TP, against megatron-core's and PyTorch's."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.layers import cross_entropy
from parallel.config import ParallelConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from ranks import run_ranks

SEQ, BATCH, VOCABULARY = 5, 3, 32


def losses_and_gradient(compute: Any, logits: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any]:
    """logits are overwritten by both, and so are copied here."""
    leaf = logits.clone().requires_grad_()
    losses = compute(leaf * 1)
    (losses.float() * weights).sum().backward()
    return losses.detach(), leaf.grad


def check(identity: Identity, tp: int, dtype: torch.dtype, padding: int) -> None:
    import torch.distributed as dist
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from models.layers.cross_entropy import token_losses
    from parallel import groups

    layout = layout_of(ParallelConfig(tensor_model_parallel_size=tp), tp)
    with groups.start(layout, identity, device="cpu", seed=1) as ranks:
        random = torch.Generator().manual_seed(1)
        whole = (30 * torch.randn(SEQ, BATCH, VOCABULARY, generator=random)).to(dtype)
        if padding:
            whole[..., -padding:] = torch.finfo(dtype).min
        labels = torch.randint(VOCABULARY - padding, (BATCH, SEQ), generator=random)
        weights = torch.rand(SEQ, BATCH, generator=random)
        part = whole.chunk(tp, dim=-1)[ranks.at.tp]
        group, called = ranks.pgs.tp, []
        reduce, gather = dist.all_reduce, dist.all_gather_into_tensor
        dist.all_reduce = lambda *args, **kwargs: called.append("all-reduce")  # type: ignore[assignment]
        dist.all_gather_into_tensor = lambda *args, **kwargs: (called.append("all-gather"), gather(*args, **kwargs))[1]
        ours = losses_and_gradient(lambda x: token_losses(labels, x, group=group).t(), part, weights)
        dist.all_reduce, dist.all_gather_into_tensor = reduce, gather
        assert called == ["all-gather"] * (tp > 1)
        theirs = losses_and_gradient(
            lambda x: vocab_parallel_cross_entropy(x, labels.t().contiguous(), tp_group=group), part, weights
        )
        plain = torch.nn.functional.cross_entropy(whole.float().permute(1, 2, 0), labels, reduction="none").t()
        for found, expected in zip((*ours, ours[0]), (*theirs, plain), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype, padding", [(torch.float32, 0), (torch.float32, 20), (torch.bfloat16, 20)])
def test_losses_and_gradients_are_megatrons(tp: int, dtype: torch.dtype, padding: int) -> None:
    """20 of 32 are padding: all of the second rank's. In one collective, where Megatron has three."""
    run_ranks(tp, lambda identity: check(identity, tp, dtype, padding))


def check_log_z(identity: Identity, tp: int) -> None:
    """Values and gradients of both, weighted differently for each token, against PyTorch's."""
    from models.layers.cross_entropy import LossesAndLogZ
    from parallel import groups

    layout = layout_of(ParallelConfig(tensor_model_parallel_size=tp), tp)
    with groups.start(layout, identity, device="cpu", seed=1) as ranks:
        random = torch.Generator().manual_seed(1)
        whole = (10 * torch.randn(SEQ, BATCH, VOCABULARY, generator=random)).requires_grad_()
        labels = torch.randint(VOCABULARY, (BATCH, SEQ), generator=random)
        weights = torch.rand(2, BATCH, SEQ, generator=random)
        log_z = whole.logsumexp(-1).t()
        losses = torch.nn.functional.cross_entropy(whole.permute(1, 2, 0), labels, reduction="none")
        (weights * torch.stack([losses, log_z])).sum().backward()
        part = whole.detach().chunk(tp, dim=-1)[ranks.at.tp].clone().requires_grad_()
        both = LossesAndLogZ(ranks.pgs.tp)
        found = both(labels, part * 1)
        torch.testing.assert_close(found, torch.stack([losses, log_z]).detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(both.plain(labels, part * 1), losses.detach(), rtol=1e-6, atol=1e-6)
        (weights * found).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, whole.grad.chunk(tp, dim=-1)[ranks.at.tp], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_log_z_beside_the_losses(tp: int) -> None:
    run_ranks(tp, lambda identity: check_log_z(identity, tp))


def _scaled(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    return 1.0001 * cross_entropy._plain(logits, labels, group)


def _without_label(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """The right losses; gradients that lack what the label takes off."""
    wrong = logits.float().logsumexp(-1)
    return wrong + (cross_entropy._plain(logits, labels, group) - wrong).detach()


def _failing(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    raise RuntimeError("no such kernel")


def check_disproof(identity: Identity, tp: int) -> None:
    from parallel import groups

    layout = layout_of(ParallelConfig(tensor_model_parallel_size=tp), tp)
    with groups.start(layout, identity, device="cpu", seed=1) as ranks:
        state = torch.get_rng_state()
        disproof = partial(cross_entropy.disproof, ranks.pgs.tp, 128, ranks.device)
        assert disproof(cross_entropy._plain) == ""
        assert "losses are off by" in disproof(_scaled)
        assert disproof(_failing) == "the kernel failed: RuntimeError: no such kernel"
        assert "gradients are off by" in disproof(_without_label)
        # a new object, whose answer is not cached
        last_is_wrong = disproof(partial(_scaled if ranks.rank == tp - 1 else cross_entropy._plain))
        expected = "losses are off by" if ranks.rank == tp - 1 else "not equal on another rank"
        assert expected in last_is_wrong
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_start_finds_a_kernel_that_is_wrong(tp: int) -> None:
    run_ranks(tp, lambda identity: check_disproof(identity, tp))
