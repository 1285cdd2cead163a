"""muP against its paper's table, megatron-core's own configuration, and the same model without it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from campaign import some
from checkpoint_parts import Parts, assembled, configuration, on_ranks, sizes
from models import gpt
from models.hf.shapes import write_config
from models.init import std_of
from models.layers import scaling
from models.names import canonical
from models.resolve import resolve
from parallel import ddp
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import Layout
from program.errors import UserError
from tests.faults.trainer import VOCABULARY, batches
from training.checkpoint.optimizer_state import main_params, parts
from training.cli.warnings import warnings
from training.config.lr_schedule import ScheduledRates
from training.config.run_config import RunConfig
from training.optimizer import set_schedule

MULT, STD, RATE, APART = 4.0, 0.5, 1e-3, 7e-3
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 16, "init_method_std": STD}
ZERO_3 = {"data_parallel_sharding_strategy": "zero3"}
LAYOUTS: dict[str, tuple[int, str, str, ParallelConfig]] = {
    "adam": (1, "adam", "gpt2_tiny", sizes()),
    "adam TP2 ZeRO-3": (4, "adam", "debug", sizes(tp=2, **ZERO_3)),
    "adam PP2, tied": (2, "adam", "gpt2_tiny", sizes(pp=2)),
    "adam EP2": (2, "adam", "deepseek_v3_tiny", sizes(expert_model_parallel_size=2)),
    "muon TP2, delta nets": (2, "muon", "qwen3_next_tiny", sizes(tp=2, sequence_parallel=True)),
}
FP32 = PrecisionConfig(dtype="fp32")
OUTSIDE = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")


def of_mup(optimizer: str, shape: str, parallel: ParallelConfig, **fields: Any) -> RunConfig:
    config = configuration(parallel, shape=shape, **{**MUP, **fields})
    changed = dataclasses.replace(config.optimizer, optimizer=optimizer, lr=RATE, adam_eps=1e-6)
    return dataclasses.replace(config, optimizer=changed)


def _rates(trainer: Parts, optimizer: str) -> None:
    """Table 8 for Adam: matrices within the blocks learn at 1 / width; of Muon, what it does not orthogonalize."""
    own = [group for part in parts(trainer.optimizer) for group in part.optimizer.param_groups]
    groups = {id(param): group for group in own for param in group["params"]}
    decoupled = trainer.parts.config.optimizer.decoupled_lr is not None
    set_schedule(trainer.optimizer, ScheduledRates(RATE, 0.1, APART if decoupled else None))
    mains, seen = dict(main_params(trainer.optimizer)), set()
    for one in (one for chunk in trainer.chunks for one in ddp.held(chunk)):
        if one.tensor not in mains:
            continue
        name, group = canonical(one.regions[0].key), groups[id(mains[one.tensor].tensor)]
        inside = len(one.regions[0].global_shape) > 1 and not name.endswith(OUTSIDE)
        scaled = inside and (optimizer == "adam" or "conv1d" in name)
        apart = decoupled and name.endswith(("word_embeddings.weight", "output_layer.weight"))
        assert group["lr"] == pytest.approx(APART if apart else RATE / MULT if scaled else RATE, rel=1e-12), name
        assert group["eps"] == pytest.approx(1e-6 / MULT if scaled and optimizer == "adam" else 1e-6, rel=1e-12), name
        seen.add(scaled)
    assert seen == {True, False} or trainer.ranks.layout.tp > 1


@pytest.mark.parametrize("name", some(LAYOUTS, ("adam", "adam TP2 ZeRO-3", "muon TP2, delta nets")))
def test_each_parameter_has_the_rate_of_the_paper_in_every_layout(name: str) -> None:
    world_size, optimizer, shape, parallel = LAYOUTS[name]
    on_ranks(world_size, of_mup(optimizer, shape, parallel), _rates, optimizer)


def test_a_decoupled_rate_stays_that_of_embeddings_and_output_layer() -> None:
    config = of_mup("adam", "debug", sizes())
    decoupled = dataclasses.replace(config.optimizer, decoupled_lr=APART)
    on_ranks(1, dataclasses.replace(config, optimizer=decoupled), _rates, "adam")


def test_a_rate_without_the_width_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.optimizer._mup_overrides", lambda *_: {})
    with pytest.raises(BaseException, match="linear"):
        on_ranks(1, of_mup("adam", "debug", sizes()), _rates, "adam")


def megatrons(**fields: Any) -> TransformerConfig:
    """megatron-core's own muP."""
    settings = {"num_layers": 8, "is_hybrid_model": True, "hidden_size": 64, "num_attention_heads": 4}
    return TransformerConfig(**settings, **MUP, **fields)


def _drawn_std(method: Any) -> float:
    return float(torch.std(method(torch.empty(1000, 1000))))


