"""The benchmark's Llama in plain JAX: the forward pass, the loss and AdamW, one jitted step that donates its state.

Weights come in Hugging Face names and layout ([out, in]), so every contender starts from the same file.
Dimension letters: B batch, S sequence, D model, N query heads, G kv heads, H head dim, F mlp, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]


def nest(flat: dict[str, Any], layers: int) -> Tree:
    """Hugging Face names -> {"embed", "norm", "head", "layers": [{short name: weight}, ...]}."""
    prefix = "model.layers.{}."
    return {
        "embed": flat["model.embed_tokens.weight"],
        "norm": flat["model.norm.weight"],
        "head": flat["lm_head.weight"],
        "layers": [
            {
                name.removeprefix(prefix.format(i)).removesuffix(".weight").split(".")[-1]: leaf
                for name, leaf in flat.items()
                if name.startswith(prefix.format(i))
            }
            for i in range(layers)
        ],
    }


def flat(params: Tree, names: list[str]) -> dict[str, Any]:
    """The inverse of `nest`: {Hugging Face name: weight} for these names."""
    top = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}

    def find(name: str) -> Any:
        if name in top:
            return params[top[name]]
        parts = name.split(".")
        return params["layers"][int(parts[2])][parts[-2]]

    return {name: find(name) for name in names}


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


def rotary(x_BSNH: jax.Array, cos_S1H: jax.Array, sin_S1H: jax.Array) -> jax.Array:
    """Rotate halves: the pair of element i is element i + H/2, as in Hugging Face Llama."""
    first, second = jnp.split(x_BSNH, 2, axis=-1)
    cos, sin = cos_S1H.astype(x_BSNH.dtype), sin_S1H.astype(x_BSNH.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def block(layer: Tree, x_BSD: jax.Array, cos: jax.Array, sin: jax.Array, config: dict[str, Any]) -> jax.Array:
    batch, length, _ = x_BSD.shape
    eps, width = config["rms_norm_eps"], config["head_dim"]
    h = rms_norm(x_BSD, layer["input_layernorm"], eps)
    q_BSNH = (h @ layer["q_proj"].T).reshape(batch, length, -1, width)
    k_BSGH = (h @ layer["k_proj"].T).reshape(batch, length, -1, width)
    v_BSGH = (h @ layer["v_proj"].T).reshape(batch, length, -1, width)
    mixed = jax.nn.dot_product_attention(rotary(q_BSNH, cos, sin), rotary(k_BSGH, cos, sin), v_BSGH, is_causal=True)
    x_BSD = x_BSD + mixed.reshape(batch, length, -1) @ layer["o_proj"].T
    h = rms_norm(x_BSD, layer["post_attention_layernorm"], eps)
    gated_BSF = jax.nn.silu(h @ layer["gate_proj"].T) * (h @ layer["up_proj"].T)
    return x_BSD + gated_BSF @ layer["down_proj"].T


def loss_fn(params: Tree, tokens_BS: jax.Array, labels_BS: jax.Array, config: dict[str, Any]) -> jax.Array:
    """Mean cross entropy over labels that are not -100, in fp32."""
    half = config["head_dim"] // 2
    inverse = config["rope_theta"] ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(tokens_BS.shape[1], dtype=jnp.float32)[:, None, None] * inverse
    x_BSD = params["embed"][tokens_BS]
    for layer in params["layers"]:
        x_BSD = block(layer, x_BSD, jnp.cos(angles), jnp.sin(angles), config)
    logits_BSV = rms_norm(x_BSD, params["norm"], config["rms_norm_eps"]) @ params["head"].T
    scores = jax.nn.log_softmax(logits_BSV.astype(jnp.float32))
    valid = labels_BS != -100
    picked = jnp.take_along_axis(scores, jnp.where(valid, labels_BS, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * valid) / jnp.sum(valid)


def adamw(
    params: Tree, grads: Tree, first: Tree, second: Tree, step: jax.Array, *, lr: float, decay: float
) -> tuple[Tree, Tree, Tree]:
    """As torch's fused AdamW: moments are stored in the parameter's dtype, the arithmetic is fp32."""
    b1, b2, eps = 0.9, 0.999, 1e-8

    def update(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        wide = [leaf.astype(jnp.float32) for leaf in (p, g, m, v)]
        m_new = b1 * wide[2] + (1 - b1) * wide[1]
        v_new = b2 * wide[3] + (1 - b2) * wide[1] ** 2
        denominator = jnp.sqrt(v_new) / jnp.sqrt(1 - b2**step) + eps
        p_new = wide[0] * (1 - lr * decay) - lr / (1 - b1**step) * m_new / denominator
        return p_new.astype(p.dtype), m_new.astype(m.dtype), v_new.astype(v.dtype)

    new = jax.tree.map(update, params, grads, first, second)
    return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), new)


def make_step(config: dict[str, Any], *, lr: float, decay: float) -> Callable[..., Any]:
    """step((params, first, second, count), tokens, labels) -> (state, loss); the state's memory is reused."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: tuple[Any, ...], tokens: jax.Array, labels: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
        params, first, second, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels, config)
        count = count + 1
        return (*adamw(params, grads, first, second, count, lr=lr, decay=decay), count), loss

    return step


def init_state(flat: dict[str, Any], layers: int, dtype: str) -> tuple[Any, ...]:
    params = nest({name: jnp.asarray(leaf, dtype=dtype) for name, leaf in flat.items()}, layers)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return params, zeros(params), zeros(params), jnp.zeros((), jnp.float32)
