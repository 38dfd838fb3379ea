"""Every torch.func transform works on the model, alone and composed, and agrees with a loop.

With kernel="math", and in fp64 where derivatives are compared with finite differences.
"""

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fnmodels
import params as P
import train
from fnmodels import testing, tree
from fnmodels.apply import with_kernel
from fnmodels.models.common.carried import borrowed, joins
from fnmodels.models.common.context import PATTERN_TAPS
from fnmodels.options import ForwardOptions
from tests.support.cases import (
    Batch,
    Case,
    attending_layers,
    attention_of,
    batch_of,
    cases,
    causal,
    covering,
    decisions_of,
    generic,
    generic_params,
    gradients,
    layer_inputs_of,
    layer_structures,
    off,
    parts,
    representatives,
    richest,
    segments,
    short,
    sparse_layers,
    subject_of,
    sublayers,
    summed_loss,
    supports,
    tap_names,
    taps_of,
    trainable,
    with_kernels,
)

# What transforms, wrappers and taps do to a block follows from the operations in it.
every_part = pytest.mark.parametrize("case", parts(), ids=str)
every_structure = pytest.mark.parametrize("case", layer_structures(), ids=str)
every_structure_and_kernel = with_kernels(layer_structures(), in_turn=True)
every_representative = pytest.mark.parametrize("case", representatives(), ids=str)
# Each way to compose derivatives runs on every third one, and all of them on the first, in which bugs are planted.
first_representatives, second_representatives, third_representatives = (
    pytest.mark.parametrize("case", list(dict.fromkeys((representatives()[0], *representatives()[i::3]))), ids=str)
    for i in range(3)
)
MIXED = segments((-2, 3, 2), (7,), (4, 1, -2), (-7,))


def direction_of(params: Any, name: str = "direction") -> Any:
    """A generic tangent of unit size per leaf."""
    flat = tree.flatten(params)
    made = {path: generic(f"{name}.{path}", torch.empty(p.shape)).to(p.dtype) for path, p in flat.items()}
    return tree.unflatten({path: value / value.norm() for path, value in made.items()})


def dot(a: Any, b: Any) -> Tensor:
    return sum(((x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)), torch.zeros(()))


class Problem:
    """The mixed batch's loss as a function of the parameters, in fp64."""

    def __init__(self, case: Case, segment_ids: Tensor = MIXED) -> None:
        self.batch: Batch = batch_of(case.config, segment_ids)
        self.config = case.config
        self.prepared, self.labels = self.batch.prepared(), self.batch.labels
        self.weights = generic_params(case.config, torch.float64)
        self.direction = direction_of(self.weights)

    def loss(self, weights: Any) -> Tensor:
        return self.loss_of(weights, self.prepared, self.labels)

    def loss_of(self, weights: Any, prepared: Any, labels: Tensor) -> Tensor:
        return summed_loss(fnmodels.forward(weights, *prepared, config=self.config, kernel="math"), labels)

    def moved(self, step: float) -> Any:
        return tree.map(lambda p, d: p + step * d, self.weights, self.direction)


def difference(f: Callable[[Any], Any], problem: Problem, step: float = 3e-6) -> Any:
    """Central difference of `f` along the direction, accurate to about 1e-9 here; 3e-8 where a root is steep."""
    return tree.map(lambda hi, lo: (hi - lo) / (2 * step), f(problem.moved(step)), f(problem.moved(-step)))


# Every model type too: the table of docs/models.md says for each whether transforms hold.
_TYPES = (*representatives(), *layer_structures(), *map(short, richest(lambda case: case.config.model_type)))


@pytest.mark.parametrize("case", {str(case): case for case in reversed(_TYPES)}.values(), ids=str)
def test_grad_is_autograd(case: Case) -> None:
    """F1: grad_and_value, and the directional derivative by differences; of some grad and vjp, which are these."""
    p = Problem(case)
    leaves = trainable(p.weights)
    loss = p.loss(leaves)
    wanted = gradients(loss, leaves)
    got, value = grad_and_value(p.loss)(p.weights)
    assert off(got, wanted) < 1e-12 and off(value, loss) < 1e-12
    if case in representatives():
        assert off(grad(p.loss)(p.weights), wanted) < 1e-12
        _, pull = vjp(p.loss, p.weights)
        assert off(pull(torch.ones((), dtype=torch.float64))[0], wanted) < 1e-12
    assert off(dot(wanted, p.direction), difference(p.loss, p)) < 1e-7


