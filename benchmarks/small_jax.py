"""One size of benchmarks/small.py in JAX: the jitted step that donates its state, and a scan of 100 such steps.

python benchmarks/small_jax.py '[layers, width, rows, length, rounds]'     prints a table of milliseconds
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_llama
import numpy as np

STEPS = 100  # of the scan


def start(layers: int, width: int) -> dict[str, Any]:
    """Random weights under Hugging Face names: 4 query heads, 2 kv heads, an MLP of twice the width."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (256, width), "model.norm.weight": (width,), "lm_head.weight": (256, width)}
    of_layer = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    of_layer |= {f"self_attn.{n}_proj": (width if n in "qo" else width // 2, width) for n in "qkvo"}
    of_layer |= {f"mlp.{n}_proj": (2 * width, width) for n in ("gate", "up")} | {"mlp.down_proj": (width, 2 * width)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in of_layer.items()}
    norms = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if len(shape) == 1}
    return {name: norms.get(name, rng.standard_normal(shape, np.float32) * 0.02) for name, shape in shapes.items()}


def timed(call: Callable[[], Any], rounds: int, repeats: int) -> tuple[float, float]:
    """(CPU ms, wall ms) of a call, medians over the rounds."""
    found = []
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            call()
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (statistics.median(one) * 1e3 / repeats for one in zip(*found, strict=True))
    return cpu, wall


def main() -> None:
    layers, width, rows, length, rounds = json.loads(sys.argv[1])
    config = {"rms_norm_eps": 1e-5, "head_dim": width // 4, "rope_theta": 10000.0}
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 256, (rows, length)))
    labels = jnp.concatenate((tokens[:, 1:], jnp.full_like(tokens[:, :1], -100)), 1)
    step = jax_llama.make_step(config, lr=1e-3, decay=0.0)
    held = [jax_llama.init_state(start(layers, width), layers, "float32")]

    def one() -> None:
        held[0], loss = step(held[0], tokens, labels)
        loss.block_until_ready()

    def many(state: Any) -> Any:
        return jax.lax.scan(lambda carry, _: step(carry, tokens, labels), state, length=STEPS)

    scanned = jax.jit(many, donate_argnums=0)

    def hundred() -> None:
        held[0], losses = scanned(held[0])
        losses.block_until_ready()

    print("| | CPU ms | wall ms | first call s |\n|---|---|---|---|")
    for name, call, calls, repeats in (("JAX jit", one, 1, 20), (f"JAX scan of {STEPS}, a step", hundred, STEPS, 1)):
        begin = time.perf_counter()
        call()
        first = time.perf_counter() - begin
        cpu, wall = timed(call, rounds, repeats)
        print(f"| {name} | {cpu / calls:.3f} | {wall / calls:.3f} | {first:.1f} |", flush=True)


if __name__ == "__main__":
    main()
