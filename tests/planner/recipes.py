"""How Megatron-Bridge's published runs ran: what its performance recipes said at the release of each.

``recipes.csv`` was read on 2026-11-22 from NVIDIA-NeMo/Megatron-Bridge: the configurations of models with experts in
scripts/performance at its tags v0.1.0rc4 (release 25.09), v0.2.0 (25.11), v0.3.0 (26.02), v0.3.1 (26.02.01), v0.4.0
(26.04), v0.4.1 (26.04.01), v0.5.0 (26.06) and v0.5.1 (26.06.01), and src/megatron/bridge/perf_recipes at 067f987df
(26.08) for what none of these has. slow_bias_gradients: experts with biases on cudnn-frontend 1.24.0, which v0.5.1
pins (v0.5.0 1.23.0, v0.6.0 1.26.0), and which a footnote of the table blames for 26.06.01's slow GPT-OSS. A line holds
from its release on until the next one of the same run. Layouts and figures are not in it: those are in the published
tables.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.planner.models import model_name

RECIPES = Path(__file__).with_name("recipes.csv")


@dataclass(kw_only=True, slots=True, frozen=True)
class Recipe:
    """Of one model, card and number format."""

    overlaps_tp: bool
    """tp_comm_overlap."""
    dispatcher: str
    """alltoall, deepep or hybridep."""
    overlaps_dispatch: bool
    cuda_graphs: str
    """none; part: attention and router; full: whole iterations."""
    fused_experts: bool
    slow_bias_gradients: bool
    fp8_attention: bool
    fp8_head: bool
    recomputes: tuple[str, ...]
    """Megatron's recompute_modules."""


def release(row: Mapping[str, str]) -> tuple[int, ...] | None:
    """Of the container that a row of Megatron-Bridge's performance summary was measured in: (26, 4, 1)."""
    found = re.search(r"Megatron-Bridge performance summary (\d+)\.(\d+)(?:\.(\d+))?", row.get("source", ""))
    return tuple(int(part or 0) for part in found.groups()) if found else None


def recipe(row: Mapping[str, str]) -> Recipe | None:
    """Of a row of that summary; None where no recipe is known."""
    at = release(row)
    name = model_name(row).replace("deepseekv", "deepseek_v")
    key = (name, row.get("gpu", "").split("-")[0], row.get("precision", "").strip("?"))
    known = [] if at is None else [found for since, found in _recipes().get(key, ()) if since <= at]
    return known[-1] if known else None


@cache
def _recipes() -> dict[tuple[str, str, str], list[tuple[tuple[int, ...], Recipe]]]:
    found: dict[tuple[str, str, str], list[tuple[tuple[int, ...], Recipe]]] = {}
    with RECIPES.open(newline="") as file:
        for line in csv.DictReader(file):
            parts = [int(part) for part in line["since"].split(".")]
            own = Recipe(
                overlaps_tp=line["overlaps_tp"] == "1",
                dispatcher=line["dispatcher"],
                overlaps_dispatch=line["overlaps_dispatch"] == "1",
                cuda_graphs=line["cuda_graphs"],
                fused_experts=line["fused_experts"] == "1",
                slow_bias_gradients=line["slow_bias_gradients"] == "1",
                fp8_attention=line["fp8_attention"] == "1",
                fp8_head=line["fp8_head"] == "1",
                recomputes=tuple(line["recomputes"].split("+")),
            )
            since = (parts[0], parts[1], parts[2] if len(parts) > 2 else 0)
            found.setdefault((line["model"], line["gpu"], line["precision"]), []).append((since, own))
    return found
