"""transformers' own model of a case, with the exported weights: logits, and what its routers said.

Documents that do not see one another are computed as what they are: texts of their own, side by side, each a row that
is padded behind its end, where a causal model cannot look. So there is no mask, and it holds for mixers, windows and
chunks of attention as for plain attention.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from models.hf.other_keys import TOKEN_IDS
from models.hf.shapes import write_config
from models.hf.tables import constants
from models.shapes import GPTShape
from tests.models.hf_weights import hf_mtp_model, of_each_expert
from tests.oracle.batches import Microbatch
from tests.oracle.exported import State, without_depths
from tests.oracle.qk_clip import Logits

WITHOUT_POSITIONS = ("mamba2", "nemotron_h")
"""Whose models take none."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Of one microbatch, by the model or by one depth of prediction."""

    logits: Tensor
    """[b, s, v]"""
    routers: list[Tensor]
    """Logits of each, [b, s, E]."""
    chosen: list[Tensor]
    """Experts of each, [b, s, topk]."""


@dataclass
class Reference:
    """The model, and its depths of multi-token prediction."""

    shape: GPTShape
    model: Any
    """transformers', for causal language modelling."""
    mtp: Any
    """transformers' MtpModel; None without."""
    heard: list[Tensor] = field(default_factory=list)
    """Logits [tokens, E] of each router that ran, padding included."""
    chosen: list[Tensor] = field(default_factory=list)
    """Of each that ran the experts [tokens, topk], likewise; not of Llama 4, whose experts get no numbers."""
    logits: Logits | None = None
    """With QK-clip."""

    def outputs(self, batch: Microbatch) -> Iterator[Output]:
        """Of the model, and of each depth of prediction."""
        if self.mtp is not None:
            yield from self._depths(batch)
            return
        rows, real = _rows(batch)
        self._listen(real)
        logits = self.model(input_ids=rows["input_ids"], use_cache=False, **self._positions(rows)).logits
        yield self._output(logits, real, batch)

    def _depths(self, batch: Microbatch) -> Iterator[Output]:
        """Logits of the model and of each depth k, which takes the depth before and the tokens k places on
        (arXiv:2412.19437, section 2.2); where there are none, as megatron-core has it, token 0. As ``logits``."""
        assert self.mtp is not None
        length, positions = batch.tokens.shape[1], batch.positions
        rows, real = _rows(batch)
        causal = torch.full((1, 1, length, length), -torch.inf).triu(1)
        self._listen(real)
        hidden = self.model.model(input_ids=batch.tokens, use_cache=False, **self._positions(rows)).last_hidden_state
        ahead = batch.tokens
        for depth in range(1 + self.shape.mtp_num_layers):
            if depth:
                ahead = torch.cat([ahead[:, 1:], torch.zeros_like(ahead[:, :1])], dim=1)
                embedded = self.mtp.embed_tokens(ahead)
                self._listen()
                hidden = self.mtp.layers[depth - 1](
                    embedded,
                    hidden,
                    position_embeddings=self.mtp.rotary_emb(embedded, position_ids=positions),
                    attention_mask=causal,
                    position_ids=positions,
                    past_key_values=None,
                )
            yield self._output(self.model.lm_head(hidden), real, batch)

    def gradients(self) -> State:
        """Of every parameter, as transformers would save it."""
        from transformers.core_model_loading import revert_weight_conversion

        own = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        found = State(revert_weight_conversion(self.model, own))
        for name, param in self._mtp_parameters():
            _, depth, rest = name.split(".", 2)
            prefix = f"model.layers.{self.shape.num_layers + int(depth)}."
            rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            assert param.grad is not None, name
            found |= {prefix + each: part for each, part in of_each_expert(rest, param.grad)}
        return found

    def words(self) -> set[str]:
        """Names of word embeddings and output layer, by transformers' own modules, as it would save them."""
        from transformers.core_model_loading import revert_weight_conversion

        modules = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        own = {id(module.weight) for module in modules}
        found = {name: param.detach() for name, param in self.model.named_parameters() if id(param) in own}
        return set(revert_weight_conversion(self.model, found))

    def _mtp_parameters(self) -> list[tuple[str, nn.Parameter]]:
        if self.mtp is None:
            return []
        return [(name, param) for name, param in self.mtp.named_parameters() if name.startswith("layers.")]

    def _positions(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        positions = rows["position_ids"]
        if torch.equal(positions, torch.arange(positions.shape[1]).expand_as(positions)):
            return {}
        # Positions that restart would be taken for documents apart, were there no mask.
        return {"position_ids": positions, "attention_mask": torch.ones_like(positions)}

    def _listen(self, begun: Tensor | None = None) -> None:
        """begun: of a forward pass, which of its places are real."""
        self.heard.clear()
        self.chosen.clear()
        if begun is not None and self.logits is not None:
            self.logits.begin(begun)

    def _output(self, logits: Tensor, real: Tensor, batch: Microbatch) -> Output:
        def without_padding(tensor: Tensor) -> Tensor:
            return tensor.view(*real.shape, -1)[real].view(*batch.tokens.shape, -1)

        return Output(
            logits=without_padding(logits),
            routers=[without_padding(one) for one in self.heard],
            chosen=[without_padding(one) for one in self.chosen],
        )


def _rows(batch: Microbatch) -> tuple[dict[str, Tensor], Tensor]:
    """One document a row, and which of its places are real: [documents, longest]."""
    spans = [(row, first, last) for row, spans in enumerate(batch.documents) for first, last in spans]
    longest = max(last - first for _, first, last in spans)
    real = torch.zeros(len(spans), longest, dtype=torch.bool)
    tokens, positions = torch.zeros(len(spans), longest).long(), torch.zeros(len(spans), longest).long()
    for number, (row, first, last) in enumerate(spans):
        size = last - first
        real[number, :size] = True
        tokens[number, :size] = batch.tokens[row, first:last]
        positions[number, :size] = batch.positions[row, first:last]
        positions[number, size:] = batch.positions[row, last - 1] + torch.arange(1, longest - size + 1)
    return {"input_ids": tokens, "position_ids": positions}, real


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Within, transformers' models compute in fp64 where they ask for fp32, as norms, softmax and routers do: torch's
    names of the one stand for the other. For a process of its own; weights are doubled before."""
    names = {(torch, "float32"): torch.float64, (torch, "float"): torch.float64, (Tensor, "float"): Tensor.double}
    kept = {(owner, name): getattr(owner, name) for owner, name in names}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for (owner, name), value in names.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in kept.items():
            setattr(owner, name, value)
        torch.set_default_dtype(default)


def load(shape: GPTShape, weights: State, folder: Path, logits: Logits | None = None) -> Reference:
    """In fp64, through a folder as an export writes it. logits: are to hear what attention computes."""
    import transformers

    model_type, config = write_config(without_depths(shape))
    plain = {name: tensor for name, tensor in weights.items() if not _of_depth(name, shape)}
    # xIELU's eps, below which transformers lets expm1 begin, is 0, as in arXiv:2411.13010: its derivative has no jump.
    plain |= {
        name: torch.tensor(0.0 if name.endswith(".eps") else value)
        for name, value in constants(model_type, shape).items()
    }
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"chunk_size": 16} if "M" in shape.hybrid_layer_pattern else {}  # of a scan: the result is the same
    ends = dict.fromkeys(TOKEN_IDS, 0) | {"pad_token_id": None}  # not every class takes None for each
    (folder / "config.json").write_text(json.dumps(config | ends | {"dtype": "float32"}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    reference = Reference(shape, model.double().eval(), None, logits=logits)
    if shape.mtp_num_layers:
        model.config.num_mtp_layers = shape.mtp_num_layers
        if getattr(model.config, "layer_types", None) is not None:
            model.config.mtp_layer_types = [model.config.layer_types[-1]] * shape.mtp_num_layers
        if hasattr(model.config, "decoder_sparse_step"):  # a depth is as the last block, not as the next one would be
            dense = [] if shape.moe_blocks[-1] else [shape.num_layers + depth for depth in range(shape.mtp_num_layers)]
            model.config.decoder_sparse_step, model.config.mlp_only_layers = 1, dense
        reference.mtp = hf_mtp_model(model, shape).double()
        _load_depths(reference, weights)
    modules = [*model.modules(), *(reference.mtp.layers.modules() if reference.mtp is not None else ())]
    if logits is not None:
        logits.listen(modules)
    for module in modules:
        for name in ("gate", "router"):
            router: Any = getattr(module, name, None)
            if _is_router(router, shape):
                router.register_forward_pre_hook(
                    lambda module, inputs: reference.heard.append(_said(module, inputs[0]))
                )
        if (experts := getattr(module, "experts", None)) is not None:
            experts.register_forward_pre_hook(lambda _, inputs: reference.chosen.extend(_numbers(inputs)))
    return reference


def _said(router: Any, hidden: Tensor) -> Tensor:
    bias = getattr(router, "bias", None)
    return linear(hidden.reshape(-1, router.weight.shape[1]), router.weight, bias)


def _numbers(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [one.reshape(-1, one.shape[-1]) for one in inputs if not one.is_floating_point()]


def _is_router(module: Any, shape: GPTShape) -> bool:
    weight = getattr(module, "weight", None)
    return bool(shape.num_moe_experts) and weight is not None and weight.shape[0] == shape.num_moe_experts


def _of_depth(name: str, shape: GPTShape) -> bool:
    return any(f".layers.{shape.num_layers + depth}." in name for depth in range(shape.mtp_num_layers))


@torch.no_grad()
def _load_depths(reference: Reference, weights: State) -> None:
    """transformers stacks experts in memory: gates before the others."""
    shape = reference.shape
    assert reference.mtp is not None
    state = {name: value for name, value in reference.mtp.layers.state_dict().items() if not name.startswith("embed")}
    for name, target in state.items():
        depth, _, rest = name.partition(".")
        prefix = f"model.layers.{shape.num_layers + int(depth)}."
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        for each, part in of_each_expert(rest, target):  # views of the target
            part.copy_(weights[prefix + each])
