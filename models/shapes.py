"""Named architectures, each with its source, and everything that is counted from one. Imports no torch.

A *shape* is a fully resolved architecture. A *block* is attention + MLP and carries a global number from 0;
mcore's HybridModel makes two layers (*sublayers*) of each block, and only this file translates between them.
Shape letters of parameters: h = hidden_size, f = ffn_hidden_size, n = num_attention_heads,
g = num_query_groups, d = kv_channels, v = vocabulary.
"""

import ast
import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from parallel.errors import UserError

if TYPE_CHECKING:  # models.config reads this module's table, so the import at run time goes one way only
    from models.config import ModelConfig

Normalization = Literal["RMSNorm", "LayerNorm"]
Activation = Literal["swiglu", "geglu", "gelu", "squared_relu"]
PositionEmbedding = Literal["rope", "learned_absolute", "none"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]
LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]


@dataclass(kw_only=True, slots=True, frozen=True)
class GPTShape:
    """One architecture with nothing left open. Fields mean what ``ModelConfig`` says of the same names."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    normalization: Normalization
    activation: Activation
    add_bias_linear: bool
    position_embedding_type: PositionEmbedding
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    hidden_dropout: float
    attention_dropout: float
    norm_epsilon: float = 1e-5
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    rotary_base: int = 10_000
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling = "none"
    rope_scaling_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 8192
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    no_rope_freq: str = "0"
    window_size: tuple[int, int] = (-1, 0)
    window_attn_skip_freq: str = "0"
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    num_moe_experts: int = 0
    moe_layer_freq: str = "1"
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_router_topk: int = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int = 0
    moe_router_group_topk: int = 0
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_load_balancing_type: LoadBalancing = "none"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_expert_capacity_factor: float = 0.0
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    mtp_num_layers: int = 0
    mtp_loss_scaling_factor: float = 0.1
    init_method_std: float = 0.02
    make_vocab_size_divisible_by: int = 128

    @property
    def moe_blocks(self) -> tuple[bool, ...]:
        """Whether each block's MLP is a mixture of experts."""
        if not self.num_moe_experts:
            return (False,) * self.num_layers
        return per_block(self.moe_layer_freq, self.num_layers, every_nth=lambda number, n: number % n == 0)

    @property
    def window_blocks(self) -> tuple[bool, ...]:
        """Whether each block's attention sees ``window_size`` only."""
        if self.window_size[0] < 0:
            return (False,) * self.num_layers
        return per_block(self.window_attn_skip_freq, self.num_layers, every_nth=_windowed)

    @property
    def no_rope_blocks(self) -> tuple[bool, ...]:
        """Whether each block's attention goes without RoPE."""
        return per_block(self.no_rope_freq, self.num_layers, every_nth=lambda number, n: n > 0 and not (number + 1) % n)

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Inner width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up, the same on every layout."""
        multiple = self.make_vocab_size_divisible_by
        return math.ceil(self.vocab_size / multiple) * multiple

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels

    @property
    def query_size(self) -> int:
        """Width of all queries together, and of what attention hands to its output projection."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_size(self) -> int:
        """Width of all keys together, and of all values."""
        return self.num_query_groups * self.kv_channels

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that RoPE turns."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections (GLU), so that fc1 has 2f rows, the gate's f first."""
        return self.activation in ("swiglu", "geglu")

    @property
    def tied(self) -> bool:
        """Whether the word embeddings are also the output layer's weight."""
        return not self.untie_embeddings_and_output_weights

    def problems(self) -> list[str]:
        """What does not fit together within the architecture; layouts are checked elsewhere."""
        found = []
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            fits = [size for size in range(1, heads + 1) if heads % size == 0]
            found.append(
                f"model.num_attention_heads {heads} is not divisible by model.num_query_groups {groups}. "
                f"Groups that divide {heads} heads: {', '.join(map(str, fits))}."
            )
        if self.position_embedding_type == "rope" and (self.rotary_dim % 2 or not self.rotary_dim):
            found.append(
                f"model: RoPE turns pairs of channels, but kv_channels {self.kv_channels} x rotary_percent "
                f"{self.rotary_percent} = {self.rotary_dim} channels. Make that even, at least 2."
            )
        if self.rope_scaling != "none" and self.position_embedding_type != "rope":
            found.append(
                f'model.rope_scaling "{self.rope_scaling}" needs model.position_embedding_type = "rope", '
                f'found "{self.position_embedding_type}".'
            )
        if self.rope_scaling == "llama3" and self.rope_low_freq_factor >= self.rope_high_freq_factor:
            found.append(
                f"model.rope_low_freq_factor {self.rope_low_freq_factor} must be below "
                f"model.rope_high_freq_factor {self.rope_high_freq_factor}."
            )
        if self.rope_scaling == "yarn" and self.yarn_beta_slow >= self.yarn_beta_fast:
            found.append(
                f"model.yarn_beta_slow {self.yarn_beta_slow} must be below model.yarn_beta_fast {self.yarn_beta_fast}."
            )
        return found


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int) -> GPTShape:
    """GPT-2's family: LayerNorm, biases, learned positions, tanh GELU, tied embeddings.

    Source: https://github.com/openai/gpt-2, and the config.json of openai-community/gpt2* on Hugging Face
    (n_layer, n_embd, n_head; gelu_new; layer_norm_epsilon 1e-5; all dropouts 0.1).
    """
    return GPTShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_attention_heads,
        kv_channels=hidden_size // num_attention_heads,
        vocab_size=50257,
        normalization="LayerNorm",
        activation="gelu",
        add_bias_linear=True,
        position_embedding_type="learned_absolute",
        max_position_embeddings=1024,
        untie_embeddings_and_output_weights=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )


