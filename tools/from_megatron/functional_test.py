"""Megatron-LM's functional tests: ENV_VARS and MODEL_ARGS in YAML, as its _run_training.sh starts them.

The file becomes the script that starts the same command, each line where it stands in the YAML, and is read as one.
"""

import re
import shlex
from pathlib import Path

from program.errors import UserError
from tools.from_megatron.flags import known
from tools.from_megatron.yaml_text import YamlText, YamlValue

_PROGRAMS = {
    "t5": "pretrain_t5.py",
    "bert": "pretrain_bert.py",
    "multimodal": "pretrain_vlm.py",
    "mimo": "pretrain_mimo.py",
}
_WORLD = '--nproc_per_node "${GPUS_PER_NODE:-8}" --nnodes "${NUM_NODES:-${SLURM_NNODES:-1}}"'


def is_functional_test(value: YamlValue) -> bool:
    """Whether a YAML file is one."""
    return isinstance(value, dict) and "MODEL_ARGS" in value


def script_of(value: YamlValue, path: Path | None) -> str:
    """The script. Raises UserError for a test of another program than pretraining."""
    assert isinstance(value, dict)
    arguments, mode = value["MODEL_ARGS"], value.get("MODE")
    if isinstance(mode, YamlText) and mode.text != "pretraining":
        raise UserError(f"MODE: {mode.text}: a test of {mode.text}, where this reads those of pretraining.")
    if not isinstance(arguments, dict) or not arguments:
        raise UserError("MODEL_ARGS: expected flags of Megatron-LM's with their values, as in --num-layers: 4.")
    if not any(name.startswith("-") for name in arguments):
        raise UserError(
            "MODEL_ARGS are those of NeMo's recipes (trainer.*), which are Python functions: the model is not in here."
        )
    lines: dict[int, str] = {}
    environment = value.get("ENV_VARS")
    for name, one in (environment if isinstance(environment, dict) else {}).items():
        if isinstance(one, YamlText) and name.isidentifier():
            _add(lines, one.line, f"export {name}={_quoted(one.text)}")
    before = value.get("BEFORE_SCRIPT")
    if isinstance(before, YamlText):
        for number, one_line in enumerate(before.text.rstrip("\n").split("\n"), 1 if "\n" in before.text else 0):
            _add(lines, before.line + number, one_line)
    for name, one in arguments.items():
        texts = [each for each in (one if isinstance(one, list) else [one]) if isinstance(each, YamlText)]
        if len(texts) == 1 and not isinstance(one, list):
            _add(lines, texts[0].line, f"P+=({_words(name, texts[0])})")
        elif texts:
            one_word = (flag := known().get(name[2:])) is not None and flag.arity == "1"
            words = shlex.quote(f"[{','.join(each.text for each in texts)}]") if one_word else None
            _add(lines, texts[0].line, f"P+=({' '.join([name, words or ' '.join(each.text for each in texts)])})")
    end = max(lines, default=0) + 1
    kind = next((part for part in (path.parts if path else ()) if part in _PROGRAMS), "")
    lines[end] = f'torchrun {_WORLD} {_PROGRAMS.get(kind, "pretrain_gpt.py")} "${{P[@]}}"'
    return "\n".join(lines.get(number, "") for number in range(1, end + 1)) + "\n"


def _add(lines: dict[int, str], line: int, text: str) -> None:
    lines[line] = f"{lines[line]}; {text}" if line in lines else text


def _words(name: str, value: YamlText) -> str:
    """A flag and its values, as the test's script writes them before it evaluates them."""
    text = " ".join(value.text.split())
    if not value.quoted and text.lower() in ("true", "yes", "on"):
        return name
    if not value.quoted and text.lower() in ("false", "no", "off", "", "null", "~"):
        return ""
    if re.fullmatch(r"\([^)]+\)", text):
        return f'{name} "{text}"'
    if re.fullmatch(r"\[[^]]+\]", text):
        return f"{name} {text[1:-1]}"
    if re.fullmatch(r"\d+( \d+)+", text):  # --rampup-batch-size: "384 384 97656250"
        return f"{name} {text}"
    if re.search(r"[ |()]", text) or ("*" in text and "/" not in text):  # M-M*-: no files
        return f'{name} "{text}"'
    return f"{name} {text}" if re.fullmatch(r"[\w./:,$\{\}=+*\[\]-]+", text) else f"{name} {shlex.quote(text)}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'