@every_structure
def test_jvp(case: Case) -> None:
    """F1: forward mode equals differences, and <w, J u> = <J^T w, u>."""
    p = Problem(case)

    def logits(weights: Any) -> Tensor:
        return fnmodels.forward(weights, *p.prepared, config=p.config, kernel="math")

    out, tangent = jvp(logits, (p.weights,), (p.direction,))
    assert off(tangent, difference(logits, p)) < 1e-7
    w = generic("cotangent", torch.empty(out.shape)).double()
    primal, pull = vjp(logits, p.weights)
    assert off(out, primal) == 0
    assert off((w * tangent).sum(), dot(pull(w)[0], p.direction)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_linearize(family: str) -> None:
    """F6: traced once, applied often. Tracing takes seconds, so one case per family; its rules are those of jvp."""
    p = Problem(short(next(case for case in richest() if case.family == family)))
    _, push = linearize(p.loss, p.weights)
    wanted = jvp(p.loss, (p.weights,), (p.direction,))[1]
    assert off(wanted, difference(p.loss, p)) < 1e-7
    for _ in range(3):
        assert off(push(p.direction), wanted) < 1e-12


@every_representative
def test_hessian_vector_products(case: Case) -> None:
    """F1: forward over reverse and differences give one result, and so does one in turn of reverse over either and
    double backward; on the first variant each of them."""
    p = Problem(case)

    def double_backward() -> Any:
        leaves = trainable(p.weights)
        # a selection bias is in no autograd graph
        first = torch.autograd.grad(p.loss(leaves), tree.leaves(leaves), create_graph=True, materialize_grads=True)
        inner = sum((g * d).sum() for g, d in zip(first, tree.leaves(p.direction), strict=True))
        return gradients(inner, leaves)

    ways: tuple[Callable[[], Any], ...] = (
        lambda: grad(lambda w: dot(grad(p.loss)(w), p.direction))(p.weights),
        lambda: grad(lambda w: jvp(p.loss, (w,), (p.direction,))[1])(p.weights),
        double_backward,
    )
    wanted = jvp(grad(p.loss), (p.weights,), (p.direction,))[1]
    assert off(difference(grad(p.loss), p), wanted) < 1e-6
    number = [one.name for one in representatives()].index(case.name)
    for way in ways if number == 0 else (ways[number % len(ways)],):
        assert off(way(), wanted) < 1e-10


@every_representative
def test_a_second_derivative_of_plain_autograd_is_right_or_names_the_way(case: Case) -> None:
    """create_graph=True is not known before the backward pass: where the kernel has none, the sentence names math."""
    for ids in (MIXED, segments((7,), (7,))):  # by blocks, and rows of one document
        p = Problem(case, ids)
        options = {"layout": fnmodels.layout(p.prepared[1])}

        def product(p: Problem = p, **options: Any) -> Any:
            leaves = trainable(p.weights)
            logits = fnmodels.forward(leaves, *p.prepared, config=p.config, **options)
            loss = summed_loss(logits, p.labels)
            first = torch.autograd.grad(loss, tree.leaves(leaves), create_graph=True, materialize_grads=True)
            inner = sum((g * d).sum() for g, d in zip(first, tree.leaves(p.direction), strict=True))
            return gradients(inner, leaves)

        wanted, refused = product(kernel="math"), ""
        try:
            found = product(**options)
        except NotImplementedError as error:
            found, refused = wanted, str(error)
        assert off(found, wanted) < 1e-9
        way = 'kernel="math"' if "kernel=" in refused else 'experts="dense"'
        assert not refused or f"a second derivative, or vmap): {way} supports all of them." in refused


@second_representatives
def test_jacobians(case: Case) -> None:
    """F1, F6: jacrev equals jacfwd for logits by a token's embedding and by a norm's weight; and the Hessian."""
    p = Problem(case, segments((-1, 3, 2)))
    x = fnmodels.family_of(p.config).embed(p.weights, p.prepared[0], config=p.config)
    places = [name for name in ("norm", "embed_norm") if name in p.weights]
    where = places[0] if places else "lm_head"  # of a family whose norms have no weights

    def logits(vector: Tensor, norm: Tensor) -> Tensor:
        inputs = {**p.prepared[0], "tokens": torch.cat((x[:, :2], vector[None, None], x[:, 3:]), dim=1)}
        weights = {**p.weights, where: norm}
        return fnmodels.forward(weights, inputs, *p.prepared[1:], config=p.config, kernel="math")[0, 1:, :3]

    at = (x[0, 2], p.weights[where])
    backward, forward = jacrev(logits, argnums=(0, 1))(*at), jacfwd(logits, argnums=(0, 1))(*at)
    assert off(forward, backward) < 1e-10
    assert backward[0][1:3].any() and backward[0][0].any() != causal(case) and not backward[0][3:].any()
    curvature = hessian(lambda vector: logits(vector, at[1]).sin().sum())(at[0])
    assert off(curvature, curvature.mT) < 1e-10 and curvature.any()


@every_part
def test_vmap_over_rows(case: Case) -> None:
    """F2."""
    testing.check_per_sample_gradients(subject_of(case, dtype=torch.float64, tolerance=1e-11))


@first_representatives
def test_compositions(case: Case) -> None:
    """F6: jvp of vmap, vmap of jvp, grad of vmap, vmap of hvp."""
    p = Problem(case)
    rows, labels = fnmodels.rows(p.prepared), fnmodels.rows(p.labels)
    each = vmap(p.loss_of, in_dims=(None, 0, 0))
    total = p.loss(p.weights)
    assert off(each(p.weights, rows, labels).sum(), total) < 1e-10
    assert off(grad(lambda w: each(w, rows, labels).sum())(p.weights), grad(p.loss)(p.weights)) < 1e-10
    outer = jvp(lambda w: each(w, rows, labels), (p.weights,), (p.direction,))[1]

    def along(prepared: Any, targets: Tensor) -> Tensor:
        return jvp(lambda w: p.loss_of(w, prepared, targets), (p.weights,), (p.direction,))[1]

    assert off(vmap(along)(rows, labels), outer) < 1e-10
    assert off(outer.sum(), difference(p.loss, p)) < 1e-7

    def bend(prepared: Any, targets: Tensor) -> Any:
        return jvp(grad(lambda w: p.loss_of(w, prepared, targets)), (p.weights,), (p.direction,))[1]

    summed = tree.map(lambda t: t.sum(0), vmap(bend)(rows, labels))
    assert off(summed, jvp(grad(p.loss), (p.weights,), (p.direction,))[1]) < 1e-10


@third_representatives
def test_ensembles(case: Case) -> None:
    """F9: vmap over stacked parameters equals a loop, forward and gradient."""
    p = Problem(case)
    members = [p.weights, p.moved(0.3), p.moved(-0.5)]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *members)
    losses, grads = vmap(lambda w: grad_and_value(p.loss)(w)[::-1])(stacked)
    for i, member in enumerate(members):
        wanted, value = grad_and_value(p.loss)(member)
        assert off(losses[i], value) < 1e-10
        assert off(tree.map(lambda t, i=i: t[i], grads), wanted) < 1e-10


