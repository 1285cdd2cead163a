"""A hook: says once that activations were on their way back before their own layer asked for them."""

from typing import Any

from models.layers import offload

unpack, fetch = offload._unpack, offload._Layer.fetch
asking: list[offload._Layer] = []
said = False


def noted_unpack(kept: Any) -> Any:
    asking[:] = [kept.of] if isinstance(kept, offload._Kept) else []
    return unpack(kept)


def noted_fetch(layer: Any) -> None:
    global said
    there = [kept for each in layer.kept if (kept := each()) is not None]
    if not said and layer not in asking and any(kept.back is None and kept.uses for kept in there):
        said = True
        print("fetched ahead", flush=True)
    fetch(layer)


offload._unpack = noted_unpack
offload._Layer.fetch = noted_fetch  # type: ignore[assignment,method-assign]
