"""What the documents promise: commands that run, links that lead somewhere, tables that are the source's.

A block of commands without a mark is run here, with training as a dry run. A mark in the line above it says otherwise:
``<!-- run by: tests/FILE.py::TEST -->`` names the test that runs the same on files of its own, ``<!-- needs: ... -->``
what no test has. Flags are checked in every block.
"""

import ast
import importlib
import re
import shlex
import shutil
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from campaign import some
from docs import generate, pictures
from models.families import SHAPES
from tools.from_megatron.convert import convert
from training.cli import parse
from training.cli.dry_run import describe
from training.config.recipe import names
from training.metrics.registry import METRICS, unknown

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]
NEEDS = {"SLURM", "a GPU", "the network", "your files", "minutes"}
"""minutes: longer than a test may take."""
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
ENDS = re.compile(r"\s(?:\d?>|\||&&)\s.*|\s&$|[;)].*")
"""Where a command ends within a line of shell."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a block of commands, with the mark above the block."""

    page: str
    mark: str
    line: str


def commands() -> list[Command]:
    """All of all pages; a line that ends in a backslash goes on in the next one."""
    found = []
    for page in PAGES:
        for mark, block in BLOCK.findall((ROOT / page).read_text()):
            lines = [line.strip() for line in block.replace("\\\n", "").splitlines()]
            found += [Command(page, mark, line) for line in lines if line and not line.startswith("#")]
    return found


COMMANDS = commands()
UNMARKED = [command for command in COMMANDS if not command.mark]
SEARCHES = re.compile(r"-m tools\.plan (?!back).*--num_gpus (64|512)")
"""Seconds each: what they search is tests/tools/plan's, the same words with 8 GPUs are tried here."""


