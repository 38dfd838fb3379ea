"""Gradients of all parameters of MoE models (experts, routers, biases, shared experts) equal those of transformers."""

import pytest
import torch

import fnmodels
from fnmodels import tree
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
from tests.support.oracle import model_of, params_of

ROUTED = [case for case in cases() if case.values is not None and is_routed(case.config)]
ROWS = segments((24,), (17, -7), (1, -23))  # all experts used, no close choices: see test_logits.py


@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_every_gradient(case: Case) -> None:
    """To 1e-5 of each leaf's norm; a leaf with only rounding noise (a key bias without position) has it in both."""
    tokens, valid = tokens_of(case.config, *ROWS.shape, seed=seed_of(case)), ROWS > 0
    labels = torch.where(valid[:, 1:], tokens[:, 1:], -100)
    model = model_of(case.values)
    model.get_input_embeddings().padding_idx = None  # with a padding_idx, torch gives that row no gradient
    logits = model(tokens, attention_mask=valid.long(), position_ids=positions_of(ROWS), use_cache=False).logits
    summed_loss(logits[:, :-1], labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            # The gradient has the file layout of its parameter. What only chooses keys has none.
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    want = tree.flatten(params_of(model, case.config))

    leaves = trainable(params_of(model_of(case.values), case.config))
    prepared = fnmodels.prepare(case.config, tokens, segment_ids=ROWS)
    spec = tree.flatten(fnmodels.family_of(case.config).spec(case.config))
    rounding = 1e-7 * max(float(t.norm()) for t in want.values())
    for kernel in ("math", "auto"):
        logits = forward(leaves, prepared, config=case.config, kernel=kernel)
        got = tree.flatten(gradients(summed_loss(logits[:, :-1], labels), leaves))
        for path, leaf in spec.items():
            if leaf.trainable:
                assert want[path].any(), path
                size = float(want[path].norm())
                allowed = 1e-5 * size if size > rounding else rounding
                assert float((got[path] - want[path]).norm()) <= allowed, (kernel, path)
            elif path.endswith("selection_bias"):
                assert not got[path].any(), (kernel, path)
