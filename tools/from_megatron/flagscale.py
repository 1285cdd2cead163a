"""FlagScale's YAML: flags of Megatron-LM's in snake case, in sections that mean nothing (its ``flatten_dict_to_args``);
and the file that names such a one with the program to start."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from program.errors import UserError
from program.untrusted import read_text
from tools.from_megatron.bridge_flags import BridgeFlags
from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.yaml_text import YamlValue, plain, read_yaml

_SECTIONS = ("system", "model", "data")
_ITS_OWN = frozenset(("log_dir", "details_dir", "scripts_dir", "pids_dir", "no_shared_fs"))
"""Where it writes by itself; no flags."""
_RENAMED = {"tokenizer_path": "tokenizer_model"}


def is_flagscale(value: YamlValue) -> bool:
    """Whether a YAML file is FlagScale's: flags of a training, or a task that it starts."""
    if not isinstance(value, dict):
        return False
    return _has_flags(value) or _has_flags(value.get("train", {})) or "task" in _table(value.get("experiment"))


def read_flagscale(value: YamlValue, path: Path | None, given: Mapping[str, str]) -> tuple[Launch, list[str]]:
    """The command that it starts, and what it leaves open. path: of its file. given: what --set says.

    Raises UserError for what trains nothing on Megatron-LM, and where the flags are in a file that is not there.
    """
    assert isinstance(value, dict)
    config = plain(value)
    if "task" not in _table(config.get("experiment")):
        flags = BridgeFlags(config=config, given=given)
        _add(flags, config if _has_flags(value) else config["train"])
        said = "the program: these are flags of FlagScale's, and the file that names them has it. A GPT is assumed."
        return Launch([], "train_gpt.py", flags.words, 0, {}), [said]
    task, runner = (_table(config["experiment"].get(name)) for name in ("task", "runner"))
    if (task.get("type"), task.get("backend")) != ("train", "megatron"):
        by = f"{task.get('type')} by {task.get('backend')}"
        raise UserError(f"a file of FlagScale's, whose task is {by}: expected train by megatron.")
    config["train"] = plain(_train(value, path))
    flags = BridgeFlags(config=config, given=given)
    _add(flags, config["train"])
    sizes = [runner.get("nnodes", 1), runner.get("nproc_per_node")]
    starter = ["torchrun", f"--nnodes={sizes[0]}", f"--nproc-per-node={sizes[1]}"]
    whole = all(isinstance(size, int) for size in sizes)
    return Launch(list(starter) if whole else [], str(task.get("entrypoint", "train_gpt.py")), flags.words, 0, {}), []


def _train(value: Mapping[str, YamlValue], path: Path | None) -> YamlValue:
    """The flags: within the file, or in the one beside it that Hydra's defaults name."""
    if _has_flags(inner := value.get("train", {})):
        return inner
    defaults = plain(value.get("defaults", []))
    lists = defaults if isinstance(defaults, list) else []
    name = next((str(each["train"]) for each in lists if isinstance(each, dict) and "train" in each), "")
    if not re.fullmatch(r"[\w.-]{1,200}", name):
        raise UserError("a file of FlagScale's that names no flags (defaults: - train: NAME): give the one with them.")
    beside = None if path is None else path.parent / "train" / f"{name}.yaml"
    if beside is None or not beside.is_file():
        raise UserError(f"a file of FlagScale's, whose flags are in train/{name}.yaml beside it: give that file.")
    found = read_yaml(read_text(beside), str(beside))
    if not _has_flags(found):
        raise UserError(f"{beside}: expected FlagScale's sections system, model and data.")
    return found


def _has_flags(value: YamlValue) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), dict) for name in _SECTIONS)


def _add(flags: BridgeFlags, train: Mapping[str, Any]) -> None:
    for name, value in _leaves({key: each for section in _SECTIONS for key, each in train[section].items()}):
        if value is None or value is False or name in _ITS_OWN or _is_null(value, flags.config):
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        flags.add(_RENAMED.get(name, name).replace("_", "-"), *values)


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value


def _is_null(value: Any, config: Mapping[str, Any]) -> bool:
    """Whether a value is a reference to one that is there and empty."""
    found = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
    here: Any = config if found else {}
    for part in found[1].split(".") if found else []:
        if not isinstance(here, Mapping) or part not in here:
            return False
        here = here[part]
    return found is not None and here is None


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