@second_representatives
def test_one_adapted_leaf(case: Case) -> None:
    """F9: a function of one leaf with the others constant, as for adapters and probes."""
    p = Problem(case)
    flat = tree.flatten(p.weights)
    path = next(path for path in flat if path.startswith("layers.0.") and flat[path].ndim == 2)
    offsets = torch.stack([0.1 * generic(f"{path}.{i}", flat[path]).double() for i in range(3)])

    def loss(offset: Tensor) -> Tensor:
        return p.loss(tree.unflatten(flat | {path: flat[path] + offset}))

    losses, grads = vmap(loss)(offsets), vmap(grad(loss))(offsets)
    for i in range(3):
        assert off(losses[i], loss(offsets[i])) < 1e-10 and off(grads[i], grad(loss)(offsets[i])) < 1e-10


def shards_of(params: Any) -> Any:
    """The tree with each layer as two halves of the rows of its leaves; a scalar is split into itself and 0."""

    def half(t: Tensor, i: int) -> Tensor:
        return t.tensor_split(2)[i] if t.ndim else t * (1 - i)

    halves = [tuple(tree.map(lambda t, i=i: half(t, i), layer) for i in (0, 1)) for layer in params["layers"]]
    return {**params, "layers": halves}


def gather(*shards: Tensor) -> Tensor:
    return torch.cat(shards) if shards[0].ndim else shards[0]


