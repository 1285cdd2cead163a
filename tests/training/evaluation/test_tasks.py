"""Tasks of lm-evaluation-harness: the scores of the running, sharded model are those that the harness itself gives the
exported one."""

import dataclasses
import functools
import json
import re
import signal
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import runs
from campaign import some
from data.prepared import Prepared
from parallel import failures, groups, launch, local_ranks, output
from parallel.launch import Identity
from parallel.layout import Layout
from program.errors import UserError
from programs import Program
from ranks import run_ranks
from tests.tools.test_convert_training import write_tokenizer
from tools.convert.__main__ import main as convert
from tools.shared.loaded_model import loaded
from tools.shared.opened_checkpoint import ModelFlags, OpenedCheckpoint, open_checkpoint
from training import train
from training.cli.dry_run import missing
from training.evaluation import harness
from training.evaluation.batching import row_shape
from training.evaluation.generating import TextGenerator
from training.evaluation.harness_tokens import HarnessTokenizer
from training.evaluation.scoring import Scorer, target_scores
from training.evaluation.shared_model import SharedModel
from training.evaluation.tasks import PreparedTasks, TaskRequest, prepare_tasks
from training.parts.run import PreparedRun
from training.start.prepare import prepare, prepare_eval_tasks
from training.watchdog.heartbeat import Heartbeat
from training.watchdog.stop_signal import StopSignal

FOLDER = "tests/training/evaluation/tasks"
NAMES = ("triplane_capitals", "triplane_last_words", "triplane_proverbs", "triplane_completions")
FLAGS = ("--train.train_iters", "2", "--eval.interval", "1", "--eval.task_folder", FOLDER, "--eval.tasks", *NAMES)
THREE_PLANES = (
    "--parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel True "
    "--parallel.pipeline_model_parallel_size 2 --parallel.expert_model_parallel_size 2 "
    "--parallel.expert_tensor_parallel_size 1"
)
CONTEXT = "Still waters run"
LETTERS = string.ascii_letters + string.digits + string.punctuation + " "


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, and a cache of data sets of the tests' own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        for module in ("datasets.config", "huggingface_hub.constants"):
            patched.setattr(f"{module}.HF_HUB_OFFLINE", True)
        patched.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("data_sets")))
        yield


@pytest.fixture(scope="module")
def tasks(offline: None) -> PreparedTasks:
    return prepare_tasks(TaskRequest(names=NAMES, folder=FOLDER, seq_length=64), lambda _: None)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Data of a tokenizer.json that begins texts with a control id, as Llama 3's."""
    folder = tmp_path_factory.mktemp("data")
    write_tokenizer(folder)
    begin_texts(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    ))  # fmt: skip
    text = (Path(FOLDER) / "proverbs.jsonl").read_text() * 20
    (folder / "text.jsonl").write_text(text)
    return "--data.tokenizer", str(folder / "tokenizer.json"), "--data.paths", str(folder / "text.jsonl")


def begin_texts(path: Path) -> None:
    content = json.loads(path.read_text())
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}},
    }
    path.write_text(json.dumps(content))


class Trained:
    """A run that was judged while it trained, its export, and what the harness' own HFLM gives that."""

    def __init__(self, given: tuple[str, ...], folder: Path, tasks: PreparedTasks) -> None:
        self.run_dir, exported, scores = folder / "run", folder / "hf", folder / "scores"
        flags = (*FLAGS, *given, "--model.shape", "mixtral_tiny", "--model.hidden_dropout", "0.1")
        self.config = runs.configuration(self.run_dir, *flags, *THREE_PLANES.split())
        self.metrics = runs.train(prepare(self.config, None), self.config, 4, tasks=tasks)
        assert convert(["export", str(self.run_dir / "checkpoints/iter_0000002"), str(exported)]) == 0
        run_ranks(1, scores_of_hflm, exported, scores, tasks)
        self.expected: dict[str, Any] = json.loads(scores.read_text())


@pytest.fixture(scope="module")
def trained(given: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory, tasks: PreparedTasks) -> Trained:
    """A model with experts, in three planes."""
    return Trained(given, tmp_path_factory.mktemp("trained"), tasks)


def judged(lm: Any, tasks: PreparedTasks) -> dict[str, Any]:
    """The harness' results, and each request's own."""
    letters = [
        Instance("loglikelihood", {}, (CONTEXT, one), number, (None, 0, 1)) for number, one in enumerate(LETTERS)
    ]
    results = harness.run_tasks(lm, tasks)["results"]
    answers: dict[str, list[Any]] = {}
    for task in tasks.loaded["tasks"].values():
        for one in task.instances:
            answers.setdefault(one.request_type, []).append(one.resps[0])
    return {"results": results, "letters": lm.loglikelihood(letters), **answers}


