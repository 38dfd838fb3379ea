"""A Llama of thirty lines in jax, its loss and its step, with the parameters and batches that tests of idioms share.

It imports jax and optax; a test module asks `pytest.importorskip` for both before it imports this one.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import llama, tree

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
CONFIG = llama.Config(**SIZES, num_attention_heads=4, num_key_value_heads=2)
LENGTH, HEAD = 8, CONFIG.head_dim
TABLE = fnmodels.prepare(CONFIG, torch.zeros(1, LENGTH, dtype=torch.int64))[2]["full"].numpy()
LOSS = functools.partial(train.next_token_loss, config=CONFIG)
# With eps=1e-8 the first updates are signs of gradients, and their derivative divides rounding errors by gradients:
# those of a model are equal to 1e-17, some are 1e-9. test_updates_are_those_of_optax compares at that eps.
EPS = 1e-3
BETAS = {"b1": 0.9, "b2": 0.999, "eps": EPS, "weight_decay": 0.01}


@pytest.fixture(autouse=True)
def _in_fp64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def params_of(seed=0):
    return tree.map(lambda leaf: 5 * leaf if leaf.ndim == 2 else leaf, P.init(CONFIG, seed, dtype=torch.float64))


def batch_of(seed=0, rows=2):
    tokens = torch.randint(31, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    batch = {"tokens": tokens, "positions": torch.arange(LENGTH).expand(rows, LENGTH)}
    return batch | {"segment_ids": torch.ones_like(tokens), "labels": tokens.roll(-1, 1)}


def mean(params, batch, **options):
    total, count = LOSS(params, batch, **options)
    return total / count


# --------------------------------------------------------------------------------------------- the same written in jax


def their_logits(p, tokens):
    def norm(x, w):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * w

    def rotated(x):
        cos, sin = TABLE[..., None, :, 0], TABLE[..., None, :, 1]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    x = p["embed_tokens"][tokens]
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in p["layers"]:
        w, h = layer["attention"], norm(x, layer["input_layernorm"])
        q, k, v = ((h @ w[f"{n}_proj"].T).reshape(*h.shape[:2], -1, HEAD) for n in "qkv")
        q, k, v = rotated(q), jnp.repeat(rotated(k), 2, 2), jnp.repeat(v, 2, 2)
        scores = jnp.where(causal, jnp.einsum("bqnh,bknh->bnqk", q, k) / HEAD**0.5, -jnp.inf)
        z = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, -1), v)
        x = x + z.reshape(*h.shape[:2], -1) @ w["o_proj"].T
        h, w = norm(x, layer["post_attention_layernorm"]), layer["mlp"]
        x = x + (jax.nn.silu(h @ w["gate_proj"].T) * (h @ w["up_proj"].T)) @ w["down_proj"].T
    return norm(x, p["norm"]) @ p["lm_head"].T


@jax.jit
def their_logprobs(p, b):
    logp = jax.nn.log_softmax(their_logits(p, b["tokens"]))
    return jnp.take_along_axis(logp, b["labels"][..., None], -1)[..., 0]


@jax.jit
def their_mean(p, b):
    return -their_logprobs(p, b).mean()


def their_step(optimizer, state, b, loss=their_mean):
    p, opt = state
    value, grads = jax.value_and_grad(loss)(p, b)
    updates, opt = optimizer.update(grads, opt, p)
    return (optax.apply_updates(p, updates), opt), value


def their_clip(limit):
    """clip_by_global_norm as torch has it, which adds 1e-6 to the norm that it divides by."""

    def update(grads, state, params=None):
        factor = jnp.minimum(limit / (optax.global_norm(grads) + 1e-6), 1)
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda params: (), update)


def close(ours, theirs, rtol=1e-10, atol=1e-10):
    flat, others = tree.flatten({"of": ours}), tree.flatten(P.from_jax({"of": theirs}))
    assert flat.keys() == others.keys() and flat
    for path, leaf in flat.items():
        torch.testing.assert_close(leaf, others[path], rtol=rtol, atol=atol, msg=lambda m, p=path: f"{p}: {m}")


p, batch = params_of(), batch_of()
BATCHES = [batch_of(seed) for seed in range(4)]


def of_jax(values):
    return P.to_jax(tree.map(torch.Tensor.contiguous, values))
