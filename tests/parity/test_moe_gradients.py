"""Gradients of all parameters of MoE models (experts, routers, biases, shared experts) equal those of transformers.

In float32; in float64 where gradients are sums over all tokens that nearly cancel. Those are the maps of several
residual streams, which have scales of three numbers and one (transformers is off by up to 2.5e-5 of them in float32),
and the decay of Ling 3's delta layers, one number per head (2.5e-5 as well).
"""

import contextlib
from typing import Any

import pytest
import torch

import fnmodels
from fnmodels import tree
from fnmodels.models.common.family import field_of
from tests.support.cases import (
    Case,
    cases,
    forward,
    gradients,
    is_routed,
    positions_of,
    seed_of,
    segments,
    summed_loss,
    tokens_of,
    trainable,
)
from tests.support.doubles import KeepsDoubles, doubled, with_exact_frequencies
from tests.support.oracle import model_of, params_of

ROUTED = [case for case in cases() if case.values is not None and is_routed(case.config)]
ROWS = segments((24,), (17, -7), (1, -23))  # all experts used, no close choices: see test_logits.py


EXACT = ("bailing_hybrid", "longcat_flash", "muse_spark")  # families whose gradients float32 is too coarse for


@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_every_gradient(case: Case) -> None:
    """To 1e-5 of each leaf's norm; a leaf with only rounding noise (a key bias without position) has it in both."""
    exact = bool(field_of(case.config, "residual_streams")) or case.family in EXACT
    assert_gradients_equal(case, seed_of(case), exact=exact, kernels=("math", "auto"))


@pytest.mark.parametrize("seed", range(1, 6))
def test_every_gradient_of_streams(seed: int) -> None:
    """In float64 no choice is too close to compare, and any tokens do."""
    assert_gradients_equal(
        next(case for case in ROUTED if case.name == "deepseek_v4"), seed, exact=True, kernels=("math",)
    )


def assert_gradients_equal(case: Case, seed: int, *, exact: bool, kernels: tuple[str, ...]) -> None:
    """exact: in float64, to 1e-11."""
    tokens, valid = tokens_of(case.config, *ROWS.shape, seed=seed), ROWS > 0
    labels = torch.where(valid[:, 1:], tokens[:, 1:], -100)
    with KeepsDoubles() if exact else contextlib.nullcontext():
        model = reference(case, exact=exact)
        logits = model(tokens, attention_mask=valid.long(), position_ids=positions_of(ROWS), use_cache=False).logits
        summed_loss(logits[:, :-1], labels).backward()
        prepared = fnmodels.prepare(case.config, tokens, segment_ids=ROWS)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            # The gradient has the file layout of its parameter. What only chooses keys has none.
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    want = tree.flatten(params_of(model, case.config))

    leaves = trainable(params_of(reference(case, exact=exact), case.config))
    spec = tree.flatten(fnmodels.family_of(case.config).spec(case.config))
    bound, noise = (1e-11, 1e-13) if exact else (1e-5, 1e-7)
    rounding = noise * max(float(t.norm()) for t in want.values())
    for kernel in kernels:
        logits = forward(leaves, prepared, config=case.config, kernel=kernel)
        got = tree.flatten(gradients(summed_loss(logits[:, :-1], labels), leaves))
        for path, leaf in spec.items():
            if leaf.trainable:
                assert want[path].any(), path
                size = float(want[path].norm())
                allowed = bound * size if size > rounding else rounding
                assert float((got[path] - want[path]).norm()) <= allowed, (kernel, path)
            elif path.endswith("selection_bias"):
                assert not got[path].any(), (kernel, path)


def reference(case: Case, *, exact: bool) -> Any:
    model = model_of(case.values)
    if exact:
        return with_exact_frequencies(doubled(model), case.config)
    model.get_input_embeddings().padding_idx = None  # with a padding_idx, torch gives that row no gradient
    return model
