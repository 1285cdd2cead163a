"""The comparison with Megatron-LM's program, which `make against-megatron` runs: what needs no checkout of it."""

from pathlib import Path

import pytest

from tests.gpu_path.megatron_lm.__main__ import costs
from tests.gpu_path.megatron_lm.both import OURS_ONLY, Translated
from tests.gpu_path.megatron_lm.cases import CONTROL, LAYOUTS, TWINS, Case
from tests.gpu_path.megatron_lm.twins import Twin
from training.cli import parse


@pytest.mark.parametrize(
    "case",
    [TWINS[0], CONTROL, *(pytest.param(case, marks=pytest.mark.campaign) for case in (*LAYOUTS, *TWINS[1:]))],
    ids=lambda case: case.name,
)
def test_its_flags_make_a_recipe(tmp_path: Path, case: Case) -> None:
    """Each has a field or changes nothing, and the configuration is allowed."""
    recipe = tmp_path / "recipe.toml"
    assert Translated(case.command_flags("tokens", 20, 1), case.ranks).write_recipe(recipe) == case.ranks
    config = parse.parse_config([str(recipe), *OURS_ONLY])
    parse.check(config, case.ranks)
    assert config.model.vocab_size == 512 and config.train.train_iters == 20


def test_a_flag_without_a_field_is_refused(tmp_path: Path) -> None:
    flags = [*LAYOUTS[0].command_flags("tokens", 20, 1), "--use-megatron-fsdp"]
    with pytest.raises(AssertionError, match="megatron-fsdp"):
        Translated(flags, 2).write_recipe(tmp_path / "recipe.toml")


def test_a_steps_costs_are_of_all_ranks() -> None:
    """But for small all-reduces, which are of the rank with most; tokens for experts are calls without bytes."""
    counted = {"LAUNCHES": 10, "STREAM_WAITS": 1, "DEVICE_WAITS": 0, "EVENT_WAITS": 2}
    sent = [("send 0->1", 8000), ("all_to_all", 70), ("all_reduce", 4), ("all_reduce", 5000)]
    logs = [
        counted | {"collectives": [{"kind": kind, "bytes": size} for kind, size in sent[:number]]} for number in (4, 2)
    ]
    found = costs(logs)
    assert (found.calls, found.bytes, found.small_all_reduces, found.kernels, found.waits) == (6, 21004, 1, 20, 6)
    assert found.kinds == {"all_reduce": 2, "all_to_all": 2, "send": 2}


def test_twins_differ_by_their_worst_loss() -> None:
    megatrons = [float(number) for number in range(1, 21)]
    assert Twin(LAYOUTS[0], [*megatrons[:-1], 20.5], megatrons).difference == 0.025
    with pytest.raises(AssertionError):
        _ = Twin(LAYOUTS[0], megatrons[:-1], megatrons).difference
