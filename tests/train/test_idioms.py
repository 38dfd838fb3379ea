"""What JAX users write, as written there: equal in fp64 to jax, optax and a Llama of thirty lines. Skipped without jax.

Tables of docs/coming-from-jax.md name these idioms. Parameters go over by `params.to_jax`.
"""

import functools

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, linearize, vjp, vmap

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
    LOSS,
    _in_fp64,  # noqa: F401  a fixture of every test
    batch,
    batch_of,
    close,
    jax,
    mean,
    of_jax,
    optax,
    p,
    params_of,
    their_clip,
    their_logits,
    their_logprobs,
    their_mean,
    their_step,
)

pytestmark = pytest.mark.slow  # jax compiles for seconds


def test_logits_and_gradients():
    q, b = of_jax(p), of_jax(batch)
    prepared = fnmodels.prepare(CONFIG, batch["tokens"])
    close(fnmodels.forward(p, *prepared, config=CONFIG), their_logits(q, b["tokens"]))
    close(grad(mean)(p, batch), jax.grad(their_mean)(q, b))


def test_trees_and_vectors():
    """jax.tree.map and leaves, and ravel_pytree, whose vector has the keys of dicts in their order by name."""
    q, other = of_jax(p), of_jax(params_of(1))
    close(
        tree.map(lambda a, b: a.sin() * b, p, params_of(1)), jax.tree.map(lambda a, b: jax.numpy.sin(a) * b, q, other)
    )
    assert len(tree.leaves(p)) == len(jax.tree.leaves(q))
    flat, inverse = tree.ravel(p)
    vector, unravel = jax.flatten_util.ravel_pytree(q)
    close({"sorted": flat.sort().values}, {"sorted": jax.numpy.sort(vector)})
    close(inverse(flat.square() + 1), unravel(vector**2 + 1))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_and_k_steps(clip):
    """lax.scan over steps there, a loop here."""
    made = [their_clip(clip)] if clip else []
    optimizer, other = train.adamw(1e-2, eps=EPS), optax.chain(*made, optax.adamw(1e-2, **BETAS))
    step, state = train.pure_step(LOSS, optimizer, clip=clip), train.init_state(p, optimizer)
    losses = []
    for each in BATCHES:
        state, metrics = step(state, each)
        losses.append(metrics["loss"])
    q, stacked = of_jax(p), of_jax(tree.stack(BATCHES))
    (after, _), values = jax.lax.scan(functools.partial(their_step, other), (q, other.init(q)), stacked)
    close(state.params, after)
    close(torch.stack(losses), values)