def _llama3(
    num_layers: int, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, kv_channels: int = 128
) -> GPTShape:
    """Llama 3's family: RMSNorm, SwiGLU, 8 key-value heads, RoPE with base 500,000, no biases.

    Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, and the config.json of each model card.
    """
    return GPTShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=8,
        kv_channels=kv_channels,
        vocab_size=128256,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=500_000,
        max_position_embeddings=8192,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _llama31(shape: GPTShape, factor: float = 8.0, tied: bool = False) -> GPTShape:
    """Llama 3.1 and 3.2: positions stretched to 131,072 by the llama3 rule, from the 8,192 of Llama 3."""
    return dataclasses.replace(
        shape,
        rope_scaling="llama3",
        rope_scaling_factor=factor,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_max_position_embeddings=8192,
        max_position_embeddings=131_072,
        untie_embeddings_and_output_weights=not tied,
    )


def _small_llama(hidden_size: int, ffn_hidden_size: int, vocab_size: int) -> GPTShape:
    """Four Llama-like blocks of four heads in two groups, for laptops; sizes are multiples of 16."""
    return dataclasses.replace(
        _llama3(4, hidden_size, ffn_hidden_size, num_attention_heads=4, kv_channels=hidden_size // 4),
        num_query_groups=2,
        vocab_size=vocab_size,
        rotary_base=10_000,
        max_position_embeddings=2048,
    )


SHAPES: dict[str, GPTShape] = {
    # Ours, for tests and the demo. Vocabularies: the byte tokenizer's 257; the demo's SentencePiece model's.
    "debug": _small_llama(hidden_size=64, ffn_hidden_size=176, vocab_size=257),
    "demo": _small_llama(hidden_size=128, ffn_hidden_size=352, vocab_size=2048),
    # Without dropout, unlike its family: what it is for is comparing layouts.
    "gpt2_tiny": dataclasses.replace(_gpt2(4, 64, 4), vocab_size=257, hidden_dropout=0.0, attention_dropout=0.0),
    # An original context of 64 puts wavelengths into all three bands of the llama3 rule at short sequences.
    "llama3_tiny": dataclasses.replace(
        _llama31(_small_llama(hidden_size=64, ffn_hidden_size=176, vocab_size=257)),
        rotary_base=500_000,
        rope_original_max_position_embeddings=64,
        max_position_embeddings=512,
    ),
    # https://huggingface.co/openai-community/gpt2, -medium, -large, -xl
    "gpt2": _gpt2(12, 768, 12),
    "gpt2_medium": _gpt2(24, 1024, 16),
    "gpt2_large": _gpt2(36, 1280, 20),
    "gpt2_xl": _gpt2(48, 1600, 25),
    # "Language Models are Few-Shot Learners" (arXiv:2005.14165), table 2.1 and section 2.1 (context 2048).
    # The paper alternates dense and banded sparse attention; here all is dense, as in Megatron's 175B runs.
    # It names no dropout: 0.1 is GPT-2's.
    "gpt3_175b": dataclasses.replace(_gpt2(96, 12288, 96), max_position_embeddings=2048),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B and -70B
    "llama3_8b": _llama3(32, 4096, 14336, 32),
    "llama3_70b": _llama3(80, 8192, 28672, 64),
    # https://huggingface.co/meta-llama/Llama-3.1-8B, -70B, -405B
    "llama31_8b": _llama31(_llama3(32, 4096, 14336, 32)),
    "llama31_70b": _llama31(_llama3(80, 8192, 28672, 64)),
    "llama31_405b": _llama31(_llama3(126, 16384, 53248, 128)),
    # https://huggingface.co/meta-llama/Llama-3.2-1B and -3B
    "llama32_1b": _llama31(_llama3(16, 2048, 8192, 32, kv_channels=64), factor=32.0, tied=True),
    "llama32_3b": _llama31(_llama3(28, 3072, 8192, 24), factor=32.0, tied=True),
}
"""Architectures by name. ``vocab_size`` is the published one; a run replaces it by its tokenizer's."""

ALIASES = {"llama3_1b": "llama32_1b", "llama3_3b": "llama32_3b", "llama3_405b": "llama31_405b"}
"""Sizes that exist in one release only, under the name of the generation."""


def unknown_shape(name: str) -> list[str]:
    """The problem of a name that is in neither table, with the nearest names; empty when it is known."""
    names = [*SHAPES, *ALIASES]
    if name in names:
        return []
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(sorted(names))}."
    return [f'model.shape "{name}" is unknown. {hint}']


