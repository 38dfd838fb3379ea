"""Blocks that are computed again: equal to blocks that are not under each transform, with their inputs alone kept."""

import functools

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, linearize, vmap

import fnmodels
import params as P
import train
from fnmodels import llama, mixtral, tree
from fnmodels.ops.remat import _Recomputed
from train.remat import layer_fn

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = llama.Config(**SIZES)
MIXTRAL = mixtral.Config(**SIZES, num_local_experts=4, num_experts_per_tok=2)
TOKENS = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TOKENS, "positions": torch.arange(8).expand(2, 8), "segment_ids": torch.ones_like(TOKENS)}
BATCH |= {"labels": TOKENS.roll(-1, 1)}
SCALES = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
PARAMS = {config: P.init(config, 0, dtype=torch.float64) for config in (LLAMA, MIXTRAL)}


def loss(params, wrap, config=LLAMA, batch=BATCH, **options):
    total, count = train.next_token_loss(params, batch, config=config, layer_fn=wrap, **options)
    return total / count


def in_layer(wrap, function):
    """The derivative `function` of the loss by a leaf inside of a wrapped block."""
    first, second = PARAMS[LLAMA]["layers"]
    return function(lambda w: loss(PARAMS[LLAMA] | {"layers": [first | {"input_layernorm": w}, second]}, wrap))(
        first["input_layernorm"]
    )


def squares(grads):
    return sum(g.square().sum() for g in tree.leaves(grads))


def in_autograd(wrap, order, config=LLAMA):
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS[config])
    kernel = "math" if order == 2 else "auto"
    grads = torch.autograd.grad(loss(params, wrap, config, kernel=kernel), tree.leaves(params), create_graph=order == 2)
    return grads if order == 1 else torch.autograd.grad(squares(grads), tree.leaves(params))