UPDATES = {
    "adamw": (train.adamw(0.01), optax.adamw(0.01, weight_decay=0.01)),
    "sgd": (
        train.sgd(0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.01, momentum=0.9, nesterov=True)),
    ),
    "lion": (train.lion(0.01, weight_decay=0.1), optax.lion(0.01, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_optax(name):
    """Of the same gradients, at the default eps."""
    optimizer, other = UPDATES[name]
    params, (state, their_state) = p, (optimizer.init(p), other.init(of_jax(p)))
    for seed in range(1, 5):
        grads = tree.map(lambda x, k=seed: 1e-3 * x**k, params_of(seed))
        updates, state = optimizer.update(grads, state, params)
        theirs, their_state = other.update(of_jax(grads), their_state, of_jax(params))
        close(updates, theirs, atol=1e-12)
        params = train.apply_updates(params, updates)


def test_seeds_and_rates_by_vmap():
    seeds, rates = tree.stack([params_of(seed) for seed in range(3)]), torch.tensor([0.01, 0.1], dtype=torch.float64)

    def ours(params, rate):
        optimizer = train.sgd(rate, momentum=0.9)
        state = train.State(torch.tensor(0), params, optimizer.init(params))
        for each in BATCHES[:2]:
            state, metrics = train.pure_step(LOSS, optimizer)(state, each)
        return state.params, metrics["loss"]

    def other(params, rate):
        optimizer = optax.sgd(rate, momentum=0.9)
        state = params, optimizer.init(params)
        for each in BATCHES[:2]:
            state, value = their_step(optimizer, state, of_jax(each))
        return state[0], value

    found = vmap(vmap(ours, (None, 0)), (0, None))(seeds, rates)
    wanted = jax.jit(jax.vmap(jax.vmap(other, (None, 0)), (0, None)))(of_jax(seeds), of_jax({"r": rates})["r"])
    close(list(found), list(wanted))


def test_an_ensemble_in_one_step():
    """A loss of stacked members, which one optimizer trains."""
    members, optimizer = tree.stack([params_of(seed) for seed in range(3)]), train.adamw(1e-2, eps=EPS)

    def loss(params, batch):
        totals, counts = vmap(LOSS, (0, None))(params, batch)
        return totals.sum(), counts[0]

    step = train.make_step(loss, optimizer)
    state, _ = step(train.init_state(members, optimizer), batch)
    other, q = optax.adamw(1e-2, **BETAS), of_jax(members)
    joint = lambda p, b: jax.vmap(their_mean, (0, None))(p, b).sum()  # noqa: E731
    (after, _), _ = jax.jit(lambda q, b: their_step(other, (q, other.init(q)), b, joint))(q, of_jax(batch))
    close(state.params, after)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_maml(name):
    """The gradient through the update of an optimizer."""
    make = {"adamw": functools.partial(train.adamw, eps=EPS), "sgd": train.sgd}[name]
    other = {"adamw": functools.partial(optax.adamw, **BETAS), "sgd": optax.sgd}[name]
    support, query = batch_of(1), batch_of(2)

    def ours(params):
        optimizer = make(0.05)
        state = train.State(torch.tensor(0), params, optimizer.init(params))
        return mean(train.pure_step(LOSS, optimizer)(state, support)[0].params, query)

    def theirs(params):
        optimizer = other(0.05)
        return their_mean(their_step(optimizer, (params, optimizer.init(params)), of_jax(support))[0][0], of_jax(query))

    close(grad(ours)(p), jax.jit(jax.grad(theirs))(of_jax(p)))


# of each optimizer a function of a vector of hyperparameters, with values
HYPER = {
    "adamw": (
        lambda h: train.adamw(h[0], betas=(h[1], h[2]), eps=h[3], weight_decay=h[4]),
        # eps_root, which vanishes: without it optax has NaN for beta2, of embeddings that no token reads
        lambda h: optax.adamw(h[0], h[1], h[2], h[3], 1e-40, weight_decay=h[4]),
        [0.01, 0.9, 0.99, EPS, 0.1],
    ),
    "sgd": (
        lambda h: train.sgd(h[0], momentum=h[1], nesterov=True, weight_decay=h[2]),
        lambda h: optax.chain(optax.add_decayed_weights(h[2]), optax.sgd(h[0], h[1], nesterov=True)),
        [0.01, 0.9, 0.1],
    ),
    "lion": (
        lambda h: train.lion(h[0], betas=(h[1], h[2]), weight_decay=h[3]),
        lambda h: optax.lion(h[0], h[1], h[2], weight_decay=h[3]),
        [0.001, 0.9, 0.99, 0.1],
    ),
}


@pytest.mark.parametrize("name", HYPER)
def test_gradients_of_hyperparameters_and_a_sweep_of_them(name):
    """Through two steps: rate, betas, momentum, eps, weight decay as tensors of grad and of vmap."""
    make, other, values = HYPER[name]

    def ours(hyper):
        optimizer = make(hyper)
        state, step = train.State(torch.tensor(0), p, optimizer.init(p)), train.pure_step(LOSS, optimizer)
        for each in BATCHES[:2]:
            state, _ = step(state, each)
        return mean(state.params, BATCHES[3])

    def theirs(hyper):
        optimizer, q = other(hyper), of_jax(p)
        state = q, optimizer.init(q)
        for each in BATCHES[:2]:
            state, _ = their_step(optimizer, state, of_jax(each))
        return their_mean(state[0], of_jax(BATCHES[3]))

    hyper = torch.tensor(values, dtype=torch.float64)
    close(grad(ours)(hyper), jax.jit(jax.grad(theirs))(of_jax({"h": hyper})["h"]))
    sweep = torch.stack((hyper, 0.5 * hyper))
    close(vmap(ours)(sweep), jax.jit(jax.vmap(theirs))(of_jax({"h": sweep})["h"]))
    torch.testing.assert_close(ours(hyper), ours(values), rtol=1e-12, atol=0)  # as numbers


def test_jvp_and_hvp():
    """No kernel is named."""
    v, q, b = params_of(7), of_jax(p), of_jax(batch)
    close(
        list(jvp(lambda x: mean(x, batch), (p,), (v,))), list(jax.jvp(lambda x: their_mean(x, b), (q,), (of_jax(v),)))
    )
    ours = jvp(grad(lambda x: mean(x, batch)), (p,), (v,))[1]
    close(ours, jax.jvp(jax.grad(lambda x: their_mean(x, b)), (q,), (of_jax(v),))[1])


def test_linearize():
    """Traced once, without the kernel being named."""
    v, q, b = params_of(7), of_jax(p), of_jax(batch)
    value, push = linearize(lambda x: mean(x, batch), p)
    wanted, theirs = jax.linearize(lambda x: their_mean(x, b), q)
    close([value, push(v), push(p)], [wanted, theirs(of_jax(v)), theirs(q)])


def test_vjp():
    q, b = of_jax(p), of_jax(batch)
    logits, pull = vjp(lambda x: fnmodels.forward(x, *fnmodels.prepare(CONFIG, batch["tokens"]), config=CONFIG), p)
    wanted, theirs = jax.vjp(lambda x: their_logits(x, b["tokens"]), q)
    along = logits.cos()
    close([logits, pull(along)[0]], [wanted, theirs(of_jax({"v": along})["v"])[0]])


def test_the_hessian_of_a_leaf():
    q, b = of_jax(p), of_jax(batch)
    close(
        hessian(lambda w: mean(p | {"norm": w}, batch))(p["norm"]),
        jax.hessian(lambda w: their_mean(q | {"norm": w}, b))(q["norm"]),
    )


def test_jacrev_of_logprobs():
    q, b = of_jax(p), of_jax(batch)
    ours = jacrev(lambda w: train.token_logprobs(p | {"norm": w}, batch, config=CONFIG)[0])(p["norm"])
    close(ours, jax.jacrev(lambda w: their_logprobs(q | {"norm": w}, b))(q["norm"]))


def test_gradients_of_each_sample():
    ours = vmap(grad(mean), (None, 0))(p, fnmodels.rows(batch))
    alone = jax.vmap(jax.grad(their_mean), (None, 0))(of_jax(p), of_jax(fnmodels.rows(batch)))
    close(ours, alone)


def test_gradients_of_each_sample_clipped():
    """As DP-SGD adds them up."""
    clip, limit = train.optim.clip_norm(0.3), their_clip(0.3)
    ours = vmap(lambda q, row: clip.update(grad(mean)(q, row), {}, q)[0], (None, 0))(p, fnmodels.rows(batch))
    theirs = lambda q, row: limit.update(jax.grad(their_mean)(q, row), ())[0]  # noqa: E731
    close(ours, jax.vmap(theirs, (None, 0))(of_jax(p), of_jax(fnmodels.rows(batch))))


@pytest.mark.parametrize("transform", ["grad", "vmap", "hvp"])
def test_remat(transform):
    """jax.checkpoint there, fnmodels.remat here."""
    b, q = of_jax(batch), of_jax(p)
    ours = functools.partial(mean, layer_fn=fnmodels.remat)
    checkpointed = jax.checkpoint(their_mean)
    if transform == "grad":
        close(grad(ours)(p, batch), jax.grad(checkpointed)(q, b))
    elif transform == "vmap":
        found = vmap(grad(ours), (None, 0))(p, fnmodels.rows(batch))
        close(found, jax.vmap(jax.grad(checkpointed), (None, 0))(q, of_jax(fnmodels.rows(batch))))
    else:
        found = jvp(grad(lambda x: ours(x, batch)), (p,), (p,))[1]
        close(found, jax.jvp(jax.grad(lambda x: checkpointed(x, b)), (q,), (q,))[1])


def test_a_hyper_network():
    """Parameters from a code by a linear map, of which the code's gradient is taken."""
    flat, inverse = tree.ravel(p)
    maps = torch.randn(len(flat), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
    code = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    ours = grad(lambda z: mean(inverse(flat + maps @ z), batch))(code)
    moved, b = of_jax({"flat": flat, "maps": maps, "code": code}), of_jax(batch)

    def theirs(z):
        vector, at, made = moved["flat"] + moved["maps"] @ z, 0, {}
        for path, leaf in tree.flatten(p).items():
            made[path] = vector[at : at + leaf.numel()].reshape(leaf.shape)
            at += leaf.numel()
        return their_mean(tree.unflatten(made), b)

    close(ours, jax.grad(theirs)(moved["code"]))


def test_some_leaves_are_trained():
    """A closure over the others; and partition there as optax.multi_transform."""
    q, b = of_jax(p), of_jax(batch)
    close(
        grad(lambda w: mean(p | {"lm_head": w}, batch))(p["lm_head"]),
        jax.grad(lambda w: their_mean(q | {"lm_head": w}, b))(q["lm_head"]),
    )
    optimizer = train.partition({"*norm*": None, "layers.0.*": train.sgd(0.1), "*": train.sgd(0.01)})
    step = train.pure_step(LOSS, optimizer)
    state, _ = step(train.State(torch.tensor(0), p, optimizer.init(p)), batch)

    def label(path, _):
        name = jax.tree_util.keystr(path)
        return "frozen" if "norm" in name else "first" if "['layers'][0]" in name else "rest"

    labels = jax.tree_util.tree_map_with_path(label, q)
    other = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "first": optax.sgd(0.1), "rest": optax.sgd(0.01)}, labels
    )
    (after, _), _ = their_step(other, (q, other.init(q)), b)
    close(state.params, after)


def test_groups_of_leaves_are_clipped_apart():
    """partition of chain(clip_norm, ...): each group by its own norm, over the leaves of the group alone."""
    groups = {"*norm*": (0.02, 0.1), "layers.0.*": (0.1, 0.2), "*": (0.3, 0.01)}  # {pattern: (limit, rate)}
    ours = {
        name: train.chain(train.optim.clip_norm(limit), train.sgd(rate, momentum=0.9))
        for name, (limit, rate) in groups.items()
    }
    theirs = {
        name: optax.chain(their_clip(limit), optax.sgd(rate, momentum=0.9)) for name, (limit, rate) in groups.items()
    }
    optimizer, q = train.partition(ours), of_jax(p)

    def label(path, _):
        name = jax.tree_util.keystr(path)
        return "*norm*" if "norm" in name else "layers.0.*" if "['layers'][0]" in name else "*"

    other = optax.multi_transform(theirs, jax.tree_util.tree_map_with_path(label, q))
    state, made = (q, other.init(q)), train.State(torch.tensor(0), p, optimizer.init(p))
    run, in_place = train.pure_step(LOSS, optimizer), train.make_step(LOSS, optimizer)
    kept = train.init_state(p, optimizer)
    for each in BATCHES[:3]:
        state, _ = their_step(other, state, of_jax(each))
        made, kept = run(made, each)[0], in_place(kept, each)[0]
        close(made.params, state[0])
        close(kept.params, state[0])
    squares = dict.fromkeys(groups, 0.0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.grad(their_mean)(q, of_jax(BATCHES[0]))):
        squares[label(path, None)] += float((leaf**2).sum())
    assert all(squares[name] > 2 * limit**2 for name, (limit, _) in groups.items()), squares  # each limit acts


@pytest.mark.parametrize("name", ["chain", "partition", "with_ema"])
def test_optimizers_of_optimizers_by_vmap(name):
    """Their states and updates hold tensors alone."""
    members = tree.stack([params_of(seed) for seed in range(3)])
    make = {
        "chain": (
            train.chain(train.optim.clip_norm(0.5), train.sgd(0.1)),
            optax.chain(their_clip(0.5), optax.sgd(0.1)),
        ),
        "partition": (train.partition({"*norm*": None, "*": train.sgd(0.1)}), None),
        "with_ema": (train.with_ema(train.sgd(0.1), 0.9), optax.sgd(0.1)),
    }
    ours, other = make[name]
    q, b = of_jax(members), of_jax(batch)
    if other is None:
        frozen = lambda path, _: "frozen" if "norm" in jax.tree_util.keystr(path) else "rest"  # noqa: E731
        rates = {"frozen": optax.set_to_zero(), "rest": optax.sgd(0.1)}
        other = optax.multi_transform(rates, jax.tree_util.tree_map_with_path(frozen, q))

    def step(params):
        grads = grad(mean)(params, batch)
        updates, state = ours.update(grads, ours.init(params), params)
        return train.apply_updates(params, updates), state

    after, state = vmap(step)(members)
    wanted, _ = jax.jit(jax.vmap(lambda x: their_step(other, (x, other.init(x)), b)[0]))(q)
    close(after, wanted)
    if name == "with_ema":
        close(state["ema"], jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, q, wanted))


