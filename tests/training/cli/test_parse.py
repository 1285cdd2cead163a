"""Recipes and flags -> a configuration; ``--help``; and mistakes in both."""

import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from program.errors import SharedMistake, UserError
from program.flags import field_docs
from training.cli import parse
from training.cli.flags import HELP, override
from training.cli.help import rare
from training.config.recipe import load, names, sections
from training.config.run_config import RunConfig

DEBUG = "slurm/recipes/debug.toml"
ROOT = Path(__file__).parents[3]


def help_text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        parse.parse_config(argv)
    assert left.value.code in (0, None)
    return capsys.readouterr().out


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        parse.parse_config(argv)
    return str(error.value)


def recipe(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_flags_override_the_recipe_which_overrides_the_defaults() -> None:
    config = parse.parse_config(
        [DEBUG, "--train.train_iters", "3", "--optimizer.lr=1e-4", "--optimizer.min-lr", "1e-5"]
    )
    assert (config.train.train_iters, config.optimizer.lr, config.optimizer.min_lr) == (3, 1e-4, 1e-5)
    assert (config.model.seq_length, config.precision.dtype) == (64, "fp32")
    assert config.optimizer.adam_beta1 == RunConfig().optimizer.adam_beta1


def test_flags_alone_are_enough() -> None:
    config = parse.parse_config(["--model.shape", "gpt2"])
    assert config.model.shape == "gpt2"
    assert config.run_dir == "runs/run"


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("--parallel.sequence_parallel", True),
        ("--parallel.sequence_parallel True", True),
        ("--parallel.sequence_parallel=true", True),
        ("--parallel.sequence-parallel False", False),
        ("--parallel.sequence_parallel --parallel.sequence_parallel false", False),
        ("", False),
    ],
)
def test_a_switch_alone_means_true(flags: str, value: bool) -> None:
    config = parse.parse_config([*flags.split(), "--train.seed", "1"])
    assert config.parallel.sequence_parallel is value
    assert config.train.seed == 1


def test_a_switch_may_be_the_last_word() -> None:
    assert parse.parse_config(["--model.qk_layernorm"]).model.qk_layernorm is True
    assert parse.parse_config([DEBUG, "--dry_run"]).dry_run is True


def test_none_unsets_a_value(tmp_path: Path) -> None:
    path = recipe(tmp_path, "nproc = 4\n[model]\nqk_layernorm = true\n[train]\nrampup_batch_size = [1, 2, 3]\n")
    config = parse.parse_config(
        [str(path), *["--nproc", "None", "--model.qk_layernorm", "None", "--train.rampup_batch_size", "None"]]
    )
    assert (config.nproc, config.model.qk_layernorm, config.train.rampup_batch_size) == (None, None, None)


def test_lists_take_several_values() -> None:
    flags = "--data.paths a b --train.rampup_batch_size 1 2 30 --kernels.off moe_grouped_gemm"
    config = parse.parse_config([*flags.split(), "--model.megatron", "a=1", "b=2"])
    assert config.data.paths == ("a", "b")
    assert config.train.rampup_batch_size == (1, 2, 30)
    assert config.kernels.off == ("moe_grouped_gemm",)
    assert config.model.megatron == ("a=1", "b=2")
    assert parse.parse_config(["--data.paths"]).data.paths == ()


@pytest.mark.parametrize("sign", ["", "-"])
def test_flags_mean_what_tyro_has_them_mean(sign: str) -> None:
    """A field of each kind; tyro prints their help."""
    flags = f"""--data.blend a 0.7 b 0.3 --eval.validation_sets x y --eval.tasks a b --profile.ranks {sign}1 2
        --model.window_size 3 0 --model.rope_long_factor 1 {sign}2.5 --data.paths --nproc None --train.recompute None
        --kernels.off moe_grouped_gemm moe_router_fusion --train.rampup_batch_size None --optimizer.lr {sign}1e-3
        --parallel.use_distributed_optimizer False --parallel.sequence-parallel True --train.seed={sign}3 --device cuda
        --model.normalization LayerNorm --precision.fp8 None --model.megatron a=1 b="c d" --dry_run True""".split()
    plain = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
    expected = tyro.cli(RunConfig, args=flags, default=load(Path(DEBUG)), use_underscores=True, config=plain)
    assert override(load(Path(DEBUG)), flags, "") == expected != load(Path(DEBUG))


def test_negative_numbers_are_values() -> None:
    assert parse.parse_config(["--optimizer.lr", "-1e-3", "--train.seed=-4"]).optimizer.lr == -1e-3