def words_after(line: str, what: str) -> list[str]:
    """The arguments of our program ``what`` (a pattern) within a line of shell; "$?" is 1."""
    rest = ENDS.sub("", re.split(what, line, maxsplit=1)[1])
    return shlex.split(rest.replace("$?", "1"), comments=True)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands read, in which they may write without harm to the checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("slurm", "tools", "docs", "tests/planner"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (script,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/from_megatron.md").read_text(), re.DOTALL)
    (folder / "train_llama3_8b.sh").write_text(script)
    (staged,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/stages.md").read_text(), re.DOTALL)
    (folder / "staged.toml").write_text(staged)
    (folder / "llama3_8b.toml").write_text(convert(script, "a script.", {})[0])
    return folder


@pytest.fixture(autouse=True)
def within_the_copy(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run where their relative paths lead somewhere."""
    monkeypatch.chdir(copy)


def test_there_are_commands() -> None:
    assert len(UNMARKED) >= 15
    assert len([command for command in COMMANDS if command.page == "README.md"]) >= 10


@pytest.mark.parametrize(
    "command",
    some(UNMARKED, [command for command in UNMARKED if not SEARCHES.search(command.line)]),
    ids=lambda one: f"{one.page}: {one.line}",
)
def test_a_command_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    if found := re.match(r"(?:\S*/)?python -m (tools\.[\w.]+)", command.line):
        assert program(found[1])(words_after(command.line, re.escape(found[1]))) == 0
        assert capsys.readouterr().out
        return
    assert re.match(r"python pretrain_gpt\.py ", command.line), "run by no test: say so above the block"
    words = words_after(command.line, r"pretrain_gpt\.py")
    if {"--help", "--help_all"} & set(words):
        with pytest.raises(SystemExit) as left:
            parse.parse_config(words)
        assert left.value.code == 0 and "--parallel.tensor_model_parallel_size" in capsys.readouterr().out
    else:
        assert "# plan for" in describe(parse.parse_config(words if "--dry_run" in words else [*words, "--dry_run"]))


def program(name: str) -> Any:
    """The ``main`` of ``python -m name``."""
    folder = ROOT / name.replace(".", "/")
    return importlib.import_module(f"{name}.__main__" if folder.is_dir() else name).main


@pytest.mark.parametrize(
    "command",
    [one for one in COMMANDS if one.mark or SEARCHES.search(one.line)],
    ids=lambda one: f"{one.page}: {one.line}",
)
def test_flags_are_known(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if found := re.search(r"pretrain_gpt\.py|pretrain\.sbatch", command.line):
        words = words_after(command.line, re.escape(found[0]))
        if words[0].endswith(".toml") and not Path(words[0]).exists():
            words[0] = "slurm/recipes/debug.toml"
        if not {"--help", "--help_all"} & set(words):
            monkeypatch.setattr(parse, "resolved", lambda config: config)  # a trunk of the reader's
            parse.parse_config(words)
    for name in re.findall(r"-m (tools\.[\w.]+)", command.line):

        class Parsed(Exception):
            pass

        def parsed(*args: Any, cli: Any = tyro.cli, **kwargs: Any) -> None:
            cli(*args, **kwargs)
            raise Parsed

        with monkeypatch.context() as patched, pytest.raises(Parsed):
            patched.setattr(tyro, "cli", parsed)
            program(name)(words_after(command.line, re.escape(name)))
    for target in re.findall(r"^make ([\w-]+)", command.line):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.mark], ids=lambda one: f"{one.page}: {one.line}")
def test_a_mark_is_true(command: Command) -> None:
    kind, _, what = command.mark.partition(": ")
    if kind == "needs":
        assert what in NEEDS
        return
    assert kind == "run by"
    file, _, test = what.partition("::")
    text = (ROOT / file).read_text()
    assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"
    for name in re.findall(r"-m (tools\.\w+)", command.line):
        assert name in text or name.replace(".", "/") in text, f"{file} does not speak of {name}"


def test_every_family_is_listed() -> None:
    named = set(re.findall(r"`(\w+_tiny)`", (ROOT / "docs/models.md").read_text()))
    assert named == {name for name in SHAPES if name.endswith("_tiny")}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/benchmarks.md"])
def test_one_page_counts_tests(page: str) -> None:
    """The figures of the suite change with each change of it: docs/benchmarks.md has them, other pages link there."""
    assert not re.findall(r"\d[\d,]* (?:tests|(?:tests )?passed)\b", (ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_make_has_the_targets_that_are_named(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", (ROOT / page).read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


def anchors(text: str) -> set[str]:
    """Of a page's headings, as code hosts and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_page_is_in_the_site_and_in_the_index() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    shown = {page for entry in nav for page in pages_of(entry)}
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert shown == there
    index = (ROOT / "docs/README.md").read_text()
    assert all(f"({name})" in index for name in there - {"README.md"})


def pages_of(entry: Any) -> list[str]:
    """File names in an entry of mkdocs.yml's nav."""
    if isinstance(entry, str):
        return [entry]
    inner = [one for value in entry.values() for one in (value if isinstance(value, list) else [value])]
    return [page for one in inner for page in pages_of(one)]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_generated_tables_are_those_of_the_source(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert generate.with_tables(text) == text, "out of date: python -m docs.generate"


def test_every_field_of_a_recipe_is_in_one_table() -> None:
    """Traits of published models apart, which no shipped recipe sets."""
    main, apart = ([*table()] for table in (generate.configuration, generate.configuration_of_shapes))
    rows = [re.findall(r"^\| `(\w+)` \|", "\n".join(each), re.MULTILINE) for each in (main, apart)]
    assert sorted(rows[0] + rows[1]) == sorted(name.rpartition(".")[2] for name in names())
    assert set(rows[1]) == generate.OF_SHAPES
    for recipe in (ROOT / "slurm/recipes").glob("*.toml"):
        assert not generate.OF_SHAPES & set(tomllib.loads(recipe.read_text()).get("model", ())), recipe.name


def test_every_table_is_on_a_page() -> None:
    found = {
        name
        for page in PAGES
        for name in re.findall(r"^<!-- generated: ([\w-]+) -->$", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert found == set(generate.TABLES)


@pytest.mark.parametrize("name", sorted(pictures.PICTURES))
def test_pictures_are_those_of_the_script(name: str) -> None:
    text = (ROOT / "docs/pictures" / name).read_text()
    assert text == pictures.PICTURES[name](), "out of date: python -m docs.pictures"
    assert ET.fromstring(text).tag.endswith("svg")


def test_every_metric_is_explained() -> None:
    """What the recorder and its meters write, and what is recorded, is in the registry, which names nothing else."""
    modules = {path for room in ("parallel", "models", "data", "training") for path in (ROOT / room).rglob("*.py")}
    modules -= {ROOT / "training/metrics/registry.py", ROOT / "parallel/metrics.py"}
    texts = [path.read_text() for path in modules]
    written = {name for text in texts for name in re.findall(r"metrics\.record\(\s*\"([^\"]+)\"", text)}
    for name in ("recorder", "rates", "meters", "parameter_stats", "node"):
        tree = ast.parse((ROOT / f"training/metrics/{name}.py").read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in (node for function in functions for node in ast.walk(function)):
            written |= keys_of(node)
    assert not unknown(written)
    for name in METRICS:
        assert name == "iteration" or any(f'"{name.partition("*")[0]}' in text for text in texts), name


def keys_of(node: ast.AST) -> set[str]:
    """String keys of a dictionary that is written out, or of an entry that is set."""
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        keys = list(node.keys)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        keys = [node.slice]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