def named(name: str) -> GPTShape:
    """The published shape of this name. Raises UserError with the nearest names."""
    if problems := unknown_shape(name):
        raise UserError(problems[0])
    return SHAPES[ALIASES.get(name, name)]


def resolve(config: "ModelConfig", tokenizer_vocab_size: int | None) -> GPTShape:
    """The named shape with the fields that the configuration sets put over it.

    ``kv_channels`` becomes hidden_size / num_attention_heads where one of these two is set and it is not.
    The vocabulary is model.vocab_size, else the tokenizer's, else (no tokenizer at hand: a dry run) the
    published one. Raises UserError for an unknown name and for a tokenizer with ids beyond model.vocab_size.
    """
    base = named(config.shape)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(GPTShape)}
    changes = {name: value for name, value in values.items() if value is not None}
    if config.vocab_size is None and tokenizer_vocab_size is not None:
        changes["vocab_size"] = tokenizer_vocab_size
    if config.vocab_size is not None and config.vocab_size < (tokenizer_vocab_size or 0):
        raise UserError(
            f"model.vocab_size is {config.vocab_size}, but the tokenizer has {tokenizer_vocab_size} ids. "
            f"Use model.vocab_size = {tokenizer_vocab_size} or more, or leave it out."
        )
    if "kv_channels" not in changes and ("hidden_size" in changes or "num_attention_heads" in changes):
        heads = changes.get("num_attention_heads", base.num_attention_heads)
        changes["kv_channels"] = changes.get("hidden_size", base.hidden_size) // heads
    return dataclasses.replace(base, **changes)


# ---- parameters


