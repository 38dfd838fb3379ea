"""The Llama of the GPU benchmark as plain nn.Modules, the usual way to write it: what the functional form is beside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fnmodels import llama
from fnmodels.tree import Tree


class Layer(nn.Module):
    """One layer. Attention is SDPA: causal by index for rows of one document, else with a dense mask [B, 1, S, S]."""

    def __init__(self, config: llama.Config) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        sizes = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        sizes["v_proj"] = sizes["k_proj"]
        self.attention = nn.ModuleDict(
            {name: nn.Linear(width, heads * self.head_dim, bias=False) for name, heads in sizes.items()}
        )
        self.attention["o_proj"] = nn.Linear(sizes["q_proj"] * self.head_dim, width, bias=False)
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(width, config.intermediate_size, bias=False) for name in ("gate_proj", "up_proj")}
        )
        self.mlp["down_proj"] = nn.Linear(config.intermediate_size, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
        own, normed = self.attention, self.input_layernorm(x)
        q, k, v = (own[f"{name}_proj"](normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in "qkv")
        q, k = turned(q, table), turned(k, table)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + own["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions, half-split: x [B, N, S, H], table [B, S, H / 2, 2]."""
    cos, sin = table[:, None].to(x.dtype).unbind(-1)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Twin(nn.Module):
    """The model; its parameters have the paths of `llama.spec`."""

    def __init__(self, config: llama.Config, weights: Tree, compiled: bool) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(config) for _ in config.layer_kinds)
            self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.load_state_dict(named(weights), strict=True, assign=True)
        self.compiled = compiled
        if compiled:
            for layer in self.layers:
                layer.compile()

    def forward(self, tokens: Tensor, labels: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, table, mask)
        logits = self.lm_head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), labels.flatten(), ignore_index=-100)


def named(weights: Tree) -> dict[str, Any]:
    """{name of the twin's parameter: a copy of the leaf}."""
    import params as P

    flat = {path: nn.Parameter(leaf.clone()) for path, leaf in P.flatten(weights).items()}
    single = {"embed_tokens", "norm", "lm_head"} | {path for path in flat if path.endswith(("_proj", "layernorm"))}
    return {f"{path}.weight" if path in single else path: leaf for path, leaf in flat.items()}