def scores_of_hflm(identity: Identity, exported: Path, found: Path, tasks: PreparedTasks) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    lm = HFLM(pretrained=model, tokenizer=str(exported), max_length=64, batch_size=4)
    found.write_text(json.dumps(judged(lm, tasks)))


def scores_of_layout(run_dir: Path, layout: str, tasks: PreparedTasks, found: Path) -> dict[str, Any]:
    opened = open_checkpoint(ModelFlags(checkpoint=run_dir, layout=layout, device="cpu", dtype="fp32"))
    run_ranks(opened.world_size, score_layout, opened, tasks, found)
    return json.loads(found.read_text())


def score_layout(identity: Identity, opened: OpenedCheckpoint, tasks: PreparedTasks, found: Path) -> None:
    with loaded(opened, identity, "cpu") as model:
        assert model.tokenizer is not None
        shape = row_shape(model.config, 2, model.ranks.layout)
        tokenizer, parts = HarnessTokenizer(model.tokenizer), {"chunks": model.chunks, "ranks": model.ranks}
        generator = TextGenerator(**parts, tokenizer=tokenizer, seq_length=64, at_once=3)
        shared = SharedModel(Scorer(**parts, shape=shape), generator, model.ranks)
        lm = harness.ShardedLM(shared, tokenizer, 64)
        if (scores := shared.run(lambda: judged(lm, tasks))) is not None:
            found.write_text(json.dumps(scores))


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """1e-3 nats, the same greedy answers and texts; metrics of log-likelihoods follow, accuracies are identical."""
    for kind in ("letters", "loglikelihood"):
        for (ours, greedy), (theirs, theirs_greedy) in zip(found[kind], expected[kind], strict=True):
            assert abs(ours - theirs) < 1e-3 and greedy == theirs_greedy
    assert sum(greedy for _, greedy in found["letters"]) == 1
    for ours, theirs in zip(found["loglikelihood_rolling"], expected["loglikelihood_rolling"], strict=True):
        assert abs(ours - theirs) < 1e-3
    assert found["generate_until"] == expected["generate_until"]
    check_results(found["results"], expected["results"])