@dataclass(slots=True, frozen=True)
class Parameter:
    """A parameter of the whole model, as no rank holds it alone."""

    name: str
    """Canonical: Transformer Engine's spelling, global block number."""

    shape: tuple[int, ...]
    """Full shape, in the orientation of torch.nn.Linear: [out, in]."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameters(shape: GPTShape, *, padded_vocab: bool = True) -> Iterator[Parameter]:
    """Every parameter of the model, once, from the embedding to the output layer.

    padded_vocab: count the rows that only round the vocabulary up, which exist but are never trained.
    """
    yield from embedding_parameters(shape, padded_vocab=padded_vocab)
    for block in range(shape.num_layers):
        yield from block_parameters(shape, block)
    yield from head_parameters(shape, padded_vocab=padded_vocab)


def num_parameters(shape: GPTShape, *, padded_vocab: bool = False) -> int:
    """Parameters of the model, without the padding of the vocabulary unless asked: the published way."""
    return sum(parameter.size for parameter in parameters(shape, padded_vocab=padded_vocab))


def embedding_parameters(shape: GPTShape, *, padded_vocab: bool = True) -> Iterator[Parameter]:
    """What the first pipeline chunk holds before its blocks."""
    yield Parameter("word_embeddings.weight", (_vocab(shape, padded_vocab), shape.hidden_size))
    if shape.position_embedding_type == "learned_absolute":
        yield Parameter("position_embeddings.weight", (shape.max_position_embeddings, shape.hidden_size))


def block_parameters(shape: GPTShape, block: int) -> Iterator[Parameter]:
    """The parameters of block ``block``, counted from 0 over the whole model.

    ``linear_qkv`` holds, group after group, the group's n/g query heads, its key and its value:
    [(n + 2g) d, h]. A gated ``linear_fc1`` holds the gate's f rows, then the other f: [2f, h].
    """
    h, f, attention, mlp = shape.hidden_size, shape.ffn_hidden_size, "self_attention", "mlp"
    prefix = f"layers.{block}."
    qkv, fc1 = shape.query_size + 2 * shape.kv_size, 2 * f if shape.gated else f
    yield from _norm(shape, f"{prefix}{attention}.linear_qkv.layer_norm_", h)
    yield from _linear(f"{prefix}{attention}.linear_qkv", qkv, h, shape.add_bias_linear or shape.add_qkv_bias)
    if shape.qk_layernorm:
        yield from _norm(shape, f"{prefix}{attention}.q_layernorm.", shape.kv_channels)
        yield from _norm(shape, f"{prefix}{attention}.k_layernorm.", shape.kv_channels)
    yield from _linear(f"{prefix}{attention}.linear_proj", h, shape.query_size, shape.add_bias_linear)
    yield from _norm(shape, f"{prefix}{mlp}.linear_fc1.layer_norm_", h)
    yield from _linear(f"{prefix}{mlp}.linear_fc1", fc1, h, shape.add_bias_linear)
    yield from _linear(f"{prefix}{mlp}.linear_fc2", h, f, shape.add_bias_linear)


def head_parameters(shape: GPTShape, *, padded_vocab: bool = True) -> Iterator[Parameter]:
    """What the last pipeline chunk holds after its blocks; a tied output layer adds nothing of its own."""
    yield from _norm(shape, "final_layernorm.", shape.hidden_size)
    if shape.untie_embeddings_and_output_weights:
        yield Parameter("output_layer.weight", (_vocab(shape, padded_vocab), shape.hidden_size))


def _vocab(shape: GPTShape, padded: bool) -> int:
    return shape.padded_vocab_size if padded else shape.vocab_size


def _norm(shape: GPTShape, prefix: str, size: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", (size,))
    if shape.normalization == "LayerNorm":
        yield Parameter(f"{prefix}bias", (size,))


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (rows, columns))
    if bias:
        yield Parameter(f"{name}.bias", (rows,))


# ---- sublayers: what mcore's HybridModel calls layers

SUBLAYERS_PER_BLOCK = 2
"""Attention ("*", latent "+") and MLP ("-", experts "E") are two layers to HybridModel."""


def hybrid_layer_pattern(shape: GPTShape, layers_per_chunk: Sequence[int]) -> str:
    """HybridModel's pattern: one symbol per sublayer, "|" between pipeline chunks, then "/" before each MTP depth.

    layers_per_chunk: blocks of each chunk, in the order activations pass through them; 0 is allowed.
    """
    if sum(layers_per_chunk) != shape.num_layers:
        raise ValueError(f"{list(layers_per_chunk)} blocks per chunk do not sum to {shape.num_layers} layers")
    blocks = [symbols(shape, moe) for moe in shape.moe_blocks]
    ends = list(itertools.accumulate(layers_per_chunk))
    chunks = ["".join(blocks[end - count : end]) for end, count in zip(ends, layers_per_chunk, strict=True)]
    return "|".join(chunks) + ("/" + mtp_symbols(shape)) * shape.mtp_num_layers


def symbols(shape: GPTShape, moe: bool) -> str:
    """HybridModel's two symbols of a block."""
    return ("+" if shape.multi_latent_attention else "*") + ("E" if moe else "-")


