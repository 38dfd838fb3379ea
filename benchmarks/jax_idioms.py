"""Times what JAX users write beside the same in JAX: a compiled step, a scan of steps, vmap over runs, MAML, hvp.

    python benchmarks/jax_idioms.py                          every idiom at the tiny size, one thread
    python benchmarks/jax_idioms.py --sizes grok small mid --idioms step
    python benchmarks/jax_idioms.py --first                  CPU seconds of a first call: run it twice for cold and warm
    python benchmarks/jax_idioms.py --quick                  one round, to check that everything runs

All contenders are in one process and take turns. A figure is the median over rounds of the milliseconds of one call, by
CPU time and by wall, and its ratio to JAX's. Models and batch are those of benchmarks/small.py. TORCHINDUCTOR_CACHE_DIR
and JAX_COMPILATION_CACHE_DIR say where compiled code is kept.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import jax_llama
import small
import small_jax
import torch
from small import LR, SIZES, Calls, Setting

import train
from fnmodels import tree

STEPS = 100  # of step.many and of the scan
SEEDS, RATES = 8, 8


class InJax:
    """The same model, batch and optimizer in JAX; weights are drawn anew, which times do not depend on."""

    def __init__(self, at: Setting) -> None:
        size = at.size
        self.config = {"rms_norm_eps": 1e-5, "head_dim": size.head_dim, "rope_theta": 10000.0}
        self.tokens, self.labels = jnp.asarray(at.tokens.numpy()), jnp.asarray(at.labels.numpy())
        self.state = jax_llama.init_state(small_jax.start(size.layers, size.width), size.layers, "float32")
        self.step = jax_llama.make_step(self.config, lr=LR, decay=0.0)

    def loss(self, params: Any) -> jax.Array:
        return jax_llama.loss_fn(params, self.tokens, self.labels, self.config)

    def copied(self) -> Any:
        return jax.tree.map(jnp.copy, self.state)


def adamw(lr: Any) -> train.Optimizer:
    return train.adamw(lr, betas=(0.9, 0.999), weight_decay=0.0)


def loss_of(at: Setting, **options: Any) -> Callable[..., Any]:
    return functools.partial(train.next_token_loss, config=at.config, **options)


def steps(at: Setting, theirs: InJax) -> Calls:
    """A training step that takes its state over."""
    held = [theirs.copied()]

    def jitted() -> None:
        held[0], loss = theirs.step(held[0], theirs.tokens, theirs.labels)
        loss.block_until_ready()

    ours = small._our_step
    return {"JAX jit": jitted, "fnmodels step": ours(at, compile="step"), "fnmodels eager": ours(at)} | {
        "hand-written": small._hand_step(at)
    }


def scans(at: Setting, theirs: InJax) -> Calls:
    """100 steps on 100 batches in one call."""

    def body(state: Any, batch: Any) -> Any:
        return theirs.step(state, *batch)

    scanned = jax.jit(lambda state, batches: jax.lax.scan(body, state, batches), donate_argnums=0)
    batches = tuple(jnp.broadcast_to(x, (STEPS, *x.shape)) for x in (theirs.tokens, theirs.labels))
    held, step = [theirs.copied()], train.make_step(loss_of(at), adamw(LR), compile="step")
    mine, stacked = [train.init_state(at.params, adamw(LR))], tree.map(lambda t: torch.stack([t] * STEPS), at.batch)

    def scan() -> None:
        held[0], losses = scanned(held[0], batches)
        losses.block_until_ready()

    def many() -> None:
        mine[0], _ = step.many(mine[0], stacked)

    return {f"JAX scan of {STEPS}": scan, f"fnmodels step.many of {STEPS}": many}


def sweeps(at: Setting, theirs: InJax) -> Calls:
    """One step of 64 runs, 8 seeds with 8 rates each."""
    params = theirs.state[0]
    rates = jnp.linspace(1e-4, 1e-2, RATES)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def one(start: Any, rate: Any) -> Any:
        loss, grads = jax.value_and_grad(theirs.loss)(start)
        return jax_llama.adamw(start, grads, zeros, zeros, jnp.ones(()), lr=rate, decay=0.0), loss

    swept = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))
    starts = jax.tree.map(lambda p: jnp.stack([p] * SEEDS), params)
    loss = loss_of(at)

    def trained(start: Any, rate: Any) -> Any:
        optimizer = adamw(rate)
        state = train.State(torch.zeros((), dtype=torch.int64), start, optimizer.init(start))
        after, metrics = train.pure_step(loss, optimizer)(state, at.batch)
        return after.params, after.opt_state, metrics["loss"]

    runs = torch.func.vmap(torch.func.vmap(trained, (None, 0)), (0, None))
    mine, of_torch = tree.stack([at.params] * SEEDS), torch.linspace(1e-4, 1e-2, RATES)
    graph = torch.compile(runs, fullgraph=True)
    return {
        "JAX jit(vmap(vmap))": lambda: jax.block_until_ready(swept(starts, rates)),
        "fnmodels vmap(vmap)": lambda: runs(mine, of_torch),
        "fnmodels compile(vmap(vmap))": lambda: graph(mine, of_torch),
    }


def meta(at: Setting, theirs: InJax) -> Calls:
    """The gradient of the loss after a step of SGD, by the parameters before it."""

    def after(params: Any) -> jax.Array:
        grads = jax.grad(theirs.loss)(params)
        return theirs.loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    jitted, start, optimizer = jax.jit(jax.grad(after)), theirs.state[0], train.sgd(0.1)
    loss = loss_of(at, kernel="math")

    def outer(params: Any) -> Any:
        state = train.State(torch.zeros((), dtype=torch.int64), params, optimizer.init(params))
        total, count = loss(train.pure_step(loss, optimizer)(state, at.batch)[0].params, at.batch)
        return total / count

    ours, hand = torch.func.grad(outer), torch.func.grad(functools.partial(_after_hand, at))
    graph = torch.compile(ours, fullgraph=True)
    return {
        "JAX jit(grad)": lambda: jax.block_until_ready(jitted(start)),
        "fnmodels grad": lambda: ours(at.params),
        "fnmodels compile(grad)": lambda: graph(at.params),
        "hand-written torch": lambda: hand(at.params),
    }


def _hand_loss(at: Setting, params: Any) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        return at.hand(params, at.tokens, at.labels)


def _after_hand(at: Setting, params: Any) -> torch.Tensor:
    grads = torch.func.grad(functools.partial(_hand_loss, at))(params)
    return _hand_loss(at, tree.map(lambda p, g: p - 0.1 * g, params, grads))


def products(at: Setting, theirs: InJax) -> Calls:
    """A Hessian-vector product, forward over reverse."""
    start, along = theirs.state[0], jax.tree.map(jnp.ones_like, theirs.state[0])
    jitted = jax.jit(lambda p, v: jax.jvp(jax.grad(theirs.loss), (p,), (v,))[1])
    mine, loss = tree.map(torch.ones_like, at.params), loss_of(at, kernel="math")

    def mean(params: Any) -> torch.Tensor:
        total, count = loss(params, at.batch)
        return total / count

    def hvp(function: Any) -> Callable[[], Any]:
        return lambda: torch.func.jvp(torch.func.grad(function), (at.params,), (mine,))[1]

    return {
        "JAX jit(jvp(grad))": lambda: jax.block_until_ready(jitted(start, along)),
        "fnmodels jvp(grad)": hvp(mean),
        "hand-written torch": hvp(functools.partial(_hand_loss, at)),
    }


IDIOMS = {"step": steps, "scan": scans, "sweep": sweeps, "maml": meta, "hvp": products}


def report(name: str, calls: Calls, rounds: int, first: bool) -> None:
    print(f"\n{name}\n\n| | CPU ms | x JAX | wall ms | first call, CPU s, with compilers |\n|---|---|---|---|---|")
    begun = {}
    for contender, call in calls.items():
        before = os.times()
        call()
        begun[contender] = sum(os.times()[:4]) - sum(before[:4])
    found = {contender: (float("nan"),) * 2 for contender in calls} if first else small.times(calls, rounds)
    base = next(iter(found.values()))[0]
    for contender, (cpu, wall) in found.items():
        print(f"| {contender} | {cpu:.2f} | {cpu / base:.2f} | {wall:.2f} | {begun[contender]:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--idioms", nargs="+", choices=IDIOMS, default=list(IDIOMS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first", action="store_true", help="only first calls")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.sizes, asked.rounds = ["tiny"], 1
    train.keep_freed_memory()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, JAX {jax.__version__}, one thread, {time.strftime('%Y-%m-%d')}")
    for name in asked.sizes:
        at = Setting(SIZES[name])
        theirs = InJax(at)
        for idiom in asked.idioms:
            report(f"{idiom}, {name}", IDIOMS[idiom](at, theirs), asked.rounds, asked.first)


if __name__ == "__main__":
    main()
