"""Curvature operators against dense matrices in fp64, and merged models against their definitions."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import hessian, jacrev, vmap

import fnmodels
import params as P
import train
from fnmodels import llama, research, tree
from fnmodels.ops.linear import linear
from tests.support.cases import cases, generic_params

CONFIG = llama.Config(
    vocab_size=5,
    hidden_size=4,
    intermediate_size=3,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
PARAMS = P.init(CONFIG, seed=0, dtype=torch.float64)
VECTOR, UNRAVEL = tree.ravel(PARAMS)
DIRECTION = torch.randn(len(VECTOR), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DOCUMENTS = [torch.tensor([1, 3, 2, 4]), torch.tensor([2, 0, 4])]


def prepared(documents: list[Tensor], length: int) -> Any:
    packed = fnmodels.pack(documents, length)
    inputs = fnmodels.prepare(CONFIG, packed.tokens, positions=packed.positions, segment_ids=packed.segment_ids)
    return inputs, packed.labels


BATCH = prepared(DOCUMENTS, 8)  # packed, with padding


def logits(params: Any, batch: Any) -> Tensor:
    return fnmodels.forward(params, *batch[0], config=CONFIG, kernel="math")[batch[1] != -100]


def losses(params: Any, batch: Any) -> Tensor:
    return F.cross_entropy(logits(params, batch), batch[1][batch[1] != -100], reduction="none")


def loss(params: Any, batch: Any) -> Tensor:
    return losses(params, batch).sum()


def applied(operator: research.Operator, vector: Tensor = DIRECTION) -> Tensor:
    return tree.ravel(operator(UNRAVEL(vector)))[0]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_hessian_products_are_those_of_the_dense_hessian_and_of_separate_documents() -> None:
    full = hessian(lambda v: loss(UNRAVEL(v), BATCH))(VECTOR)
    operator = research.hvp(loss, PARAMS, BATCH)
    close(applied(operator), full @ DIRECTION)
    close(applied(operator, DIRECTION.flip(0)), full @ DIRECTION.flip(0))  # the graph serves again
    alone = sum(applied(research.hvp(loss, PARAMS, prepared([document], 5))) for document in DOCUMENTS)
    close(applied(operator), alone)
    values, weights = research.lanczos(operator, UNRAVEL(DIRECTION), len(VECTOR))
    eigenvalues = torch.linalg.eigvalsh(full)
    close(values[[0, -1]], eigenvalues[[0, -1]])
    unit = DIRECTION / DIRECTION.norm()
    close((weights * values**2).sum(), unit @ full @ full @ unit)  # moments of the spectrum
    draws = research.hutchinson_trace(operator, PARAMS, 400, torch.Generator().manual_seed(0))
    assert abs(draws.mean() - full.trace()) < 4 * draws.std() / 20


def test_gauss_newton_and_fisher_products_are_those_of_dense_matrices() -> None:
    jacobian = jacrev(lambda v: logits(UNRAVEL(v), BATCH).flatten())(VECTOR)
    p = logits(PARAMS, BATCH).softmax(-1)
    curvature = torch.block_diag(*(q.diag() - torch.outer(q, q) for q in p))
    expected = jacobian.T @ curvature @ jacobian @ DIRECTION

    def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1][batch[1] != -100], reduction="sum")

    close(applied(research.ggn_vp(logits, cross_entropy, PARAMS, BATCH)), expected)
    close(applied(research.fisher_vp(logits, PARAMS, BATCH)), expected)
    each = jacrev(lambda v: losses(UNRAVEL(v), BATCH))(VECTOR)
    close(applied(research.empirical_fisher_vp(losses, PARAMS, BATCH)), each.T @ each @ DIRECTION)
    close(research.empirical_ntk(losses, PARAMS, BATCH), each @ each.T)
    for chunk in (1, 2):
        close(research.empirical_ntk(losses, PARAMS, BATCH, chunk=chunk), each @ each.T)
    damped = jacobian.T @ curvature @ jacobian + 0.1 * torch.eye(len(VECTOR), dtype=torch.float64)
    rows = vmap(UNRAVEL)(each)
    found = research.influence(
        research.fisher_vp(logits, PARAMS, BATCH), rows, UNRAVEL(DIRECTION), damping=0.1, tolerance=1e-12, steps=300
    )
    torch.testing.assert_close(found, -each @ torch.linalg.solve(damped, DIRECTION), rtol=1e-8, atol=1e-9)


@pytest.fixture
def fresh_compiler() -> None:
    """Sizes that another test had would become symbolic, and tracing take ten times as long."""
    torch.compiler.reset()


def test_compiled_products_are_those_of_eager_blocks(fresh_compiler: None) -> None:
    """Of experts too, whose blocks return counts beside floating outputs."""
    config = next(case.config for case in cases() if case.name == "mixtral")
    config = dataclasses.replace(config, num_hidden_layers=1, layer_kinds=("full_moe",))
    params = generic_params(config, torch.float64)
    inputs = fnmodels.prepare(config, torch.arange(8).view(2, 4))

    def outputs(params: Any, batch: Any) -> Tensor:
        return fnmodels.forward(params, *batch, config=config, kernel="math")

    def of_outputs(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.logsumexp(-1).sum()

    def of_params(params: Any, batch: Any) -> Tensor:
        return of_outputs(outputs(params, batch), batch)

    direction = tree.map(torch.sin, params)
    for compiled, eager in (
        (research.hvp(of_params, params, inputs, compile="aot_eager"), research.hvp(of_params, params, inputs)),
        (
            research.ggn_vp(outputs, of_outputs, params, inputs, compile="aot_eager"),
            research.ggn_vp(outputs, of_outputs, params, inputs),
        ),
    ):
        for got, want in zip(tree.leaves(compiled(direction)), tree.leaves(eager(direction)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="none ran"):
        research.hvp(lambda p, b: of_params(dict(p), b), params, inputs, compile="aot_eager")(direction)


def test_train_losses_compile_and_their_tuple_is_refused(fresh_compiler: None) -> None:
    packed = fnmodels.pack(DOCUMENTS, 8)
    batch = packed.batch()

    def pair(params: Any, batch: Any) -> Any:
        return train.next_token_loss(params, batch, config=CONFIG, kernel="math")

    def total(params: Any, batch: Any) -> Tensor:
        found: Tensor = pair(params, batch)[0]
        return found

    want = applied(research.hvp(total, PARAMS, batch))
    close(applied(research.hvp(total, PARAMS, batch, compile="aot_eager")), want)
    squared = [research.ggn_vp(total, lambda o, _: o.square(), PARAMS, batch, compile=c) for c in (None, "aot_eager")]
    close(applied(squared[1]), applied(squared[0]))
    for make in (research.hvp, research.fisher_vp, research.empirical_fisher_vp, research.empirical_ntk):
        with pytest.raises(TypeError, match=r"The (loss|function) returned a tuple; return one tensor"):
            make(pair, PARAMS, batch)
    for compile in (None, "aot_eager"):
        with pytest.raises(TypeError, match="The function returned a tuple; return one tensor"):
            applied(research.ggn_vp(pair, lambda o, _: o.square(), PARAMS, batch, compile=compile))
        with pytest.raises(TypeError, match="The loss returned a tuple; return one tensor"):
            applied(research.ggn_vp(total, lambda o, _: (o.square(), 1), PARAMS, batch, compile=compile))


def test_no_value_of_a_gradient_is_read() -> None:
    """Products of weights large enough for a gradient that is not computed: a Hessian without NaN."""
    weight, x = torch.randn(512, 512) / 512**0.5, torch.randn(128, 512)

    def loss(params: Any, batch: Any) -> Tensor:
        return linear(torch.tanh(linear(batch, params["w"])), params["w"]).square().sum()

    direction = {"w": torch.randn_like(weight)}
    wide = {"w": weight.double()}, x.double(), {"w": direction["w"].double()}
    found = research.hvp(loss, {"w": weight}, x)(direction)["w"]
    want = research.hvp(loss, *wide[:2])(wide[2])["w"]
    assert (found - want).norm() <= 1e-5 * want.norm()


def test_what_has_no_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="not positive definite"):
        research.conjugate_gradients(lambda v: tree.map(torch.neg, v), PARAMS)
    with pytest.raises(ValueError, match="more steps"):
        research.conjugate_gradients(research.fisher_vp(logits, PARAMS, BATCH), PARAMS, damping=1e-3, steps=1)
    with pytest.raises(ValueError, match="'count' is not"):
        research.hvp(loss, PARAMS | {"count": torch.tensor(1)}, BATCH)
    with pytest.raises(ValueError, match=r"must return \[n\]"):
        research.empirical_ntk(logits, PARAMS, BATCH)


def test_merged_models() -> None:
    base = {"a": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    one = {"a": torch.tensor([4.0, -1.0, 3.0, 1.0])}
    other = {"a": torch.tensor([2.0, 5.0, -4.0, 1.5])}
    close(research.merge_linear([one, other], [0.25, 0.75])["a"], torch.tensor([2.5, 3.5, -2.25, 1.375]))
    close(research.merge_task_arithmetic(base, [one, other], [1, -1])["a"], torch.tensor([2.0, -6.0, 7.0, 0.5]))
    # density 1/2 keeps (4, 0, 3, 0) and (0, 5, -4, 0); the sum's signs are (+, +, -, 0)
    close(research.merge_ties(base, [one, other], density=0.5)["a"], torch.tensor([4.0, 5.0, -4.0, 1.0]))
    x, y = {"a": torch.tensor([2.0, 0.0])}, {"a": torch.tensor([0.0, 2.0])}
    close(research.merge_slerp(x, y, 0.5)["a"], torch.tensor([2.0, 2.0]) / 2**0.5)
    close(research.merge_slerp(x, x, 0.3)["a"], x["a"])
    half = {"a": torch.full((300, 300), 2.0, dtype=torch.float16)}
    assert torch.equal(research.merge_slerp(half, half, 0.3)["a"], half["a"])
    with pytest.raises(ValueError, match="density"):
        research.merge_ties(base, [one], density=0)
    with pytest.raises(ValueError, match="one weight"):
        research.merge_linear([one], [1, 2])
