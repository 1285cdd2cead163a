"""A hook: prints the layer, by megatron-core's number, whose forward pass quantizes something; each once."""

from typing import Any

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from tests.gpu_path.te import nvfp4, quantization

running: list[Any] = []
"""The layers that the forward pass is in, the innermost last."""
said: set[str] = set()


def named(forward: Any) -> Any:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(self)
        try:
            return forward(self, *args, **kwargs)
        finally:
            running.pop()

    return wrapped


def counted(quantize: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if running and isinstance(running[-1], TransformerLayer):
            text = f"fp8 in sublayer {running[-1].layer_number}{' of MTP' if len(running) > 1 else ''}"
            if text not in said:
                said.add(text)
                print(text, flush=True)
        quantize(*args, **kwargs)

    return wrapped


for layer in (TransformerLayer, MultiTokenPredictionLayer):
    layer.forward = named(layer.forward)
for name in ("_quantize_per_tensor", "_quantize_blocks", "_quantize_mx"):
    setattr(quantization, name, counted(getattr(quantization, name)))
nvfp4.quantize = counted(nvfp4.quantize)