def check_results(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected.items():
        for key, value in values.items():
            if isinstance(value, float) and key != "sample_len":
                exact = key.startswith("acc")
                assert found[name][key] == (value if exact else pytest.approx(value, rel=2e-3)), (name, key)


def test_scores_in_training_are_those_of_the_exported_model(trained: Trained) -> None:
    lines = [json.loads(line) for line in (trained.run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["iteration"], line["task"]) for line in lines] == [(n, name) for n in (1, 2) for name in NAMES]
    last = {
        line["task"]: {f"{key},none": value for key, value in line["metrics"].items()} for line in lines[-len(NAMES) :]
    }
    assert {*last["triplane_capitals"]} == {"acc,none", "acc_stderr,none", "acc_norm,none", "acc_norm_stderr,none"}
    expected = trained.expected["results"]
    check_results(last, expected)
    logged = [line for line in trained.metrics if "eval/triplane_capitals/acc" in line]
    assert [line["iteration"] for line in logged] == [1, 2] and logged[0] != {**logged[1], "iteration": 1}
    assert logged[1]["eval/triplane_capitals/acc"] == expected["triplane_capitals"]["acc,none"]


@pytest.mark.parametrize("layout", some(("cp2", "dp2zero3", "pp2vpp2", "ep2dp2"), ("ep2dp2",)))
def test_scores_are_the_same_in_every_layout(
    layout: str, trained: Trained, tasks: PreparedTasks, tmp_path: Path
) -> None:
    assert any(trained.expected["generate_until"])
    check_equal(scores_of_layout(trained.run_dir, layout, tasks, tmp_path / "scores"), trained.expected)


def test_training_is_the_same_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    """With dropout, which an evaluation must neither have nor draw for."""
    without = dataclasses.replace(trained.config.eval, tasks=())
    plain = dataclasses.replace(trained.config, run_dir=str(tmp_path), eval=without)
    lines = runs.train(prepare(plain, None), plain, 4)
    numbers = [(one["loss"], one["grad_norm"]) for one in trained.metrics if "loss" in one]
    assert [(one["loss"], one["grad_norm"]) for one in lines] == numbers and len(numbers) == 2


def test_the_tool_prints_and_writes_the_scores_of_a_run(trained: Trained, tmp_path: Path) -> None:
    """python -m tools.evaluate"""
    arguments = [str(trained.run_dir), "--tasks", ",".join(NAMES), "--task_folder", FOLDER, "--layout", "dp2",
                 "--device", "cpu", "--output", str(tmp_path / "scores.json")]  # fmt: skip
    program = Program(arguments, tmp_path / "tool", module="tools.evaluate")
    out, err = program.communicate()
    assert program.returncode == 0, err
    rows = [re.split(r"  +", line) for line in out.splitlines()]
    assert rows[0] == ["task", "examples", "documents", "metric", "value", "± stderr"]
    written = json.loads((tmp_path / "scores.json").read_text())
    accuracy = written["results"]["triplane_capitals"]["acc,none"]
    assert rows[1][:6] == ["triplane_capitals", "2", "16", "acc", "↑", f"{accuracy:.4f}"]
    assert written["config"]["model_args"]["layout"] == "TP 1 x PP 1 x DP 2" and written["lm_eval_version"] == "0.4.13"
    check_results(written["results"], trained.expected["results"])
    assert "72 loglikelihood requests" in err and "83 requests in " in err


def test_the_most_probable_token_is_found_over_tensor_ranks() -> None:
    run_ranks(2, find_the_most_probable)


def find_the_most_probable(identity: Identity) -> None:
    with groups.start(Layout(tp=2), identity, device="cpu", seed=1) as ranks:
        whole = torch.randn(40, 10, generator=torch.Generator().manual_seed(1))
        whole[:20] = whole[:20].round()  # with ties, of which the first counts
        ids = whole.argmax(-1)
        ids[::3] = (ids[::3] + 5) % 10
        mine = whole[:, 5 * ranks.at.tp : 5 * ranks.at.tp + 5]
        found = target_scores(mine, ids, ranks)
        torch.testing.assert_close(found[:, 0].float(), whole.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
        assert torch.equal(found[:, 1], (whole.argmax(-1) != ids).double()) and 0 < found[:, 1].sum() < 40
        dist.barrier()


# ---- texts as ids


def test_texts_become_the_ids_of_the_exported_tokenizer(given: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(1, compare_ids, Path(given[1]), tmp_path)


TEXTS = ("", "a", " a", "a ", "two  blanks", "a\n\nb\tc", "Ünï漢🙂", "<|begin|>again", "a<|end|>b", "12 345")


def compare_ids(identity: Identity, with_begin: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    from data.tokenizers.base import open_tokenizer
    from data.tokenizers.sentencepiece_training import train as train_pieces
    from tools.convert.generation import more_files
    from tools.shared.carried_tokenizer import Ends

    plain = folder / "plain"
    plain.mkdir()
    write_tokenizer(plain)
    pieces = folder / "pieces"
    pieces.mkdir()
    (pieces / "tokenizer.model").write_bytes(train_pieces([Path("CONTRIBUTING.md")], 400))
    for path, eod in ((with_begin, None), (plain / "tokenizer.json", "<|end|>"), (pieces / "tokenizer.model", None)):
        ours = HarnessTokenizer(open_tokenizer(path, eod))
        texts = {"eos_token": ours.eot_text, **({"bos_token": ours.bos_text} if ours.bos is not None else {})}
        if path.suffix == ".model":
            texts["unk_token"] = "<unk>"
        if not (path.parent / "tokenizer_config.json").exists():
            ends = Ends(ours.eot, ours.bos, texts, ours.tokenizer)
            for name, content in more_files({"eos_token_id": ours.eot}, {path.name: path}, ends).items():
                (path.parent / name).write_bytes(content)
        theirs = AutoTokenizer.from_pretrained(path.parent)
        assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eot, ours.bos)
        for text in TEXTS if path.suffix == ".json" else [text for text in TEXTS if "<|" not in text]:
            begins = text.startswith(ours.prefix_text)
            expected = theirs.encode(text, **({"add_special_tokens": False} if begins else {}))
            assert ours.encode(text) == expected, (path, text)
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


# ---- what goes wrong


class AskedAtTheSecondEvaluation(Heartbeat):
    """The rank is asked to stop when it begins to evaluate the second time."""

    def __init__(self, request: StopSignal) -> None:
        super().__init__()
        self.request, self.evaluations = request, 0

    def enter(self, phase: str, iteration: int | None = None) -> None:
        super().enter(phase, iteration)
        self.evaluations += phase == "evaluation"
        if self.evaluations == 2:
            self.request.hear(signal.SIGUSR2)


@pytest.mark.parametrize("name", ["triplane_capitals", "triplane_completions"])
def test_a_request_to_stop_breaks_tasks_off(name: str, prepared: Prepared, tmp_path: Path) -> None:
    """Between rounds of log-likelihoods, and within texts."""
    config = runs.configuration(tmp_path, *FLAGS, "--train.train_iters", "9", "--eval.tasks", name)
    tasks = prepare_tasks(TaskRequest(names=(name,), folder=FOLDER, seq_length=64), lambda _: None)
    output.make_run_dir(tmp_path)
    console = tmp_path / "console"

    def rank(identity: launch.Identity) -> int:
        request = StopSignal()
        heartbeat = AskedAtTheSecondEvaluation(request) if identity.rank == 1 else None
        with output.own_output(tmp_path / "logs", identity, every_rank=False), console.open("ab") as file:
            fd = file.fileno() if identity.rank == 0 else None
            ready = PreparedRun(
                config=config, prepared=prepared, device="cpu", run_dir=tmp_path, stop=request, tasks=tasks
            )
            return train.train(ready, identity, heartbeat, fd)

    code, failure = local_ranks.fork_ranks(2, rank)
    assert failure is None, failure.text
    assert code == failures.STOPPED
    printed = console.read_text()
    assert "asked to stop: tasks after iteration 2 are broken off" in printed
    assert "stopped on request at iteration 3, saved" in printed
    assert [json.loads(line)["iteration"] for line in (tmp_path / "evaluations.jsonl").open()] == [1]


def test_what_fails_in_the_harness_ends_no_training(
    prepared: Prepared, tmp_path: Path, tasks: PreparedTasks, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    real = harness.run_tasks

    def fails_once(lm: harness.ShardedLM, tasks: PreparedTasks) -> dict[str, Any]:
        results = real(lm, tasks)
        monkeypatch.setattr(harness, "run_tasks", real)
        raise ZeroDivisionError(f"a metric of {len(results['results'])} tasks")

    monkeypatch.setattr(harness, "run_tasks", fails_once)
    lines = runs.train(prepared, runs.configuration(tmp_path, *FLAGS), 2, tasks=tasks)
    said = capfd.readouterr().out
    assert "warning: tasks after iteration 1 failed in lm-evaluation-harness: ZeroDivisionError: a metric of 4" in said
    assert [line["iteration"] for line in lines if "eval/triplane_capitals/acc" in line] == [2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("triplane_capital", 'eval.tasks: no task, group or tag "triplane_capital" .* Did you mean triplane_capitals'),
        ("triplane_capitals --eval.task_folder nowhere", "eval.task_folder: no folder nowhere"),
        ("triplane_capitals --eval.num_fewshot 20", "triplane_capitals: a question cannot be written: ValueError"),
        ("triplane_missing_file", "triplane_missing_file cannot be loaded: HF_HUB_OFFLINE is set: FileNotFoundError"),
        ("triplane_too_long", "triplane_too_long asks for texts of up to 64 tokens; .* model.seq_length = 64"),
        ("triplane_draws", "triplane_draws draws its texts at random; Triplane's are greedy"),
    ],
)
def test_tasks_that_cannot_be_had_are_named_before_anything_runs(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(TaskManager, include_defaults=False)  # without the harness' own 14,000, which take seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path, **_: few(include_path=include_path))
    (tmp_path / "missing.yaml").write_text(
        Path(FOLDER, "capitals.yaml").read_text().replace("_capitals", "_missing_file").replace("capitals.jsonl", "x")
    )
    text = Path(FOLDER, "completions.yaml").read_text()
    (tmp_path / "long.yaml").write_text(
        text.replace("completions", "too_long").replace("max_gen_toks: 6", "max_gen_toks: 64")
    )
    (tmp_path / "draws.yaml").write_text(
        text.replace("completions", "draws").replace("until:", "do_sample: true\n  temperature: 0.5\n  until:")
    )
    folder = FOLDER if "capital" in flags else str(tmp_path)
    given = ("--eval.task_folder", folder, "--eval.tasks", *flags.split())
    config = runs.configuration(tmp_path / "run", *given)
    with pytest.raises(UserError, match=words):
        prepare_eval_tasks(config, None)
    planned = "".join(missing(config))  # a dry run looks the names up, and loads nothing
    assert bool(re.search(words, planned)) == words.startswith(("eval.tasks: no task", "eval.task_folder"))


def test_only_rank_0_builds_tasks(tmp_path: Path) -> None:
    config = runs.configuration(tmp_path, *FLAGS)
    assert prepare_eval_tasks(config, Identity(rank=1, world_size=2)) is None
    assert prepare_eval_tasks(runs.configuration(tmp_path), None) is None
