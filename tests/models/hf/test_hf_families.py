"""Keys of configurations that several families share, read as transformers reads them; model types that overlap."""

import dataclasses
from typing import Any

import pytest

from models.families import ARCHITECTURES, SHAPES, TINY
from models.hf.shapes import read_shape, write_config
from models.shapes import GPTShape
from program.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


def read(name: str, **changes: Any) -> GPTShape:
    """What a tiny shape's configuration means with other values, without those that are \"absent\"."""
    config = write_config(TINY[name])[1] | changes
    return read_shape({key: value for key, value in config.items() if value != "absent"})[1]


ON = {"use_sliding_window": True, "sliding_window": 9}
WINDOWS: dict[str, tuple[str, dict[str, Any], list[bool]]] = {
    "from a block on": ("qwen2_tiny", {**ON, "max_window_layers": 3}, [False, False, False, True]),
    "behind the last block": ("qwen2_tiny", {**ON, "max_window_layers": 28}, [False] * 4),
    "switched off": ("qwen3_tiny", {"sliding_window": 9, "max_window_layers": 0}, [False] * 4),
    "by kind": ("qwen3_tiny", {**ON, "layer_types": [SLIDING, FULL, FULL, SLIDING]}, [True, False, False, True]),
    "all, whatever the first is": ("qwen3_moe_tiny", {**ON, "max_window_layers": 28}, [True] * 4),
    "every second sees all": ("gemma2_tiny", {"layer_types": "absent"}, [True, False, True, False]),
    "every sixth sees all": ("gemma3_tiny", {"layer_types": "absent"}, [True] * 4),
    "every second, by the old key": (
        "gemma3_tiny", {"layer_types": "absent", "sliding_window_pattern": 2}, [True, False, True, False]
    ),
    "every fourth sees all": ("olmo3_tiny", {"layer_types": None}, [True, True, True, False]),
    "all, by default": ("ministral_tiny", {"layer_types": "absent"}, [True] * 4),
    "none": ("ministral_tiny", {"layer_types": "absent", "sliding_window": None}, [False] * 4),
}  # fmt: skip


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_are_those_of_transformers(kind: str) -> None:
    name, changes, expected = WINDOWS[kind]
    shape = read(name, **changes)
    assert list(shape.window_blocks) == expected
    import transformers

    values = {key: value for key, value in (write_config(TINY[name])[1] | changes).items() if value != "absent"}
    theirs = transformers.AutoConfig.for_model(**values | dict.fromkeys(("bos_token_id", "eos_token_id")))
    if name != "qwen3_moe_tiny":  # which looks at sliding_window alone
        windowed = [kind == SLIDING and theirs.sliding_window is not None for kind in theirs.layer_types]
        assert windowed == expected


def test_old_keys_of_rope_mean_what_the_new_ones_do() -> None:
    new, old = read("gemma3_tiny"), {"rope_parameters": "absent", "rope_local_base_freq": 10000.0}
    assert read("gemma3_tiny", **old) == new
    assert new.rotary_base_local == 10_000 and new.rope_scaling == "linear"
    assert read("gemma3_tiny", **old | {"rope_local_base_freq": 500.0}).rotary_base_local == 500
    assert read("gemma3_tiny", rope_parameters="absent", rope_theta="absent").rotary_base == 1_000_000
    other = read("olmo3_tiny", rope_parameters="absent", rope_theta=700000.0)  # of blocks without a window alone
    assert (other.rotary_base, other.rotary_base_local) == (700_000, 500_000)
    share = {"rope_parameters": "absent", "rope_theta": "absent", "rotary_pct": 0.5, "rotary_emb_base": 500}
    assert (read("pythia_tiny", **share).rotary_percent, read("pythia_tiny", **share).rotary_base) == (0.5, 500)
    assert read("pythia_tiny", rope_parameters="absent", rotary_pct="absent").rotary_percent == 0.25
    assert read("nemotron_tiny", rope_parameters="absent", partial_rotary_factor="absent").rotary_percent == 0.5