p, m = PARAMS[LLAMA], PARAMS[MIXTRAL]
DERIVATIVES = {
    "autograd": lambda wrap: in_autograd(wrap, 1),
    "autograd, experts": lambda wrap: in_autograd(wrap, 1, MIXTRAL),
    "autograd twice": lambda wrap: in_autograd(wrap, 2),
    "grad": lambda wrap: grad(loss)(p, wrap),
    "grad, experts": lambda wrap: grad(lambda q: loss(q, wrap, MIXTRAL, balance=train.Balance(0.1)))(m),
    "jvp": lambda wrap: jvp(lambda q: loss(q, wrap), (p,), (p,)),
    "hvp": lambda wrap: jvp(grad(lambda q: loss(q, wrap)), (p,), (p,))[1],
    "hvp, experts": lambda wrap: jvp(grad(lambda q: loss(q, wrap, MIXTRAL)), (m,), (m,))[1],
    "grad of grad": lambda wrap: grad(lambda q: squares(grad(loss)(q, wrap)))(p),
    "per sample": lambda wrap: vmap(grad(lambda q, b: loss(q, wrap, batch=b)), (None, 0))(p, fnmodels.rows(BATCH)),
    "over seeds": lambda wrap: vmap(grad(lambda s: loss(tree.map(lambda leaf: leaf * s, p), wrap)))(SCALES),
    "hessian": lambda wrap: in_layer(wrap, hessian),
    "jacrev": lambda wrap: in_layer(wrap, jacrev),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_remat_under_each_transform_changes_nothing(name):
    derivative = DERIVATIVES[name]
    plain, again = tree.leaves(derivative(None)), tree.leaves(derivative(fnmodels.remat))
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("remat", ["full", "every:2"])
def test_wrappers_of_steps_go_through_transforms(remat):
    expected = grad(loss)(p, None)
    for path, leaf in tree.flatten(grad(loss)(p, layer_fn(remat, "none"))).items():
        torch.testing.assert_close(leaf, tree.flatten(expected)[path], rtol=1e-10, atol=1e-12)


def test_selective_remat_names_the_ways_that_go_through_transforms():
    with pytest.raises(NotImplementedError, match=r'"full", "every:N" and layer_fn=fnmodels.remat do'):
        grad(loss)(p, layer_fn("selective", "none"))


def test_each_block_runs_twice_and_saves_its_inputs_alone(monkeypatch):
    runs, saved = [], []

    def counted(block):
        def run(*args, **tensors):
            runs.append(block.keywords["kind"])
            return block(*args, **tensors)

        return fnmodels.remat(functools.wraps(block)(run))

    setup = _Recomputed.setup_context

    def noted(ctx, inputs, output):
        setup(ctx, inputs, output)
        saved.append(sum(isinstance(t, torch.Tensor) for t in inputs))

    monkeypatch.setattr(_Recomputed, "setup_context", staticmethod(noted))
    grad(loss)(p, counted)
    assert runs == ["full"] * 4
    leaves = len(tree.leaves(p["layers"][0]))
    assert all(n <= leaves + 7 for n in saved)  # x, the mask's positions and segment ids or its ready form, the table


def test_an_edit_that_closes_over_a_differentiated_tensor_is_refused():
    def by_closure(v):
        return loss(p, fnmodels.remat, edits={"layers.*.mlp": lambda value, name: value * v})

    def by_keyword(v, wrap=fnmodels.remat):
        edit = functools.partial(lambda value, name, v: value * v, v=v)
        return loss(p, wrap, edits={"layers.*.mlp": edit})

    v = torch.linspace(0.5, 2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'layers.0.mlp' closes over the tensor 'v'.*partial\(function, v=v\)"):
        grad(by_closure)(v)
    with pytest.raises(ValueError, match="closes over the tensor 'v'"):
        by_closure(v.clone().requires_grad_())
    torch.testing.assert_close(grad(by_keyword)(v), grad(by_keyword)(v, None), rtol=1e-10, atol=1e-12)


class Scaled:
    """A callable with an attribute, and a method."""

    def __init__(self, v):
        self.v = v

    def __call__(self, x):
        return x * self.v

    def method(self, x):
        return x * self.v


def nested(v):
    one = lambda x: x * v  # noqa: E731
    two = lambda x: one(x)  # noqa: E731
    three = lambda x: two(x)  # noqa: E731
    four = lambda x: three(x)  # noqa: E731
    return lambda x: four(x)


def filled_later(v):
    run = fnmodels.remat(lambda x: x * late)
    late = v
    return run


def in_a_module(v):
    GLOBAL["v"] = v
    return lambda x: x * GLOBAL["v"]


def in_an_object_of_the_module(v):
    OBJECT.v = v
    return lambda x: x * OBJECT.v


def by_a_callable_of_the_module(v):
    OBJECT.v = v
    return lambda x: OBJECT(x)


def by_a_partial_of_the_module(v):
    PARTIALS[0] = functools.partial(torch.mul, v)
    return lambda x: PARTIALS[0](x)


def in_an_attribute_of_a_module(v):
    module = torch.nn.Sequential(torch.nn.Identity())
    object.__setattr__(module[0], "v", v)  # unregistered, whatever it is
    return lambda x: module(x) * module[0].v


GLOBAL, OBJECT, PARTIALS = {}, Scaled(None), [None]
HOLDING = {
    "variable": lambda v: lambda x: x * v,
    "dict": lambda v: (lambda held: lambda x: x * held["k"])({"k": v}),
    "state": lambda v: (lambda held: lambda x: x * held.params["v"])(train.State(torch.zeros(()), {"v": v}, [])),
    "inner functions": nested,
    "partial": lambda v: functools.partial(lambda y, x: x * v * y, 2),
    "default": lambda v: lambda x, v=v: x * v,
    "keyword's default": lambda v: lambda x, *, v=v: x * v,
    "object": Scaled,
    "method": lambda v: Scaled(v).method,
    "self": lambda v: (lambda self: lambda x: x * self.v)(Scaled(v)),
    "variable without a value yet": filled_later,
    "global": in_a_module,
    "global object": in_an_object_of_the_module,
    "global callable": by_a_callable_of_the_module,
    "global partial": by_a_partial_of_the_module,
    "attribute of a module": in_an_attribute_of_a_module,
    "kernel in options": lambda v: functools.partial(lambda x, o: o["kernel"](x), o={"kernel": lambda x: x * v}),
}


@pytest.mark.parametrize("how", HOLDING)
def test_a_function_that_holds_a_differentiated_tensor_is_refused(how):
    holding, x, v = HOLDING[how], torch.ones(3), torch.linspace(0.5, 2, 3)
    names = "v|held|late|GLOBAL|OBJECT|PARTIALS|module|self|o"
    refused = rf"The function of remat closes over the tensor '({names})', whose gradient"
    with pytest.raises(ValueError, match=refused):
        grad(lambda v: fnmodels.remat(holding(v))(x).sum())(v)
    with pytest.raises(ValueError, match=refused):
        vmap(lambda v: fnmodels.remat(holding(v))(x))(torch.stack([v, v]))
    with pytest.raises(ValueError, match=refused):
        fnmodels.remat(holding(v.clone().requires_grad_()))(x)
    assert torch.equal(fnmodels.remat(holding(v))(x), x * v * (2 if how == "partial" else 1))  # a constant


def test_an_attribute_is_no_variable_of_the_module():
    OBJECT.v, thing = torch.ones(3, requires_grad=True), Scaled(2.0)
    thing.OBJECT = 3.0
    assert torch.equal(fnmodels.remat(lambda x: x * thing.OBJECT)(torch.ones(3)), torch.full((3,), 3.0))


def test_what_a_function_holds_is_checked_in_each_call():
    v, x = torch.linspace(0.5, 2, 3), torch.ones(3)
    again = fnmodels.remat(lambda x: x * v)
    assert torch.equal(again(x), x * v)
    v.requires_grad_()
    with pytest.raises(ValueError, match="closes over the tensor 'v'"):
        again(x)


def test_a_module_and_a_kernel_that_hold_parameters_are_refused():
    with pytest.raises(ValueError, match="closes over the tensor 'weight'"):
        fnmodels.remat(torch.nn.Linear(3, 3))(torch.ones(3))
    held = {"v": torch.ones(16, dtype=torch.float64, requires_grad=True)}
    with pytest.raises(ValueError, match=r"'layers\.0\.mlp' closes over the tensor 'held'"):
        loss(p, fnmodels.remat, edits={"layers.*.mlp": lambda value, name: value * held["v"]})

    def scaled(s):
        def kernel(q, *others, **options):
            return fnmodels.ops.attention.kernels.math(q * s, *others, **options)

        return loss(p, fnmodels.remat, kernel=kernel)

    with pytest.raises(ValueError, match="The function of remat closes over the tensor 's'"):
        grad(scaled)(torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("how", ["arguments", "keywords", "trees"])
def test_tensors_of_a_partial_are_arguments(how):
    def bound(v):
        if how == "arguments":
            return functools.partial(lambda v, x: (x * v).sin().sum(), v)
        if how == "keywords":
            return functools.partial(lambda x, v: (x * v).sin().sum(), v=v)
        return functools.partial(lambda held, x: (x * held["a"][0]).sin().sum(), {"a": [v], "n": None})

    x, v = torch.ones(3), torch.linspace(0.5, 2, 3)
    expected = grad(lambda v: bound(v)(x))(v)
    torch.testing.assert_close(grad(lambda v: fnmodels.remat(bound(v))(x))(v), expected)
    per_sample = vmap(grad(lambda v: fnmodels.remat(bound(v))(x)))(torch.stack([v, v]))
    torch.testing.assert_close(per_sample, torch.stack([expected, expected]))


def test_remat_in_compiled_code_is_one_graph():
    compiled = torch.compile(lambda q: loss(q, fnmodels.remat), backend="aot_eager", fullgraph=True)
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), p)
    grads = torch.autograd.grad(compiled(params), tree.leaves(params))
    step = torch.compile(grad(lambda q: loss(q, fnmodels.remat)), backend="aot_eager", fullgraph=True)
    for one, other, plain in zip(grads, tree.leaves(step(p)), tree.leaves(grad(loss)(p, None)), strict=True):
        torch.testing.assert_close(one, plain, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(other, plain, rtol=1e-9, atol=1e-11)
    torch.compiler.reset()


GENERATOR = torch.Generator()


def scaled_at_random(x):
    return x * torch.rand(3, generator=GENERATOR)


DRAWING = {
    "rand": lambda x: x * torch.rand(3),
    "dropout": torch.nn.functional.dropout,
    "a generator of a partial": functools.partial(lambda g, x: x * torch.rand(3, generator=g), torch.Generator()),
    "a generator of the module": lambda x: scaled_at_random(x),
    "an edit": lambda x: functools.partial(scaled_at_random)(x),
}
TAKEN = {
    "autograd": lambda run: torch.autograd.grad(run(torch.ones(3, requires_grad=True)).sum(), []),
    "no gradient": lambda run: run(torch.ones(3)),
    "grad": lambda run: grad(lambda x: run(x).sum())(torch.ones(3)),
    "per sample": lambda run: vmap(grad(lambda x: run(x).sum()), randomness="different")(torch.ones(2, 3)),
    "linearize": lambda run: linearize(run, torch.ones(3)),
}


@pytest.mark.parametrize("derivative", TAKEN)
@pytest.mark.parametrize("function", DRAWING)
def test_a_function_that_draws_random_numbers_is_refused(function, derivative):
    with pytest.raises(ValueError, match="The function of remat draws random numbers, and its recomputation would"):
        TAKEN[derivative](fnmodels.remat(DRAWING[function]))


def test_a_generator_that_is_an_argument_is_refused_and_one_made_inside_is_not():
    drawn = fnmodels.remat(lambda x, g: x * torch.rand(3, generator=g))
    with pytest.raises(ValueError, match="draws random numbers"):
        drawn(torch.ones(3), torch.Generator())
    seeded = fnmodels.remat(lambda x: x * torch.rand(3, generator=torch.Generator().manual_seed(1)))
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(grad(lambda x: seeded(x).sum())(torch.ones(3)), expected)


@pytest.mark.parametrize("how", [None, "full", "selective"])
def test_edits_that_draw_have_the_gradient_of_their_masks(how):
    """Under torch's checkpoint, which replays its default generators; by another generator they are refused."""
    draws = []

    def edit(value, name, generator=None):
        draws.append(torch.rand(16, dtype=torch.float64, generator=generator))
        return value * draws[-1]

    def derivative(generator, wrap):
        w = p["layers"][0]["mlp"]["down_proj"].clone().requires_grad_()
        first = p["layers"][0]
        params = p | {"layers": [first | {"mlp": first["mlp"] | {"down_proj": w}}, p["layers"][1]]}
        edits = {"layers.0.mlp": functools.partial(edit, generator=generator)}
        return torch.autograd.grad(loss(params, wrap, edits=edits), w)[0]

    wrap = how and layer_fn(how, "none")
    torch.manual_seed(0)
    ours = derivative(None, wrap)
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, derivative(None, None), rtol=1e-10, atol=1e-12)
    if how:
        with pytest.raises(ValueError, match="draws random numbers"):
            derivative(torch.Generator(), wrap)
    for generator in (None, torch.Generator()):
        with pytest.raises(ValueError, match="The function of remat draws random numbers"):
            derivative(generator, fnmodels.remat)


def test_compiled_remat_replays_its_draws():
    """Where the compiler keeps or draws again, as it likes."""
    function = lambda x: fnmodels.remat(lambda x: (torch.nn.functional.dropout(x.sin()) * 2).sin())(x)  # noqa: E731
    compiled, x = torch.compile(function, fullgraph=True), torch.linspace(1, 2, 64).requires_grad_()
    result = compiled(x)
    gradient = torch.autograd.grad(result.sum(), x)[0]
    assert torch.equal(result == 0, gradient == 0) and 16 < (result == 0).sum() < 48
    torch.compiler.reset()