def test_an_integer_may_stand_for_a_float(tmp_path: Path) -> None:
    lr = load(recipe(tmp_path, "[optimizer]\nlr = 1\n")).optimizer.lr
    assert lr == 1.0
    assert isinstance(lr, float)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.train_iter 3", ["unknown flag --train.train_iter. Did you mean --train.train_iters?"]),
        ("--trian.train_iters 3", ["Did you mean --train.train_iters?"]),
        ("--lr 3", ["unknown flag --lr. Did you mean --optimizer.lr?"]),
        ("--tensor-model-parallel-size 2", ["Did you mean --parallel.tensor_model_parallel_size?"]),
        ("--megatron a=1", ["--parallel.megatron or --model.megatron or --optimizer.megatron"]),
        ("--zzzzzz", ["unknown flag --zzzzzz.", "--help_all"]),
        ("-v", ["unknown flag --v."]),
        ("--train.train_iters x", ["--train.train_iters: expected a whole number, found x."]),
        ("--train.train_iters 1.5", ["expected a whole number, found 1.5."]),
        ("--train.train_iters", ["expected a whole number, found nothing."]),
        ("--train.train_iters 1 2", ["expected a whole number, found 1 2."]),
        ("--optimizer.lr fast", ["--optimizer.lr: expected a number, found fast."]),
        ("--device gpu", ['--device: expected "auto" or "cpu" or "cuda", found gpu.']),
        ("--dry_run maybe", ["--dry_run: expected true or false, found maybe."]),
        ("--train.rampup_batch_size 1 2", ["expected a list of 3 whole numbers, found 1 2."]),
        ("--train.seed None", ["--train.seed: expected a whole number, found None."]),
        (DEBUG, [f"unexpected argument {DEBUG}. The recipe is the first argument"]),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_expected(flags: str, words: list[str]) -> None:
    text = mistake(DEBUG, *flags.split())
    assert all(word in text for word in words), text


def test_all_wrong_flags_are_named_at_once() -> None:
    text = mistake(*["--device", "gpu", "--train.seed", "x", "--nope", "1", "--data.paths", "a", "--optimizer.lr"])
    assert all(word in text for word in ("--device", "--train.seed", "--nope", "--optimizer.lr"))
    assert "data.paths" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\ntrain_iter = 1\n", ["unknown key train.train_iter.", "train.train_iters?"]),
        ("train_iters = 1\n", ["unknown key train_iters.", "train.train_iters?"]),
        ("[train]\nlr = 1.0\n", ["unknown key train.lr.", "optimizer.lr?"]),
        ("[trian]\nseed = 1\n", ["unknown key trian.", "train?"]),
        ("[log]\nzzzzzz = 1\n", ["unknown key log.zzzzzz.", "log_interval"]),
        ('[train]\ntrain_iters = "10"\n', ['train.train_iters: expected a whole number, found "10".']),
        ("[train]\ntrain_iters = 1.5\n", ["expected a whole number, found 1.5."]),
        ("[train]\ntrain_iters = true\n", ["expected a whole number, found true."]),
        ("[optimizer]\nlr = true\n", ["optimizer.lr: expected a number, found true."]),
        ("[optimizer]\nlr = '1'\n", ["optimizer.lr: expected a number"]),
        ("[parallel]\nsequence_parallel = 1\n", ["expected true or false, found 1."]),
        ('[precision]\ndtype = "bf17"\n', ['expected "fp32" or "fp16" or "bf16", found "bf17".']),
        ('[data]\npaths = "a"\n', ['data.paths: expected a list of strings, found "a".']),
        ("[data]\npaths = [1]\n", ["data.paths: expected a list of strings"]),
        ("[train]\nrampup_batch_size = [1, 2]\n", ["expected a list of 3 whole numbers"]),
        ("[model]\nhidden_size = '64'\n", ["model.hidden_size: expected a whole number"]),
        ("train = 3\n", ["train: expected a table [train], found 3."]),
        ("[train\n", ["not valid TOML"]),
        ("[train]\nseed = 1\nseed = 2\n", ["not valid TOML"]),
    ],
)
def test_a_wrong_recipe_is_told_where_and_what(tmp_path: Path, text: str, words: list[str]) -> None:
    path = recipe(tmp_path, text)
    message = mistake(str(path))
    assert message.startswith(str(path))
    assert all(word in message for word in words), message


