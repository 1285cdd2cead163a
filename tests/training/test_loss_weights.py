"""Each loss is the mean that training/loss_weights.py says, whatever is masked and however a batch is cut."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import runs
from data.loader import Batch
from gradients import VOCABULARY, sums_and_gradients
from models.resolve import resolve
from parallel import groups
from parallel.ddp import unwrap
from parallel.groups import Ranks
from parallel.launch import Identity
from ranks import run_ranks
from training.config.run_config import RunConfig
from training.metrics.meters import DepthMeter
from training.parts.model import build_parts

LENGTH, SAMPLES = 32, 8
SMALL = f"--model.seq_length {LENGTH} --train.global_batch_size {SAMPLES}".split()
WHOLE = "--parallel.use_distributed_optimizer False".split()
"""Each rank holds all of each reduced gradient."""
MTP = "--model.mtp_num_layers 2 --model.mtp_loss_scaling_factor 1.0".split()
EXPERTS = (
    "--model.num_moe_experts 4 --model.moe_router_topk 2 --model.moe_ffn_hidden_size 32 "
    "--model.moe_router_load_balancing_type seq_aux_loss"
).split()


def whole_batch(kept: Sequence[int]) -> Batch:
    """All samples, of which the first ``kept[i]`` tokens count, and never the third."""
    drawn = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(LENGTH)[None] < torch.tensor(kept)[:, None]).float()
    mask[:, 2] = 0
    positions = torch.arange(LENGTH).expand(SAMPLES, -1).contiguous()
    return Batch(tokens=drawn[:, :-1], labels=drawn[:, 1:], loss_mask=mask, position_ids=positions)


def gradients(config: RunConfig, ranks: Ranks, whole: Batch, micro_batch: int) -> dict[str, torch.Tensor]:
    """Of the batch in microbatches dealt to the replicas."""
    own = [one.chunk(ranks.layout.dp)[ranks.at.dp] for one in whole if one is not None]
    pieces = zip(*(one.split(micro_batch) for one in own), strict=True)
    return sums_and_gradients(config, ranks, [Batch(*piece) for piece in pieces])


def started(identity: Identity, config: RunConfig) -> AbstractContextManager[Ranks]:
    layout = config.layout(identity.world_size)
    return groups.start(layout, identity, device="cpu", seed=1)


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of a gradient's elements, of its largest element."""
    return max(
        ((found[name] - one).abs().max() / one.abs().max().clamp(min=1e-12)).item()
        for name, one in expected.items()
        if name != "sums"
    )


def _few(identity: Identity, config: RunConfig) -> None:
    whole = whole_batch([1] * SAMPLES)
    whole = Batch(*(one[:1] for one in whole if one is not None))
    with started(identity, config) as ranks:
        found = gradients(config, ranks, whole, 1)
        chunks = build_parts(config, resolve(config.model, VOCABULARY), ranks).chunks
        model = unwrap(chunks[0])
        model(whole.tokens, whole.position_ids, None, labels=whole.labels)[0, 0].backward()  # that token's loss
        expected = {f"0.{name}": param.main_grad.clone() for name, param in model.named_parameters()}
    assert furthest(found, expected) < 1e-6


def test_a_step_of_one_token_has_its_whole_gradient(tmp_path: Path) -> None:
    run_ranks(1, _few, runs.configuration(tmp_path, *SMALL))


def _cuts(identity: Identity, config: RunConfig) -> None:
    whole = whole_batch([32, 1, 9, 3, 30, 4, 0, 17])
    with started(identity, config) as ranks:
        meter = DepthMeter(resolve(config.model, VOCABULARY), ranks)
        once, logged = gradients(config, ranks, whole, SAMPLES), meter.report()
        assert len(logged.get("mtp_loss", ())) == (config.model.mtp_num_layers or 0)
        assert furthest(gradients(config, ranks, whole, 1), once) < 2e-5
        assert meter.report() == {name: pytest.approx(value, rel=1e-6) for name, value in logged.items()}


@pytest.mark.parametrize("flags", [MTP, [*EXPERTS, "--model.moe_aux_loss_coeff", "1"]], ids=["mtp", "balancing"])
def test_gradients_do_not_depend_on_the_micro_batch(flags: list[str], tmp_path: Path) -> None:
    """Though each microbatch counts another number of tokens; balancing over each sample."""
    run_ranks(1, _cuts, runs.configuration(tmp_path, *SMALL, *flags))


def _by_masks(identity: Identity, with_losses: Sequence[RunConfig], without: RunConfig) -> None:
    with started(identity, without) as ranks:
        batches = [whole_batch(kept) for kept in ([2, 1, 1, 2, 1, 2, 1, 1], [LENGTH] * SAMPLES)]
        plain = [gradients(without, ranks, batch, 2) for batch in batches]
        for config in with_losses:
            parts = []
            for batch, other in zip(batches, plain, strict=True):
                both = gradients(config, ranks, batch, 2)
                parts.append({name: both[name] - other[name] for name in both if name.endswith("router.weight")})
            assert parts[0] and furthest(*parts) < 1e-3


@pytest.mark.campaign
def test_losses_of_routers_do_not_grow_with_masked_tokens(tmp_path: Path) -> None:
    """What each adds to a router's gradient; two replicas."""
    zero = "--model.moe_aux_loss_coeff 0 --model.moe_z_loss_coeff 0".split()
    each = ([], ["--model.moe_aux_loss_coeff", "10"], ["--model.moe_z_loss_coeff", "10"])
    without, *with_losses = (runs.configuration(tmp_path, *SMALL, *WHOLE, *EXPERTS, *zero, *flags) for flags in each)
    run_ranks(2, _by_masks, with_losses, without)
