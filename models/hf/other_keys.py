"""Keys of a ``config.json`` that an architecture does not read."""

from collections.abc import Iterator
from typing import Any

from models.hf.config_parts import WHOLE
from models.hf.keys import Config, is_one_of
from models.spans import MOST_TOKENS, Span, shown

NO_EFFECT = frozenset("""
    architectures model_type transformers_version torch_dtype dtype use_cache auto_map _name_or_path name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id decoder_start_token_id
    pretraining_tp ep_size n_ctx task_specific_params output_router_logits output_attentions output_hidden_states
    return_dict summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    reorder_and_upcast_attn is_encoder_decoder is_decoder id2label label2id problem_type chunk_size_feed_forward
    _attn_implementation_autoset _attn_implementation attn_implementation cache_implementation _sliding_window_pattern
    is_llama_config unsloth_version unsloth_fixed finetuning_task tokenizer_class prefix torchscript use_bfloat16
    use_return_dict tie_encoder_decoder
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
""".split())  # fmt: skip
"""Keys that say nothing about what the model computes in pretraining; the last ones are of generation, which older
files hold, too."""

SHOWN_BY_NO_TENSOR = frozenset("""
    rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings rope_interleaved
    head_dim layer_types sliding_window use_sliding_window attention_chunk_size is_causal use_bidirectional_attention
    attn_logit_softcapping final_logit_softcapping tie_word_embeddings text_config add_cross_attention per_layer_config
    quantization_config compression_config fusion_config
""".split())  # fmt: skip
"""Keys that say how a model computes, which its tensors do not tell. Code that transformers' models share reads some of
them, whatever a model's own class has; so none is skipped."""

OFF: dict[str, Any] = {
    "use_sliding_window": False, "rope_interleaved": False, "add_cross_attention": False, "is_causal": True,
    "use_bidirectional_attention": False,
}  # fmt: skip
"""Keys that an architecture does not read, and what says that the model is without such a thing."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def left_problems(left: Config, has_code: bool) -> Iterator[str]:
    """Of keys that no table has. has_code: the folder names code of its own, which may read them."""
    for key, value in left.items():
        if key in SHOWN_BY_NO_TENSOR:
            yield f"{key} = {shown(value)}: unknown"
        elif has_code:
            yield f"{key} = {shown(value)}: unknown, and code that comes with the model may read it (auto_map)"


def is_off(key: str, value: object) -> bool:
    """Of a key that was not read."""
    if key == "layer_types" and isinstance(value, list):
        return all(kind == WHOLE for kind in value)
    return value is None or (key in OFF and is_one_of(value, (OFF[key],)))


def token_problems(config: Config) -> list[str]:
    """Of ids that say nothing about the model, but are written when it is exported. Old files have -1 for none."""
    span, problems = Span(-1, MOST_TOKENS, whole=True), []
    for key in TOKEN_IDS:
        value = config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        problems += [problem for one in ids if (problem := span.problem(key, one)) is not None]
    return problems
