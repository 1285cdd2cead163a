"""Qwen3.5's files hold a model of text and images: refused with the command that saves its text model, which comes in.

The command is run as the message has it, by transformers, on random models of its own classes.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from campaign import some
from models.families import TINY
from models.hf.shapes import read_shape, write_config
from ranks import run_ranks
from tests.models.hf_weights import hf_config
from tools.convert.__main__ import main

PUBLISHED: dict[str, Any] = {
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000, "rope_type": "default",
    },
    "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}  # fmt: skip
"""Keys of text_config in the files on the hub."""
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
KINDS = {
    "dense": ("qwen35_tiny", True),
    "experts": ("qwen35_moe_tiny", True),
    "experts_fused": ("qwen35_moe_tiny", False),
}
"""Our shape, and whether files have each expert's tensors, as transformers writes them, or as on the hub all in one."""


SUITE = ["experts_fused"]


def save_whole(folder: Path, shape: str, each_expert: bool) -> None:
    """A random model of text and images as transformers saves it."""
    import transformers

    family = "Qwen3_5Moe" if TINY[shape].num_moe_experts else "Qwen3_5"
    text = write_config(TINY[shape])[1]
    kept = {key: value for key, value in text.items() if not key.startswith(("rope_", "partial_", "layer_types"))}
    config = getattr(transformers, f"{family}Config")(text_config=kept | PUBLISHED, vision_config=VISION)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.save_pretrained(folder, save_original_format=each_expert)


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each kind tried: whole, the message that refuses it; text, as its command saves that; checkpoint; again."""
    folder = tmp_path_factory.mktemp("qwen35")
    for kind in KINDS if request.config.getoption("campaign") else SUITE:
        shape, each_expert = KINDS[kind]
        hf_config(TINY[shape])  # transformers is imported once, here
        own = folder / kind
        run_ranks(1, lambda _, own=own, shape=shape, each=each_expert: save_whole(own / "whole", shape, each))
        (own / "refused").write_text(message(own / "whole"))
        run_ranks(1, lambda _, own=own: follow(own))
        assert main(["import", "--no_logits", str(own / "text"), str(own / "checkpoint"), "--verify"]) == 0
        assert main(["export", str(own / "checkpoint"), str(own / "again"), "--verify"]) == 0
    return folder


def message(folder: Path) -> str:
    """What reading this folder's configuration is refused with."""
    with pytest.raises(Exception, match="is not supported") as error:
        read_shape(json.loads((folder / "config.json").read_text()))
    return str(error.value)


def follow(folder: Path) -> None:
    """Run the message's command on the folder's model."""
    (code,) = re.findall(r'python -c "([^"]+)"', (folder / "refused").read_text())
    exec(code.replace("FOLDER", str(folder / "whole")).replace("TEXT", str(folder / "text")))


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a folder's files, each expert's by itself, under the text model's names."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                plain, found = name.replace("model.language_model.", "model."), file.get_tensor(name)
                if ".experts." not in plain or found.dim() == 2:
                    yield plain, found
                    continue
                for expert, matrix in enumerate(found):
                    stem, _, last = plain.rpartition(".")
                    halves = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
                    for part, rows in halves.items() if last == "gate_up_proj" else [(last, matrix)]:
                        yield f"{stem}.{expert}.{part}.weight", rows


@pytest.mark.parametrize("kind", some(KINDS, SUITE))
def test_the_model_of_text_and_images_is_refused_with_a_command(
    root: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "--no_logits", str(root / kind / "whole"), str(tmp_path / "checkpoint")]) == 2
    said = capsys.readouterr().err
    assert (root / kind / "refused").read_text() in said
    assert "it is a model of text and images" in said and "model.visual." in said


@pytest.mark.parametrize("kind", some(KINDS, SUITE))
def test_the_text_model_that_the_command_saves_goes_through_bit_by_bit(root: Path, kind: str) -> None:
    whole = dict(tensors(root / kind / "whole"))
    expected = {name: tensor for name, tensor in whole.items() if "visual" not in name}
    assert len(expected) < len(whole)
    found = dict(tensors(root / kind / "again"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.campaign
def test_experts_come_in_one_tensor_or_each_alone(root: Path) -> None:
    def names(kind: str) -> set[str]:
        with safe_open(root / kind / "text" / "model.safetensors", "pt") as file:
            return set(file.keys())

    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in names("experts_fused")
    assert "model.language_model.layers.0.mlp.experts.0.gate_proj.weight" in names("experts")


@pytest.mark.parametrize("kind", some(KINDS, SUITE))
def test_published_keys_mean_the_same_model(root: Path, kind: str) -> None:
    model_type, shape = read_shape(json.loads((root / kind / "text" / "config.json").read_text()))
    assert write_config(shape) == write_config(TINY[KINDS[kind][0]])
    assert shape.hf_model_type == model_type
