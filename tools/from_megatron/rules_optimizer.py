"""Which optimizer, Muon's settings, and QK-clip."""

from tools.from_megatron import flags_translated as table
from tools.from_megatron.draft import Draft

_MUON = ("muon", "dist_muon")


def optimizer(draft: Draft) -> None:
    """optimizer.optimizer, and muon_* with Megatron-LM's defaults where it is Muon; optimizer.qk_clip."""
    arguments = draft.arguments
    _qk_clip(draft)
    name = arguments.text("optimizer") or "adam"
    if name in _MUON:
        draft.put("optimizer.optimizer", "muon", "--optimizer")
        draft.fields(table.MUON_FIELDS)
        draft.put("optimizer.muon_split_qkv", not arguments.switch("muon-no-split-qkv"), "--muon-no-split-qkv")
        ahead = [flag for flag in ("muon-nesterov", "muon-use-nesterov") if arguments.switch(flag)]
        draft.put("optimizer.muon_nesterov", bool(ahead), f"--{ahead[0]}" if ahead else "no --muon-nesterov")
        _whole_matrices(draft)
        return
    if name != "adam":
        draft.other_model.append(
            f"--optimizer {name}: another optimizer than AdamW and Muon: optimizer.optimizer takes a class of yours."
        )
    draft.only_with("optimizer muon", table.MUON_FLAGS)


def _qk_clip(draft: Draft) -> None:
    if draft.arguments.switch("qk-clip"):
        draft.put("optimizer.qk_clip", True, "--qk-clip")
        draft.fields(table.QK_CLIP_FIELDS)
    else:
        draft.only_with("qk-clip", table.QK_CLIP_FIELDS)


def _whole_matrices(draft: Draft) -> None:
    """Flags that say how, but for one word of one of them."""
    mode = draft.arguments.text("muon-tp-mode") or "blockwise"
    if mode == "blockwise" and draft.values["parallel.tensor_model_parallel_size"] != 1:
        draft.notes.append(
            "--muon-tp-mode blockwise, Megatron-LM's default, orthogonalizes each TP rank's part by itself: another "
            "update for each TP. Here matrices are whole, as with duplicated and distributed."
        )
    elif "muon-tp-mode" in draft.arguments.given:
        draft.irrelevant.append("--muon-tp-mode: matrices are whole on every layout, each on one rank")
    if draft.arguments.switch("muon-use-syrk"):
        draft.irrelevant.append("--muon-use-syrk: which kernel multiplies; torch's does here")
    scalar = draft.arguments.text("muon-scalar-optimizer") or "adam"
    if scalar != "adam":
        draft.other_model.append(f"--muon-scalar-optimizer {scalar}: what is no matrix is AdamW's here.")
