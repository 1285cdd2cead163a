"""DCP folders as FSDP2 leaves them, of transformers' own models, and with torchtitan's names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from parallel.launch import Identity
from ranks import run_ranks

STEPS = 2


def build(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' own class, with weights of seed 1."""
    torch.manual_seed(1)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    )
    return model


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    """Steps of a size that shows."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))


def train(model: torch.nn.Module, optimizer: torch.optim.AdamW, rank: int, world: int, vocab_size: int) -> None:
    """A few steps of one batch, of which each rank has its part."""
    tokens = torch.randint(vocab_size, (4, 16), generator=torch.Generator().manual_seed(2))
    for _ in range(STEPS):
        mine = tokens.chunk(world)[rank]
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


Save = Callable[[torch.nn.Module, torch.optim.Optimizer, Path], None]


def on_fsdp_ranks(save: Save, *models: tuple[dict[str, Any], Path], world: int = 2) -> None:
    """Train with FSDP2 on a CPU's ranks, one model after the other, and save each in its folder."""
    store = models[0][1].parent
    store.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):  # imports their classes, once for all ranks
        for config, _ in models:
            build(config)

    def run(identity: Identity) -> None:
        method = f"file://{store}/ranks.store"
        dist.init_process_group("gloo", init_method=method, rank=identity.rank, world_size=world)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for config, folder in models:
            model = build(config)
            layers = getattr(getattr(model, "model", None), "layers", None) or model.transformer.h  # type: ignore[union-attr]
            for layer in layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = optimizer_of(model)
            train(model, optimizer, identity.rank, world, config["vocab_size"])
            save(model, optimizer, folder)
            dist.barrier()
        dist.destroy_process_group()

    run_ranks(world, run)


def save_nested(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """PyTorch's own recipe: {"model": ..., "optimizer": ...}."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def save_as_accelerate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Two folders, as save_fsdp_model and save_fsdp_optimizer make."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")


# ---- torchtitan


TITAN = {
    r"^model\.embed_tokens\.": "tok_embeddings.", r"^model\.norm\.": "norm.", r"^model\.layers\.": "layers.",
    r"\.self_attn\.([qkv])_proj\.": r".attention.qkv_linear.w\1.", r"\.self_attn\.o_proj\.": ".attention.wo.",
    r"\.self_attn\.([qk])_norm\.": r".attention.\1_norm.", r"\.mlp\.gate\.": ".moe.router.gate.",
    r"\.mlp\.gate_proj\.": ".feed_forward.w1.", r"\.mlp\.up_proj\.": ".feed_forward.w3.",
    r"\.mlp\.down_proj\.": ".feed_forward.w2.", r"\.input_layernorm\.": ".attention_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
}  # fmt: skip


def titan_name(name: str) -> str:
    for pattern, new in TITAN.items():
        name = re.sub(pattern, new, name)
    return name


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Its from_hf: [heads, 2, channels / 2, columns] -> [heads, channels / 2, 2, columns]."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def as_titan_of_2026(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """transformers' tensors as torchtitan's model of the same function has them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            prefix = titan_name(name).removesuffix("mlp.experts.gate_up_proj") + "moe.routed_experts.inner_experts."
            found |= {prefix + "w1_EFD": gate.contiguous(), prefix + "w3_EFD": up.contiguous()}
        elif name.endswith("experts.down_proj"):
            prefix = titan_name(name).removesuffix("mlp.experts.down_proj") + "moe.routed_experts.inner_experts."
            found[prefix + "w2_EDF"] = tensor
        else:
            heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
            match = re.search(r"self_attn\.([qk])_proj", name)
            turned = config["model_type"] == "llama" and match
            found[titan_name(name)] = interleaved(tensor, config[heads[match[1]]]) if turned and match else tensor
    return found


OLD = {
    r"\.qkv_linear\.": ".", r"^lm_head\.": "output.", r"\.routed_experts\.inner_experts\.": ".experts.",
    r"_E(FD|DF)$": "",
}  # fmt: skip
"""Names of 2025."""


def old_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for pattern, old in OLD.items():
            name = re.sub(pattern, old, name)
        found[name] = tensor
    return found


def save_as_titan(
    weights: dict[str, Any], states: dict[str, dict[str, Any]], config: Any, folder: Path, is_old: bool = False
) -> None:
    """Model flat beside the optimizer, whose states are flat by name; other states as it has them."""

    def as_titan(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = as_titan_of_2026(tensors, config)
        return old_names(found) if is_old else found

    content: dict[str, Any] = dict(as_titan(weights, config))
    flat: dict[str, Any] = {}
    for state in ("exp_avg", "exp_avg_sq"):
        turned = as_titan({name: each[state] for name, each in states.items()}, config)
        flat |= {f"state.{name}.{state}": tensor for name, tensor in turned.items()}
    for name in as_titan(weights, config):
        flat |= {f"state.{name}.step": torch.tensor(float(STEPS)), f"param_groups.{name}.lr": 1e-2}
    content |= {"optimizer": flat, "train_state": {"step": torch.tensor(STEPS)}, "lr_scheduler": {"last_epoch": STEPS}}
    dcp.save(content, checkpoint_id=folder, no_dist=True)


def load_and_compare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """The model was trained as the folder's was; what is loaded over it, after more steps, are the same numbers."""
    weights, states = get_state_dict(model, optimizer)
    before = {name: tensor.full_tensor().clone() for name, tensor in weights.items()}
    moments = {name: state["exp_avg_sq"].full_tensor().clone() for name, state in states["state"].items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            optimizer.state[param]["exp_avg_sq"].zero_()
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    weights, states = get_state_dict(model, optimizer)
    assert before.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor.full_tensor(), before[name]), name
        assert torch.equal(states["state"][name]["exp_avg_sq"].full_tensor(), moments[name]), name
    assert {float(state["step"]) for state in states["state"].values()} == {2.0}