def test_longrope_without_a_factor_is_stretched_from_the_original_context() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "type": "su"}
    keys = {"rope_parameters": "absent", "rope_scaling": factors, "original_max_position_embeddings": 128}
    shape = read("phi4_tiny", **keys)
    assert (shape.rope_scaling, shape.rope_scaling_factor) == ("longrope", 512 / 128)
    assert shape.rope_original_max_position_embeddings == 128
    assert read_shape(write_config(shape)[1])[1] == shape


def test_blocks_without_rope_are_listed_or_counted() -> None:
    assert read("smollm3_tiny", no_rope_layers="absent").no_rope_blocks == (False, False, False, True)
    counted = read("smollm3_tiny", no_rope_layers="absent", no_rope_layer_interval=2)
    assert counted.no_rope_blocks == (False, True, False, True)


@pytest.mark.parametrize("name", [name for name in TINY if TINY[name].hf_model_type])
def test_an_import_remembers_its_model_type(name: str) -> None:
    """Other types mean the same model: an export writes the one that it came from."""
    model_type, config = write_config(TINY[name])
    assert model_type == TINY[name].hf_model_type == read_shape(config)[1].hf_model_type


def test_a_model_type_that_no_longer_fits_gives_way_to_one_that_does() -> None:
    granite = dataclasses.replace(
        TINY["granite_tiny"], embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0, softmax_scale=0.0
    )
    assert write_config(granite)[0] == "granite"
    assert write_config(dataclasses.replace(granite, qk_layernorm=True))[0] == "qwen3"
    assert write_config(dataclasses.replace(TINY["llama2_tiny"], add_qkv_bias=True))[0] == "qwen2"
    assert write_config(dataclasses.replace(TINY["llama2_tiny"], add_bias_linear=True))[0] == "llama"
    assert write_config(dataclasses.replace(TINY["olmo2_tiny"], hf_model_type=""))[0] == "olmo2"


def test_a_shape_that_no_model_type_has_is_refused_by_the_nearest() -> None:
    shape = dataclasses.replace(TINY["gemma2_tiny"], norm_placement="post")
    with pytest.raises(UserError, match=r"transformers' gemma2, the nearest, has no:\n  model.norm_placement 'post'"):
        write_config(shape)


@pytest.mark.parametrize(
    "model_type, words",
    [
        ("gemma3", '"model_type": "gemma3_text"'),
        ("mistral3", "The nearest that is: mistral or ministral3"),
        ("bloom", "ALiBi adds a bias to every score"),
        ("t5", "Triplane trains decoders only"),
        ("qwen3_vl_text", "The nearest that is: qwen3"),
        ("phi4", "The nearest that is: phi3"),
        ("arcee", "The nearest that is: nemotron"),
        ("jamba", "it has layers of Mamba-1"),
        ("falcon", "attention and MLP of a block read one norm together"),
        ("zamba9000", "not supported. Supported: apertus, "),
        (None, "model_type None is not supported. Supported: apertus"),
    ],
)
def test_an_unknown_model_type_is_answered_by_name(model_type: object, words: str) -> None:
    with pytest.raises(UserError) as error:
        read_shape({"model_type": model_type})
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text, words",
    [
        (
            {"model_type": "ministral3"},
            'Its text model is: take text_config out of config.json, with "model_type": "mini',
        ),
        ({"model_type": "llama"}, '"model_type": "llama"'),
        ({"model_type": "qwen2_vl_text"}, "The nearest that is: mistral or ministral3"),
        ({"model_type": ["llama"]}, "The nearest that is: mistral or ministral3"),
        ("llama", "The nearest that is: mistral or ministral3"),
    ],
)
def test_the_text_model_of_one_of_text_and_images_is_named(text: object, words: str) -> None:
    with pytest.raises(UserError) as error:
        read_shape({"model_type": "mistral3", "text_config": text})
    assert words in str(error.value)


def test_every_dense_family_of_the_tables_has_a_shape() -> None:
    written = {write_config(shape)[0] for shape in SHAPES.values()}
    # GLM-4-9B of 2024: as glm4 without the norms behind; Kimi K2: as deepseek_v3
    assert set(ARCHITECTURES) - written == {"glm", "kimi_k2"}
