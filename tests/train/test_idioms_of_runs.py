"""What JAX users write around a step, equal in fp64 to jax and optax as in `test_idioms`: graphs of one step and of k,
several batches, averages of parameters, recomputation by a policy, and caches. Meshes are in
parallel/test_mesh_in_jax.py. Skipped without jax."""

import functools

import pytest
import torch
from torch.func import vmap

import fnmodels
import train
from fnmodels import tree

pytest.importorskip("jax")
pytest.importorskip("optax")
from tests.support.llama_in_jax import (
    BATCHES,
    BETAS,
    CONFIG,
    EPS,
    LENGTH,
    LOSS,
    _in_fp64,  # noqa: F401  a fixture of every test
    batch_of,
    close,
    jax,
    of_jax,
    optax,
    p,
    params_of,
    their_clip,
    their_logits,
    their_mean,
    their_step,
)

pytestmark = pytest.mark.slow  # jax compiles for seconds


def scanned(clip, batches):
    """(params, optimizer's state, losses) of jit with donated arguments, of lax.scan over the batches."""
    made = [their_clip(clip)] if clip else []
    other, q = optax.chain(*made, optax.adamw(1e-2, **BETAS)), of_jax(p)
    scan = jax.jit(
        lambda state, each: jax.lax.scan(functools.partial(their_step, other), state, each), donate_argnums=0
    )
    (after, opt_state), losses = scan(
        (jax.tree.map(lambda leaf: leaf.copy(), q), other.init(q)), of_jax(tree.stack(batches))
    )
    return after, opt_state[-1][0], losses


def check_scanned(state, losses, wanted):
    after, adam, values = wanted
    close(state.params, after)
    close([state.opt_state["exp_avg"], state.opt_state["exp_avg_sq"]], [adam.mu, adam.nu])
    close(losses, values)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_compiled_step_is_a_jitted_one_and_many_are_a_scan(graphs, clip):
    """make_step(compile="step") consumes its State; its steps one by one, and step.many of a list and of a stack."""
    optimizer, wanted = train.adamw(1e-2, eps=EPS), scanned(clip, BATCHES)
    step = train.make_step(LOSS, optimizer, clip=clip, compile="step")
    state, losses = train.init_state(p, optimizer), []
    for each in BATCHES:
        state, metrics = step(state, each)
        losses.append(metrics["loss"])
    check_scanned(state, torch.stack(losses), wanted)
    for batches in (BATCHES, tree.stack(BATCHES)):
        state, metrics = step.many(train.init_state(p, optimizer), batches)
        check_scanned(state, metrics["loss"], wanted)
    eager, metrics = train.make_step(LOSS, optimizer, clip=clip).many(train.init_state(p, optimizer), BATCHES)
    check_scanned(eager, metrics["loss"], wanted)


def test_generated_code_of_many_steps_is_a_scan():
    """The same by the default compiler."""
    optimizer = train.adamw(1e-2, eps=EPS)
    step = train.make_step(LOSS, optimizer, clip=0.5, compile="step")
    state, metrics = step.many(train.init_state(p, optimizer), BATCHES)
    check_scanned(state, metrics["loss"], scanned(0.5, BATCHES))
    torch.compiler.reset()


def test_microbatches_are_multi_steps():
    """optax.MultiSteps there, accumulate here, or a list of microbatches. It adds gradients in fp32, also those of fp64
    parameters, so that the mean is written out beside it."""
    inner, q = optax.adamw(1e-2, **BETAS), of_jax(p)
    other, optimizer = optax.MultiSteps(inner, every_k_schedule=2), train.adamw(1e-2, eps=EPS)
    theirs, written = (q, other.init(q)), (q, inner.init(q))
    pairs = BATCHES[:2], BATCHES[2:]
    for pair in pairs:
        grads = [jax.grad(their_mean)(written[0], of_jax(each)) for each in pair]
        updates, held = inner.update(jax.tree.map(lambda a, b: (a + b) / 2, *grads), written[1], written[0])
        written = optax.apply_updates(written[0], updates), held
        for each in pair:
            theirs, _ = their_step(other, theirs, of_jax(each))
    joint = [tree.map(lambda *parts: torch.cat(parts), *pair) for pair in pairs]
    for batches, options in ((joint, {"accumulate": 2}), (pairs, {})):
        step, state = train.make_step(LOSS, optimizer, **options), train.init_state(p, optimizer)
        for each in batches:
            state, _ = step(state, each)
        close(state.params, written[0])
        close(state.params, theirs[0], rtol=1e-6, atol=1e-7)


def test_averages_of_parameters():
    """optax.ema from the first parameters, without its correction of an average that begins at 0."""
    optimizer, other = train.with_ema(train.adamw(1e-2, eps=EPS), 0.9), optax.adamw(1e-2, **BETAS)
    q, average = of_jax(p), optax.ema(0.9, debias=False)
    theirs, held = (q, other.init(q)), average.init(q)._replace(ema=q)
    step, state = train.make_step(LOSS, optimizer), train.init_state(p, optimizer)
    for each in BATCHES:
        state, _ = step(state, each)
        theirs, _ = their_step(other, theirs, of_jax(each))
        _, held = average.update(theirs[0], held)
        close(state.opt_state["ema"], held.ema)
    close(state.params, theirs[0])


@pytest.mark.parametrize("remat", ["full", "selective", "every:2"])
def test_recomputation_by_a_policy(remat):
    """jax.checkpoint with a policy there; the results of matmuls are kept, or inputs of layers."""
    policy = jax.checkpoint_policies.dots_saveable if remat == "selective" else None
    checkpointed = jax.checkpoint(their_mean, policy=policy)
    optimizer, other, q = train.adamw(1e-2, eps=EPS), optax.adamw(1e-2, **BETAS), of_jax(p)
    theirs = q, other.init(q)
    step, state = train.make_step(LOSS, optimizer, remat=remat), train.init_state(p, optimizer)
    for each in BATCHES[:2]:
        state, metrics = step(state, each)
        theirs, value = their_step(other, theirs, of_jax(each), checkpointed)
        close([metrics["loss"]], [value])
    close(state.params, theirs[0])


def test_prefill_and_decode_by_vmap():
    """Of models and of rows: the logits of a step on each one's cache are those of the whole rows in jax."""
    members = tree.stack([params_of(seed) for seed in range(3)])
    tokens = torch.stack([batch_of(seed)["tokens"] for seed in range(3)])  # [3, 2, 8]
    caches = tree.stack([fnmodels.init_cache(CONFIG, 2, LENGTH, dtype=torch.float64) for _ in range(3)])
    empty = fnmodels.init_cache(CONFIG, 2, LENGTH, dtype=torch.float64)
    first = fnmodels.prepare_step(CONFIG, tokens[0, :, :5], empty)
    _, filled = fnmodels.prefill(tree.map(lambda leaf: leaf[0], members), *first, empty, config=CONFIG)
    second = fnmodels.prepare_step(CONFIG, tokens[0, :, 5:], filled)

    def run(function, params, ids, cache, prepared):
        inputs, masks, freqs = prepared
        return function(params, inputs | {"tokens": ids}, masks, freqs, cache, config=CONFIG)

    early, caches = vmap(functools.partial(run, fnmodels.prefill, prepared=first))(members, tokens[:, :, :5], caches)
    late, _ = vmap(functools.partial(run, fnmodels.decode, prepared=second))(members, tokens[:, :, 5:], caches)
    wanted = jax.jit(jax.vmap(their_logits))(of_jax(members), of_jax({"ids": tokens})["ids"])
    close(late, wanted[:, :, 5:])
    close(early, wanted[:, :, 4])
