"""`overwrite`: without gradients a result takes the place of an argument, and nothing else is written."""

import functools

import pytest
import torch

from fnmodels.ops.recurrent import conv, delta_rule
from tests.fnmodels.ops.recurrent.references import ROWS
from tests.fnmodels.ops.recurrent.test_ops import close, delta_inputs, normal


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tail", [False, True])
def test_a_short_convolution_over_its_argument(dtype: torch.dtype, tail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients the result may take the argument's place, block by block: bits and tail stay what they are."""
    monkeypatch.setattr("fnmodels.ops.cpu.recurrent.conv._ELEMENTS", 5 * 6)  # blocks of 5 tokens
    ids = ROWS[[0, 2]]
    x, weight, bias = (t.to(dtype) for t in (normal(2, 27, 6), normal(6, 4), normal(6)))
    before = (normal(2, 3, 6).to(dtype), torch.tensor([1, 5])) if tail else (None, None)
    with torch.no_grad():
        wanted = conv.short_conv(x, weight, bias, ids, *before, silu=True)
        given = x.clone()
        found = conv.short_conv(given, weight, bias, ids, *before, silu=True, overwrite=True)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert torch.equal(given, x) == tail  # a tail is joined with a copy
    asked = conv.short_conv(given := x.clone().requires_grad_(), weight, bias, ids, *before, silu=True, overwrite=True)
    assert torch.equal(asked[0], wanted[0]) and torch.equal(given, x)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_delta_rule_over_its_values(channels: bool, dtype: torch.dtype) -> None:
    drawn = delta_inputs(*ROWS.shape, channels=channels, speed=0.2, strength=1.0)
    q, k, v, g, beta = (t.to(dtype) for t in drawn)
    rule = functools.partial(delta_rule.delta_rule, chunk=8, normalize=True)
    kept = v.clone()
    with torch.no_grad():
        wanted = rule(q, k, v, g, beta, ROWS)
        found = rule(*(before := (q.clone(), k.clone())), given := v.clone(), g, beta, ROWS, overwrite=True)
        one_chunk = [t[:, :5] for t in (q, k, kept, g, beta)]
        rule(*one_chunk, ROWS[:, :5], overwrite=True)
    assert found[0].data_ptr() == given.data_ptr()
    close((*found, *before, kept), (*wanted, q, k, v), 0)
    asked = rule(q, k, leaf := v.clone().requires_grad_(), g, beta, ROWS, overwrite=True)
    close((*asked, leaf), (*wanted, v), 0)