def test_the_users_optimizer():
    """(init, update) of optax, written anew."""

    def update(grads, state, _):
        return tree.map(lambda g: -0.01 * g.sign(), grads), state

    signs = train.Optimizer(lambda params: {}, update)
    state, _ = train.pure_step(LOSS, signs)(train.State(torch.tensor(0), p, {}), batch)
    other, q = optax.sign_sgd(0.01), of_jax(p)
    (after, _), _ = jax.jit(lambda q, b: their_step(other, (q, other.init(q)), b))(q, of_jax(batch))
    close(state.params, after)


def test_a_whole_step_compiled():
    """jax.jit of a step with its optimizer."""
    optimizer, other = train.sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)

    def step(params, opt_state, batch):
        grads, value = grad_and_value(mean)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return train.apply_updates(params, updates), opt_state, value

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    after, _, value = compiled(p, optimizer.init(p), batch)
    q = of_jax(p)
    (wanted, _), expected = jax.jit(functools.partial(their_step, other))((q, other.init(q)), of_jax(batch))
    close([after, value], [wanted, expected])
    torch.compiler.reset()


def test_trees_of_torch_and_donation():
    """torch's pytrees see params and State; a consumed State raises, as a donated buffer does."""
    from torch.utils import _pytree

    optimizer = train.adamw(1e-2)
    state = train.init_state(p, optimizer)
    leaves, spec = _pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    close(_pytree.tree_unflatten(leaves, spec).params, of_jax(p))
    step = train.make_step(LOSS, optimizer)
    step(state, batch)
    with pytest.raises(RuntimeError, match="was used up by a step with inplace=True"):
        step(state, batch)
