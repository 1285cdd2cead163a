"""tools.reshard reads DeepSpeed's ZeRO folders, which are written here in its layout: the suite does not need it.

By hand, with DeepSpeed 0.19.8 on CPU ranks (bf16 and fp32; 2 and 3 ranks; ZeRO-1, 2 and 3; llama, and qwen3 with tied
embeddings; two parameter groups): weights are those of its own zero_to_fp32.py, bit by bit, and the moments of ZeRO-1,
2 and 3 after the same steps are each other's.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from campaign import some
from models.families import TINY
from tests.tools.deepspeed_folders import MOMENTS, STEP, LossScaler, Tensors, save, save_with_classes
from tests.tools.hf_folders import write_folder
from tests.tools.test_reshard_untrusted import Touch
from tools.convert.__main__ import main as convert
from tools.reshard.__main__ import main
from training.checkpoint.format.reader import FileReader
from training.checkpoint.state import read_state

SHAPES = ("llama2_tiny", "qwen3_moe_tiny")


def imported(folder: Path) -> dict[str, np.ndarray]:
    target = folder.with_name(f"{folder.name}_imported")
    assert convert(["import", str(folder), str(target), "--no_logits"]) == 0
    with FileReader(target) as reader:
        return {key: reader.whole(key) for key in reader.tensors}


class Model:
    """Random weights and moments by transformers' names, and what tools.convert makes of them."""

    def __init__(self, root: Path, shape: str) -> None:
        self.weights: Tensors = write_folder(root / "hf", TINY[shape], dtype=torch.float32)
        self.config = root / "hf/config.json"
        self.expected = {"param": imported(root / "hf")}
        self.moments: dict[str, Tensors] = {}
        for number, state in enumerate(MOMENTS):
            generator = torch.Generator().manual_seed(number)
            self.moments[state] = {
                name: torch.rand(each.shape, generator=generator) for name, each in self.weights.items()
            }
            (root / state).mkdir()
            shutil.copy(self.config, root / state)
            save_file(self.moments[state], root / state / "model.safetensors")
            self.expected[state] = imported(root / state)

    def check(self, target: Path) -> None:
        """That a checkpoint has all of it."""
        with FileReader(target) as reader:
            assert len(reader.tensors) == 3 * len(self.expected["param"])
            for state, tensors in self.expected.items():
                for key, words in tensors.items():
                    assert np.array_equal(reader.whole(f"optimizer.state.{state}.{key}"), words), (state, key)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {shape: Model(tmp_path_factory.mktemp(shape), shape) for shape in SHAPES}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("stage", "ranks", "padding"), some([(1, 2, 0), (2, 3, 5), (3, 2, 0), (3, 5, 0)], [(1, 2, 0), (2, 3, 5), (3, 5, 0)])
)
def test_all_ranks_files_are_one_model(
    stage: int, ranks: int, padding: int, shape: str, models: dict[str, Model], tmp_path: Path
) -> None:
    model = models[shape]
    save(tmp_path / "theirs", model.weights, model.moments, stage, ranks, padding=padding)
    given = [str(tmp_path / "theirs"), str(tmp_path / "ours"), "--recipe", str(model.config), "--verify"]
    assert main(given) == 0
    model.check(tmp_path / "ours")
    state = read_state(tmp_path / "ours")
    assert (state.progress.iteration, state.progress.consumed_samples) == (STEP, 40)
    assert state.optimizer["step"] == STEP


def test_a_tied_output_layer_is_shared(models: dict[str, Model], tmp_path: Path) -> None:
    """Whichever of the two names DeepSpeed has kept."""
    model = models["llama2_tiny"]
    config = json.loads(model.config.read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for kept, shared in (("lm_head.weight", "model.embed_tokens.weight"), ("model.embed_tokens.weight",) * 2):
        folder = tmp_path / kept
        weights = {name: each for name, each in model.weights.items() if "embed" not in name and "lm_head" not in name}
        weights[kept] = model.weights["lm_head.weight"]
        moments = {
            state: {name: model.moments[state]["lm_head.weight" if name == kept else name] for name in weights}
            for state in MOMENTS
        }
        alias = {shared: kept} if shared != kept else {"lm_head.weight": kept}
        save(folder, weights, moments, 3, 2, shared_params=alias)
        target = tmp_path / f"{kept}_ours"
        assert main([str(folder), str(target), "--recipe", str(tmp_path / "config.json")]) == 0
        with FileReader(target) as reader:
            found = reader.whole("optimizer.state.exp_avg.embedding.word_embeddings.weight")
        assert np.array_equal(found, model.expected["exp_avg"]["output_layer.weight"])


# ---- what is refused


def lose(folder: Path, _: Path) -> None:
    next(folder.glob("*rank_1_*optim*")).unlink()


def cut(folder: Path, _: Path) -> None:
    path = next(folder.glob("*rank_0_*optim*"))
    path.write_bytes(path.read_bytes()[:-3000])


def flip(folder: Path, _: Path) -> None:
    path = next(folder.glob("*rank_0_*optim*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def of_another_step(folder: Path, _: Path) -> None:
    content = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    content["module"]["model.norm.weight"] += 1
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def tensor_parallel(folder: Path, _: Path) -> None:
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")


def pipeline(folder: Path, _: Path) -> None:
    (folder / "layer_01-model_00-model_states.pt").touch()


def code(folder: Path, witness: Path) -> None:
    scaler = LossScaler()
    vars(scaler)["attack"] = Touch(witness)
    save_with_classes({"module": {}, "loss_scaler": scaler}, folder / "mp_rank_00_model_states.pt")


def nonsense(folder: Path, _: Path) -> None:
    torch.save({"module": 3, "param_shapes": {"a": None}}, folder / "mp_rank_00_model_states.pt")


DAMAGES: dict[Callable[[Path, Path], None], str] = {
    lose: r"1 optim_states\.pt of 2\. Copy all",
    cut: "not what torch.save writes",
    flip: "is damaged: 1 of its storages",
    of_another_step: r"fp32 weights of model\.norm\.weight do not round to the model's",
    tensor_parallel: "several tensor-parallel ranks of DeepSpeed",
    pipeline: "of DeepSpeed's pipeline",
    code: r"refused, nothing was run: it names posix\.system",
    nonsense: "not what DeepSpeed writes",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(
    damage: Callable[[Path, Path], None],
    models: dict[str, Model],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = models["llama2_tiny"]
    save(tmp_path / "theirs", model.weights, model.moments, 2, 2)
    damage(tmp_path / f"theirs/global_step{STEP}", tmp_path / "executed")
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--recipe", str(model.config)]) == 2
    said = capsys.readouterr().err
    assert re.search(DAMAGES[damage], said)
    assert said.count("\n") == 1
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "ours").exists()


def test_without_a_model(models: dict[str, Model], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models["llama2_tiny"]
    save(tmp_path / "theirs", model.weights, model.moments, 2, 2)
    given: list[Any] = [str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main(given) == 2
    assert "--recipe config.json" in capsys.readouterr().err