@third_representatives
def test_parameters_gathered_layer_by_layer(case: Case) -> None:
    """F5, without processes: shards that `layer_fn` joins have the derivatives of full parameters, in every mode."""
    p = Problem(case)

    def loss(shards: Any) -> Tensor:
        def layer_fn(block: Any) -> Any:
            return lambda layer, *rest, **more: block(tree.map(gather, *layer), *rest, **more)

        logits = fnmodels.forward(shards, *p.prepared, config=p.config, kernel="math", layer_fn=layer_fn)
        return summed_loss(logits, p.labels)

    at, along = shards_of(p.weights), shards_of(p.direction)
    assert off(jvp(loss, (at,), (along,)), jvp(p.loss, (p.weights,), (p.direction,))) < 1e-12
    assert off(grad(loss)(at), shards_of(grad(p.loss)(p.weights))) < 1e-12
    bent = jvp(grad(loss), (at,), (along,))[1]
    assert off(bent, shards_of(jvp(grad(p.loss), (p.weights,), (p.direction,))[1])) < 1e-10


def custom_functions() -> list[type[Function]]:
    """Every autograd.Function of the three packages."""
    for package in (fnmodels, P, train):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if info.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(info.name)
            except ModuleNotFoundError as error:
                if error.name not in ("lm_eval", "ray", "verl"):  # optional, and not needed by these tests
                    raise
    ours = [m for name, m in sys.modules.items() if name.partition(".")[0] in ("fnmodels", "params", "train")]
    values = [value for module in ours for value in vars(module).values() if isinstance(value, type)]
    return [value for value in values if issubclass(value, Function) and value is not Function]


def test_custom_functions_have_every_rule() -> None:
    """F4: setup_context, a vmap rule and a jvp rule, which may raise an error with a message."""
    assert {function.__name__ for function in custom_functions()} >= {"_Tiles", "_HeadLoss", "Scores"}
    for function in custom_functions():
        if function.__module__ == "train.simulate.fake_ops":  # shapes only, on meta; in no model's path
            continue
        assert function.setup_context is not Function.setup_context, function
        if function.__name__.endswith("Traced"):  # for torch.compile, which supports no jvp rule; eager uses others
            assert function.__subclasses__(), function
            continue
        assert function.generate_vmap_rule or function.vmap is not Function.vmap, function
        assert function.jvp is not Function.jvp, function


def ends_of(case: Case) -> tuple[Any, Any]:
    """The two functions that read a tied leaf, which families may share."""
    family = fnmodels.family_of(case.config)
    return family.embed, family.unembed


TIED = tuple({ends_of(case): case for case in cases() if getattr(case.config, "tie_word_embeddings", False)}.values())


@with_kernels(TIED, in_turn=True)
def test_a_tied_head_is_one_leaf_read_twice(case: Case, kernel: str) -> None:
    """F7: its gradient is the sum of the gradients of two untied leaves with equal values."""
    batch, config = batch_of(case.config, MIXED), replace(case.config, tie_word_embeddings=False)
    tied = trainable(generic_params(case.config))
    untied = trainable({**tied, "lm_head": tied["embed_tokens"]})
    one = gradients(summed_loss(batch.forward(tied, kernel=kernel), batch.labels), tied)
    two = gradients(summed_loss(replace(batch, config=config).forward(untied, kernel=kernel), batch.labels), untied)
    assert two["lm_head"].any() and two["embed_tokens"].any()
    two["embed_tokens"] = two["embed_tokens"] + two.pop("lm_head")
    assert off(one, two) < 1e-5


