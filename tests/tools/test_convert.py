"""tools.convert against transformers itself: families there and back, in our model's logits and in bytes.

What one family alone has is tried in each run of the suite; the names of all are held by tests/models/hf.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from campaign import some
from models.config import ModelConfig
from models.resolve import resolve
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from ranks import run_ranks
from tests.models.hf_weights import hf_config, hf_model, randomise
from tools.convert.__main__ import main
from tools.shared.hf_folder.source import HfFolder
from training.checkpoint.folders import find
from training.checkpoint.format.verify import damages
from training.config.recipe import load

VOCAB, SEQ = 257, 96
NO_GROUPS = {"moe_router_num_groups": 0, "moe_router_group_topk": 0, "moe_router_topk_scaling_factor": 1.0}
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 32}
TIED = {"untie_embeddings_and_output_weights": False}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2_tiny", {}),
    "llama2": ("llama2_tiny", {}),
    "llama2_linear": ("llama2_tiny", {"rope_scaling": "linear", "rope_scaling_factor": 2.5}),
    "llama2_yarn": ("llama2_tiny", YARN),
    "llama3": ("llama3_tiny", {}),
    "llama3_tied": ("llama3_tiny", TIED),
    "mistral": ("mistral_tiny", {}),
    "mixtral": ("mixtral_tiny", {}),
    "qwen2": ("qwen2_tiny", {}),
    "qwen2_tied": ("qwen2_tiny", TIED),
    "qwen3": ("qwen3_tiny", {}),
    "qwen3_moe": ("qwen3_moe_tiny", {"moe_layer_freq": "[0,1,1,0]"}),
    "deepseek_v2": ("deepseek_v2_tiny", {}),
    "deepseek_v2_lite": ("deepseek_v2_tiny", {"q_lora_rank": 0, **NO_GROUPS}),
    "deepseek_v3": ("deepseek_v3_tiny", {"mtp_num_layers": 0}),
    "moonlight": ("moonlight_tiny", {}),
    "kimi_k2": ("kimi_k2_tiny", {}),
    "qwen2_moe": ("qwen2_moe_tiny", {}),
    "gpt_oss": ("gpt_oss_tiny", {}),
    "minimax_m2": ("minimax_m2_tiny", {}),
    "ernie45": ("ernie45_moe_tiny", {}),
    "olmoe": ("olmoe_tiny", {}),
    "llama4": ("llama4_tiny", {"moe_layer_freq": "[0,1,0,1]"}),
    "glm45": ("glm45_tiny", {"mtp_num_layers": 0}),
    "mamba2": ("mamba2_tiny", {}),
    "nemotron_h": ("nemotron_h_tiny", {}),
    "nemotron3": ("nemotron3_tiny", {}),
    "qwen3_5": ("qwen35_tiny", {"num_layers": 2, "linear_attention_freq": "2"}),
    "qwen3_5_moe": ("qwen35_moe_tiny", {"num_layers": 2, "linear_attention_freq": "2"}),
    "qwen3_next": ("qwen3_next_tiny", {"num_layers": 2, "linear_attention_freq": "2"}),
}

SHORT = {
    "gpt2", "llama2_yarn", "llama3_tied", "deepseek_v3", "gpt_oss", "llama4", "nemotron_h", "qwen3_5_moe",
}  # fmt: skip
"""Fused and biased rows, scaled positions, tied, latent with experts, expert biases, stacked experts, mixers, both."""
EACH = some(FAMILIES, SHORT)


def families(root: Path) -> list[str]:
    """Those that this run tries."""
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def some_tokens() -> torch.Tensor:
    """[1, s]"""
    return torch.randint(0, VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def save_theirs(root: Path) -> None:
    """A random model of each family as transformers saves it, and its logits."""
    for name in families(root):
        shape, changes = FAMILIES[name]
        resolved = resolve(ModelConfig(shape=shape, **changes), VOCAB)
        model = hf_model(resolved)
        randomise(model, seed=1, centre=0.0 if resolved.layernorm_zero_centered_gamma else 1.0)
        model.save_pretrained(root / name / "hf")
        np.save(root / name / "logits.npy", model(some_tokens()).logits[0].numpy())


@torch.no_grad()
def our_differences(identity: Identity, root: Path, output: Path) -> None:
    """Each imported checkpoint in our model, split over all ranks: the largest difference to transformers' logits."""
    from models import gpt
    from parallel import groups
    from training.checkpoint.model_state import model_boxes
    from training.checkpoint.restoring import read_weights
    from training.checkpoint.storage import TensorReader

    tp = identity.world_size
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=tp > 1, expert_tensor_parallel_size=1)
    found = {}
    with groups.start(layout_of(parallel, tp), identity, device="cpu", seed=1) as ranks:
        for name in families(root):
            config = load(root / name / "checkpoint" / "config.toml")
            shape, fp32 = resolve(config.model, None), PrecisionConfig(dtype="fp32")
            blueprint = gpt.Blueprint(model=config.model, shape=shape, parallel=parallel, precision=fp32)
            chunks = gpt.build(blueprint, ranks)
            with TensorReader(root / name / "checkpoint") as reader:
                read_weights(reader, model_boxes(chunks, ranks))
            ours = chunks[0].eval()(some_tokens(), torch.arange(SEQ)[None], None)[0]
            first = ours.shape[-1] * identity.rank
            expected = torch.from_numpy(np.load(root / name / "logits.npy"))[:, first : first + ours.shape[-1]]
            found[name] = float((ours[:, : expected.shape[-1]] - expected).abs().max()) if expected.numel() else 0.0
    output.with_suffix(f".{identity.rank}").write_text(json.dumps(found))


