"""Hugging Face folders of random numbers, without transformers: names and shapes as the tables have them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.hf.shapes import write_config
from models.hf.tables import entries
from models.shapes import GPTShape


def write_folder(
    folder: Path,
    shape: GPTShape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes the folder: its tensors. config, tensors: what is put over what the tables say; None takes away."""
    model_type, values = write_config(shape)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, torch.Tensor | None] = {
        name: torch.randn(size, generator=generator).to(dtype)
        for entry in entries(model_type, shape)
        for name, size in entry.their_shapes().items()
    }
    found |= tensors or {}
    kept = {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values | (config or {})))
    save_file(kept, folder / "model.safetensors")
    return kept