@with_kernels(tuple(map(short, richest())), in_turn=True)
def test_the_stack_comes_apart(case: Case, kernel: str) -> None:
    """F8: embed, two slices of layers and head have the bits of forward; so has the head on (chunks of) `hidden`."""
    batch, weights, family = batch_of(case.config, MIXED), generic_params(case.config), fnmodels.family_of(case.config)
    inputs, masks, freqs_cis = batch.prepared()
    options: dict[str, Any] = {"config": case.config, "kernel": kernel}
    whole = fnmodels.forward(weights, inputs, masks, freqs_cis, **options)
    hidden = fnmodels.hidden(weights, inputs, masks, freqs_cis, **options)
    layers = len(family.kinds(case.config))
    x = family.embed(weights, inputs, config=case.config)
    decided = decisions_of(weights, (inputs, masks, freqs_cis), case.config, kernel=kernel)  # which flow over layers
    more = layer_inputs_of(case.config, weights, inputs)
    kinds = family.kinds(case.config)
    for cut in range(layers + 1):
        middle = fnmodels.run_layers(weights, x, masks, freqs_cis, 0, cut, **options, **more)
        left = f"Layer {cut} reads what layer {cut - 1} has left for it"
        last = functools.partial(fnmodels.run_layers, weights, middle, masks, freqs_cis, cut, layers)
        if sources := borrowed(kinds, cut):
            with pytest.raises(
                ValueError, match=rf"reads the keys and values of the last layer of kind '{sources[0]}'|{left}"
            ):
                last(**decided, **options, **more)
            continue
        if joins(kinds, cut):
            with pytest.raises(ValueError, match=left):
                last(**decided, **options, **more)
            continue
        assert torch.equal(last(**decided, **options, **more), hidden)
    assert torch.equal(family.unembed(weights, hidden, config=case.config), whole)
    chunks = [family.unembed(weights, part, config=case.config) for part in hidden.split(3, dim=1)]
    assert off(torch.cat(chunks, dim=1), whole) < 1e-6
    soft = {**inputs, "tokens": torch.randn(x.shape, generator=torch.Generator().manual_seed(0))}  # instead of tokens
    more = layer_inputs_of(case.config, weights, soft)
    last = fnmodels.run_layers(
        weights, family.embed(weights, soft, config=case.config), masks, freqs_cis, 0, layers, **options, **more
    )
    assert torch.equal(fnmodels.hidden(weights, soft, masks, freqs_cis, **options), last)
    with pytest.raises(ValueError, match=f"the model has {layers}"):
        fnmodels.run_layers(weights, x, masks, freqs_cis, 0, layers + 1, **options)


@every_structure_and_kernel
def test_taps_are_outputs(case: Case, kernel: str) -> None:
    """Taps change no bit of the logits, are named in the result, and carry gradients."""
    batch, weights, family = batch_of(case.config, MIXED), generic_params(case.config), fnmodels.family_of(case.config)
    layers = len(family.kinds(case.config))
    there = {name for name in tap_names(case.config) if "norm" not in name}
    there = there if kernel == "math" else {name for name in there if not name.endswith((".scores", ".pattern"))}
    names = [name for name in taps_of(case.config) if kernel == "math" or name not in PATTERN_TAPS]
    logits, tapped = batch.forward(
        weights, kernel=kernel, taps=("embed", "hidden", *(f"layers.*.{name}" for name in names))
    )
    assert torch.equal(logits, batch.forward(weights, kernel=kernel))
    assert tapped.keys() == there
    sparse, parts = sparse_layers(case.config), sublayers(case.config)
    if dense := sorted(set(range(layers)) - set(sparse)) if sparse else []:
        with pytest.raises(ValueError, match=f"unknown in layer {dense[0]}"):
            batch.forward(weights, taps=(f"layers.{dense[0]}.counts",))
    assert torch.equal(tapped["embed"], tapped["layers.0.input"])
    assert torch.equal(tapped["hidden"], tapped[f"layers.{layers - 1}.output"])
    for i in range(1, layers):
        assert torch.equal(tapped[f"layers.{i}.input"], tapped[f"layers.{i - 1}.output"])
    _, only = batch.forward(weights, kernel=kernel, taps=(f"layers.1.{parts[1][0]}",) if layers > 1 else ("embed",))
    assert len(only) == 1 and all(torch.equal(value, tapped[name]) for name, value in only.items())
    leaves = trainable(weights)
    _, last = batch.forward(leaves, taps=("layers.0.output",))
    to_embedding = tree.flatten(gradients(last["layers.0.output"].square().sum(), leaves))
    assert any(gradient.any() for path, gradient in to_embedding.items() if "embed" in path)


