"""Documents packed into a sample: each as if it were alone, on every stage, in training and in validation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import runs
from campaign import param
from data.config import DataConfig
from data.loader import Batch, Packing, to_batch
from data.prepare import prepare
from data.prepared import Prepared
from models.config import ModelConfig
from models.resolve import resolve
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from ranks import run_ranks

EOD = 256
PACKING = Packing(eod=EOD, reset_attention=True, reset_positions=True)


def build(ranks: Any, model: ModelConfig, gain: float = 4.0) -> Any:
    """One chunk with larger weights, so that attention is far from uniform."""
    from models import gpt

    fp32 = PrecisionConfig(dtype="fp32")
    (chunk,) = gpt.build(gpt.Blueprint(model=model, shape=resolve(model, 257), precision=fp32), ranks)
    with torch.no_grad():
        for param in chunk.parameters():
            param.mul_(gain if param.dim() > 1 else 1)
    return chunk


def samples() -> torch.Tensor:
    """[2, 65] int32: documents of 13, 1, 20 and 30 tokens or more, and of 40 and 24 or more."""
    window = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    window[0, [12, 13, 33]] = EOD
    window[1, 39] = EOD
    return window


DOCUMENTS = [(0, 0, 13), (0, 13, 14), (0, 14, 34), (0, 34, 64), (1, 0, 40), (1, 40, 64)]
"""(sample, first token, end)"""


# ---- a document as if it were alone


def _alone(identity: Identity, model: ModelConfig) -> None:
    from models.layers.documents import Documents
    from parallel import groups

    with groups.start(layout_of(ParallelConfig(), 1), identity, device="cpu", seed=1) as ranks:
        chunk = build(ranks, model).eval()
        batch = to_batch(samples(), ranks.device, PACKING)
        assert batch.starts is not None
        with torch.no_grad():
            documents = Documents(batch.starts, batch.position_ids)
            packed = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=documents)
            mixed = chunk(batch.tokens, torch.arange(64)[None], None)
            for sample, first, end in DOCUMENTS:
                tokens = batch.tokens[sample : sample + 1, first:end]
                alone = chunk(tokens, torch.arange(end - first)[None], None)[..., :257]
                assert (packed[sample, first:end, :257] - alone).abs().max().item() < 1e-5 * alone.abs().max().item()
                if first:
                    difference = (mixed[sample, first:end, :257] - alone).abs().max().item()
                    assert difference > 0.05 * alone.abs().max().item()


LATENT = {"multi_latent_attention": True, "num_query_groups": 4, "kv_lora_rank": 32, "qk_head_dim": 16,
          "qk_pos_emb_head_dim": 8, "v_head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": "debug"},
        {"shape": "gpt2_tiny", "hidden_dropout": 0.0, "attention_dropout": 0.0},
        {"shape": "debug", "window_size": (5, 0), "window_attn_skip_freq": "2"},
        {"shape": "debug", "rope_scaling": "yarn", "rope_scaling_factor": 4.0,
         "rope_original_max_position_embeddings": 16},
        {"shape": "debug", **LATENT},
        {"shape": "mamba2_tiny"},
        {"shape": "debug", "linear_attention_freq": "3", "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "attention_output_gate": True},
    ],
    ids=["RoPE", "learned positions", "window", "YaRN", "MLA", "Mamba-2", "gated delta nets"],
)  # fmt: skip
def test_a_packed_document_is_as_if_alone(changes: dict[str, Any]) -> None:
    """Logits of each of two samples' documents; without being kept apart they are others."""
    run_ranks(1, _alone, ModelConfig(seq_length=64, **changes))


# ---- recomputation


def _recomputed(identity: Identity) -> None:
    from models import gpt
    from models.layers.documents import Documents
    from parallel import groups

    with groups.start(layout_of(ParallelConfig(), 1), identity, device="cpu", seed=1) as ranks:
        batch = to_batch(samples(), ranks.device, PACKING)
        assert batch.starts is not None
        gradients = []
        for recompute in (
            gpt.Recompute(),
            gpt.Recompute(granularity="selective"),
            gpt.Recompute(granularity="full", method="uniform", num_layers=1),
        ):
            model, precision = ModelConfig(seq_length=64), PrecisionConfig(dtype="fp32")
            blueprint = gpt.Blueprint(model=model, shape=resolve(model, 257), precision=precision, recompute=recompute)
            (chunk,) = gpt.build(blueprint, ranks)
            documents = Documents(batch.starts, batch.position_ids)
            chunk(
                batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=documents
            ).sum().backward()
            gradients.append([param.grad for param in chunk.parameters()])
        for other in gradients[1:]:
            for one, two in zip(gradients[0], other, strict=True):
                assert (one - two).abs().max().item() <= 1e-6 * one.abs().max().item()


def test_recomputed_layers_keep_documents_apart() -> None:
    run_ranks(1, _recomputed)


# ---- a whole run


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, Prepared]:
    """Documents of some 20 bytes, so that a sample of 64 tokens holds several."""
    folder = tmp_path_factory.mktemp("documents")
    lines = [json.dumps({"text": f"document {number} says {number * number}"}) for number in range(3000)]
    (folder / "short.jsonl").write_text("\n".join(lines))
    config = DataConfig(paths=(str(folder / "short.jsonl"),), tokenizer="byte", cache_dir=str(folder / "cache"))
    return config, prepare(config, lambda _: None)


