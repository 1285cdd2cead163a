"""``--dry_run``: the plan's numbers against hand counts and a model that is really built, and its warnings."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from data.tokenizers.base import ByteTokenizer
from models import gpt
from models.costs.parameters import num_parameters
from models.costs.predict import fullest
from models.costs.stage_parameters import stages
from models.resolve import resolve
from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout, bubble
from program.errors import UserError
from ranks import run_ranks
from training.cli.dry_run import bytes_per_parameter, describe, grid
from training.cli.parse import parse_config
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.memory.planned import Modules, as_case

GPU = Modules(cuda=True, transformer_engine=True)
DEMO, DEBUG = "slurm/recipes/demo.toml", "slurm/recipes/debug.toml"
LARGE = """--dry_run --model.shape llama31_405b --model.seq_length 8192 --train.train_iters 1000000
    --parallel.tensor_model_parallel_size 8 --parallel.sequence_parallel --parallel.overlap_grad_reduce
    --parallel.pipeline_model_parallel_size 16 --parallel.num_layers_in_first_pipeline_stage 7
    --parallel.num_layers_in_last_pipeline_stage 7 --train.global_batch_size 2048 --data.tokenizer llama.model
    --train.recompute selective --optimizer.lr_warmup_iters 8000 --checkpoint.save_interval 500"""


def plan(*argv: str) -> str:
    return describe(parse_config(argv))


def test_the_plan_of_the_demo() -> None:
    text = plan(DEMO, "--dry_run")
    for line in (
        "# plan for 8 ranks: TP 2 x PP 2 x DP 2",
        "# rank = tp + 2 dp + 4 pp",
        "#   TP 2: 0-1 is the first of 4 groups",
        "#   DP 2: 0, 2 is the first of 4 groups",
        "#   PP 2: 0, 4 is the first of 4 groups",
        "16 samples x 128 tokens = 2,048 tokens an iteration; 2 microbatches of 4 on each of 2 replicas",
        "150 iterations: 2,400 samples, 307,200 tokens",
        "(p - 1) / (v m) = 1 / (1 x 2) = 50.0%",
        "checkpoints: 2, of about 20.2 MB each",
        "1,262,720 parameters",
    ):
        assert line in text, line
    assert "warning" not in text


def test_what_is_offloaded_is_printed() -> None:
    """16 bytes of each of 7 billion parameters over 16 ranks, of the stage that has most."""
    asked = "--dry_run --model.shape llama3_8b --world_size 16 --train.global_batch_size 16".split()
    text = plan(*asked, "--optimizer.optimizer_cpu_offload", "true")
    assert "offloaded to the host: 6.52 GiB a rank of stage 0, times the ranks of a node" in text
    assert "offloaded to" not in plan(*asked)


def test_the_plan_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    path.write_text(plan(DEMO, "--dry_run", "--world_size", "16", "--train.seed", "7"))
    planned = load(path)
    assert planned == parse_config([DEMO, "--train.seed", "7"])
    assert tomllib.loads(path.read_text())["train"]["seed"] == 7


def test_a_plan_shows_every_problem_and_nothing_else() -> None:
    with pytest.raises(UserError) as error:
        plan(DEMO, "--dry_run", "--world_size", "6", "--train.micro_batch_size", "3", "--checkpoint.keep", "0")
    assert "3 problems" in str(error.value)
    assert "6 ranks cannot be split" in str(error.value)


def test_the_world_defaults_to_nproc_then_to_one_replica() -> None:
    assert "plan for 8 ranks" in plan(DEMO, "--dry_run")
    assert "plan for 4 ranks" in plan(DEMO, "--dry_run", "--nproc", "None")


def test_a_plan_is_fitted_as_a_run_is() -> None:
    text = plan(
        "--dry_run", "--world_size", "3", "--parallel.tensor_model_parallel_size", "2", "--parallel.elastic", "True"
    )
    assert "# parallel.elastic: " in text and "# plan for 2 ranks: TP 2 x PP 1 x DP 1" in text


def test_a_plan_does_not_grow_with_the_world() -> None:
    large = plan(*LARGE.split(), "--world_size", "16384")
    assert len(large.splitlines()) < 240  # of which the configuration has 197
    assert "PP 16: 0, 1024, 2048, ..., 15360 is the first of 1,024 groups" in large
    assert "15360-15367" in large  # ranks of the last stage's first replica
    flags = """--parallel.pipeline_model_parallel_size 64 --model.num_layers 64 --world_size 512
        --parallel.num_layers_in_first_pipeline_stage 1 --parallel.num_layers_in_last_pipeline_stage 1"""
    assert "... 48 more stages ..." in plan(*LARGE.split(), *flags.split())


def test_the_grid_names_the_ranks_of_each_axis() -> None:
    layout = Layout(tp=2, cp=2, dp=3, pp=2)
    assert grid(layout) == [
        "rank = tp + 2 cp + 4 dp + 12 pp",
        "  TP 2: 0-1 is the first of 12 groups",
        "  CP 2: 0, 2 is the first of 12 groups",
        "  DP 3: 0, 4, 8 is the first of 8 groups",
        "  PP 2: 0, 12 is the first of 12 groups",
    ]
    assert grid(Layout()) == ["rank = 0"]


@pytest.mark.parametrize("shape", ["debug", "gpt2_tiny", "llama32_1b", "gpt3_175b"])
def test_stages_add_up_to_the_model(shape: str) -> None:
    config = parse_config(["--model.shape", shape])
    resolved = resolve(config.model, None)
    [whole] = stages(resolved, config.parallel)
    assert whole.parameters == whole.parameters_per_rank == num_parameters(resolved, padded_vocab=True)
    four = parse_config(["--model.shape", shape, "--parallel.pipeline_model_parallel_size", "4"])
    copied = resolved.padded_vocab_size * resolved.hidden_size * resolved.tied
    assert sum(stage.parameters for stage in stages(resolved, four.parallel)) == whole.parameters + copied


def check_stages(identity: Identity, config: RunConfig) -> None:
    """Every rank builds its chunks and compares their parameters with its stage's."""
    shape = resolve(config.model, ByteTokenizer.vocab_size)
    layout = config.layout(identity.world_size)
    with groups.start(layout, identity, device="cpu", seed=1) as ranks:
        blueprint = gpt.Blueprint(model=config.model, shape=shape, parallel=config.parallel, precision=config.precision)
        chunks = gpt.build(blueprint, ranks)
        held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        assert held == stages(shape, config.parallel)[ranks.at.pp].parameters_per_rank
        torch.distributed.barrier()


