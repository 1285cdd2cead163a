"""Folders as Megatron-LM's --ckpt-format torch leaves them: of megatron-core's modules, or with older names."""

import argparse
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend

from checkpoint_parts import Parts
from models.names import canonical
from models.shapes import GPTShape
from parallel.ddp import unwrap
from training.checkpoint.format.reader import FileReader


def write(path: Path, content: dict[str, Any], old_format: bool = False) -> None:
    """One rank's file; data-parallel ranks write the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(content, temporary, _use_new_zipfile_serialization=not old_format)
    temporary.replace(path)


def settings(**more: Any) -> argparse.Namespace:
    """What parse_args gives, with values that are no plain data."""
    kinds = {"model_type": ModelType.encoder_or_decoder, "attention_backend": AttnBackend.auto}
    return argparse.Namespace(**kinds, params_dtype=torch.bfloat16, consumed_train_samples=32, **more)


def save_ranks(parts: Parts, folder: Path) -> None:
    """What Megatron-LM's save_checkpoint writes: get_checkpoint_name and generate_state_dict."""
    groups = parts.ranks.pgs
    tp, pp, ep = groups.tp, groups.pp, groups.ep
    name = f"mp_rank_{tp.rank():02d}" + (f"_{pp.rank():03d}" if pp.size() > 1 else "")
    name += f"_{ep.rank():03d}" if ep.size() > 1 else ""
    several = len(parts.chunks) > 1
    models = {
        f"model{number}" if several else "model": unwrap(chunk).state_dict_for_save_checkpoint()
        for number, chunk in enumerate(parts.chunks)
    }
    args = settings(
        tensor_model_parallel_size=tp.size(), pipeline_model_parallel_size=pp.size(),
        expert_model_parallel_size=ep.size(),
    )  # fmt: skip
    generators = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 2, **models, "rng_state": [generators]}
    write(folder / name / "model_optim_rng.pt", content | {"optimizer": parts.optimizer.state_dict()})
    dist.barrier()


def train_and_save(parts: Parts, folder: Path) -> None:
    """Ours beside Megatron's, of the same moment."""
    parts.train(2)
    parts.keep(folder / "ours")
    save_ranks(parts, folder / "theirs/iter_0000002")


OLD_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "{attention}.query_key_value.",
    "self_attention.linear_proj.": "{attention}.dense.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
CUT_ALONG = {"query_key_value": 0, "dense_h_to_4h": 0, "dense.weight": 1, "dense_4h_to_h.weight": 1}


def old_order(rows: torch.Tensor, version: float, heads: int, channels: int) -> torch.Tensor:
    """One rank's rows of today, [heads, 3, channels], as they were: [3, heads, channels], or [heads, channels, 3]."""
    split = rows.reshape(heads, 3, channels, *rows.shape[1:])
    turned = split.transpose(0, 1) if version == 0 else split.transpose(1, 2)
    return turned.reshape(rows.shape) if version < 2 else rows


def save_old(ours: Path, shape: GPTShape, folder: Path, version: float, tp: int, pp: int, **more: Any) -> None:
    """A checkpoint of weights as Megatron-LM wrote it before megatron-core. more: attention's name; old_format."""
    attention, old_format = more.get("attention", "self_attention"), more.get("old_format", False)
    per_stage = shape.num_layers // pp
    with FileReader(ours) as reader:
        tensors = {canonical(key): torch.from_numpy(reader.whole(key).view(np.float32)) for key in reader.tensors}
    for t in range(tp):
        for p in range(pp):
            encoder: dict[str, torch.Tensor] = {}
            for name, whole in tensors.items():
                kind, _, rest = name.partition(".")
                if kind == "layers":
                    number, _, rest = rest.partition(".")
                    if int(number) // per_stage != p:
                        continue
                    ending = next(end for end in OLD_NAMES if rest.startswith(end))
                    old = OLD_NAMES[ending].format(attention=attention) + rest.removeprefix(ending)
                    axis = next((axis for end, axis in CUT_ALONG.items() if end in old), None)
                    own = whole if axis is None else whole.chunk(tp, dim=axis)[t]
                    if "query_key_value" in old:
                        own = old_order(own, version, shape.num_attention_heads // tp, shape.kv_channels)
                    encoder[f"layers.{int(number) % per_stage}.{old}"] = own.clone()
                elif kind == "final_layernorm" and p == pp - 1:
                    encoder[name] = whole
            model: dict[str, Any] = {"transformer": encoder} if attention == "attention" else {"encoder": encoder}
            embedding = tensors["word_embeddings.weight"].chunk(tp)[t]
            if p == 0:
                model["embedding"] = {
                    "word_embeddings": {"weight": embedding},
                    "position_embeddings": {"weight": tensors["position_embeddings.weight"]},
                }
            head = {"word_embeddings_for_head": {"weight": embedding}} if p == pp - 1 and pp > 1 else {}
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            content = {"iteration": 7, "model": {"language_model": model, **head}}
            content |= {"checkpoint_version": version} if version else {}
            write(folder / name / "model_optim_rng.pt", content, old_format)
