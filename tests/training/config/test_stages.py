"""From ``[[stage]]`` tables to configurations: where each begins and ends, its curves, what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from data.config import TEXTS
from program.errors import SharedMistake
from training.config.recipe import dump, dump_changed, load, names
from training.config.run_config import RunConfig
from training.config.stage_config import BegunStage, RunPosition
from training.config.stage_curves import CURVE
from training.config.stages import MODEL, NEVER, stage_at, stages

HEAD = """
[model]
shape = "debug"
seq_length = 64
[train]
global_batch_size = 8
{train}
[optimizer]
lr = 1e-3
{optimizer}
"""


def recipe(tmp_path: Path, tables: str, train: str = "", optimizer: str = "") -> RunConfig:
    path = tmp_path / "recipe.toml"
    path.write_text(HEAD.format(train=train, optimizer=optimizer) + tables)
    return load(path)


def of(tmp_path: Path, tables: str, train: str = "", optimizer: str = "") -> list[RunConfig]:
    return stages(recipe(tmp_path, tables, train, optimizer))


def counts(one: RunConfig) -> tuple[int, int, int, int]:
    """Iterations before a stage and after it, samples and tokens of it."""
    first, end = one.own_stage.first, one.own_stage.end
    return first.iteration, end.iteration, end.samples - first.samples, end.tokens - first.tokens


def here(iteration: int, samples: int, tokens: int) -> BegunStage:
    return BegunStage(name="", iteration=iteration, samples=samples, tokens=tokens)


def stage(name: str, *lines: str) -> str:
    return "\n".join(["[[stage]]", f'name = "{name}"', *lines, ""])


THREE = (
    stage("a", "until_iterations = 10")
    + stage("b", "until_tokens = 8000", "model.seq_length = 128", "train.global_batch_size = 4")
    + stage("c", "until_samples = 150", "train.micro_batch_size = 2")
)


def test_each_stage_ends_with_the_first_iteration_that_reaches_what_it_names(tmp_path: Path) -> None:
    a, b, c = of(tmp_path, THREE)
    assert counts(a) == (0, 10, 80, 5120)
    # 2,880 tokens are left: 5.6 batches of 4 x 128
    assert counts(b) == (10, 16, 24, 3072)
    # 46 samples are left: 11.5 batches of 4, for what b changed holds on
    assert (c.own_stage.first.samples, c.own_stage.first.tokens, c.train.train_iters, c.samples) == (104, 8192, 28, 48)
    assert [one.train.train_iters for one in (a, b, c)] == [10, 16, 28]
    assert (c.model.seq_length, c.train.global_batch_size, c.train.micro_batch_size) == (128, 4, 2)
    assert [one.own_stage.data_iteration for one in (a, b, c)] == [0, 10, 10]  # c reads what b reads
    weights = ("{ x = 1.0, y = 1.0 }", "{ x = 2.0, y = 1.0 }", "{ x = 2.0, y = 1.0 }")
    tables = (stage(f"s{end}", f"until_iterations = {end}", f"data.stream_blend = {own}")
              for end, own in enumerate(weights, 1))  # fmt: skip
    assert [one.own_stage.data_iteration for one in of(tmp_path, "".join(tables))] == [0, 1, 1]
    assert [one.own_stage.ends for one in (a, b, c)] == [(10,), (10, 16), (10, 16, 28)]
    assert [stage_at([a, b, c], iteration).own_stage.first.name for iteration in (0, 9, 10, 15, 16, 28, 40)] == list(
        "aabbccc"
    )
    assert all(not one.problems(1) and not one.stage for one in (a, b, c))


def test_a_ramp_goes_on_and_is_over_where_it_ends(tmp_path: Path) -> None:
    ramp = "rampup_batch_size = [4, 4, 16]"
    a, b = of(tmp_path, stage("a", "until_samples = 20") + stage("b", "until_samples = 100", GBS16), train=ramp)
    assert counts(a)[1:3] == (5, 24)  # 4 + 4 + 4 + 4 + 8
    assert (b.train.train_iters, b.train.rampup_batch_size) == (10, None)
    assert not b.problems(1)


GBS16 = "train.global_batch_size = 16"


def test_text_that_is_shaped_otherwise_begins_an_order(tmp_path: Path) -> None:
    for line in ('data.packing = "best_fit"', "data.fim_rate = 0.5", 'data.transform = "mine:function"'):
        a, b = of(tmp_path, stage("a", "until_iterations = 10") + stage("b", "until_iterations = 20", line))
        assert (a.own_stage.data_iteration, b.own_stage.data_iteration) == (0, 10) and not b.problems(1)
    unused = stage("b", "until_iterations = 20", "data.fim_spm_rate = 1.0")
    assert (
        of(tmp_path, stage("a", "until_iterations = 10") + unused)[1].own_stage.data_iteration == 0
    )  # without fim_rate it is none


def test_a_curve_spans_the_stages_that_give_none(tmp_path: Path) -> None:
    a, b, c = of(tmp_path, THREE, optimizer="lr_warmup_iters = 3")
    curves = [one.schedule for one in (a, b, c)]
    assert curves[0].warmup_samples == 24 and curves[0].decay_samples == 152
    assert all(curve.is_same_as(curves[0]) for curve in curves)


def test_a_stages_own_curve_begins_where_the_one_before_ends(tmp_path: Path) -> None:
    tables = stage("a", "until_iterations = 10") + stage(
        "b", "until_iterations = 14", 'optimizer.lr_decay_style = "linear"', "optimizer.min_lr = 0.0"
    )
    given = 'lr_warmup_iters = 2\nmin_lr = 1e-4\nlr_decay_style = "cosine"\nweight_decay = 0.2'
    a, b = of(tmp_path, tables, optimizer=given)
    before, after = a.schedule, b.schedule
    assert before.learning_rate(80) == pytest.approx(1e-4)
    assert [after.learning_rate(at) for at in (80, 88, 96, 104, 112)] == pytest.approx(
        [1e-4, 7.5e-5, 5e-5, 2.5e-5, 0.0]
    )
    assert after.weight_decay(90) == 0.2 and after.warmup_samples == 0
    # with rates and a warm-up of its own
    own = stage("b", "until_iterations = 14", "optimizer.lr = 5e-4", "optimizer.lr_warmup_iters = 1")
    after = of(tmp_path, stage("a", "until_iterations = 10") + own, optimizer=given)[1].schedule
    assert [after.learning_rate(at) for at in (80, 84, 88)] == pytest.approx([0.0, 2.5e-4, 5e-4])
    assert after.decay_samples == 32 and after.begins_at == 80


def test_a_recipe_with_stages_is_written_back_as_it_was(tmp_path: Path) -> None:
    config = recipe(tmp_path, THREE)
    for number, written in enumerate((dump(config), dump_changed(config))):
        again = tmp_path / f"again{number}.toml"
        again.write_text(written)
        assert load(again) == config
    # one stage's configuration is an ordinary recipe
    again.write_text(dump(stages(config)[2]))
    assert load(again) == replace(stages(config)[2], begin=None)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (stage("a"), 'stage "a": expected one of until_iterations, until_samples, until_tokens, found none'),
        (stage("a", "until_iterations = 4", "until_tokens = 9"), "found until_iterations and until_tokens"),
        (stage("a", "until_iterations = 4") * 2, "each stage another name"),
        (
            stage("a", "until_iterations = 4") + stage("b", "until_samples = 30"),
            'stage "b" ends where it begins, after 4 iterations, 32 samples and 2,048 tokens',
        ),
        (stage("a", "until_iterations = 4", "model.hidden_size = 32"), "hidden_size: a stage changes no weight's"),
        (stage("a", "until_iterations = 4", "train.seed = 1"), "train.seed: holds for the whole run"),
        (stage("a", "until_iterations = 4", "data.samples_to_skip = [3]"), "data.samples_to_skip: holds for the whole"),
        (stage("a", "until_iterations = 4", "train.iterations_to_skip = [3]"), "iterations_to_skip: holds for the"),
        (stage("a", "until_iterations = 4", 'train.micro_batch_size = "2"'), "expected a whole number, found"),
        (stage("a", "until_iterations = 4", "train.micro_batch = 2"), "Did you mean train.micro_batch_size?"),
        (
            stage("a", "until_iterations = 4") + stage("b", "until_iterations = 8", "optimizer.min_lr = 0.0"),
            'stage "b": the learning rate is 0 when it begins',
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, tables: str, words: str) -> None:
    with pytest.raises(SharedMistake) as caught:
        of(tmp_path, tables)
    assert words in str(caught.value)


def test_what_counts_the_whole_run_is_refused_beside_stages(tmp_path: Path) -> None:
    one = stage("a", "until_iterations = 4")
    for train, words in (
        ("average_last = 5", 'train.average_last = 5, and [[stage]] "a", the last, has 4: weights'),
        ("train_iters = 7", "train.train_iters = 7, but the last [[stage]] ends after 4 iterations"),
        ('step_batch_size_schedule = "0:8"', "stages have a global_batch_size each"),
    ):
        with pytest.raises(SharedMistake) as caught:
            of(tmp_path, one, train)
        assert words in str(caught.value)
    assert of(tmp_path, one, "train_iters = 4")[0].train.train_iters == 4
    with pytest.raises(SharedMistake, match=r"unknown key stage\[0\].untill"):
        recipe(tmp_path, stage("a", "untill = 4"))
    with pytest.raises(SharedMistake, match="unknown key begin"):
        recipe(tmp_path, "[begin]\nbegun = []\ncount = 1\ndata_iteration = 0\n")


def test_a_stage_names_fields_that_there_are() -> None:
    known = set(names())
    named = {"model": MODEL, "optimizer": CURVE, "data": TEXTS}
    asked = [f"{section}.{name}" for section, fields in [*NEVER.items(), *named.items()] for name in fields]
    assert not set(asked) - known


def test_the_mean_of_the_last_weights_is_of_the_whole_run(tmp_path: Path) -> None:
    found = of(tmp_path, THREE, "average_last = 5")
    assert [one.train.average_last for one in found] == [None, None, 5]


def test_the_running_stage_is_counted_from_where_the_run_is(tmp_path: Path) -> None:
    """Its batch was changed on the way: the samples and tokens that its table names are what counts."""
    begun = (
        BegunStage(name="a", iteration=0, samples=0, tokens=0),
        BegunStage(name="b", iteration=7, samples=70, tokens=5000),
    )
    at = RunPosition(now=here(9, 80, 5000 + 10 * 128), begun=begun)
    a, b, c = stages(recipe(tmp_path, THREE), at)
    assert counts(a) == (0, 7, 70, 5000)  # as it was, whatever its table says
    # 1,720 tokens are left of b: 3.4 batches of 4 x 128
    assert counts(b) == (7, 13, 26, 1280 + 4 * 512)
    first = c.own_stage.first
    assert (first.iteration, first.samples, first.tokens) == (13, 96, 5000 + 26 * 128)
    assert b.tokens_of(80) == 6280 and c.tokens_of(96) == 8328
    # a stage that is to end earlier than the run has come ends now
    shorter = recipe(tmp_path, THREE.replace("until_tokens = 8000", "until_tokens = 6000"))
    assert [one.train.train_iters for one in stages(shorter, at)][:2] == [7, 9]
    assert stage_at(stages(shorter, at), 9).own_stage.first.name == "c"


LINEAR = 'optimizer.lr_decay_style = "linear"'


def test_a_stages_own_curve_begins_at_the_rate_that_held(tmp_path: Path) -> None:
    """The stage before was shortened on the way: its curve is still the longer one, which the checkpoint has."""
    tables = stage("a", "until_iterations = 60") + stage("b", "until_iterations = 70", LINEAR)
    longer = tables.replace("60", "100").replace("70", "110")
    kept = of(tmp_path, longer, optimizer="min_lr = 1e-4")[0].schedule
    begun = (BegunStage(name="a", iteration=0, samples=0, tokens=0),)
    at = RunPosition(now=here(50, 400, 400 * 64), begun=begun, schedule=kept)
    b = stages(recipe(tmp_path, tables, optimizer="min_lr = 1e-4"), at)[1].schedule
    assert b.lr == kept.learning_rate(480) > 1e-4
