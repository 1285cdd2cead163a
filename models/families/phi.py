"""Phi-3 and Phi-4."""

import dataclasses

from models.families.base import llama, tiny
from models.shapes import GPTShape

PUBLISHED: dict[str, GPTShape] = {
    # https://huggingface.co/microsoft/Phi-3-mini-4k-instruct; "Phi-3 Technical Report" (arXiv:2404.14219), section 2
    "phi3_mini": dataclasses.replace(
        llama(32, 3072, 8192, 32, 32), vocab_size=32064, window_size=(2046, 0), hf_model_type="phi3"
    ),
    # https://huggingface.co/microsoft/phi-4; "Phi-4 Technical Report" (arXiv:2412.08905)
    "phi4": dataclasses.replace(
        llama(40, 5120, 17920, 40, 10),
        vocab_size=100352,
        rotary_base=250_000,
        max_position_embeddings=16384,
        hf_model_type="phi3",
    ),
}

TINY: dict[str, GPTShape] = {
    "phi3_tiny": tiny(PUBLISHED["phi3_mini"], window_size=(15, 0)),
    "phi4_tiny": tiny(PUBLISHED["phi4"]),
}
