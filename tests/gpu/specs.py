"""On a rank: the model of Transformer Engine's modules against our own, on the same weights."""

import json
import os
import traceback
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.models.backends import BackendSpecProvider
from torch import Tensor, nn

from models import gpt
from models.config import ModelConfig
from models.families import TINY
from models.layers.spec import PortableProvider, provider
from models.names import canonical
from models.resolve import resolve
from parallel import groups
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.groups import Ranks
from parallel.launch import Identity
from parallel.layout import layout_of
from parallel.regions import boxes_of, whole_tensors

Outputs = dict[str, Tensor]
"""Logits and gradients by name, fp32, on the host."""

MODEL = ModelConfig(
    shape="debug",
    hidden_size=256,
    ffn_hidden_size=704,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=256,
)
MODELS = {"dense": MODEL} | {name: ModelConfig(shape=name, seq_length=256) for name in TINY}


CASES: dict[str, tuple[Literal["fp32", "bf16"], str]] = {
    **{f"fp32-{name}": ("fp32", name) for name in MODELS},
    "bf16-dense": ("bf16", "dense"),
}
"""Row -> dtype and model. bf16 rounds a router's input, so that some tokens go to other experts: that would say nothing
about modules."""


def measure(identity: Identity, names: list[str], results: str, device: Literal["cpu", "cuda"] = "cuda") -> None:
    """Largest relative differences of logits and of any gradient, a line of JSON each as soon as it is there; of a case
    that fails, its error.

    fp32 needs NVIDIA_TF32_OVERRIDE=0 in the environment: Transformer Engine would use TF32.
    """
    start = groups.start(layout_of(ParallelConfig(), 1), identity, device=device, seed=1)
    with start as ranks, Path(results).open("a") as file:
        for name in names:
            found = compared(ranks, *CASES[name])
            print(json.dumps({"name": name} | found), file=file, flush=True)
            if "error" in found:
                end_where_poisoned(ranks.device)


def compared(ranks: Ranks, dtype: Literal["fp32", "bf16"], name: str) -> dict[str, Any]:
    """``differences``, or the error."""
    precision = PrecisionConfig(dtype=dtype)
    try:
        theirs = outputs(provider(ranks.device), precision, ranks, MODELS[name])
        return differences(theirs, outputs(PortableProvider(), precision, ranks, MODELS[name]))
    except Exception as error:  # the other families are still worth their time
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def end_where_poisoned(device: torch.device) -> None:
    """After an error of CUDA every later call fails, in another case's name; the process's own end may hang."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def outputs(
    backend: BackendSpecProvider, precision: PrecisionConfig, ranks: Ranks, model: ModelConfig = MODEL
) -> Outputs:
    """Logits and gradients of one batch of two samples, without the padding of the vocabulary."""
    shape = resolve(model, 257)
    kernels = gpt.Kernels(backend=backend)
    (chunk,) = gpt.build(gpt.Blueprint(model=model, shape=shape, precision=precision, kernels=kernels), ranks)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab_size, (2, model.seq_length + 1), generator=generator).to(ranks.device)
    positions = torch.arange(model.seq_length, device=ranks.device).expand(2, -1)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with torch.no_grad():
        logits = chunk(tokens, positions, None)[..., : shape.vocab_size]
    chunk(tokens, positions, None, labels=labels).float().mean().backward()
    return {"logits": logits.float().cpu()} | gradients(chunk)


@torch.no_grad()
def gradients(chunk: nn.Module) -> Outputs:
    """By canonical name and place. They replace the weights, where the checkpoint's names find them."""
    for param in chunk.parameters():
        assert param.grad is not None
        param.copy_(param.grad)
    return {f"{canonical(box.key)} at {box.offset}": box.data.float().cpu() for box in boxes_of(whole_tensors(chunk))}


def differences(theirs: Outputs, ours: Outputs) -> dict[str, Any]:
    """Largest difference relative to each tensor's largest element: of the logits, and of the worst gradient.

    Raises RuntimeError where the two models do not have the same parameters.
    """
    if theirs.keys() != ours.keys():
        raise RuntimeError(f"only one of the two models has {sorted(theirs.keys() ^ ours.keys())}")
    relative = {name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs}
    logits = relative.pop("logits")
    worst = max(relative, key=lambda name: relative[name])
    return {"logits": logits, "gradient": relative[worst], "worst": worst, "tensors": len(relative)}