def test_initial_weights_scores_and_logits_are_megatrons() -> None:
    theirs = megatrons(mup_base_head_dim=9.0, kv_channels=16)
    shape = resolve(of_mup("adam", "debug", sizes(), mup_base_head_dim=9.0).model, VOCABULARY)
    for name, method in (
        ("layers.1.self_attention.linear_qkv.weight", theirs.init_method),
        ("layers.0.mlp.router.weight", theirs.init_method),
        ("layers.1.mlp.linear_fc2.weight", theirs.output_layer_init_method),
        ("word_embeddings.weight", theirs.embedding_init_method),
        ("output_layer.weight", theirs.embedding_init_method),
    ):
        assert std_of(name, shape) == pytest.approx(_drawn_std(method), rel=5e-3), name
    assert shape.scores_mult == theirs.softmax_scale == 3 / 16
    assert 1 / shape.logits_divisor == theirs.mup_output_mult == 1 / MULT
    other = dataclasses.replace(shape, mup_output_mult=0.3, mup_attn_scale_power=0.5, mup_base_head_dim=0.0)
    same = megatrons(mup_output_mult=0.3, mup_attn_scale_power=0.5, kv_channels=16)
    assert (other.scores_mult, 1 / other.logits_divisor) == pytest.approx((same.softmax_scale, same.mup_output_mult))


def _weights(trainer: Parts, folder: Path) -> None:
    if (whole := assembled(trainer, folder)) is not None:
        torch.save(whole, folder / "whole.pt")


def test_drawn_weights_have_that_size(tmp_path: Path) -> None:
    """Table 3: of hidden matrices 1 / width of the variance, whoever holds which part."""
    on_ranks(2, of_mup("adam", "debug", sizes(tp=2)), _weights, tmp_path)
    whole = torch.load(tmp_path / "whole.pt")
    for name, std in (("word_embeddings", STD), ("output_layer", STD), ("layers.2.mlp.linear_fc1", STD / MULT**0.5)):
        assert float(whole[f"{name}.weight"].std()) == pytest.approx(std, rel=0.03), name


def _losses(trainer: Parts) -> torch.Tensor:
    """Of the first microbatch, [b, s], by the chunk alone."""
    batch = batches(0, trainer.ranks)[0]
    assert batch is not None
    with torch.no_grad():
        return trainer.chunks[0](batch.tokens, batch.position_ids, None, labels=batch.labels).clone()


def _as_megatron(trainer: Parts, model: Any) -> None:
    """The same weights where megatron-core multiplies embeddings and logits itself, and scores by its number."""
    theirs = megatrons(mup_embedding_mult=3.0, mup_base_head_dim=4.0, kv_channels=16)
    bare = dataclasses.replace(model, use_mup=False, softmax_scale=theirs.softmax_scale)
    (chunk,) = gpt.build(gpt.Blueprint(model=bare, shape=resolve(bare, VOCABULARY), precision=FP32), trainer.ranks)
    for name in ("use_mup", "mup_embedding_mult", "mup_output_mult"):
        setattr(chunk.config, name, getattr(theirs, name))
    chunk.load_state_dict(ddp.unwrap(trainer.chunks[0]).state_dict())
    ours = _losses(trainer)
    trainer.chunks = (chunk,)
    torch.testing.assert_close(ours, _losses(trainer), rtol=0, atol=2e-6)


def test_losses_are_those_of_megatron_s_multipliers() -> None:
    config = of_mup("adam", "gpt2_tiny", sizes(), mup_embedding_mult=3.0, mup_base_head_dim=4.0)
    chunked = dataclasses.replace(config, train=dataclasses.replace(config.train, cross_entropy_chunk_tokens=8))
    for one in (config, chunked):
        on_ranks(1, one, _as_megatron, config.model)


def test_logits_without_their_multiplier_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "scale_logits", lambda *_: None)
    config = of_mup("adam", "gpt2_tiny", sizes(), mup_embedding_mult=3.0, mup_base_head_dim=4.0)
    with pytest.raises(BaseException, match="not close"):
        on_ranks(1, config, _as_megatron, config.model)


def test_what_it_cannot_be_with_is_said() -> None:
    own = of_mup("torch.optim:SGD", "debug", sizes())
    assert any("found optimizer.optimizer" in problem for problem in own.problems(1))
    muon = of_mup("muon", "debug", sizes())
    shape = resolve(muon.model, VOCABULARY)
    assert any("unit_rms_norm" in line for line in warnings(muon, shape, Layout()))
    fits = dataclasses.replace(muon, optimizer=dataclasses.replace(muon.optimizer, muon_scale_mode="unit_rms_norm"))
    assert not any("unit_rms_norm" in line for line in warnings(fits, shape, Layout()))
    with pytest.raises(UserError, match=r"has no:\n  model\.use_mup True .*\n  model\.mup_base_hidden_size 16 .*$"):
        write_config(shape)
    assert write_config(dataclasses.replace(shape, use_mup=False))
