"""Headers, indices and numbers of Hugging Face folders that claim what cannot be: one message each, at once."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.families import TINY
from program.errors import UserError
from tests.tools.hf_folders import write_folder
from tests.tools.test_convert_training import EOS, SHAPE, SIDE, write_tokenizer
from tools.convert.__main__ import main
from tools.shared.hf_folder.headers import read_header, read_places
from training.config.recipe import load

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADERS: dict[str, tuple[Any, int, str]] = {
    "no object": ([1], 16, "expected an object"),
    "entry without offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "a.data_offsets is missing"),
    "offset below 0": ({"a": F32 | {"data_offsets": [-16, 0]}}, 16, "a.data_offsets: expected"),
    "dim below 0": ({"a": F32 | {"shape": [-2, -2]}}, 16, "a.shape: expected"),
    "dim that is true": ({"a": F32 | {"shape": [True, 4]}}, 16, "a.shape: expected"),
    "dims whose product is 0 in 64 bits": (
        {"a": F32 | {"shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}}, 0, "expected 73,786,976,294,838,206,464"
    ),
    "dims beyond all bounds": ({"a": F32 | {"shape": [1 << 62]}}, 16, "a.shape: expected"),
    "too many dims": ({"a": F32 | {"shape": [1] * 9, "data_offsets": [0, 4]}}, 4, "a has 9 dims; expected at most 8"),
    "size that is not the shape's": ({"a": F32 | {"data_offsets": [0, 12]}}, 12, "a F32 [2, 2]: expected 16 bytes"),
    "behind the file's end": ({"a": F32}, 15, "cut short: a ends at byte"),
    "overlap": ({"a": F32, "b": F32 | {"data_offsets": [8, 24]}}, 24, "b begins at byte 8 of the data; expected 16"),
    "gap": ({"a": F32, "b": F32 | {"data_offsets": [20, 36]}}, 36, "b begins at byte 20 of the data; expected 16"),
    "gap at first": ({"a": F32 | {"data_offsets": [8, 24]}}, 24, "a begins at byte 8 of the data; expected 0"),
    "bytes that nothing describes": ({"a": F32}, 20, "bytes, which its header describes; found"),
    "control character": ({"a\x1b[31m": F32}, 16, "names in text"),
}  # fmt: skip


def write_header(path: Path, header: Any, data_bytes: int, claimed: int | None = None) -> None:
    """A safetensors file of zeros. claimed: the header's length, where it is not the true one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text + bytes(data_bytes))


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_does_not_fit_its_file_is_refused(kind: str, tmp_path: Path) -> None:
    header, size, expected = HEADERS[kind]
    write_header(tmp_path / "model.safetensors", header, size)
    with pytest.raises(UserError) as error:
        read_header(tmp_path / "model.safetensors")
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("claimed", [17, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, claimed: int) -> None:
    write_header(tmp_path / "a.safetensors", {}, 0, claimed)
    with pytest.raises(UserError, match="not a safetensors file: expected a header of at most 2 bytes"):
        read_header(tmp_path / "a.safetensors")


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    entry = json.dumps(F32)
    write_header(tmp_path / "a.safetensors", f'{{"a": {entry}, "a": {entry}}}'.encode(), 16)
    with pytest.raises(UserError, match='"a" is there twice'):
        read_header(tmp_path / "a.safetensors")


INDICES: dict[str, tuple[Any, str]] = {
    "a file above": ({"a": "../one.safetensors"}, 'expected names of .safetensors files beside it, found "../one'),
    "an absolute file": ({"a": "/etc/one.safetensors"}, "expected names of .safetensors files beside it"),
    "a pickle": ({"a": "one.bin"}, "expected names of .safetensors files beside it"),
    "a number": ({"a": 1}, "weight_map.a: expected a string, found 1"),
    "no tensors": ({}, "expected tensors and the files that hold them, found none"),
    "no such file": ({"a": "none.safetensors"}, "names it, but it is not there"),
    "a tensor that the file lacks": (
        {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"}, "one.safetensors lacks c"
    ),
    "a tensor that is not mapped": ({"a": "one.safetensors"}, "one.safetensors holds, beside what is mapped to it, b"),
    "a tensor of the other file": (
        {"a": "one.safetensors", "b": "two.safetensors"}, "one.safetensors holds, beside what is mapped to it, b"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_is_compared_with_the_files(kind: str, tmp_path: Path) -> None:
    weight_map, expected = INDICES[kind]
    write_header(tmp_path / "one.safetensors", {"a": F32, "b": F32 | {"data_offsets": [16, 32]}}, 32)
    write_header(tmp_path / "two.safetensors", {"d": F32}, 16)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError) as error:
        read_places(tmp_path)
    assert expected in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_nothing_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("../blobs/gone")
    with pytest.raises(UserError, match=rf"{name}: a link to \.\./blobs/gone, which is not there"):
        read_places(tmp_path)


def test_weights_in_two_ways_are_refused(tmp_path: Path) -> None:
    """transformers takes the single file then, whatever the index says."""
    write_header(tmp_path / "one.safetensors", {"a": F32}, 16)
    write_header(tmp_path / "model.safetensors", {"a": F32}, 16)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(UserError, match="has both"):
        read_places(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    (tmp_path / "hf" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "hf" / name)
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 2
    assert f"{name}: expected a regular file, found a FIFO" in capsys.readouterr().err
    assert not list(tmp_path.glob("checkpoint*"))


HUGE = 1 << 62
NUMBERS: list[tuple[str, dict[str, Any]]] = [
    *[("llama2_tiny", {"rms_norm_eps": value}) for value in (-1, 0, 1e30, True, "1e-6")],
    *[("llama2_tiny", {key: HUGE}) for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size",
                                               "num_attention_heads", "num_key_value_heads", "head_dim")],
    ("llama2_tiny", {"num_hidden_layers": True}),
    ("llama2_tiny", {"num_attention_heads": 5, "head_dim": None}),
    ("llama2_tiny", {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": None}),
    ("llama2_tiny", {"num_key_value_heads": 3}),
    ("llama2_tiny", {"rope_parameters": {"rope_theta": 0}, "rope_theta": None}),
    ("llama2_tiny", {"rope_parameters": {"rope_theta": HUGE}, "rope_theta": None}),
    ("llama2_tiny", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}, "rope_theta": None}),
    ("llama2_tiny", {"tie_word_embeddings": "no"}),
    ("llama2_tiny", {"attention_bias": 0}),
    ("llama2_tiny", {"eos_token_id": 1e30}),
    ("llama2_tiny", {"eos_token_id": [2, "x"]}),
    ("llama2_tiny", {"attention_dropout": -0.1}),
    ("gpt2_tiny", {"n_head": 7}),
    ("mistral_tiny", {"sliding_window": HUGE}),
    ("qwen3_moe_tiny", {"num_experts": HUGE}),
    ("qwen3_moe_tiny", {"mlp_only_layers": [HUGE]}),
    ("qwen3_moe_tiny", {"decoder_sparse_step": HUGE}),
    ("deepseek_v3_tiny", {"n_shared_experts": HUGE}),
    ("deepseek_v3_tiny", {"first_k_dense_replace": 4}),
    ("deepseek_v3_tiny", {"num_nextn_predict_layers": HUGE}),
    ("deepseek_v3_tiny", {"routed_scaling_factor": -2.5}),
    ("deepseek_v3_tiny", {"head_dim": 6}),
]  # fmt: skip


@pytest.mark.parametrize("name, change", NUMBERS, ids=[str(change) for _, change in NUMBERS])
def test_a_number_out_of_bounds_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: dict[str, Any]
) -> None:
    write_folder(tmp_path / "hf", TINY[name], config=change)
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 2
    assert next(iter(change)).removeprefix("rope_") in capsys.readouterr().err
    assert not list(tmp_path.glob("checkpoint*"))


@pytest.mark.parametrize(
    "name, change",
    [
        ("llama2_tiny", {"num_hidden_layers": 10_000}),
        ("llama2_tiny", {"intermediate_size": 1 << 24, "vocab_size": (1 << 31) - 1}),
        ("llama2_tiny", {"num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16, "num_hidden_layers": 10_000}),
        ("qwen3_moe_tiny", {"num_experts": 1 << 16, "num_hidden_layers": 10_000}),
    ],
)
def test_a_model_far_larger_than_its_files_is_refused_before_it_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: dict[str, Any]
) -> None:
    """Each within its bounds; together they name billions of tensors and rows."""
    write_folder(tmp_path / "hf", TINY[name], config=change)
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 2
    said = capsys.readouterr().err
    assert " lacks model.layers." in said or "has shapes that differ" in said


ODD = '[1000000000000000019884624838656, 1e30, NaN, -Infinity, "\\ud800", "\\u0000", {"a\\u0001": null}]'
"""What the libraries that write and read these files take, and is not used here."""
NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


def with_odd(text: str) -> str:
    """An object of the folder's own with ODD put into it."""
    return text.replace("{", f'{{"has_no_reader": {ODD}, "nor_this": 1, "nor_this": 2, ', 1)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_what_has_no_reader_is_carried_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: str
) -> None:
    """And named, where it is a key of the model's configuration."""
    hf, imported = tmp_path / "hf", tmp_path / "checkpoint"
    write_folder(hf, SHAPE, config={"bos_token_id": 0, "eos_token_id": 1, "rope_scaling": None})
    write_tokenizer(hf)
    for name in NAMES:
        text = (hf / name).read_text() if (hf / name).exists() else SIDE[name]
        (hf / name).write_text(mark + with_odd(text))
    (hf / "chat_template.json").write_text("no JSON at all")
    (hf / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1e30, "x": float("nan")},
                    "weight_map": dict.fromkeys(load_file(hf / "model.safetensors"), "model.safetensors")})
    )  # fmt: skip
    assert main(["import", "--no_logits", str(hf), str(imported)]) == 0
    said = capsys.readouterr().out
    assert "keys that say nothing to transformers' llama, nor to Triplane: has_no_reader, nor_this." in said
    assert "no tokenizer" not in said and load(imported / "config.toml").data.eod_token == EOS
    assert main(["export", str(imported), str(tmp_path / "out")]) == 0
    for name in (*NAMES[1:], "chat_template.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert repr(exported["has_no_reader"]) == repr(json.loads(ODD)) and exported["nor_this"] == 2


def test_code_of_the_folder_s_own_may_read_what_transformers_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "hf", SHAPE, config={"auto_map": {"AutoModel": "modeling.Mine"}, "use_gates": True})
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 2
    assert "use_gates = True: unknown, and code that comes with the model may read it" in capsys.readouterr().err


def test_tensors_that_no_model_has_may_be_of_any_dtype(tmp_path: Path) -> None:
    """Masks of old GPT-NeoX files are truth values, and their sizes are checked like others'."""
    masks = {f"gpt_neox.layers.{block}.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool) for block in range(4)}
    write_folder(tmp_path / "hf", TINY["pythia_tiny"], tensors=dict(masks))
    assert main(["import", "--no_logits", "--verify", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0


def test_constants_that_lie_beside_weights_are_those_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"model.layers.1.mlp.act_fn.beta": torch.tensor(0.7)}
    write_folder(tmp_path / "hf", TINY["apertus_tiny"], tensors=dict(other))
    assert main(["import", "--no_logits", str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 2
    assert "model.layers.1.mlp.act_fn.beta is 0.7; expected 0.5" in capsys.readouterr().err