def mtp_symbols(shape: GPTShape) -> str:
    """Of the block within an MTP depth: one like the last of the model, as DeepSeek-V3 has it (arXiv:2412.19437)."""
    return symbols(shape, shape.moe_blocks[-1])


def num_sublayers(shape: GPTShape) -> int:
    """What HybridModel wants as ``num_layers``."""
    return SUBLAYERS_PER_BLOCK * shape.num_layers


def recompute_num_sublayers(recompute_num_layers: int) -> int:
    """mcore's ``recompute_num_layers`` for that many of our blocks, of either recompute method."""
    return SUBLAYERS_PER_BLOCK * recompute_num_layers


def block_of(layer_number: int) -> tuple[int, Literal["self_attention", "mlp"]]:
    """Our block and part for mcore's global ``layer_number``, which counts sublayers from 1."""
    block, part = divmod(layer_number - 1, SUBLAYERS_PER_BLOCK)
    return block, "mlp" if part else "self_attention"


def per_sublayer(per_block: Sequence[int | bool]) -> list[int]:
    """A per-block list (no_rope_freq, window_attn_skip_freq) as mcore reads it: by sublayer.

    Never give mcore an integer frequency instead: it would count sublayers and hit every attention or none.
    """
    return [int(value) for value in per_block for _ in range(SUBLAYERS_PER_BLOCK)]


# ---- frequencies: Megatron's "N, or a list with a 0 or 1 for each layer"


def per_block(freq: str, num_layers: int, every_nth: Callable[[int, int], bool]) -> tuple[bool, ...]:
    """A frequency for each block. every_nth: what a plain number N means for block ``number``, counted from 0.

    Raises UserError for what is neither a whole number nor a list of num_layers zeros and ones.
    """
    value = parse_freq(freq)
    if isinstance(value, int):
        return tuple(every_nth(number, value) for number in range(num_layers))
    if len(value) != num_layers:
        raise UserError(f'"{freq}" has {len(value)} entries for model.num_layers {num_layers}.')
    return tuple(bool(entry) for entry in value)


def parse_freq(freq: str) -> int | list[int]:
    """``"2"`` -> 2; ``"[0]*3+[1]*58"`` -> a list: lists of 0 and 1, with + and * and brackets, as Megatron has it.

    Raises UserError for anything else; nothing is evaluated.
    """
    try:
        value = _freq_value(ast.parse(freq.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        value = None
    if value is None or (isinstance(value, list) and (not set(value) <= {0, 1})) or (value == []):
        raise UserError(
            f'"{freq}" is no layer frequency. Use a whole number such as "2", or zeros and ones: "[0]*3+[1]*5".'
        )
    return value


def _freq_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 10_000:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_freq_value(entry) for entry in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _freq_value(node.left), _freq_value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            return left * right
    raise ValueError


def _windowed(number: int, n: int) -> bool:
    """Megatron's rule: every n-th layer, counted from 1, sees everything; 0: none does."""
    return n == 0 or (number + 1) % n != 0
