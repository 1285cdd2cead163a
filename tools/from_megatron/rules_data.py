"""The data, checkpoint and log sections, and the run's folder."""

from pathlib import PurePath

from program.errors import UserError
from tools.from_megatron.draft import DEFAULT, Draft
from tools.from_megatron.flags_translated import FIM_FIELDS
from tools.from_megatron.unknown import ScriptWord

KEEP_ALL = 1_000_000
"""checkpoint.keep where none is to be deleted, as Megatron-LM deletes none."""


def data(draft: Draft) -> None:
    """Which text, and how documents are divided and separated."""
    arguments = draft.arguments
    mock, paths, file = arguments.switch("mock-data"), arguments.raw("data-path"), arguments.raw("data-args-path")
    if file and not mock:
        _blend_file(draft, file[0], bool(paths))
    elif mock or not paths:
        draft.notes.append(
            f"{'--mock-data' if mock else 'no --data-path'}: Triplane makes no random data; without data.paths it "
            "trains on its built-in corpus."
        )
    elif (known := [word for word in paths if isinstance(word, str)]) == paths:
        _paths(draft, known)
        _order(draft)
    else:  # as the script has them: a run that finds no such file says so, and trains on nothing else
        draft.leave_open("data-path", paths, "data.paths")
        _paths(draft, list(map(str, paths)), "--data-path, left open")
    split = arguments.text("split")
    if split is not None:
        draft.put("data.split", split.strip("'\" "), "--split")
    elif paths or file:
        draft.put("data.split", "969,30,1", DEFAULT)
    _documents(draft)
    _fim(draft)


def _blend_file(draft: Draft, file: ScriptWord, paths: bool) -> None:
    """Weights and paths in a file, which Megatron-LM does not take beside --data-path."""
    if paths:
        raise UserError("--data-args-path beside --data-path: Megatron-LM refuses both. Leave one out.")
    draft.put("data.blend_file", str(file), "--data-args-path")
    if not isinstance(file, str):
        draft.leave_open("data-args-path", [file], "data.blend_file")
    _order(draft)


def _paths(draft: Draft, paths: list[str], source: str = "--data-path") -> None:
    """One path, several, or weights and paths in turn."""
    weights = paths[::2]
    if len(paths) % 2 == 0 and all(map(_is_number, weights)):
        if len(paths) > 2:
            blend: dict[str, float] = {}
            for weight, path in zip(weights, paths[1::2], strict=True):
                blend[path] = blend.get(path, 0.0) + float(weight)
            draft.put("data.blend", blend, source)
            return
        paths = paths[1::2]
    draft.put("data.paths", paths, source)