def metrics(short_documents: tuple[DataConfig, Prepared], folder: Path, flags: str, world_size: int = 1) -> list[float]:
    """Losses of two iterations of two microbatches, and the validation loss after them."""
    data, prepared = short_documents
    given = ["--data.paths", *data.paths, "--data.split", "9,1", "--train.train_iters", "2"]
    given += ["--train.global_batch_size", "4", "--train.eval_interval", "2", "--train.eval_iters", "1"]
    lines = runs.train(prepared, runs.configuration(folder, *given, *flags.split()), world_size)
    return runs.losses(lines) + [line["validation_loss"] for line in lines if "validation_loss" in line]


@pytest.fixture(scope="module")
def apart(short_documents: tuple[DataConfig, Prepared], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return metrics(
        short_documents, tmp_path_factory.mktemp("apart"), "--data.reset_attention_mask --data.reset_position_ids"
    )


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(4, "--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 2 "
         "--parallel.context_parallel_size 2"),
     pytest.param(4, "--parallel.pipeline_model_parallel_size 4", marks=pytest.mark.campaign)],
    ids=["cp2pp2vpp2", "pp4"],
)  # fmt: skip
@pytest.mark.campaign
def test_every_stage_keeps_documents_apart(
    world_size: int, flags: str, short_documents: tuple[DataConfig, Prepared], apart: list[float], tmp_path: Path
) -> None:
    """A stage between the first and the last reads tokens only for where documents start."""
    assert metrics(
        short_documents, tmp_path, f"--data.reset_attention_mask --data.reset_position_ids {flags}", world_size
    ) == pytest.approx(apart, rel=1e-5)


MIDDLE = "--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 2 "
LATENT_FLAGS = " ".join(f"--model.{name} {value}" for name, value in LATENT.items())


def alone(model: str = "") -> str:
    """Flags: documents see one another, by attention that is far from uniform, and RoPE counts within each."""
    return f"--data.reset_position_ids --model.init_method_std 0.1 {model} "


@pytest.mark.parametrize("model", ["", param(LATENT_FLAGS)], ids=["RoPE", "MLA"])
def test_positions_restart_alone_on_every_layout(
    model: str, short_documents: tuple[DataConfig, Prepared], tmp_path: Path
) -> None:
    one = metrics(short_documents, tmp_path / "one", alone(model))
    middle, context = "" if model else MIDDLE, "--parallel.context_parallel_size 2"
    split = metrics(short_documents, tmp_path / "split", alone(model) + middle + context, 2 if model else 4)
    assert split == pytest.approx(one, rel=1e-5)
    if model:
        return
    plain, sampled, recomputed = (
        metrics(short_documents, tmp_path / name, flags, world_size)
        for name, flags, world_size in (
            ("plain", "--model.init_method_std 0.1", 1),
            ("sampled", alone() + "--train.sample_interval 1 --train.generate_tokens 4 --train.sample_prompts a", 1),
            ("recomputed", alone() + "--train.recompute "
             "full:uniform:1 --parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel", 2),
        )
    )  # fmt: skip
    assert sampled == one  # a text in between leaves the embedding as it was
    assert recomputed == pytest.approx(one, rel=1e-5)
    assert max(abs(mine - other) for mine, other in zip(one, plain, strict=True)) > 1e-3


def test_rope_need_not_restart_in_documents_that_are_apart(
    short_documents: tuple[DataConfig, Prepared], apart: list[float], tmp_path: Path
) -> None:
    assert metrics(short_documents, tmp_path, "--data.reset_attention_mask") == pytest.approx(apart, rel=1e-5)


def test_a_run_does_what_its_data_section_says(short_documents: tuple[DataConfig, Prepared], tmp_path: Path) -> None:
    """In training and in validation; nothing is learned here, so that each loss shows its own batches only."""
    still = "--optimizer.lr 1e-12 --data."
    apart, together, masked = (
        metrics(short_documents, tmp_path / flags.split()[0], still + flags)
        for flags in (
            "reset_attention_mask True --data.reset_position_ids True",
            "jsonl_key text",
            "eod_mask_loss True",
        )
    )
    assert len(together) == len(apart) == len(masked) == 3
    for one, two, three in zip(apart, together, masked, strict=True):
        assert abs(one - two) > 1e-4
        assert abs(two - three) > 1e-4


# ---- the loss mask within the model


def _masked_targets(identity: Identity) -> None:
    from parallel import ddp, groups
    from training.forward_backward import forward_step
    from training.loss_weights import count_tokens

    with groups.start(layout_of(ParallelConfig(), 1), identity, device="cpu", seed=1) as ranks:
        chunk = build(ranks, ModelConfig(seq_length=64, mtp_num_layers=1))
        (wrapped,) = ddp.wrap([chunk], ParallelConfig(), PrecisionConfig(dtype="fp32"), ranks)

        def gradients(batch: Batch) -> list[torch.Tensor]:
            wrapped.zero_grad_buffer()
            count_tokens([wrapped], [batch], ranks)
            output, loss = forward_step(iter([batch]), wrapped)
            loss(output)[0].backward()
            return [param.main_grad.clone() for param in chunk.parameters()]

        batch = to_batch(samples(), ranks.device, Packing(eod=EOD, eod_mask_loss=True))
        changed = batch._replace(labels=torch.where(batch.loss_mask > 0, batch.labels, 7))
        unmasked = batch._replace(loss_mask=torch.ones_like(batch.loss_mask))
        assert not torch.equal(batch.labels, changed.labels)
        first = gradients(batch)
        assert all(torch.equal(*pair) for pair in zip(first, gradients(changed), strict=True))
        assert not all(torch.equal(*pair) for pair in zip(first, gradients(unmasked), strict=True))


def test_masked_tokens_are_no_targets_of_multi_token_prediction_either() -> None:
    run_ranks(1, _masked_targets)