def test_all_mistakes_in_a_recipe_are_told_at_once(tmp_path: Path) -> None:
    text = "nope = 1\nnproc = 'x'\n[train]\nseeed = 1\nseed = 'x'\n[log]\nranks = 3\n"
    assert len(mistake(str(recipe(tmp_path, text))).splitlines()) == 5


def test_a_missing_recipe_is_told_what_is_there() -> None:
    text = mistake("slurm/recipes/debugg.toml")
    assert "slurm/recipes/debugg.toml: no such recipe" in text
    assert "debug.toml" in text
    assert "no folder nowhere either" in mistake("nowhere/x.toml")
    assert "expected a regular file, found a folder" in mistake("slurm/recipes")


def test_the_run_folder_follows_the_recipe(tmp_path: Path) -> None:
    run = tmp_path / "run/config.toml"
    for folder in ("run/checkpoints/iter_0000100", "copies/best"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "state.json").touch()
    assert parse.default_run_dir(Path(DEBUG)) == Path("runs/debug")
    assert parse.default_run_dir(run) == run.parent
    checkpoint = run.parent / "checkpoints/iter_0000100/config.toml"
    assert parse.default_run_dir(checkpoint) == Path("runs/from_run_iter_0000100")
    assert parse.default_run_dir(tmp_path / "copies/best/config.toml") == Path("runs/from_copies_best")
    assert parse.parse_config([DEBUG, "--run_dir", "x"]).run_dir == "x"


def test_a_tokenizer_is_found_beside_its_recipe(tmp_path: Path) -> None:
    path = recipe(tmp_path, '[data]\ntokenizer = "tokenizer.model"\n')
    assert load(path).data.tokenizer == "tokenizer.model"
    (tmp_path / "tokenizer.model").touch()
    assert load(path).data.tokenizer == str(tmp_path / "tokenizer.model")


def test_help_shows_what_most_runs_need(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "--help")
    shown = {name for name in names() if f"--{name} " in text}
    assert shown == set(names()) - rare()
    assert len(shown) <= 85
    assert "--help_all" in text


def test_help_all_shows_every_field_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "--help_all")
    assert {name for name in names() if f"--{name} " in text} == set(names())


@pytest.mark.parametrize("flag", sorted(HELP))
def test_help_shows_the_recipes_values(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert "(default: 64)" in help_text(capsys, DEBUG, flag)


def test_every_field_has_a_docstring() -> None:
    for section in [RunConfig, *sections().values()]:
        own = {name for name in section.__annotations__ if name not in sections() or section is not RunConfig}
        assert own <= field_docs(section).keys()


def test_rare_fields_exist_and_can_be_set() -> None:
    assert rare() <= set(names())
    assert parse.parse_config(["--model.kv_channels", "32"]).model.kv_channels == 32


def test_a_quiet_failure_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "QUIET_S", 0.0)
    monkeypatch.setattr(parse.signal, "signal", lambda *_: None)  # a handler would outlive the test
    for quiet, said in ((True, ""), (False, "pretrain_gpt.py: why\n")):
        with pytest.raises(SystemExit) as left:
            parse.fail(UserError("why"), quiet)
        assert left.value.code == 2
        assert capsys.readouterr().err == said


def test_a_recipe_that_does_not_fit_the_allocation_is_told_how_many_nodes_would() -> None:
    flags = "--parallel.pipeline_model_parallel_size 4 --train.global_batch_size 16 --train.micro_batch_size 2"
    config = parse.parse_config([DEBUG, *flags.split()])
    with pytest.raises(SharedMistake) as raised:
        parse.check(config, 24, ranks_per_node=8)
    assert "16 is not a multiple of train.micro_batch_size 2 x DP 6" in str(raised.value)
    assert str(raised.value).endswith("It fits an allocation of 2 or 4 nodes with 8 ranks each; this one has 3.")
    assert str(raised.value).startswith("1 problem with")
    parse.check(config, 16, ranks_per_node=8)
    with pytest.raises(SharedMistake) as raised:
        parse.check(parse.parse_config([DEBUG, "--parallel.tensor_model_parallel_size", "3"]), 24, ranks_per_node=8)
    assert "allocation" not in str(raised.value), "4 heads by 3: no number of nodes helps"


def test_what_libraries_left_for_the_end_holds_nothing_up() -> None:
    program = (
        "import atexit, runpy, sys, time\n"
        "atexit.register(time.sleep, 600)\n"
        f"sys.argv = ['pretrain_gpt.py', {DEBUG!r}, '--dry_run']\n"
        "runpy.run_path('pretrain_gpt.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("are kept")
