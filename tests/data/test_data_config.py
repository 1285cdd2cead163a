import pytest

from data.config import DataConfig, split_weights
from training.cli import parse


def test_defaults_have_no_problems():
    assert DataConfig().problems() == []


@pytest.mark.parametrize("split, weights", [("969,30,1", (969, 30, 1)), ("1", (1, 0, 0)), ("0.9, 0.1", (0.9, 0.1, 0))])
def test_split_weights(split, weights):
    assert split_weights(split) == weights
    assert DataConfig(split=split).problems() == []


@pytest.mark.parametrize("split", ["", "a,b", "0,1,1", "-1,2", "1,2,3,4", "inf,1", "nan", "1;2"])
def test_bad_split_is_one_problem_that_quotes_it(split):
    problems = DataConfig(split=split).problems()
    assert len(problems) == 1
    assert f'data.split = "{split}"' in problems[0]


@pytest.mark.parametrize(
    "config, field",
    [
        (DataConfig(builtin_vocab_size=300), "data.builtin_vocab_size = 300"),
        (DataConfig(tokenizer=""), "data.tokenizer"),
        (DataConfig(jsonl_key=""), "data.jsonl_key"),
        (DataConfig(paths=("a", "")), "data.paths"),
    ],
)
def test_bad_fields_are_named(config, field):
    (problem,) = config.problems()
    assert field in problem


def test_documents_see_one_another_by_default_and_a_recipe_can_say_otherwise():
    assert not DataConfig().reset_attention_mask and not DataConfig().eod_mask_loss
    config = parse.parse_config(
        ["--data.reset_attention_mask", "--data.reset_position_ids", "--data.eod_mask_loss", "True"]
    )
    assert config.data.reset_attention_mask and config.data.reset_position_ids and config.data.eod_mask_loss
    assert config.data.problems() == []
