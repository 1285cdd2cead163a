"""A Llama-like model and its training step in plain PyTorch: the yardstick, as one would write it by hand.

Shape letters: b samples, s sequence, g query groups, d head width, h hidden, f feed-forward width, v vocabulary.
Weights have the layout (a group's queries, key and value lie side by side in one matrix) and the initial values of
``models/``, so that both sides compute the same losses; a test holds them to that.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.init import fill_normal, std_of
from models.shapes import GPTShape


class Attention(nn.Module):
    """Causal attention of grouped queries (arXiv:2305.13245) with rotary positions."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.head_dim, self.groups = shape.kv_channels, shape.num_query_groups
        self.queries = shape.num_attention_heads // shape.num_query_groups
        width = self.groups * (self.queries + 2) * self.head_dim
        self.linear_qkv = nn.Linear(shape.hidden_size, width, bias=False)
        self.linear_proj = nn.Linear(shape.query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        b, s, _ = x.shape
        qkv = self.linear_qkv(x).view(b, s, self.groups, self.queries + 2, self.head_dim)
        parts = qkv.split((self.queries, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)  # [b, heads, s, d]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.queries > 1)
        return self.linear_proj(out.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False)
        self.linear_fc2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        policy, up = self.linear_fc1(x).chunk(2, dim=-1)
        return self.linear_fc2(F.silu(policy) * up)


class ReferenceBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.self_attention = Attention(shape)
        self.pre_mlp_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x = x + self.self_attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class PlainGPT(nn.Module):
    """Embedding, blocks, norm, output layer; initial weights as ``models/init.py`` has them for this seed."""

    def __init__(self, shape: GPTShape, seq_length: int, seed: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(ReferenceBlock(shape) for _ in range(shape.num_layers))
        self.final_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.output_layer = nn.Linear(shape.hidden_size, shape.padded_vocab_size, bias=False)
        frequencies = shape.rotary_base ** -(torch.arange(0, shape.kv_channels, 2) / shape.kv_channels)
        angles = torch.outer(torch.arange(seq_length), frequencies)
        self.register_buffer("cos", angles.cos().repeat(1, 2))  # [s, d]
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        self.mean_loss = mean_loss
        initialise(self, shape, seed)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[b, s] int64 twice -> mean loss in nats per token."""
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.mean_loss(self.output_layer(self.final_layernorm(x)), labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """[b, s, v], [b, s] -> nats per token."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv:2104.09864) of [b, heads, s, d]; channel i turns with i + d/2. cos, sin: [s, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@torch.no_grad()
def initialise(model: PlainGPT, shape: GPTShape, seed: int) -> None:
    """Triplane's initial weights, by canonical name. Its policy and up projections have names of their own."""
    for name, param in model.named_parameters():
        std = std_of(name, shape)
        if std is None:
            continue  # norms start at 1, as torch makes them
        fill_normal(param, seed, name, tuple(param.shape), (0,) * param.dim(), std)


def build_optimizer(
    model: PlainGPT, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """torch's fused AdamW; norms do not decay."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    norms = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def train_step(
    model: PlainGPT, optimizer: torch.optim.AdamW, tokens: Tensor, labels: Tensor, clip_grad: float
) -> float:
    """One update on one microbatch; the loss before it, in nats per token."""
    optimizer.zero_grad()
    loss = model(tokens, labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
    optimizer.step()
    return loss.item()
