"""``tools.parity --against``: a model and its export compute the same in each layer, and a changed weight is named."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import runs
from campaign import param, some
from data.prepared import Prepared
from models.families import named
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main as convert
from tools.parity.__main__ import main
from tools.parity.against import compare

SHORT = "--train.train_iters 1 --train.global_batch_size 4".split()
LAYOUTS = {
    "llama3_tiny": "--precision.dtype bf16 --parallel.pipeline_model_parallel_size 2",
    "mixtral_tiny": "--parallel.expert_model_parallel_size 2",
    "deepseek_v3_tiny": "--parallel.data_parallel_sharding_strategy optim_grads_params",
    "gpt2_tiny": "",
}
"""Each trained on two ranks, in a layout of its own."""
SUITE = ["llama3_tiny", "deepseek_v3_tiny"]


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each shape that is tried, and its export."""
    import transformers

    for name in ("LlamaForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "GPT2LMHeadModel"):
        getattr(transformers, name)  # once, here, and not in every forked process
    folder = tmp_path_factory.mktemp("against")
    for shape in LAYOUTS if request.config.getoption("campaign") else SUITE:
        config = runs.configuration(folder / shape, "--model.shape", shape, *LAYOUTS[shape].split(), *SHORT)
        runs.train(prepared, config, 2)
        assert convert(["export", str(folder / shape / "checkpoints/iter_0000001"), str(folder / f"{shape}_hf")]) == 0
    return folder


def printed(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main([str(one) for one in arguments])
    return (code, *capfd.readouterr())


def spoiled(folder: Path, target: Path, tensor: str, place: int, value: float) -> Path:
    """A copy of a Hugging Face folder with one element of a tensor changed."""
    shutil.copytree(folder, target)
    (path,) = target.glob("*.safetensors")
    tensors = load_file(path)
    tensors[tensor].view(-1)[place] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("shape", some(LAYOUTS, SUITE))
@pytest.mark.campaign
def test_a_checkpoint_and_its_export_compute_the_same(
    shape: str, pairs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = printed(capfd, pairs / shape, "--against", pairs / f"{shape}_hf")
    assert (code, err) == (0, ""), out
    assert "12 outputs are equal; furthest" in out  # embedding, 4 x (attention, MLP), last norm, logits, loss
    assert ("the weights of both rounded to bfloat16" in out) is (shape == "llama3_tiny")
    assert ("not compared: mtp.0.mlp, which only the model has" in out) is (shape == "deepseek_v3_tiny")


@pytest.mark.parametrize(
    "shape, tensor, place, value, weight",
    [
        param(("llama3_tiny", "model.layers.1.mlp.up_proj.weight", 70, 2.0,
               "layers.1.mlp.linear_fc1.weight: 1 of 22,528 elements differ, most at [177, 6]: ")),
        param(("mixtral_tiny", "model.layers.1.block_sparse_moe.gate.weight", 3, 5.0,
               "layers.1.mlp.router.weight: 1 of 256 elements differ, most at [0, 3]: ")),
        ("deepseek_v3_tiny", "model.layers.1.mlp.shared_experts.down_proj.weight", 5, float("nan"),
         "layers.1.mlp.shared_experts.linear_fc2.weight: 1 of 2,048 elements differ, most at [0, 5]: "),
    ],
    ids=list(LAYOUTS)[:3],
)  # fmt: skip
def test_a_weight_that_was_changed_in_block_1s_mlp_is_named(
    shape: str, tensor: str, place: int, value: float, weight: str, pairs: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    reference = spoiled(pairs / f"{shape}_hf", tmp_path / "hf", tensor, place, value)
    code, out, _ = printed(capfd, pairs / shape, "--against", reference)
    assert code == 1
    assert "of 12 outputs differ. First: layers.1.mlp; the 4 before it are equal\n" in out, out
    assert f"weights behind it that differ:\n  {weight}" in out
    assert out.rstrip().endswith(f"instead of {value:g}")  # one weight, and no difference of configurations


@pytest.mark.campaign
def test_weights_in_16_bits_are_compared_with_others_rounded_to_them(
    pairs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs, imported = pairs / "deepseek_v3_tiny_hf", tmp_path / "imported"
    assert convert(["import", str(theirs), str(imported), "--dtype", "bfloat16", "--no_logits"]) == 0
    code, out, _ = printed(capfd, imported, "--against", theirs)
    assert code == 0 and "imported from deepseek_v3_tiny_hf" in out and "both rounded to bfloat16" in out


def test_gradients_are_compared_where_both_are_ours(
    pairs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Depths of multi-token prediction, too; the same initial weights with another weight of their loss."""
    run = pairs / "deepseek_v3_tiny"
    code, out, _ = printed(capfd, run / "checkpoints/iter_0000001", "--against", run)
    assert code == 0 and "15 outputs are equal; furthest word_embeddings: 0.0e+00" in out
    assert " gradients are equal; furthest gradient of output_layer.weight: 0.0e+00" in out
    recipes = []
    for factor in (0.1, 0.4):
        recipes.append(tmp_path / f"{factor}.toml")
        text = runs.DEBUG.read_text().replace(
            'shape = "debug"', f'shape = "llama3_tiny"\nmtp_num_layers = 1\nmtp_loss_scaling_factor = {factor}'
        )
        recipes[-1].write_text(text)
    code, out, _ = printed(capfd, recipes[0], "--against", recipes[1])
    assert code == 1 and "15 outputs are equal" in out
    assert "gradients differ. First: gradient of output_layer.weight; nothing comes before it" in out


def test_what_cannot_be_compared_is_bad_input(pairs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    llama = pairs / "llama3_tiny"
    small = write_folder(tmp_path / "small", dataclasses.replace(named("llama3_tiny"), num_layers=2))
    assert small
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "mamba"}')
    for arguments, words in (
        ((llama, "--against", tmp_path / "nothing"), "expected a checkpoint"),
        ((tmp_path / "no.toml", "--against", llama), "no such recipe"),
        ((llama, "--against", tmp_path / "other"), "mamba"),
        ((llama, "--against", tmp_path / "small"), "models of other sizes: num_layers 4 and 2"),
        ((llama, "--against", llama, "--num_samples", "0"), "--num_samples"),
    ):
        code, out, err = printed(capfd, *arguments)
        assert code == 2 and words in err and not out and err.count("\n") == 1, err
    damaged = tmp_path / "damaged"
    shutil.copytree(llama, damaged)
    (file, *_) = sorted((damaged / "checkpoints/iter_0000001").glob("*.bin"))
    file.write_bytes(file.read_bytes()[:-9])
    code, _, err = printed(capfd, damaged, "--against", llama)
    assert code == 2 and "is damaged" in err


def test_what_is_not_finite_differs() -> None:
    numbers, spoiled_numbers = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    spoiled_numbers[1, 2] = np.nan
    for pair in ((numbers, spoiled_numbers), (spoiled_numbers, numbers), (spoiled_numbers, spoiled_numbers)):
        found = compare(*pair, "x")
        assert found.relative == np.inf and found.place == (1, 2)
    assert compare(numbers, numbers, "x").relative == 0