def _order(draft: Draft) -> None:
    """Triplane's own order, unless a run continues in Megatron's."""
    if draft.arguments.switch("load"):
        samples = draft.arguments.whole("train-samples")
        plan = "" if samples is None else f" and data.megatron_train_samples = {samples} (--train-samples)"
        draft.notes.append(
            f'--load: to go on in the order in which Megatron-LM reads the data, set data.order = "megatron"{plan}.'
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _documents(draft: Draft) -> None:
    mask, positions = map(draft.arguments.switch, ("reset-attention-mask", "reset-position-ids"))
    if mask:
        draft.put("data.reset_attention_mask", True, "--reset-attention-mask")
    rotary = draft.arguments.switch("use-rotary-position-embeddings")
    rotary = rotary or draft.arguments.text("position-embedding-type") in ("rope", "yarn")
    if positions and rotary and not mask:
        draft.irrelevant.append(
            "--reset-position-ids: without --reset-attention-mask, Megatron-LM's rotary embedding does not look at "
            "position ids"
        )
    elif positions:
        draft.put("data.reset_position_ids", True, "--reset-position-ids")


def _fim(draft: Draft) -> None:
    end = draft.arguments.text("fim-eod-token")
    if not draft.arguments.switch("fim-data"):
        draft.only_with("fim-data", (*FIM_FIELDS, "fim-eod-token"))
        return
    draft.fields(FIM_FIELDS)
    if end is not None:
        draft.notes.append("--fim-eod-token: here FIM goes by what ends documents in data.tokenizer (data.eod_token).")


def saving(draft: Draft) -> None:
    """The run's folder, its checkpoints, and what it starts from."""
    arguments = draft.arguments
    save, load = draft.path("save", "run_dir"), arguments.raw("load")
    interval = arguments.whole("save-interval", arguments.whole("persistent-save-interval"))
    draft.put("run_dir", save, "--save")
    source = "--save-interval" if arguments.switch("save-interval") else "--persistent-save-interval"
    draft.put("checkpoint.save_interval", interval or None, source)
    if interval == 0:
        draft.irrelevant.append(f"{source} 0: it never saves before the end, which is Triplane's default")
    retained = arguments.whole("save-retain-interval")
    if retained is None:
        draft.put("checkpoint.keep", KEEP_ALL, "Megatron-LM deletes none")
    else:
        draft.put("checkpoint.keep", 1, "--save-retain-interval deletes the others but the last")
        draft.put("checkpoint.save_retain_interval", retained, "--save-retain-interval")
    if not arguments.switch("save"):
        draft.notes.append("no --save: Triplane saves at the end all the same, into run_dir (by default runs/NAME).")
    for flag in ("override-opt_param-scheduler", "use-checkpoint-opt_param-scheduler"):
        for name in (flag, flag.replace("_", "-")):
            if arguments.switch(name):
                draft.put(f"checkpoint.{flag.replace('-', '_')}", True, f"--{name}")
    start, finetune = _start(draft, load)
    partly = {name: arguments.switch(name) for name in ("finetune", "no-load-optim", "no-load-rng")}
    if start is not None:
        draft.put("checkpoint.load", *start)
        draft.notes.append(
            "checkpoint.load must be a checkpoint of Triplane's; tools.reshard rewrites one of Megatron-LM's."
        )
        for name, given in partly.items():
            if given or (finetune and name == "finetune"):
                source = f"--{name}" if given else "--pretrained-checkpoint"
                draft.put(f"checkpoint.{name.replace('-', '_')}", True, source)
    elif unheeded := [f"--{name}" for name, on in partly.items() if on]:
        draft.unsupported.append(
            f"{' '.join(unheeded)}: without a --load other than --save. A run's own folder is resumed whole; to start "
            "from part of a checkpoint, set checkpoint.load to it, with a run_dir of its own."
        )


def _start(draft: Draft, load: list[ScriptWord]) -> tuple[tuple[str, str] | None, bool]:
    """What a new run starts from with its flag, and whether from its weights only."""
    pretrained = draft.path("pretrained-checkpoint", "checkpoint.load")
    if load and load != draft.arguments.raw("save"):
        path = draft.path("load", "checkpoint.load")
        return (None if path is None else (path, "--load")), False
    return (None, False) if pretrained is None else ((pretrained, "--pretrained-checkpoint"), True)


def logging(draft: Draft) -> None:
    """Where metrics go: with Megatron-LM only where asked to."""
    arguments = draft.arguments
    folder, project = next(iter(arguments.raw("tensorboard-dir")), None), arguments.switch("wandb-project")
    name = draft.path("wandb-exp-name", "log.wandb_name")
    draft.put("log.tensorboard", folder is not None, "--tensorboard-dir" if folder else "no --tensorboard-dir")
    if isinstance(folder, str) and PurePath(folder).name != "events":
        draft.notes.append(f"--tensorboard-dir {folder}: TensorBoard's events go to run_dir/events.")
    if not project:
        draft.put("log.wandb", "off", "no --wandb-project")
        if name is not None:
            draft.irrelevant.append("--wandb-exp-name: has no effect without --wandb-project")
        return
    draft.put("log.wandb", "online", "--wandb-project")
    draft.put("log.wandb_project", draft.path("wandb-project", "log.wandb_project"), "--wandb-project")
    draft.put("log.wandb_name", name, "--wandb-exp-name")
