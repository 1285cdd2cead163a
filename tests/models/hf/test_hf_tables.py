"""Tables and configurations of models.hf, for every shape that has a name: no weights, no torch."""

import json

import numpy as np
import pytest

from campaign import some
from models.costs.parameters import parameters
from models.families import SHAPES, TINY
from models.hf.shapes import read_shape, write_config
from models.hf.tables import entries, full_name, is_computed
from training.checkpoint.format.coverage import covered_once

LARGE = {"llama31_405b", "kimi_k2", "deepseek_v3", "deepseek_v2", "gpt3_175b"}


@pytest.mark.parametrize("name", SHAPES)
def test_a_configuration_means_the_shape_that_it_was_written_from(name: str) -> None:
    """write_config compares what it reads back itself; here once more through JSON, with fields that it may skip."""
    model_type, config = write_config(SHAPES[name])
    again, found = read_shape(json.loads(json.dumps(config)))
    assert again == model_type
    for field in ("num_layers", "vocab_size", "moe_blocks", "window_blocks", "tied", "rope_scaling", "init_method_std"):
        assert getattr(found, field) == getattr(SHAPES[name], field), field
    assert sum(parameter.size for parameter in parameters(found)) == sum(
        parameter.size for parameter in parameters(SHAPES[name])
    )


ROWS = [name for name in SHAPES if name not in LARGE]


@pytest.mark.parametrize("name", some(ROWS, TINY))
def test_each_row_of_ours_is_one_row_of_theirs(name: str) -> None:
    shape = SHAPES[name]
    model_type, _ = write_config(shape)
    used: set[str] = set()
    names = set()
    for entry in entries(model_type, shape):
        names.add(entry.name)
        rows = shape.vocab_size if entry.padded else entry.rows
        assert covered_once((rows,), (((strip.row,), (strip.rows,)) for strip in entry.strips)), entry.name
        for theirs, strips in entry.by_their_name().items():
            found = np.sort(np.concatenate([np.arange(*strip.theirs.indices(1 << 30)) for strip in strips]))
            assert np.array_equal(found, np.arange(len(found))), theirs
        assert not used & entry.their_shapes().keys()
        used |= entry.their_shapes().keys()
    assert {parameter.name for parameter in parameters(shape)} <= names


def test_buffers_of_old_files_are_no_weights() -> None:
    assert is_computed("llama", "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert is_computed("gpt2", full_name("gpt2", "h.3.attn.bias"))
    assert not is_computed("gpt2", "transformer.h.3.attn.c_attn.bias")
    assert full_name("gpt2", "lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("old", [None, {"type": "linear", "factor": 4.0}, {"rope_type": "default"}])
def test_older_files_keep_rope_in_two_keys(old: dict[str, object] | None) -> None:
    _, config = write_config(SHAPES["llama2_tiny"])
    del config["rope_parameters"]
    _, shape = read_shape(config | {"rope_scaling": old, "rope_theta": 500000.0})
    assert shape.rotary_base == 500_000
    assert (shape.rope_scaling, shape.rope_scaling_factor) == (
        ("linear", 4.0) if old and "factor" in old else ("none", 1.0)
    )
