"""What is said of a model_type that is not supported."""

import difflib

from models.families import ARCHITECTURES
from models.hf.keys import Config
from models.spans import shown

IMPOSSIBLE: dict[str, str] = {
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "bart", "t5gemma", "t5gemma2"),
        "it has an encoder and a decoder; Triplane trains decoders only",
    ),
    **dict.fromkeys(("bert", "roberta", "modernbert", "deberta_v2"), "it is an encoder; Triplane trains decoders only"),
    **dict.fromkeys(("bloom", "mpt"), "ALiBi adds a bias to every score, which megatron-core 0.19.2 has not"),
    **dict.fromkeys(
        ("cohere", "cohere2", "gptj", "phi"),
        "attention and MLP of a block read one norm together, where a block here has a norm for each",
    ),
    "olmo": "its norms have no weights, which megatron-core 0.19.2 has not",
    "gemma3n": "its blocks share keys and values, and have embeddings and residual streams of their own, which "
    "megatron-core 0.19.2 has not",
    **dict.fromkeys(("rwkv", "xlstm", "recurrent_gemma"), "megatron-core 0.19.2 has no such recurrence"),
    **dict.fromkeys(
        ("mamba", "falcon_mamba", "jamba"), "it has layers of Mamba-1; those of megatron-core 0.19.2 are Mamba-2's"
    ),
    "falcon": "attention and MLP of a block read one norm together (7B), or scores have ALiBi (1B)",
    "falcon_h1": "a block runs Mamba-2 and attention beside each other, where one here runs one of them",
    **dict.fromkeys(
        ("zamba", "zamba2"), "its attention blocks share weights, which those of megatron-core 0.19.2 do not"
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), "it has blocks of gated short convolutions, which megatron-core 0.19.2 has not"
    ),
    "minimax": "it has blocks of linear attention with a decay for each head, which megatron-core 0.19.2 has not",
    "opt": "its MLP has a ReLU, and its positions begin at 2: neither is here",
}
"""Families of which megatron-core, or the code around it, cannot make the same model, and why."""

NEAREST: dict[str, str] = {
    "arcee": "nemotron", "dots1": "deepseek_v3", "granitemoe": "granite", "exaone4": "olmo3", "stablelm": "gpt_neox",
    "gpt_bigcode": "gpt2", "internlm2": "llama", "internlm3": "qwen2", "baichuan": "llama", "bamba": "nemotron_h",
    "granitemoehybrid": "nemotron_h", "hunyuan_v1_dense": "qwen3", "hunyuan_v1_moe": "qwen3_moe",
}  # fmt: skip
"""Supported ones that compute most alike, where names do not tell."""

LIKE: dict[str, str] = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Models of text and images -> the text model within them, where their text_config does not say."""

SAVED_ALONE: dict[str, str] = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Likewise, where transformers loads and saves the text model by itself."""

SAVE_ALONE = (
    'python -c "import transformers as t; '
    "t.AutoModelForCausalLM.from_pretrained('FOLDER', dtype='auto').save_pretrained('TEXT')\""
)


def unsupported(config: Config) -> str:
    """The sentence: the reason where it cannot be, else the text model within, or the nearest supported ones."""
    model_type, text = config.get("model_type"), config.get("text_config")
    start = f"config.json: model_type {shown(model_type)} is not supported"
    if isinstance(model_type, str):
        if why := IMPOSSIBLE.get(model_type):
            return f"{start}: {why}."
        if inner := SAVED_ALONE.get(model_type):
            return (
                f"{start}: it is a model of text and images. Its text model, {inner}, is: transformers saves that "
                f"without vision (model.visual.) and multi-token prediction (mtp.): {SAVE_ALONE}. Then copy "
                "the tokenizer's files into TEXT, and import it."
            )
        own = text.get("model_type") if isinstance(text, dict) else None
        inner = own if isinstance(own, str) else LIKE.get(model_type)
        if inner in ARCHITECTURES:
            return (
                f"{start}: it is a model of text and images. Its text model is: take text_config out of config.json, "
                f'with "model_type": "{inner}", and the tensors below language_model.'
            )
        near = [NEAREST[model_type]] if model_type in NEAREST else []
        if near := near or difflib.get_close_matches(model_type, ARCHITECTURES, n=3, cutoff=0.6):
            return f"{start}. The nearest that is: {' or '.join(near)}. Supported: {', '.join(sorted(ARCHITECTURES))}."
    return f"{start}. Supported: {', '.join(sorted(ARCHITECTURES))}."
