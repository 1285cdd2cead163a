"""Greedy texts are those of transformers' ``generate`` on the exported model, for every family, in every layout; logits
with the KV cache are those without."""

from pathlib import Path

import pytest
import torch

from campaign import some
from ranks import run_ranks
from tests.training.generation.families import CROWDED, SHAPES, ours, theirs, write_checkpoints

SUITE = {
    "gpt2_tiny", "deepseek_v3_tiny", "mixtral_tiny", "gpt_oss_tiny", "llama4_tiny", "nemotron_h_tiny",
    "qwen3_next_tiny",
}  # fmt: skip
"""Each way to remember: all others' logits are compared in tests/models/test_hf_parity.py."""
ALL = [name for name in [*SHAPES, CROWDED] if name != "mamba2_tiny"]
QUICK = {
    "tp2sp": ["gpt2_tiny", "deepseek_v3_tiny"],
    "pp2vpp2": ["deepseek_v3_tiny"],
    "dp2ep2": [CROWDED],
}
EXPERTS = [name for name in ALL if SHAPES.get(name, SHAPES["mixtral_tiny"]).num_moe_experts]
DENSE = [name for name in ALL if name not in EXPERTS]
SPLIT = [name for name in ALL if name in DENSE or not SHAPES.get(name, SHAPES["mixtral_tiny"]).fc_bias]
"""Biases of experts that TP splits are refused; with ETP 1 they are among EXPERTS."""
CAMPAIGN = {
    "tp1": ALL, "tp2": DENSE, "tp2sp": SPLIT, "pp2": ALL, "pp2vpp2": ALL, "dp2ep2": EXPERTS, "tp2spep2etp1": EXPERTS,
    "dp2zero2": ALL, "dp2zero3": ALL, "tp2sppp2dp2": SPLIT, "dp3": ALL, "cp2": ALL,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, exported models, and ``theirs.pt``."""
    folder = tmp_path_factory.mktemp("families")
    names = SHAPES if request.config.getoption("campaign") else SUITE
    write_checkpoints(folder, names)
    run_ranks(1, theirs, folder, names, folder / "theirs.pt")
    return folder


def check(folder: Path, layout: str, names: list[str], world_size: int) -> None:
    run_ranks(world_size, ours, folder, layout, names, folder / f"{layout}.pt")
    expected, found = torch.load(folder / "theirs.pt"), torch.load(folder / f"{layout}.pt")
    assert list(found) == names
    for name, (texts, difference) in found.items():
        assert texts == expected[name], f"{name}: not transformers' text"
        assert difference <= 1e-5, f"{name}: logits with the cache are off by {difference:.1e}"
        assert len({token for text in texts for token in text}) > 10, f"{name}: texts that say something"


def test_families_on_one_rank(folder: Path) -> None:
    check(folder, "tp1", [*(name for name in ALL if name in SUITE), CROWDED], 1)


@pytest.mark.parametrize("layout", some(QUICK, ("pp2vpp2",)))
def test_layouts(folder: Path, layout: str) -> None:
    check(folder, layout, QUICK[layout], 2)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", CAMPAIGN)
def test_every_family_in_every_layout(folder: Path, layout: str) -> None:
    check(folder, layout, CAMPAIGN[layout], {"tp1": 1, "tp2sppp2dp2": 8, "dp3": 3}.get(layout, 2))
