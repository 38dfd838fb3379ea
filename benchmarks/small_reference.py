"""The hand-written functional Llama that benchmarks/small.py measures against: what a notebook would have instead.

Weights are a nested dict in the layout of fnmodels' params. Dimension letters: B batch, S sequence, D model, N query
heads, G kv heads, H head dim, V vocab.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tree = dict[str, Any]


def rotary_table(length: int, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """(cos, sin) [S, 1, H]; sin has the sign of the rotation of halves."""
    half = torch.arange(head_dim // 2, dtype=torch.float64) * (2 / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / theta**half
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x_BSNH * cos, x_BSNH.roll(x_BSNH.shape[-1] // 2, -1), sin)


def block(layer: Tree, x_BSD: Tensor, table: tuple[Tensor, Tensor], head_dim: int, cache: Any = None) -> Tensor:
    """One layer. cache: (keys, values [B, C, G, H], position) to write at and to read up to."""
    at, mlp, (batch, length, width) = layer["attention"], layer["mlp"], x_BSD.shape
    h = F.rms_norm(x_BSD, (width,), layer["input_layernorm"], 1e-5)
    q, k, v = (F.linear(h, at[f"{n}_proj"]).view(batch, length, -1, head_dim) for n in "qkv")
    q, k = rotate(q, *table), rotate(k, *table)
    if cache is not None:
        keys, values, position = cache
        keys[:, position : position + length], values[:, position : position + length] = k, v
        k, v = keys[:, : position + length], values[:, : position + length]
    causal = cache is None or length > 1
    heads = (t.transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True).transpose(1, 2)
    x_BSD = x_BSD + F.linear(mixed.reshape(batch, length, -1), at["o_proj"])
    h = F.rms_norm(x_BSD, (width,), layer["post_attention_layernorm"], 1e-5)
    return x_BSD + F.linear(F.silu(F.linear(h, mlp["gate_proj"])) * F.linear(h, mlp["up_proj"]), mlp["down_proj"])


def forward(params: Tree, tokens_BS: Tensor, table: tuple[Tensor, Tensor], head_dim: int) -> Tensor:
    """Logits [B, S, V]."""
    x = F.embedding(tokens_BS, params["embed_tokens"])
    for layer in params["layers"]:
        x = block(layer, x, table, head_dim)
    return F.linear(F.rms_norm(x, x.shape[-1:], params["norm"], 1e-5), params["lm_head"])


def loss(params: Tree, tokens_BS: Tensor, labels_BS: Tensor, table: tuple[Tensor, Tensor], head_dim: int) -> Tensor:
    logits = forward(params, tokens_BS, table, head_dim)
    return F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), ignore_index=-100)


def decode(params: Tree, token_B1: Tensor, table: tuple[Tensor, Tensor], caches: list[Any], position: int) -> Tensor:
    """Logits [B, V] of the token at `position`; caches: (keys, values) of each layer, written in place."""
    x, here = F.embedding(token_B1, params["embed_tokens"]), tuple(t[position : position + 1] for t in table)
    for layer, (keys, values) in zip(params["layers"], caches, strict=True):
        x = block(layer, x, here, keys.shape[-1], (keys, values, position))
    return F.linear(F.rms_norm(x[:, -1], x.shape[-1:], params["norm"], 1e-5), params["lm_head"])
