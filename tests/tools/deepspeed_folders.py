"""Folders in the layout of DeepSpeed 0.19.8's save_checkpoint. Real ones were compared by hand: see the docstring of
test_reshard_deepspeed.py."""

import math
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

STEP = 5
MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


LossScaler = type("LossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})


def save_with_classes(content: Any, path: Path) -> None:
    """torch.save of objects of classes that only DeepSpeed has: the pickle names them."""
    module = LossScaler.__module__
    names = [module.rsplit(".", depth)[0] for depth in range(module.count(".") + 1)]
    with patch.dict(sys.modules, {name: types.ModuleType(name) for name in names}):
        vars(sys.modules[module])["LossScaler"] = LossScaler
        torch.save(content, path)


def groups_of(weights: Tensors) -> list[Tensors]:
    """With and without weight decay."""
    return [
        {name: each for name, each in weights.items() if each.ndim > 1},
        {name: each for name, each in weights.items() if each.ndim < 2},
    ]


def model_states(weights: Tensors, stage: int, **more: Any) -> dict[str, Any]:
    rounded = {name: each.to(torch.bfloat16) for name, each in weights.items()}
    return {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in weights} if stage == 3 else rounded,
        "buffer_names": [], "optimizer": None, "frozen_param_shapes": {}, "frozen_param_fragments": {},
        "param_shapes": [{name: each.shape for name, each in group.items()} for group in groups_of(weights)],
        "shared_params": {}, "global_steps": STEP, "global_samples": 40, "ds_version": "0.19.8",
        "dp_world_size": 2, "mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": stage}}, **more,
    }  # fmt: skip


def flat_parts(group: list[torch.Tensor], ranks: int, padding: int) -> tuple[list[torch.Tensor], list[int]]:
    """ZeRO-1 and 2: one vector, cut for the ranks; each parameter has some padding behind it; the last part is lean."""
    paddings = [padding] * len(group)
    pieces = [part for each in group for part in (each.reshape(-1), torch.full((padding,), 9.0))]
    whole = torch.cat(pieces)
    size = 2 * ranks * math.ceil(len(whole) / (2 * ranks)) // ranks
    return list(whole.split(size)), paddings


def stage_3_parts(group: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """Each parameter cut for the ranks, with padding; a rank's parts one after another."""
    found: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for each in group:
        own = math.ceil(each.numel() / ranks)
        padded = torch.cat([each.reshape(-1), torch.full((own * ranks - each.numel(),), 9.0)])
        for rank in range(ranks):
            found[rank].append(padded[rank * own : (rank + 1) * own])
    return [torch.cat(parts) for parts in found]


def save(folder: Path, weights: Tensors, moments: dict[str, Tensors], stage: int, ranks: int, **more: Any) -> None:
    """more: padding, and elements of model_states."""
    padding = more.pop("padding", 0)
    tag = folder / f"global_step{STEP}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    everything = {"param": weights, **moments}
    parts: dict[str, list[list[torch.Tensor]]] = {}
    paddings: list[list[int]] = []
    for state, tensors in everything.items():
        groups = [list(group.values()) for group in groups_of({name: tensors[name] for name in weights})]
        if stage == 3:
            merged = stage_3_parts([each for group in groups for each in group], ranks)
            cut = len(merged[0]) // 3  # sub-groups end anywhere
            parts[state] = [[part[:cut].clone(), part[cut:].clone()] for part in merged]
        else:
            found = [flat_parts(group, ranks, padding) for group in groups]
            parts[state] = [[group[0][rank].clone() for group in found] for rank in range(ranks)]
            paddings = [group[1] for group in found]
    scaler = LossScaler()
    vars(scaler)["cur_scale"] = 1.0
    for rank in range(ranks):
        inner = {
            number: {"step": torch.tensor(float(STEP)), **{each: parts[each][rank][number] for each in MOMENTS}}
            for number in range(len(parts["param"][rank]))
        }
        base = {"state": inner, "param_groups": [{"lr": 0.01, "params": [0]}]}
        state: dict[str, Any] = {"loss_scaler": scaler, "zero_stage": stage, "partition_count": ranks}
        if stage == 3:
            state |= {"fp32_flat_groups": parts["param"][rank], "optimizer_state_dict": base}
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save(model_states(weights, stage, **more), tag / name)
        else:
            state |= {"single_partition_of_fp32_groups": parts["param"][rank], "base_optimizer_state": base}
            state |= {"param_alignment_paddings": paddings, "partition_count": [ranks, ranks]}
        save_with_classes(
            {"optimizer_state_dict": state, "ds_version": "0.19.8"},
            tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    if stage < 3:
        torch.save(model_states(weights, stage, **more), tag / "mp_rank_00_model_states.pt")
