"""Preference and policy losses against their formulas written out token by token."""

import math

import pytest
import torch

from train import dpo_loss, group_advantages, policy_loss

DRAW = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


def test_dpo_is_its_formula() -> None:
    chosen, rejected, ref_chosen, ref_rejected = (-_normal(5).abs() for _ in range(4))
    total, count, metrics = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3, label_smoothing=0.1)
    losses, margins = [], []
    for c, r, rc, rr in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True):
        m = 0.3 * float((c - rc) - (r - rr))
        losses.append(0.9 * math.log1p(math.exp(-m)) + 0.1 * math.log1p(math.exp(m)))
        margins.append(m)
    assert int(count) == 5
    assert float(total) == pytest.approx(sum(losses))
    assert float(metrics["margin"]) == pytest.approx(sum(margins))
    assert float(metrics["accuracy"]) == sum(m > 0 for m in margins)


def test_policy_loss_is_its_formula() -> None:
    shape = (3, 4)
    logp, old, ref = (-_normal(*shape).abs() for _ in range(3))
    gains, entropy = _normal(*shape), _normal(*shape).abs()
    valid = torch.rand(shape, generator=DRAW) > 0.3
    total, count, metrics = policy_loss(
        logp, old, gains, valid, clip=(0.2, 0.3), reference_logp=ref, kl=0.05, entropy=entropy, entropy_bonus=0.01
    )
    loss = clipped = 0.0
    for b, t in valid.nonzero().tolist():
        ratio, a = math.exp(logp[b, t] - old[b, t]), float(gains[b, t])
        cut = min(max(ratio, 0.8), 1.3)
        clipped += ratio * a > cut * a
        r = float(ref[b, t] - logp[b, t])
        loss += -min(ratio * a, cut * a) + 0.05 * (math.exp(r) - r - 1) - 0.01 * float(entropy[b, t])
    assert int(count) == int(valid.sum())
    assert float(total) == pytest.approx(loss)
    assert float(metrics["clipped"]) == clipped


def test_at_the_old_policy_the_gradient_is_the_policy_gradient() -> None:
    logp, gains = -_normal(2, 3).abs(), _normal(2, 3)
    valid = torch.tensor([[True, True, False], [True, False, True]])
    live = logp.clone().requires_grad_()
    total, _, _ = policy_loss(live, logp, gains, valid)
    (grad,) = torch.autograd.grad(total, live)
    torch.testing.assert_close(grad, torch.where(valid, -gains, 0.0))


def test_beyond_the_clip_nothing_is_pushed_further() -> None:
    live = torch.tensor([[0.5, 0.5, -0.5, -0.5]], requires_grad=True)
    gains = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    total, _, _ = policy_loss(live, torch.zeros(1, 4), gains, torch.ones(1, 4, dtype=torch.bool))
    (grad,) = torch.autograd.grad(total, live)
    assert (grad[0] == 0).tolist() == [True, False, False, True]


def test_what_is_not_valid_may_hold_anything() -> None:
    logp = torch.tensor([[-1.0, torch.nan]], requires_grad=True)
    valid = torch.tensor([[True, False]])
    bad = torch.tensor([[-1.0, torch.inf]])
    total, _, metrics = policy_loss(logp, bad, bad, valid, reference_logp=bad, kl=1.0, entropy=bad, entropy_bonus=1.0)
    (grad,) = torch.autograd.grad(total, logp)
    assert torch.isfinite(total) and all(torch.isfinite(m) for m in metrics.values())
    assert grad[0, 1] == 0


def test_parts_that_are_asked_for_must_be_given() -> None:
    t, valid = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="reference_logp"):
        policy_loss(t, t, t, valid, kl=0.1)
    with pytest.raises(ValueError, match="entropy must be given"):
        policy_loss(t, t, t, valid, entropy_bonus=0.1)
    with pytest.raises(ValueError, match=r"advantages \[1, 1\]"):
        policy_loss(t, t, t[:, :1], valid)


def test_group_advantages() -> None:
    found = group_advantages(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[-1.0, 1.0], [0.0, 0.0]]), atol=1e-5, rtol=0)
    assert group_advantages(torch.tensor([[0, 1]]), normalize=False).tolist() == [[-0.5, 0.5]]
    with pytest.raises(ValueError, match="prompts"):
        group_advantages(torch.zeros(3))
