"""The profile section."""

from tools.from_megatron.arguments import number
from tools.from_megatron.draft import DEFAULT, Draft

STEP_START, STEP_END = 10, 12
"""Megatron-LM's defaults."""


def profile(draft: Draft) -> None:
    """What is traced, with Megatron-LM only where asked to."""
    arguments = draft.arguments
    start, end = arguments.whole("profile-step-start"), arguments.whole("profile-step-end")
    ranks = [number("profile-ranks", text, int) for text in arguments.texts("profile-ranks")]
    switches = {
        name: arguments.switch(name)
        for name in ("use-pytorch-profiler", "pytorch-profiler-collect-callstack", "nvtx-ranges")
    }
    shapes = [name for name in ("pytorch-profiler-collect-shapes", "record-shapes") if arguments.switch(name)]
    if arguments.switch("record-memory-history"):
        draft.put("profile.record_memory_history", True, "--record-memory-history")
    if not arguments.switch("profile"):
        draft.only_with("profile", ["profile-step-start", "profile-step-end", "profile-ranks", *switches, *shapes])
        return
    draft.put("profile.enable_profiling", True, "--profile")
    for field, value, flag, default in (
        ("step_start", start, "profile-step-start", STEP_START), ("step_end", end, "profile-step-end", STEP_END)
    ):  # fmt: skip
        given_value = default if value is None else value
        draft.put(f"profile.{field}", given_value, DEFAULT if value is None else f"--{flag}")
    draft.put("profile.ranks", ranks or None, "--profile-ranks")
    by_torch = switches["use-pytorch-profiler"]
    source = "--use-pytorch-profiler" if by_torch else "no --use-pytorch-profiler: for nsys"
    draft.put("profile.use_pytorch_profiler", by_torch, source)
    if shapes:
        draft.put("profile.pytorch_profiler_collect_shapes", True, f"--{shapes[0]}")
    for name in ("pytorch-profiler-collect-callstack", "nvtx-ranges"):
        if switches[name]:
            draft.put(f"profile.{name.replace('-', '_')}", True, f"--{name}")
