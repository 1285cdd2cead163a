"""transformers' own model of one of our shapes, and its weights under our canonical names, for tests."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from models.families import TABLES
from models.hf.shapes import write_config
from models.hf.tables import entries, is_computed
from models.names import canonical
from models.shapes import GPTShape
from parallel.regions import boxes_of, whole_tensors

State = dict[str, Tensor]
XIELU_CONSTANTS = ("mlp.act_fn.beta", "mlp.act_fn.eps")
"""Apertus saves them with its weights."""


def hf_config(shape: GPTShape) -> Any:
    """transformers' configuration of this architecture, as an export writes it."""
    import transformers

    values = write_config(shape)[1]
    no_padding = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return transformers.AutoConfig.for_model(**values | no_padding)


def hf_model(shape: GPTShape) -> Any:
    """transformers' model for evaluation, in fp32, with its plain attention and its loop over experts."""
    import transformers

    config = hf_config(shape)
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int, centre: float = 1.0) -> None:
    """Random values for every parameter and saved buffer, such that none can be missed without changing the output.

    Matrices halve what they multiply: with larger ones, transformers' own fp32 logits are 2e-5 from its fp64 ones for
    DeepSeek's, and with these 2e-6. Norms' weights differ from ``centre``, biases from 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith(XIELU_CONSTANTS):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise * 0.5 * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_((0.0 if name.endswith("bias") else centre) + 0.3 * noise)


def hf_mtp_model(theirs: Any, shape: GPTShape) -> Any:
    """transformers' multi-token prediction beside ``theirs``, whose embedding and output layer it uses."""
    from transformers.modeling_layers import MtpModel

    return MtpModel(theirs, shape.mtp_num_layers).float().eval()


def canonical_weights(model: Any, shape: GPTShape) -> State:
    """Every tensor of transformers' model, under our canonical names, in our layout, by the tables of models.hf.

    Raises AssertionError for tensors of theirs that ours has no place for.
    """
    from transformers.core_model_loading import revert_weight_conversion

    theirs = revert_weight_conversion(model, dict(model.state_dict()))  # as it would save them: each expert alone
    plain = dataclasses.replace(shape, mtp_num_layers=0)
    if shape.tied:
        theirs.pop(TABLES[write_config(shape)[0]].whole["output_layer.weight"].names[0], None)
    return arranged(theirs, plain)


def canonical_mtp_weights(mtp: nn.Module, shape: GPTShape) -> State:
    """Those of transformers' multi-token prediction that it has of its own, likewise."""
    theirs: State = {}
    for name, tensor in mtp.state_dict().items():
        if name in ("embed_tokens.weight", "shared_head.weight"):
            continue
        _, depth, rest = name.split(".", 2)
        prefix = f"model.layers.{shape.num_layers + int(depth)}."
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        theirs |= {prefix + each: part for each, part in of_each_expert(rest, tensor)}
    return arranged(theirs, shape, "mtp.")


def of_each_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers stacks experts in memory only: [E, 2 f, h] with the gate's rows before the others, and [E, h, f]."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        if kind == "down_proj":
            yield f"{stem}.{expert}.down_proj.weight", matrix
        else:
            for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                yield f"{stem}.{expert}.{part}.weight", half


def arranged(theirs: State, shape: GPTShape, prefix: str = "") -> State:
    """Their tensors as ours, for all of our parameters whose canonical names begin with ``prefix``."""
    model_type = write_config(shape)[0]
    weights, unused = {}, {name for name in theirs if not is_computed(model_type, name)}
    for entry in entries(model_type, shape):
        if not entry.name.startswith(prefix):
            continue
        whole = torch.zeros(entry.rows, entry.columns)
        for strip in entry.strips:
            unused.discard(strip.name)
            source = theirs[strip.name].mT if entry.transposed else theirs[strip.name]
            part = source.reshape(-1, entry.columns)[strip.theirs]
            whole[strip.row : strip.row + strip.rows] = part
        weights[entry.name] = whole[: shape.vocab_size] if entry.padded else whole.reshape(entry.shape)
    assert not unused, f"ours has no place for {', '.join(sorted(unused))}"
    return weights


@torch.no_grad()
def copy_into(chunk: nn.Module, weights: State) -> None:
    """Set all of a chunk's parameters and its routers' biases, on any layout, from whole tensors.

    Rows of the vocabulary that are only padding become 3.0, which must not show. Raises AssertionError for a tensor
    that no entry of this chunk took, for a shape that differs, and for a parameter that nothing set.
    """
    for param in chunk.parameters():
        param.fill_(torch.nan)
    unused = set(weights)
    for box in boxes_of(whole_tensors(chunk)):
        name = canonical(box.key)
        source = weights[name]
        unused.discard(name)
        if name in ("word_embeddings.weight", "output_layer.weight"):
            source = nn.functional.pad(source, (0, 0, 0, box.global_shape[0] - source.shape[0]), value=3.0)
        assert tuple(source.shape) == box.global_shape, f"{name}: {source.shape}, not {box.global_shape}"
        offsets = zip(box.offset, box.data.shape, strict=True)
        box.data.copy_(source[tuple(slice(start, start + size) for start, size in offsets)])
    assert not unused, f"this chunk has no {', '.join(sorted(unused))}"
    unset = [name for name, param in chunk.named_parameters() if param.isnan().any()]
    assert not unset, f"nothing set {', '.join(unset)}"