@pytest.mark.parametrize(
    "flags",
    [
        "--parallel.tensor_model_parallel_size 4",
        "--model.shape gpt2_tiny --parallel.tensor_model_parallel_size 2 --parallel.pipeline_model_parallel_size 2",
        "--parallel.pipeline_model_parallel_size 2 --parallel.virtual_pipeline_model_parallel_size 2 "
        "--model.qk_layernorm --model.add_qkv_bias --parallel.tensor_model_parallel_size 2",
        "--model.shape mixtral_tiny --parallel.tensor_model_parallel_size 4 --parallel.sequence_parallel "
        "--parallel.expert_model_parallel_size 2 --parallel.expert_tensor_parallel_size 2",
        "--model.shape deepseek_v3_tiny --parallel.pipeline_model_parallel_size 2 "
        "--parallel.expert_model_parallel_size 2",
    ],
)
def test_a_rank_holds_what_the_plan_says(flags: str) -> None:
    run_ranks(4, check_stages, parse_config([DEBUG, *flags.split()]))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (2, 4, 12)),  # megatron-core's table: 6 + 12/d
        ("--precision.dtype fp32", (4, 4, 8)),  # 8 + 8/d
        ("--precision.dtype fp16 --precision.grad_reduce_in_fp32 False", (2, 2, 16)),  # 4 + 16/d
        ("--precision.fp8 hybrid", (4, 4, 12)),
    ],
)
def test_bytes_per_parameter(flags: str, expected: tuple[float, float, float]) -> None:
    config = parse_config(["--train.global_batch_size", "8", *flags.split()])
    assert bytes_per_parameter(config, as_case(config, 4, resolve(config.model, None), GPU)) == (*expected, 0)


