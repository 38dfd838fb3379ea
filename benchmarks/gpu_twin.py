"""Training steps of the GPU benchmark's Llama as nn.Modules: written plainly, the usual way, and by transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnmodels
import params as P
from fnmodels import llama
from fnmodels.tree import Tree

Step = Callable[[], float]  # one training step: returns its loss, when the device has made the update


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
    """{name of the twin's parameter: the leaf}."""
    flat = {path: nn.Parameter(leaf) for path, leaf in P.flatten(weights).items()}
    single = {"embed_tokens", "norm", "lm_head"} | {path for path in flat if path.endswith(("_proj", "layernorm"))}
    return {f"{path}.weight" if path in single else path: leaf for path, leaf in flat.items()}


def twin_step(config: llama.Config, fresh: Callable[[], Tree], batch: dict[str, Tensor], *, compiled: bool) -> Step:
    own = {name: batch[name] for name in ("positions", "segment_ids")}
    _, masks, tables = fnmodels.prepare(config, batch["tokens"], **own)
    mask = None if one_document(batch) else masks["full"].dense()
    model = Twin(config, fresh(), compiled)
    return module_step(model, lambda: model(batch["tokens"], batch["labels"], tables["full"], mask))


def transformers_model(config: llama.Config, weights: Tree, *, attention: str) -> Any:
    """transformers' Llama with these weights."""
    import transformers

    names = llama.hf_names(config)
    settings = transformers.LlamaConfig(**{k: v for k, v in config.to_hf().items() if k != "model_type"})
    settings._attn_implementation = attention
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(settings)
    flat = P.flatten(weights)
    model.load_state_dict({names[path]: leaf for path, leaf in flat.items()}, strict=True, assign=True)
    with next(iter(flat.values())).device:
        model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    return model


def transformers_step(
    config: llama.Config, fresh: Callable[[], Tree], batch: dict[str, Tensor], *, attention: str
) -> Step:
    model = transformers_model(config, fresh(), attention=attention).train()

    def loss_of() -> Tensor:
        logits = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    return module_step(model, loss_of)


def one_document(batch: dict[str, Tensor]) -> bool:
    """Whether every row is one document, which needs no mask but causality."""
    return bool((batch["segment_ids"] == 1).all())


def module_step(model: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)

    def run() -> float:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())  # waits for the update too: all of it is in one stream

    return run