@pytest.mark.parametrize(
    ("wrong", "case"),
    zip(("layers.0.nothing", "layers.9.output", "nothing", "layers.x.output"), covering(), strict=False),
    ids=str,
)
def test_a_tap_that_no_layer_has_is_unknown(wrong: str, case: Case) -> None:
    with pytest.raises(ValueError, match="unknown"):
        batch_of(case.config, MIXED).forward(generic_params(case.config), taps=(wrong,))


@every_structure_and_kernel
def test_layer_fn_wraps_each_kind_once(case: Case, kernel: str) -> None:
    """layer_fn is called once per kind, and rematerialization (F3) changes no bit of loss or gradient."""
    batch, weights = batch_of(case.config, MIXED), trainable(generic_params(case.config))
    seen: list[Any] = []

    def remat(block: Any) -> Any:
        seen.append(block.keywords["kind"])
        return partial(checkpoint, block, use_reentrant=False)

    plain = summed_loss(batch.forward(weights, kernel=kernel), batch.labels)
    saved = summed_loss(batch.forward(weights, kernel=kernel, layer_fn=remat), batch.labels)
    assert sorted(seen) == sorted(set(fnmodels.family_of(case.config).kinds(case.config)))
    assert torch.equal(plain, saved)
    assert off(gradients(saved, weights), gradients(plain, weights)) == 0


@every_structure
def test_a_module_around_it_is_the_callers_business(case: Case) -> None:
    """functional_call over a user's own module, with our tree as its parameters."""
    batch = batch_of(case.config, MIXED)
    flat = tree.flatten(generic_params(case.config))

    class Shell(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for path, leaf in flat.items():
                self.register_parameter(path.replace(".", "/"), torch.nn.Parameter(leaf))

        def forward(self) -> Tensor:
            named = {path.replace("/", "."): leaf for path, leaf in self.named_parameters()}
            return batch.forward(tree.unflatten(named))

    doubled = {path.replace(".", "/"): 2 * leaf for path, leaf in flat.items()}
    wanted = batch.forward(tree.unflatten({path: 2 * leaf for path, leaf in flat.items()}))
    assert torch.equal(functional_call(Shell(), doubled, ()), wanted)


@first_representatives
def test_auto_is_math_where_a_second_derivative_is_taken(case: Case) -> None:
    """F1: jvp and hvp of a loss that names no kernel have the bits of kernel="math"; a gradient keeps its kernel."""
    p, asked = Problem(case), []

    def loss(weights: Any) -> Tensor:
        asked.append(with_kernel(ForwardOptions(), p.config, None).kernel)
        return summed_loss(fnmodels.forward(weights, *p.prepared, config=p.config), p.labels)

    tangents = jvp(loss, (p.weights,), (p.direction,))[1], jvp(p.loss, (p.weights,), (p.direction,))[1]
    assert torch.equal(*tangents)
    products = [jvp(grad(f), (p.weights,), (p.direction,))[1] for f in (loss, p.loss)]
    assert all(map(torch.equal, *map(tree.leaves, products)))
    grad(loss)(p.weights)
    assert asked == ["math", "math", "auto"]


@pytest.mark.parametrize("case", [short(case) for case in richest(attention_of) if supports(case, "sdpa")], ids=str)
def test_the_fused_kernel_names_the_one_that_can(case: Case) -> None:
    """F1: grad, vmap and vmap(grad) work with "sdpa"; forward mode raises an error that names kernel="math"."""
    p = Problem(case)

    def loss(weights: Any, prepared: Any = p.prepared, labels: Tensor = p.labels) -> Tensor:
        return summed_loss(fnmodels.forward(weights, *prepared, config=p.config, kernel="sdpa"), labels)

    assert off(grad(loss)(p.weights), grad(p.loss)(p.weights)) < 1e-10
    rows, labels = fnmodels.rows(p.prepared), fnmodels.rows(p.labels)
    one, other = (vmap(grad(f), in_dims=(None, 0, 0))(p.weights, rows, labels) for f in (loss, p.loss_of))
    assert off(one, other) < 1e-10
    if not attending_layers(case.config):
        return  # recurrent layers support it with every kernel
    with pytest.raises(NotImplementedError, match=r'kernel="math"|experts="dense"'):
        jvp(loss, (p.weights,), (p.direction,))