def test_the_plan_predicts_what_a_run_does() -> None:
    """The same bytes as the run's own line about memory, and the planner's table."""
    config = parse_config([*LARGE.split(), "--world_size", "16384"])
    shape = resolve(config.model, None)
    (held,) = fullest([as_case(config, 16384, shape, GPU)], shape)
    row = plan(*LARGE.split(), "--world_size", "16384").partition("# ")[2]
    totals = [float(line.split()[-1]) for line in row.splitlines() if re.match(r"#\s+\d+\s+\d+-\d+ ", line)]
    assert max(totals) == pytest.approx(held.total / 2**30, abs=0.005)
    assert totals.index(max(totals)) == held.stage


def test_the_bubble_is_narayanans() -> None:
    assert bubble(Layout(pp=4), 12) == 3 / 12
    assert bubble(Layout(pp=4, vpp=2), 12) == 3 / 24
    assert bubble(Layout(), 1) == 0


def test_a_sound_plan_of_a_large_model_has_no_warnings() -> None:
    found = warnings_of("")
    assert found == ["data.tokenizer: no file llama.model on this machine"], found


def warnings_of(flags: str) -> list[str]:
    """The first words of each warning on the large plan with these flags over it."""
    argv = [*LARGE.split(), "--world_size", "16384", "--data.paths", __file__, *flags.split()]
    text = re.sub(r"\n#     ", " ", plan(*argv))
    return [line.removeprefix("# warning: ").split(". ")[0] for line in text.splitlines() if "# warning: " in line]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--precision.dtype fp32", 'precision.dtype = "fp32"'),
        ("--train.recompute None", "no recomputation at seq_length 8192"),
        ("--parallel.tensor_model_parallel_size 16", "TP 16 leaves the node"),
        ("--parallel.sequence_parallel False", "parallel.sequence_parallel is off"),
        ("--parallel.overlap_grad_reduce False", "parallel.overlap_grad_reduce is off"),
        (
            "--train.global_batch_size 1024",
            "8 microbatches cannot fill 16 pipeline stages: ranks idle 65% of the time",
        ),
        (
            "--model.seq_length 128 --checkpoint.save_interval 10000",
            "tiny batch: each replica computes 2,048 tokens",
        ),
        ("--optimizer.lr_warmup_iters 0", "no warm-up"),
        (
            "--optimizer.lr_decay_style WSD --optimizer.lr_wsd_decay_iters 1000000",
            "WSD's final decay begins within the warm-up: the learning rate drops from",
        ),
        ("--checkpoint.save_interval 5", "saving too often"),
        ("--checkpoint.save_interval_minutes 1", "saving too often"),
        ("--checkpoint.save_interval None", "nothing is saved before the end"),
        ("--data.paths", "data.paths is empty"),
        ("--data.paths /nowhere/text", "on this machine: data.paths: no file"),
        ("--data.paths --data.stream_blend /nowhere/x 1 y 1", "on this machine: data.stream_blend: no file"),
        ("--eval.by_source True", "eval.by_source has no effect without a blend"),
        ("--data.tokenizer builtin", "data.tokenizer is the built-in one"),
        ("--log.prometheus 0.0.0.0:9464", 'log.prometheus "0.0.0.0:9464": whoever'),
        (
            "--parallel.tensor_model_parallel_size 1 --parallel.sequence_parallel False "
            "--train.global_batch_size 16384",
            "weights, gradients and optimizer take",
        ),
    ],
)
def test_a_known_bad_choice_is_warned_of(flags: str, words: str) -> None:
    new = [text for text in warnings_of(flags) if "llama.model" not in text]
    assert len(new) == 1, new
    assert new[0].startswith(words), new


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "the model gets that vocabulary"),
        ("--model.vocab_size 2048", "the model gets that vocabulary"),
        ("--model.vocab_size 128256", "a vocabulary of 128,256 (model.vocab_size), the rest of which is never trained"),
    ],
)
def test_what_the_built_in_tokenizer_means_for_the_vocabulary(flags: str, words: str) -> None:
    (warning,) = warnings_of(f"--data.tokenizer builtin {flags}")
    assert warning.endswith(words), warning


def test_small_models_and_cpu_runs_are_left_alone() -> None:
    assert "warning" not in plan(DEBUG, "--dry_run", "--device", "auto", "--precision.dtype", "fp32")
    assert "warning" not in plan(
        "--dry_run", "--device", "cpu", "--model.shape", "llama3_8b", "--data.tokenizer", "byte", "--world_size", "1"
    )
