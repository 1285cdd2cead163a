"""The card that every resumed start shows: what is taken, what changed, and whether the numbers stay the same."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import runs
from data.prepared import Prepared
from models.config import ModelConfig
from models.resolve import resolve
from parallel.layout import Layout
from training.checkpoint.restoring import Restored
from training.config.recipe import dump
from training.config.run_config import RunConfig
from training.progress import Progress
from training.run_dir.resume_report import Now, card, recipe_of

ENTRIES: dict[str, Any] = {
    "schedule": "cosine",
    "data": {"fingerprint": "ab", "seed": 1},
    "versions": {"torch": "2.13.0", "triplane": "c0de"},
}
RECIPE = 'device = "cpu"\n[train]\ntrain_iters = 10\nseed = 1\n[optimizer]\nlr = 0.1\n[log]\nlog_interval = 1\n'
THEN = Restored(
    progress=Progress(iteration=3, consumed_samples=24),
    path=Path("runs/demo/checkpoints/iter_0000003"),
    entries=ENTRIES,
    layout_before=Layout(tp=2, dp=4),
    device="cpu",
    rng_restored=True,
    fp8_restored=True,
    own=True,
    loaded=None,
    optimizer_restored=True,
)
NOW = Now(
    layout=Layout(tp=2, dp=4),
    device="cpu",
    fp8=False,
    recipe=RECIPE,
    recipe_before=RECIPE,
    entries=ENTRIES,
    tokens=1536,
)


def row(name: str, restored: Restored = THEN, now: Now = NOW) -> str:
    """What the card says under ``name``."""
    [line] = [line for line in card(restored, now, 1.25).splitlines() if line.startswith(f"  {name} ")]
    return line.removeprefix(f"  {name}").strip()


def test_nothing_changed() -> None:
    assert row("from") == "runs/demo/checkpoints/iter_0000003"
    assert row("at") == "iteration 3, 24 samples, 1,536 tokens"
    assert row("layout") == f"{THEN.layout_before}, as before"
    assert row("restored") == "weights + optimizer + RNG; 1.2 s"
    assert row("changed") == "nothing"
    assert row("bit for bit") == "the same numbers as without the interruption"


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        ({}, {"layout": Layout(tp=4, dp=2)}, "another layout adds up in another order"),
        ({"device": "cuda"}, {}, "cuda before, cpu now"),
        ({"optimizer_restored": False}, {}, "the optimizer starts fresh"),
        ({"rng_restored": False}, {}, "the random numbers start fresh"),
        ({"fp8_restored": False}, {"fp8": True}, "fp8's scales start fresh (recipe delayed; see docs/checkpoints.md)"),
        ({}, {"entries": ENTRIES | {"versions": {"torch": "2.14.0", "triplane": "c0de"}}},
         "torch 2.13.0 before, 2.14.0 now"),
        ({}, {"entries": ENTRIES | {"data": {"fingerprint": "cd", "seed": 1}}}, "other data (fingerprint)"),
        ({}, {"entries": ENTRIES | {"schedule": "linear"}}, "another schedule"),
        ({}, {"recipe": RECIPE.replace("seed = 1", "seed = 2")}, "changed: train.seed"),
        ({}, {"unreadable": "there is none"}, "what else has changed is not known"),
        ({"device": "cuda"}, {"device": "cuda"}, "kernels on GPUs may add up in another order each time"),
    ],
)  # fmt: skip
def test_why_numbers_differ(then: dict[str, Any], now: dict[str, Any], reason: str) -> None:
    shown = row("bit for bit", dataclasses.replace(THEN, **then), dataclasses.replace(NOW, **now))
    assert shown == f"not expected: {reason}"


def test_a_row_is_no_longer_than_a_screen_whatever_the_checkpoint_holds() -> None:
    then = dataclasses.replace(THEN, entries=ENTRIES | {"versions": {"torch": "x" * 100_000}})
    assert row("bit for bit", then).startswith("not expected: torch xxx")
    assert len(card(then, NOW, 1.0)) < 3000


def test_changes_are_named_and_not_all_of_them_change_numbers() -> None:
    recipe = RECIPE.replace("train_iters = 10", "train_iters = 20\nexit_interval = 5").replace("log_interval = 1", "")
    now = dataclasses.replace(NOW, recipe=recipe)
    assert row("changed", now=now) == (
        "train.train_iters 10 -> 20; log.log_interval 1 -> unset; train.exit_interval unset -> 5"
    )
    assert row("bit for bit", now=now) == "the same numbers as without the interruption"


def test_the_changes_fit_a_terminal_and_those_that_decide_come_first() -> None:
    many = "".join(f"f{number} = 1\n" for number in range(20)) + f'long = "{"x" * 500}"\n'
    shown = row("changed", now=dataclasses.replace(NOW, recipe=many + RECIPE + "exit_interval = 5\n"))
    assert shown.startswith("f0 unset -> 1; f1 unset -> 1; ")
    named = shown.count("->")
    assert shown.endswith(f"; and {22 - named} more") and named > 3
    recipe = f'long = "{"x" * 500}"\n' + RECIPE
    lines = card(THEN, dataclasses.replace(NOW, recipe=recipe), 1.0).splitlines()
    assert all(len(line) <= 120 for line in lines if "bit for bit" not in line)


def test_an_imports_recipe_that_names_few_fields_differs_in_those_alone() -> None:
    full = dump(dataclasses.replace(RunConfig(), train=dataclasses.replace(RunConfig().train, exit_interval=7)))
    before = dataclasses.replace(NOW, recipe=full, recipe_before="[model]\nseq_length = 64\n[log]\nlog_interval = 3\n")
    assert row("changed", now=before) == (
        f"model.seq_length 64 -> {RunConfig().model.seq_length}; log.log_interval 3 -> {RunConfig().log.log_interval}; "
        "train.exit_interval unset -> 7"
    )
    imported = dataclasses.replace(THEN, entries={"imported": {"source": "x"}}, optimizer_restored=False)
    shown = row("bit for bit", imported, dataclasses.replace(before, entries=ENTRIES))
    assert shown == "not expected: the optimizer starts fresh; changed: model.seq_length"


def test_what_was_left_out_is_said() -> None:
    restored = dataclasses.replace(THEN, optimizer_restored=False, rng_restored=False)
    assert row("restored", restored) == "weights (fresh: optimizer, RNG); 1.2 s"


def test_a_run_shows_its_card(prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("--train.train_iters", "2", "--train.eval_interval", "None", "--log.report", "False")
    runs.train(prepared, runs.configuration(tmp_path, *flags, "--train.exit_interval", "1"), 1)
    assert "starting from initial weights (seed " in capfd.readouterr().out
    runs.train(prepared, runs.configuration(tmp_path, *flags), 1)
    printed = capfd.readouterr().out
    assert f"  from         {tmp_path}/checkpoints/iter_0000001\n" in printed
    assert "  changed      train.exit_interval 1 -> unset\n" in printed
    assert "  bit for bit  the same numbers as without the interruption\n" in printed
    runs.train(prepared, runs.configuration(tmp_path, *flags, "--train.train_iters", "3"), 2)
    printed = capfd.readouterr().out
    assert "  layout       TP 1 x PP 1 x DP 1 -> TP 1 x PP 1 x DP 2\n" in printed
    assert "not expected: another layout adds up in another order; " in printed
    assert "another schedule" not in printed
    assert ": kept from the checkpoint. This configuration makes another one: " in printed


def test_a_model_that_is_spelled_out_is_the_one_that_is_named() -> None:
    """An import's recipe has every number, a run's a name: what is said is the one number that differs."""
    shape = dataclasses.asdict(resolve(ModelConfig(shape="llama2_tiny"), None)) | {"hf_model_type": "llama"}
    whole = {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}
    before = tomli_w.dumps({"model": whole})
    now = '[model]\nshape = "llama2_tiny"\nvocab_size = 257\nrotary_base = 500000\n'
    card_of = dataclasses.replace(NOW, recipe_before=before, recipe=now)
    assert row("changed", now=card_of) == "model.rotary_base 10000 -> 500000; model.hf_model_type llama ->"
    assert row("bit for bit", now=card_of) == "not expected: changed: model.rotary_base"


@pytest.mark.parametrize("text", [b"", b"\xff", b"[train\n", b"train = 5\n", b"x = 1\n", None])
def test_a_recipe_that_tells_nothing_is_unreadable_and_not_unset(text: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    if text is not None:
        path.write_bytes(text)
    found, problem = recipe_of(path)
    assert found == "" and problem.startswith(f"{path} is unreadable (")
    now = dataclasses.replace(NOW, recipe_before=found, unreadable=problem)
    assert row("changed", now=now) == f"not known: {problem}"
    assert row("bit for bit", now=now) == "not expected: what else has changed is not known"
