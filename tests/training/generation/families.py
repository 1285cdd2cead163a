"""Checkpoints of every family with random weights, copies for transformers, and what both generate greedily."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from models.families import TINY
from models.hf.shapes import write_config
from models.hf.tables import entries
from models.layers.kv_cache import cached
from models.resolve import resolve
from models.shapes import GPTShape
from parallel import groups
from parallel.launch import Identity
from tests.tools.hf_folders import write_folder
from tools.convert.exporting import export_folder
from tools.convert.importing import import_folder
from tools.shared.loaded_model import LoadedModel, build
from tools.shared.opened_checkpoint import ModelFlags, OpenedCheckpoint, open_checkpoint
from training.generation import forward
from training.generation.generate import Limits, generate, no_cache_reason
from training.generation.settings import Sampling

SHAPES: dict[str, GPTShape] = {
    **TINY,
    "llama2_yarn": dataclasses.replace(
        TINY["llama2_tiny"], rope_scaling="yarn", rope_scaling_factor=4.0, rope_original_max_position_embeddings=16
    ),
}
"""The families', and YaRN without latent attention."""
CROWDED = "mixtral_tiny, crowded"
"""The same weights, with experts that have room for half of their tokens in training."""
PROMPTS: tuple[list[int], ...] = ([5], list(range(40, 80)), [0, 1, 2, 0, 1, 2, 250, 256])
"""One token; more than windows, original contexts and a part of a prefill; the first and the last ids."""
NEW_TOKENS, SEQ_LENGTH, PREFILL_TOKENS = 10, 64, 16


def write_checkpoints(folder: Path, names: Collection[str]) -> None:
    """``checkpoints/NAME``, and ``hf/NAME``, exported from it."""
    for name in names:
        shape = SHAPES[name]
        made, checkpoint = folder / "made" / name, folder / "checkpoints" / name
        write_folder(made, shape, dtype=torch.float32, tensors=random_tensors(shape))
        import_folder(made, checkpoint, dtype=None, workers=1, max_file_bytes=1 << 30)
        export_folder(
            checkpoint, folder / "hf" / name, dtype="float32", workers=1, max_shard_bytes=1 << 30, like=None
        )  # fmt: skip


def random_tensors(shape: GPTShape) -> dict[str, torch.Tensor | None]:
    """Matrices large enough that a text depends on all of its tokens; a tied embedding small, or it repeats one."""
    draw, found = torch.Generator().manual_seed(1), dict[str, torch.Tensor | None]()
    for entry in entries(write_config(shape)[0], shape):
        for name, size in entry.their_shapes().items():
            small = len(size) == 1 or "wte" in name
            tensor = torch.randn(size, generator=draw) * (0.1 if small else 0.2)
            if shape.tied and "embed" in name:
                tensor /= 2 * shape.embedding_multiplier / shape.residual_multiplier
            found[name] = tensor + (1 if len(size) == 1 and name.endswith("weight") else 0)
    return found


def theirs(identity: Identity, folder: Path, names: Collection[str], output: Path) -> None:
    """Transformers' greedy texts: {name: one for each prompt}."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    found = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(
            folder / "hf" / name, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()
        found[name] = [
            model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
                max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]  # fmt: skip
    torch.save(found | {CROWDED: found["mixtral_tiny"]}, output)


def ours(identity: Identity, folder: Path, layout: str, names: Sequence[str], output: Path) -> None:
    """Ours, with a KV cache, and how far its logits are from those of whole windows: {name: (texts, difference)}."""
    forward.PREFILL_TOKENS = PREFILL_TOKENS
    found, opened = {}, {name: open_model(folder, layout, name) for name in names}
    first = opened[names[0]]
    with groups.start(
        first.config.layout(identity.world_size), identity, device="cpu", seed=1,
        parallel=first.config.parallel,
    ) as ranks:  # fmt: skip
        for name in names:
            model = build(opened[name], ranks)
            limits = Limits(new_tokens=NEW_TOKENS, seq_length=SEQ_LENGTH, vocab_size=257)
            rows = generate(model.chunks, ranks, PROMPTS, limits, Sampling())
            found[name] = [row.generated for row in rows], difference(model, [row.ids for row in rows])
    if ranks.is_last_stage and ranks.at.dp == ranks.at.tp == 0:
        torch.save(found, output)


def open_model(folder: Path, layout: str, name: str) -> OpenedCheckpoint:
    opened = open_checkpoint(
        ModelFlags(checkpoint=folder / "checkpoints" / name.partition(",")[0], layout=layout, device="cpu")
    )
    if name != CROWDED:
        return opened
    model = dataclasses.replace(
        opened.config.model, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=True
    )
    config = dataclasses.replace(opened.config, model=model)
    return dataclasses.replace(opened, config=config, shape=resolve(model, None))


def difference(model: LoadedModel, rows: Sequence[Sequence[int]]) -> float:
    """Of the cache's logits and whole windows', relative to the largest, after parts and all of each row."""
    chunks, ranks, worst = model.chunks, model.ranks, 0.0
    if no_cache_reason(chunks, ranks):
        return 0.0
    computed = list(range(len(rows)))
    with forward.evaluating(chunks):
        with cached(chunks, len(rows), forward.CachedLogits.length(chunks, ranks, SEQ_LENGTH)) as cache:
            by_cache = forward.CachedLogits(chunks, ranks, cache, computed)
            parts = [[row[: max(1, len(row) - less)] for row in rows] for less in (9, 1, 0)]
            cached_logits = [by_cache(part) for part in parts]
        by_windows = forward.WindowLogits(chunks, ranks, SEQ_LENGTH, computed)
        for part, found in zip(parts, cached_logits, strict=True):
            whole = by_windows(part)
            if found is not None and whole is not None:
                one, other = found[0][:, :257], whole[0][:, :257]
                worst = max(worst, ((one - other).abs().max() / other.abs().max()).item())
    return worst
