"""What is not one number for one number: heads, rotary positions, windows, experts."""

from collections.abc import Mapping
from typing import Any

from models.hf import rope
from models.hf.keys import Config, Read, Unsupported, Write, is_one_of, pop_number, take_bool, take_list
from models.shapes import GPTShape
from models.spans import EXPERTS, HEADS, MOST_EXPERTS, MOST_TOKENS, WIDTH, Span

TOKENS = Span(1, MOST_TOKENS, whole=True)
COUNT = Span(0, MOST_EXPERTS, whole=True)


def heads(may_be_missing: tuple[str, ...], defaults: Mapping[str, int] | None = None) -> tuple[Read, Write]:
    """may_be_missing: keys that mean the plain thing where they are left out or null; for others of these
    architectures transformers has a number of its own there: ``defaults``, where published configurations rely on it.
    """

    def read(left: Config, fields: dict[str, Any]) -> None:
        heads = fields["num_attention_heads"]
        if left.get("head_dim") is None and "head_dim" in may_be_missing:
            _check_divides(left, fields, "num_attention_heads")
        plain = {"num_key_value_heads": heads, "head_dim": fields["hidden_size"] // heads, **(defaults or {})}
        for key, ours in (("num_key_value_heads", "num_query_groups"), ("head_dim", "kv_channels")):
            if left.get(key) is None and key not in (*may_be_missing, *(defaults or {})):
                raise Unsupported(key, None, "a number")
            fields[ours] = pop_number(left, key, plain[key], HEADS)
        if heads % fields["num_query_groups"]:
            raise Unsupported("num_key_value_heads", fields["num_query_groups"], f"a number that divides {heads} heads")

    return read, lambda shape: {"num_key_value_heads": shape.num_query_groups, "head_dim": shape.kv_channels}


def _check_divides(left: Config, fields: dict[str, Any], key: str) -> None:
    """Raises Unsupported where heads are no equal parts of the hidden state, and have no width of their own."""
    if fields["hidden_size"] % fields["num_attention_heads"]:
        raise Unsupported(key, fields["num_attention_heads"], f"a number that divides {fields['hidden_size']}")


def tied(default: bool) -> tuple[Read, Write]:
    """default: what it means where ``tie_word_embeddings`` is left out."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        fields["untie_embeddings_and_output_weights"] = not take_bool(left, "tie_word_embeddings", default)

    return read, lambda shape: {"tie_word_embeddings": shape.tied}


def read_rope(left: Config, fields: dict[str, Any]) -> None:
    """Rotary positions."""
    fields |= rope.read(left, latent=bool(fields.get("multi_latent_attention")))


def rope_unless_given(default: Config, read: Read = read_rope) -> Read:
    """default: the parameters that transformers' class has where a file has none."""

    def given(left: Config, fields: dict[str, Any]) -> None:
        if left.get("rope_parameters") is None and left.get("rope_scaling") is None:
            left["rope_parameters"] = default
        read(left, fields)

    return given


def window(default: int | None) -> tuple[Read, Write]:
    """default: what it means where ``sliding_window`` is left out."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        window = pop_window(left, default)
        fields["window_size"] = (-1, 0) if window is None else (window - 1, 0)

    return read, lambda shape: {"sliding_window": window_of(shape)}


def pop_window(left: Config, default: int | None) -> int | None:
    """``sliding_window``, which counts the token itself; null is none."""
    window = left.pop("sliding_window", default)
    if window is not None and TOKENS.problem("sliding_window", window):
        raise Unsupported("sliding_window", window, f"{TOKENS}, of tokens, or null")
    return int(window) if window is not None else None


def window_of(shape: GPTShape) -> int | None:
    """``sliding_window``, or null."""
    return shape.window_size[0] + 1 if any(shape.window_blocks) else None


WINDOWED, WHOLE = "sliding_attention", "full_attention"


def write_window_types(shape: GPTShape) -> list[str]:
    """``layer_types``."""
    return [WINDOWED if windowed else WHOLE for windowed in shape.window_blocks]


def skip_freq(windowed: list[bool]) -> str:
    """window_attn_skip_freq of these blocks; the shortest way to say it."""
    for n in range(len(windowed) + 1):
        if windowed == [n == 0 or (block + 1) % n != 0 for block in range(len(windowed))]:
            return str(n)
    return str([int(each) for each in windowed]).replace(" ", "")


def read_mixtral(left: Config, fields: dict[str, Any]) -> None:
    """One width for the experts, and no other MLP."""
    fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]


def write_mixtral(shape: GPTShape) -> Config:
    """As ``read_mixtral``."""
    return {"intermediate_size": shape.expert_ffn_hidden_size}


def qwen_moe(default: int) -> tuple[Read, Write]:
    """default: experts where no key says how many."""
    return lambda left, fields: _read_qwen_moe(left, fields, default), write_qwen_moe


def olmoe_experts(default: int) -> tuple[Read, Write]:
    """Experts in every block, as wide as intermediate_size says. default: how many where no key says so."""

    def read(left: Config, fields: dict[str, Any]) -> None:
        fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
        fields["num_moe_experts"] = pop_number(left, "num_experts", default, EXPERTS)
        fields["moe_router_pre_softmax"] = not take_bool(left, "norm_topk_prob", False)

    def write(shape: GPTShape) -> Config:
        return {
            "intermediate_size": shape.expert_ffn_hidden_size,
            "num_experts": shape.num_moe_experts,
            "norm_topk_prob": not shape.moe_router_pre_softmax,
        }

    return read, write


def _read_qwen_moe(left: Config, fields: dict[str, Any], default: int) -> None:
    """transformers 5 writes num_experts as num_local_experts."""
    experts = pop_number(left, "num_experts", 0, EXPERTS)
    also = pop_number(left, "num_local_experts", 0, EXPERTS)
    if experts and also and experts != also:
        raise Unsupported("num_local_experts", also, f"{experts}, which num_experts says")
    fields["num_moe_experts"] = experts or also or default
    fields["moe_router_pre_softmax"] = not take_bool(left, "norm_topk_prob", False)
    dense, step = take_list(left, "mlp_only_layers"), pop_number(left, "decoder_sparse_step", 1, TOKENS)
    blocks = range(fields["num_layers"])
    if any(isinstance(block, bool) or block not in blocks for block in dense):
        raise Unsupported("mlp_only_layers", dense, f"numbers of blocks, 0 to {len(blocks) - 1}")
    fields["moe_layer_freq"] = freq([block not in dense and (block + 1) % step == 0 for block in blocks])


def write_qwen_moe(shape: GPTShape) -> Config:
    """As ``qwen_moe``."""
    return {
        "num_experts": shape.num_moe_experts,
        "norm_topk_prob": not shape.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [block for block, moe in enumerate(shape.moe_blocks) if not moe],
        "moe_intermediate_size": shape.expert_ffn_hidden_size,
    }


def freq(moe: list[bool]) -> str:
    """A layer frequency for each block; the shortest way to say it where all or all after the first few are alike."""
    dense = moe.index(True) if True in moe else len(moe)
    if all(moe):
        return "1"
    if all(moe[dense:]):
        return f"[0]*{dense}+[1]*{len(moe) - dense}"
    return str([int(each) for each in moe]).replace(" ", "")


def read_gpt2(left: Config, fields: dict[str, Any]) -> None:
    """Heads, the MLP's width, and the embedding's dropout, which is the other one."""
    fields["num_query_groups"] = fields["num_attention_heads"]
    _check_divides(left, fields, "n_head")
    fields["kv_channels"] = fields["hidden_size"] // fields["num_attention_heads"]
    fields["ffn_hidden_size"] = pop_number(left, "n_inner", 4 * fields["hidden_size"], WIDTH)
    embedding = left.pop("embd_pdrop", 0.1)
    if not is_one_of(embedding, (fields["hidden_dropout"],)):
        raise Unsupported("embd_pdrop", embedding, f"{fields['hidden_dropout']}, the same as resid_pdrop")


def write_gpt2(shape: GPTShape) -> Config:
    """As ``read_gpt2``."""
    return {"n_inner": shape.ffn_hidden_size, "embd_pdrop": shape.hidden_dropout}