@torch.no_grad()
def their_differences(root: Path, output: Path) -> None:
    """Each exported folder in transformers: the largest difference to the logits of the model that it once was."""
    import transformers

    found = {}
    for name in families(root):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            root / name / "again", dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        model.config._experts_implementation = "eager"
        expected = torch.from_numpy(np.load(root / name / "logits.npy"))
        found[name] = float((model(some_tokens()).logits[0] - expected).abs().max())
    output.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each family of this run: hf (transformers' own), checkpoint (imported), again (exported), logits.npy."""
    import transformers

    folder = tmp_path_factory.mktemp("convert")
    for name in FAMILIES if request.config.getoption("campaign") else SHORT:
        (folder / name).mkdir()
    for shape, changes in map(
        FAMILIES.__getitem__, families(folder)
    ):  # imported once, here, and not in every forked rank
        getattr(transformers, type(hf_config(resolve(ModelConfig(shape=shape, **changes), VOCAB))).__name__)
    run_ranks(1, lambda _identity: save_theirs(folder))
    for name in families(folder):
        paths = [str(folder / name / kind) for kind in ("hf", "checkpoint", "again")]
        assert main(["import", "--no_logits", paths[0], paths[1], "--verify"]) == 0
        assert main(["export", paths[1], paths[2], "--verify", "--max_shard_size", "300KB"]) == 0
    return folder


def measured(root: Path, name: str, measure: Callable[[Path], None]) -> dict[str, float]:
    """What ``measure`` writes into the file ``name`` or, one a rank, name.0, name.1, ...: the largest of each."""
    output = root / name
    if not list(root.glob(f"{name}*")):
        measure(output)
    files = [json.loads(path.read_text()) for path in root.glob(f"{name}*")]
    return {family: max(file[family] for file in files) for family in families(root)}


@pytest.mark.parametrize("tp", some([1, 2], [2]))
@pytest.mark.parametrize("family", EACH)
@pytest.mark.campaign
def test_our_model_has_transformers_logits(root: Path, family: str, tp: int) -> None:
    found = measured(root, f"tp{tp}", lambda output: run_ranks(tp, our_differences, root, output))
    assert found[family] < 1e-5


@pytest.mark.parametrize("family", EACH)
@pytest.mark.campaign
def test_transformers_loads_what_is_exported(root: Path, family: str) -> None:
    found = measured(root, "theirs", lambda output: run_ranks(1, lambda _: their_differences(root, output)))
    assert found[family] < 1e-6


@pytest.mark.parametrize("family", EACH)
def test_there_and_back_is_the_same_bytes(root: Path, family: str) -> None:
    with HfFolder(root / family / "hf") as one, HfFolder(root / family / "again") as other:
        assert one.places.keys() == other.places.keys()
        assert len({place.file for place in other.places.values()}) > 1
        for name, place in one.places.items():
            assert (place.dtype, place.shape) == (other.places[name].dtype, other.places[name].shape), name
            rows = [side.rows(name, 0, place.shape[0], place.dtype) for side in (one, other)]
            assert np.array_equal(rows[0], rows[1]), name


@pytest.mark.parametrize("family", EACH)
def test_an_imported_checkpoint_is_a_checkpoint(root: Path, family: str) -> None:
    folder = root / family / "checkpoint"
    assert damages(folder, "hashes", (0, 1)) == []
    assert find(str(folder)) == [folder]
    config = load(folder / "config.toml")
    shape, changes = FAMILIES[family]
    expected = resolve(ModelConfig(shape=shape, **changes), VOCAB)
    found = resolve(config.model, None)
    for field in ("num_layers", "rope_scaling", "rotary_base", "window_blocks", "moe_blocks", "tied", "norm_epsilon"):
        assert getattr(found, field) == getattr(expected, field), field
