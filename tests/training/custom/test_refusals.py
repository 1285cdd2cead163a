"""What a user's module may get wrong: one message, before ranks start; and what it does wrong once it runs."""

import shutil
import sys
from pathlib import Path

import pytest

import runs
from campaign import param, some
from data.prepared import Prepared
from program.errors import UserError
from programs import Program
from training.cli import parse
from training.cli.dry_run import describe
from training.config.import_path import digest
from training.custom.callbacks import HOOKS, UserCallback, load_callback
from training.custom.check import check
from training.loop import Callback
from training.progress import Progress
from training.run_dir.fingerprint import facts

SMALL = ("--train.train_iters", "4", "--train.global_batch_size", "2")

MODULE = '''
import os
import sys
import torch
from parallel import metrics
from training.loop import Callback
from training.step import StepRequests


class NoHook(Callback):
    def after_stp(self, progress, result): ...


class WrongHook(Callback):
    def after_step(self, result): ...


class Needs(Callback):
    def __init__(self, run, interval): ...
    def start(self, progress): ...


class Raises(Callback):
    def after_step(self, progress, result):
        raise ZeroDivisionError("mine")


class Wishes(Callback):
    def requests(self):
        return True


class Yields(Callback):
    def after_step(self, progress, result):
        yield 1


class Awaits(Callback):
    async def stop(self, progress, reason): ...


class Five(Callback):
    after_step = 5


class Static(Callback):
    @staticmethod
    def after_step(progress, result): ...


class At2(Callback):
    def __init__(self, run):
        self.last = run.ranks.identity.world_size - 1 == run.ranks.rank

    def after_step(self, progress, result):
        if progress.iteration == 2 and self.last:
            self.end()


class Leaves(At2):
    def end(self):
        sys.exit(0)


class LeavesWithText(At2):
    def end(self):
        sys.exit("text")


class Continues(At2):
    def end(self):
        sys.exit(75)


class LeavesNow(At2):
    def end(self):
        os._exit(0)


class Becomes(At2):
    def end(self):
        os.execv("/bin/true", ["true"])


class Forks(At2):
    def end(self):
        if os.fork() == 0:
            os._exit(0)  # as multiprocessing does
        os.fork()


class Lists(At2):
    def end(self):
        return metrics.record("seven", torch.zeros(7))


class Median(At2):
    def end(self):
        return metrics.record("median", 1.0, reduce="median")


class Maybe(Callback):
    def requests(self):
        return StepRequests(finish="maybe")


class Soon(Callback):
    def after_step(self, progress, result):
        return (number for number in range(3))


class FinishesByTensor(Callback):
    def requests(self):
        return StepRequests(finish=torch.tensor(True))


def leaves(losses, log_z, batch):
    sys.exit(0)


def leaves_now(losses, log_z, batch):
    os._exit(0)


class OfItsOwn:
    """Is no Callback, and has one of its methods."""

    def __init__(self, run):
        self.run = run

    def stop(self, progress, reason):
        (self.run.run_dir / f"stopped-{self.run.ranks.rank}").write_text(reason)


def two(losses, log_z):
    return losses


def mean(losses, log_z, batch):
    return losses.mean()


def detached(losses, log_z, batch):
    return losses.detach()


def of_the_batch(losses, log_z, batch):
    return losses / losses.mean().detach()


def of_the_sample(losses, log_z, batch):
    return losses / losses.mean(1, keepdim=True).detach()


def broken(losses, log_z, batch):
    return losses.nothing


def number(losses, log_z, batch):
    return 3.0


def nan(losses, log_z, batch):
    return losses * float("nan")


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, self.state[param], group["lr"])

    def update(self, param, state, lr):
        param.sub_(param.grad, alpha=lr)


class NoDecay(Plain):
    def __init__(self, params, lr): ...


class Factored(Plain):
    def update(self, param, state, lr):
        state["row"] = torch.zeros(len(param))


class Half(Plain):
    def update(self, param, state, lr):
        state["m"] = torch.zeros_like(param, dtype=torch.bfloat16)


class Dotted(Plain):
    def update(self, param, state, lr):
        state["m.1"] = torch.zeros_like(param)


class Counts(Plain):
    count = 0

    def update(self, param, state, lr):
        self.count += 1
        param.sub_(param.grad, alpha=lr / self.count)


class CountsSteps(Plain):
    def update(self, param, state, lr):
        state["step"] = state.get("step", 0) + 1
        param.sub_(param.grad, alpha=lr / state["step"])


class OwnRate(Plain):
    def update(self, param, state, lr):
        param.sub_(param.grad, alpha=0.1)


class Matrix(Plain):
    def update(self, param, state, lr):
        param.sub_(param.grad / param.grad.norm(), alpha=lr)


class Model(Plain):
    def update(self, param, state, lr):
        norm = sum(one.grad.norm() for group in self.param_groups for one in group["params"])
        param.sub_(param.grad / norm, alpha=lr)


class Eager(Plain):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.state[self.param_groups[0]["params"][0]]["m"] = 0


class Starts(Plain):
    def update(self, param, state, lr):
        state["m"] = state.get("m", param.grad).lerp(param.grad, 0.5)
        param.sub_(state["m"], alpha=lr)


class Quits(Plain):
    def update(self, param, state, lr):
        sys.exit(75)


class Fails(Plain):
    def update(self, param, state, lr):
        raise LookupError("mine")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and modules beside it."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "wrong.py").write_text(MODULE)
    (folder / "no_syntax.py").write_text("def f(:\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "leaves_now.py").write_text("import os\nos._exit(0)\n")
    (folder / "needs_more.py").write_text("import not_installed_here\n")
    shutil.copy(runs.DEBUG, folder / "recipe.toml")
    return folder


REFUSED = {
    "train.callbacks": {
        "absent:X": "there is no module absent. Looked in the recipe's folder, the current folder and PYTHONPATH",
        "wrong:Raise": r"module wrong \(.*/wrong\.py\) has no Raise\. Did you mean Raises\?",
        "data:X": r"module data \(.*/data/__init__\.py\) has no X",  # Triplane's names come first
        "no_syntax:f": r"no_syntax\.py, line 1: invalid syntax",
        "needs_more:f": r"cannot be imported: ModuleNotFoundError.*not_installed_here.*needs_more\.py, line 1",
        "wrong:two": "expected a class, found function",
        "wrong:NoHook": "NoHook has none of the methods that are called: start, requests, before_step, before_update",
        "wrong:WrongHook": r"expected after_step\(self, progress, result\), found after_step\(self, result\)",
        "wrong:Yields": "after_step is a generator: it would never run",
        "wrong:Awaits": "stop is a coroutine: it would never be awaited",
        "wrong:Five": r"expected a method after_step\(self, progress, result\), found int",
        "leaves:X": r"EndsProcess: SystemExit\('0'\): a rank must not end by itself.*/leaves\.py, line 2\)",
        "wrong:Needs": r"expected __init__\(self\) or __init__\(self, run\), found one that also needs interval",
    },
    "train.loss": {
        "wrong:Raises": "expected a function, found type",
        "wrong:two": r"expected \(losses, log_z, batch\), found two\(losses, log_z\)",
        "wrong:mean": r"expected a loss for each token, of the shape of losses \[2, 8\], found \[\]",
        "wrong:detached": "its result has no gradient",
        "wrong:of_the_batch": "depends on those of the other samples of its microbatch: it would change with",
        "wrong:broken": r"AttributeError: 'Tensor' object has no attribute 'nothing' \(.*wrong\.py, line \d+\)",
        "wrong:number": "expected a tensor of each token's loss, found float",
        "wrong:nan": "gives NaN or Inf",
        "wrong:leaves": r"EndsProcess: SystemExit\('0'\): a rank must not end by itself.*wrong\.py, line \d+\)",
        "wrong:leaves_now": r"EndsProcess: os\._exit\(0\): a rank must not end by itself.*wrong\.py, line \d+\)",
        "torch:add": "TypeError",
    },
    "optimizer.optimizer": {
        "wrong:Raises": "expected a subclass of torch.optim.Optimizer, found class Raises",
        "wrong:NoDecay": r"expected NoDecay\(params, lr, weight_decay\), found NoDecay\(params, lr\)",
        "wrong:Factored": r"must be an fp32 tensor .* found state\[\"row\"\]: float32 \[4\] for a parameter \[4, 6\]",
        "wrong:Half": r"found state\[\"m\"\]: bfloat16 \[4, 6\]",
        "wrong:Dotted": "cannot name its state 'm.1'",
        "wrong:Counts": r"after a resume it would go on otherwise.*Keep it in state\[param\]",
        "wrong:OwnRate": r"with group\[\"lr\"\] = 0 it still changes weights",
        "wrong:Matrix": "is another one when the matrix is cut in two, as the distributed optimizer",
        "wrong:Model": "depends on others, which may be on other ranks",
        "wrong:Eager": "__init__ makes state",
        "wrong:Starts": "with a state of zeros its first steps are other ones",
        "wrong:Quits": r"EndsProcess: SystemExit\('75'\): a rank must not end by itself",
        "wrong:Fails": r"LookupError: mine \(.*wrong\.py, line \d+\)",
        "torch.optim:Adafactor": "must be an fp32 tensor of the parameter's shape",
    },
}


ALIKE = ("wrong:leaves", "torch:add", "wrong:Half", "torch.optim:Adafactor")
"""Refused by the same line as another one."""
EACH = [(field, path) for field, paths in REFUSED.items() for path in paths]


@pytest.mark.parametrize("field, path", some(EACH, [one for one in EACH if one[1] not in ALIKE]))
def test_what_cannot_be_is_one_message(field: str, path: str, folder: Path) -> None:
    config = parse.parse_config([str(folder / "recipe.toml"), f"--{field}", path])
    with pytest.raises(UserError, match=REFUSED[field][path]) as refused:
        check(config, "cpu")
    assert str(refused.value).startswith(f'{field} "{path}": ') and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer.optimizer wrong:Plain", "--optimizer.optimizer torch.optim:RMSprop",
        "--optimizer.optimizer wrong:CountsSteps", "--train.callbacks wrong:OfItsOwn wrong:Raises wrong:Static",
        "--train.loss wrong:of_the_sample",
        "--optimizer.optimizer wrong:Matrix --parallel.use_distributed_optimizer False",
    ],
)  # fmt: skip
def test_what_can_be_is_let_through(flags: str, folder: Path) -> None:
    check(parse.parse_config([str(folder / "recipe.toml"), *flags.split()]), "cpu")


@pytest.mark.parametrize(
    "flags, why",
    [
        ("--train.loss wrong:of_the_sample --parallel.context_parallel_size 2", "lie on another context rank"),
        (
            "--optimizer.optimizer wrong:Matrix --parallel.use_distributed_optimizer False"
            " --parallel.tensor_model_parallel_size 2",
            "as tensor parallelism cuts it",
        ),
    ],
)
def test_what_one_rank_could_is_refused_where_it_would_be_another(flags: str, why: str, folder: Path) -> None:
    with pytest.raises(UserError, match=why):
        check(parse.parse_config([str(folder / "recipe.toml"), *flags.split()]), "cpu")


def test_a_dry_run_refuses_it_and_the_form_is_checked_with_all_else(folder: Path) -> None:
    recipe = str(folder / "recipe.toml")
    with pytest.raises(UserError, match="found two"):
        describe(parse.parse_config([recipe, "--dry_run", "--train.loss", "wrong:two"]))
    flags = "--train.loss z_loss --train.callbacks a.py --optimizer.optimizer adamw --train.seed -1".split()
    with pytest.raises(UserError) as refused:
        describe(parse.parse_config([recipe, "--dry_run", *flags]))
    assert str(refused.value).startswith("4 problems with this configuration:")
    assert 'optimizer.optimizer: expected "adam", "muon" or "module:attribute"' in str(refused.value)


def test_no_code_beside_a_checkpoint_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config.toml may come from elsewhere. A recipe's folder, and the current one, are searched."""
    checkpoint, elsewhere = folder / "iter_0000001", folder / "elsewhere"
    for path in (checkpoint, elsewhere):
        path.mkdir()
        (path / f"beside_{path.name}.py").write_text("raise SystemExit('ran')\n")
    (checkpoint / "state.json").write_text("{}")
    shutil.copy(runs.DEBUG, checkpoint / "config.toml")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, why in (("iter_0000001", "there is no module"), ("elsewhere", r"SystemExit\('ran'\)")):
        flags = ["--train.callbacks", f"beside_{name}:X"]
        with pytest.raises(UserError, match=why):
            check(parse.parse_config([str(checkpoint / "config.toml"), *flags]), "cpu")
    assert str(checkpoint) not in sys.path and str(Path.cwd()) in sys.path


def test_ranks_compare_the_sources(folder: Path) -> None:
    config = parse.parse_config([str(folder / "recipe.toml"), "--train.callbacks", "wrong:Raises"])
    check(config, "cpu")
    before = digest(["wrong:Raises"])
    code = facts(config, "")["the code of your callbacks, loss, optimizer and transformation"]
    assert code == before != digest([]) == "none"
    (folder / "wrong.py").write_text(MODULE + "\n")
    assert digest(["wrong:two"]) != before
    (folder / "wrong.py").write_text(MODULE)


def test_each_method_of_a_callback_is_handed_on() -> None:
    assert {name for name in vars(Callback) if name[0] != "_"} == set(HOOKS)
    assert set(HOOKS) <= set(vars(UserCallback))


def test_what_a_callback_raises_names_it(folder: Path, prepared: Prepared) -> None:
    recipe = folder / "recipe.toml"
    short = ("--train.train_iters", "2")
    config = runs.configuration(folder / "a", *short, "--train.callbacks", "wrong:Raises", recipe=recipe)
    code, failure = runs.train_or_fail(prepared, config, 2)
    assert code == 1 and failure is not None and "ZeroDivisionError: mine" in failure.text
    assert failure.notes == "raised by after_step of your callback wrong:Raises (train.callbacks)"
    config = runs.configuration(folder / "b", *short, "--train.callbacks", "wrong:Wishes", recipe=recipe)
    code, failure = runs.train_or_fail(prepared, config, 1)
    assert failure is not None and "wrong:Wishes: requests() must return StepRequests, found bool" in failure.text


@pytest.mark.parametrize("path", ["wrong:Leaves", param("wrong:Continues")])
def test_an_end_that_a_callback_causes_on_one_rank_is_a_fault(path: str, folder: Path, prepared: Prepared) -> None:
    flags = ("--train.train_iters", "3", "--train.callbacks", path)
    config = runs.configuration(folder / path, *flags, recipe=folder / "recipe.toml")
    code, failure = runs.train_or_fail(prepared, config, 2)
    assert code == 1 and failure is not None and "EndsProcess: SystemExit(" in failure.text
    assert failure.notes == f"raised by after_step of your callback {path} (train.callbacks)"
    assert not (folder / path / "done").exists()


@pytest.mark.parametrize(
    "name, hook, why",
    [
        ("LeavesWithText", "end", r"SystemExit\('text'\): a rank must not end by itself"),
        ("Lists", "end", r"metrics.record\('seven', ...\): expected one real number, .* of shape \[7\]"),
        ("Median", "end", r"metrics.record\('median', ...\): expected reduce to be one of .*, found 'median'"),
        ("Soon", "after_step", "after_step returned a generator, which never runs"),
        ("Maybe", "requests", r"StepRequests\(finish=...\) must be True or False, found 'maybe'"),
    ],
)
def test_what_a_callback_must_not_ask_for(
    name: str, hook: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    kind = load_callback(f"wrong:{name}")
    inner = kind.__new__(kind)
    callback = UserCallback(f"wrong:{name}", inner)
    if hook == "end":
        inner.after_step = lambda *_: inner.end()
    with pytest.raises(Exception, match=why):
        callback.requests() if hook == "requests" else callback.after_step(Progress(), None)


def test_a_forked_child_does_not_go_on_as_a_rank(folder: Path, prepared: Prepared) -> None:
    flags = ("--train.train_iters", "3", "--train.callbacks", "wrong:Forks", "wrong:FinishesByTensor")
    config = runs.configuration(folder / "forks", *flags[:-1], recipe=folder / "recipe.toml")
    lines = runs.train(prepared, config, 2)
    assert len(lines) == 3
    (log,) = (folder / "forks/logs").glob("node-*.log")
    assert "a process that after_step of your callback wrong:Forks (train.callbacks) has forked came" in log.read_text()
    config = runs.configuration(folder / "tensor", *flags[:-2], flags[-1], recipe=folder / "recipe.toml")
    assert len(runs.train(prepared, config, 1)) == 1


@pytest.mark.parametrize("path, code", [("wrong:LeavesNow", 1), param(("wrong:Becomes", 1)), ("leaves_now:X", 2)])
def test_the_program_names_who_ended_a_rank_without_a_word(path: str, code: int, folder: Path, tmp_path: Path) -> None:
    flags = ["--run_dir", str(tmp_path / "run"), "--data.cache_dir", str(folder / "cache"), "--train.callbacks", path]
    flags += ["--nproc", "2", "--train.micro_batch_size", "2"]
    program = Program([str(folder / "recipe.toml"), *flags], tmp_path / "said")
    errors = program.communicate()[1]
    assert program.returncode == code, errors
    assert f"after_step of your callback {path} (train.callbacks)" in errors or "os._exit(0)" in errors
    assert not (tmp_path / "run/done").exists()


@pytest.mark.parametrize("optimizer", [param("wrong:CountsSteps"), "torch.optim:AdamW"])
def test_a_class_of_its_own_is_called_and_steps_that_are_counted_are_resumed(
    optimizer: str, folder: Path, prepared: Prepared, tmp_path: Path
) -> None:
    """Counted in each parameter's state, as a number and, by torch's own optimizers, as a tensor."""

    def trained(name: str, *flags: str) -> list[float]:
        named = ("--optimizer.optimizer", optimizer, "--train.callbacks", "wrong:OfItsOwn", *SMALL)
        config = runs.configuration(tmp_path / name, *named, *flags, recipe=folder / "recipe.toml")
        return runs.losses(runs.train(prepared, config, 1))

    straight = trained("straight", "--optimizer.lr", "0.01")
    assert (tmp_path / "straight/stopped-0").read_text() == "done"
    trained("broken", "--optimizer.lr", "0.01", "--train.exit_interval", "2")
    assert trained("broken", "--optimizer.lr", "0.01") == straight
