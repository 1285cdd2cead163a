"""What each layer of a model gives for the same tokens, fp32 on the CPU, by canonical names in the order of computing.

Shapes: b samples, s tokens, h hidden, v vocabulary.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models import gpt
from models.families import TABLES
from models.shapes import GPTShape
from models.sublayers import block_of
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout
from program.errors import UserError
from tools.parity.compared_model import ComparedModel
from tools.shared.dtypes import round_weights
from training.checkpoint.weights import restore_weights
from training.health.names import parameter_names

Outputs = dict[str, Tensor]
EMBEDDING, NORM, LOGITS, LOSS = "word_embeddings", "final_layernorm", "output_layer", "loss"
GRADIENT = "gradient of "
_SUBLAYER = re.compile(r"decoder\.layers\.(\d+)\.(self_attention|mlp|mixer)")
_OF_DEPTH = re.compile(r"mtp\.layers\.(\d+)\.mtp_model_layer\.layers\.\d+\.(self_attention|mlp)")


def write_outputs(model: ComparedModel, tokens: Tensor, output: Path, gradients: bool, dtype: str) -> None:
    """Save the outputs of ``model`` for tokens [b, s + 1]: name -> fp32 [b, s, h]; logits [b, s, v], the loss a number.

    gradients: with every parameter's, of the loss; Triplane's models only. dtype: weights are rounded to it first.
    Raises UserError where it cannot run.
    """
    found = _ours(model, tokens, gradients, dtype) if model.is_ours else _theirs(model, tokens, dtype)
    torch.save({name: tensor.detach().float().contiguous() for name, tensor in found.items()}, output)


def _ours(model: ComparedModel, tokens: Tensor, gradients: bool, dtype: str) -> Outputs:
    """Of Triplane's model, whole on one rank."""
    config, shape = model.config, model.shape
    assert config is not None
    start = groups.start(Layout(), Identity(), device="cpu", seed=config.train.seed)
    with start as ranks:
        blueprint = gpt.Blueprint(
            model=config.model, shape=shape, parallel=config.parallel, precision=config.precision,
            seed=config.train.seed,
        )  # fmt: skip
        (chunk,) = gpt.build(blueprint, ranks)
        if model.checkpoint is not None:
            with model.checkpoint.reading() as files:
                restore_weights(files, [chunk], ranks)
        round_weights(chunk.eval(), dtype)
        found: Outputs = {}
        record(our_modules(shape, chunk), found, lambda output: output.transpose(0, 1))
        depths = record_logits(chunk.output_layer, found)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        with torch.set_grad_enabled(gradients):
            losses = chunk(inputs, positions, None, labels=labels)
            found[LOSS] = losses.mean()
            if gradients:
                found[LOSS].backward()
        found |= _named_logits(depths, shape.vocab_size)
        found[LOSS] = found.pop(LOSS)  # last
        for param, name in parameter_names([chunk]).items():
            if param.grad is not None:
                found[GRADIENT + name] = param.grad
        return found


def our_modules(shape: GPTShape, chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by the names of their outputs."""
    for path, module in chunk.named_modules():
        if isinstance(module, IdentityOp):  # the half that a sublayer has not
            continue
        if match := _SUBLAYER.fullmatch(path):
            yield f"layers.{block_of(shape, int(match[1]) + 1)[0]}.{match[2]}", module
        elif match := _OF_DEPTH.fullmatch(path):
            yield f"mtp.{match[1]}.{match[2]}", module
        elif path in ("embedding", "decoder.final_norm"):
            yield (EMBEDDING if path == "embedding" else NORM), module


def record_logits(output_layer: nn.Module, found: Outputs) -> list[Tensor]:
    """Logits [b, s, v] of each call: of the depths of multi-token prediction, and then of the model. Copies: the loss
    overwrites them."""
    calls: list[Tensor] = []
    output_layer.register_forward_hook(
        lambda _module, _inputs, output: calls.append(output[0].detach().transpose(0, 1).clone())
    )
    return calls


def _named_logits(calls: list[Tensor], vocab_size: int) -> Outputs:
    *depths, own = (call[..., :vocab_size] for call in calls)
    return {f"mtp.{depth}.{LOGITS}": logits for depth, logits in enumerate(depths)} | {LOGITS: own}


def _theirs(model: ComparedModel, tokens: Tensor, dtype: str) -> Outputs:
    """Of transformers' model. Nothing is downloaded, no code of the folder is run."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise UserError(
            f"{model.path} is a Hugging Face folder, and transformers cannot be imported: {error}."
        ) from None
    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, local_files_only=True, trust_remote_code=False, attn_implementation="eager"
    ).eval()
    round_weights(loaded, dtype)
    found: Outputs = {}
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    record(_their_modules(loaded, model), found, lambda output: output.view(*inputs.shape, -1))
    with torch.no_grad():
        logits = loaded(inputs, use_cache=False).logits
    found[LOGITS] = logits
    found[LOSS] = cross_entropy(logits.flatten(0, 1), labels.flatten())
    return found


def _their_modules(loaded: nn.Module, model: ComparedModel) -> Iterator[tuple[str, nn.Module]]:
    is_gpt2 = model.model_type == "gpt2"
    yield EMBEDDING, loaded.get_submodule("transformer.drop" if is_gpt2 else "model.embed_tokens")
    for block in range(model.shape.num_layers):
        parts = dict(loaded.get_submodule(f"{TABLES[model.model_type].prefix}{block}").named_children())
        for name, theirs in (("self_attention", ("attn", "self_attn")), ("mlp", ("mlp", "block_sparse_moe"))):
            yield f"layers.{block}.{name}", next(parts[one] for one in theirs if one in parts)
    yield NORM, loaded.get_submodule("transformer.ln_f" if is_gpt2 else "model.norm")


def record(modules: Iterator[tuple[str, nn.Module]], found: Outputs, as_samples: Callable[[Tensor], Tensor]) -> None:
    """Note each module's first output by its name, with its bias where it returns one beside it. Multi-token prediction
    embeds further tokens by the same module, later."""

    def note(name: str, output: Any) -> None:
        if name in found:
            return
        bias = None
        if isinstance(output, tuple):
            output, bias = (*output, None)[:2]
        output = output.detach()
        if isinstance(bias, Tensor) and bias.shape == output.shape[-1:]:
            output = output + bias.detach()
        found[name] = as_samples(output).clone()

    for name, module in modules:
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
