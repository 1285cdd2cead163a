"""Programs that start others: bash -c, sbatch, srun, ssh; and which command starts Megatron-LM. Words in, facts out."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tools.from_megatron.unknown import MARK, ScriptWord

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SCRIPT = re.compile(r".*\.(sh|bash|slurm|sbatch|job|slrm|submit|sub)", re.DOTALL)
_STARTERS = (
    "srun", "mpirun", "mpiexec", "jsrun", "aprun", "nohup", "env", "time", "timeout", "numactl", "taskset", "stdbuf",
    "sudo", "nice", "ionice", "setsid", "singularity", "apptainer", "enroot", "docker", "podman", "exec", "command",
    "strace", "nsys", "uv", "conda", "xvfb-run", "flux", "runx", "yhrun", "screen", "tmux",
)  # fmt: skip
_REMOTE = ("ssh", "pdsh", "clush", "dsh", "parallel-ssh", "pssh", "docker", "podman", "singularity", "kubectl", "bsub",
           "tmux", "screen")  # fmt: skip
_OTHER_TASKS = re.compile(
    r"preprocess|convert|merge_|tokeniz|text_generation|inference|server|generate|util\.py|report_|eval_|quantize|"
    r"prune|export|tasks/|setup\.py|_hf\.py|hf_"
)
_LAUNCHERS = ("-", "torch.distributed.", "deepspeed", "accelerate", "nvidia_resiliency_ext")
_BATCH_SWITCHES = frozenset(
    "wait hold parsable requeue no-requeue verbose quiet overcommit contiguous test-only spread-job reboot ignore-pbs"
    " use-min-nodes oversubscribe exclusive help usage version".split()
)
_BATCH_LETTERS = "HQvWIsOkhVb"
_PROMPTS = {
    "-N": "--nodes", "-n": "--ntasks", "-J": "--job-name", "-c": "--cpus-per-task", "-G": "--gpus",
}  # fmt: skip
SLURM_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--job-name": ("SLURM_JOB_NAME",),
}
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.+)$", re.MULTILINE)


SILENT = frozenset(
    "mkdir touch rm cp mv ln chmod chown sleep disown complete bind stty clear tput logger sync truncate module ml"
    " conda kill spack mount umount".split()
)
"""Programs that print nothing which a script goes on with."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that starts a program with flags of Megatron's."""

    launcher: list[ScriptWord]
    """What stands before the program: srun, torchrun and their options."""
    program: ScriptWord
    flags: list[ScriptWord]
    """What stands behind it."""
    line: int
    slurm: dict[str, str]
    """Variables that SLURM would set, from #SBATCH lines and sbatch's flags."""


@dataclass(frozen=True, slots=True)
class NestedScript:
    """A script that a command starts."""

    kind: Literal["text", "file", "input"]
    """Its text is given; it is a file's; or it is what the command reads."""
    source: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    """What stands before it: srun and its options."""
    slurm: dict[str, str] | None = None
    """Of sbatch: what its flags set."""
    remote: bool = False
    """On another machine, where nothing of this shell is set."""


def program_name(word: str) -> str:
    """``/usr/bin/env`` -> ``env``."""
    return word.rpartition("/")[2]


def nested_script(words: Sequence[str]) -> NestedScript | None:
    """The script that a command starts, if it starts one."""
    if program_name(words[0]) == "sbatch":
        return _batch(words)
    for at, word in enumerate(words):
        if program_name(word) in SHELLS and (at == 0 or _starts(words[:at])):
            return _shell(words, at)
    if program_name(words[0]) in _REMOTE or program_name(words[0]) == "srun":
        texts = [word for word in words[1:] if re.search(r"\s", word) and re.search(r"\.py\b|torchrun|bash ", word)]
        if texts:
            return NestedScript("text", texts[-1], launcher=list(words[: words.index(texts[-1])]), remote=True)
    for at, word in enumerate(words):
        if _SCRIPT.fullmatch(word) and not word.startswith("-"):
            started = at == 0 or (program_name(words[0]) in _STARTERS and _starts(words[:at]))
            return NestedScript("file", word, word, list(words[at + 1 :]), list(words[:at])) if started else None
    return None


def _starts(before: Sequence[str]) -> bool:
    """Whether what stands before a program can start it; an argument of another program cannot be one."""
    return program_name(before[0]) in (*_STARTERS, *_REMOTE) or all("=" in word for word in before)


def _shell(words: Sequence[str], at: int) -> NestedScript | None:
    launcher = list(words[:at])
    rest = list(words[at + 1 :])
    letters = ""
    while rest and rest[0][:1] in "-+" and len(rest[0]) > 1:
        option = rest.pop(0)
        if option.startswith("--"):
            rest = rest[1:] if option in ("--rcfile", "--init-file") else rest
        else:
            letters += option[1:]
            rest = rest[option.count("o") + option.count("O") :]
    if "c" in letters:
        if not rest:
            return None
        return NestedScript("text", rest[0], rest[1] if len(rest) > 1 else "bash", rest[2:], launcher)
    if "s" in letters:
        return NestedScript("input", name="bash", arguments=rest, launcher=launcher)
    if not rest or rest[0] == "-":
        return NestedScript("input", name="bash", launcher=launcher)
    return NestedScript("file", rest[0], rest[0], rest[1:], launcher)


def _batch(words: Sequence[str]) -> NestedScript:
    options, rest, wrapped = batch_options(words[1:])
    slurm = slurm_variables(options)
    if wrapped is not None:
        return NestedScript("text", wrapped, "slurm_script", slurm=slurm)
    if not rest:
        return NestedScript("input", name="slurm_script", slurm=slurm)
    return NestedScript("file", rest[0], rest[0], rest[1:], slurm=slurm)


def batch_options(words: Sequence[str]) -> tuple[dict[str, str], list[str], str | None]:
    """sbatch's flags by long name, what stands behind them, and the text of --wrap."""
    options, at, wrapped = dict[str, str](), 0, None
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            if not equals and name[2:] not in _BATCH_SWITCHES and at < len(words):
                value, at = words[at], at + 1
        elif len(word) > 2:
            name, value = word[:2], word[2:].removeprefix("=")
        elif word[1:] not in _BATCH_LETTERS and at < len(words):
            value, at = words[at], at + 1
        if name == "--wrap":
            wrapped = value
        options[_PROMPTS.get(name, name)] = value
    return options, list(words[at:]), wrapped


def slurm_variables(options: dict[str, str]) -> dict[str, str]:
    """What SLURM sets for them, and --export; a range of nodes is not known to be its end."""
    found = {name: options[flag] for flag, names in SLURM_VARIABLES.items() if options.get(flag) for name in names}
    exported = [item.partition("=") for item in options.get("--export", "").split(",")]
    found |= {name: value for name, equals, value in exported if equals and name.isidentifier()}
    if "SLURM_NTASKS" not in found and found.get("SLURM_NNODES", "").isdigit():
        each = found.get("SLURM_NTASKS_PER_NODE", "")
        if each.isdigit():
            product = str(int(found["SLURM_NNODES"]) * int(each))
            found |= {"SLURM_NTASKS": product, "SLURM_NPROCS": product}
    return found


def directives(text: str) -> dict[str, str]:
    """What SLURM sets for a script's #SBATCH lines, which stand before its first command."""
    head: list[str] = []
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        head.append(line)
    options: dict[str, str] = {}
    for line in _DIRECTIVE.findall("\n".join(head)):
        options |= batch_options(re.sub(r"\s#.*", "", line).split())[0]
    return slurm_variables({name: value.strip("\"'") for name, value in options.items()})


def trains_nothing(program: str) -> bool:
    """Whether a program takes Megatron-LM's flags and does something else than training, by its name."""
    return _OTHER_TASKS.search(program) is not None


def launch_at(words: Sequence[str], starts_megatron: Callable[[Sequence[str]], bool]) -> int | None:
    """The place of the program that is started with Megatron-LM's flags: behind it they stand."""
    unknown: int | None = None
    for at, word in enumerate(words[:-1]):
        before = words[at - 1] if at else ""
        if word.startswith("--") and at == 0:
            return None
        named = word.endswith(".py") or (before == "-m" and not word.startswith(_LAUNCHERS))
        if named and starts_megatron(words[at + 1 :]):
            return at
        if unknown is None and MARK.fullmatch(word) and not before.startswith("-"):
            unknown = at if words[at + 1].startswith("--") and starts_megatron(words[at + 1 :]) else None
    return unknown
