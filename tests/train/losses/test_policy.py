"""Preference and policy losses against their formulas written out token by token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import llama
from tests.support.cases import generic_params
from train import adamw, dpo_loss, init_state, make_step, policy_loss, sgd, token_logprobs
from train.batch import microbatches
from train.gradients import gradient_sums
from train.losses import document_sums, group_advantages

DRAW = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


def test_dpo_is_its_formula() -> None:
    chosen, rejected, ref_chosen, ref_rejected = (-_normal(5).abs() for _ in range(4))
    total, count, metrics = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3, label_smoothing=0.1)
    losses, margins, rewards = [], [], [0.0, 0.0]
    for c, r, rc, rr in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True):
        m = 0.3 * float((c - rc) - (r - rr))
        losses.append(0.9 * math.log1p(math.exp(-m)) + 0.1 * math.log1p(math.exp(m)))
        margins.append(m)
        rewards = [rewards[0] + 0.3 * float(c - rc), rewards[1] + 0.3 * float(r - rr)]
    assert int(count) == 5
    assert float(total) == pytest.approx(sum(losses))
    assert float(metrics["margin"]) == pytest.approx(sum(margins))
    assert float(metrics["accuracy"]) == sum(m > 0 for m in margins)
    assert [float(metrics["chosen"]), float(metrics["rejected"])] == pytest.approx(rewards)
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.1"):
        dpo_loss(chosen, rejected, ref_chosen, ref_rejected, label_smoothing=1.1)


def test_no_gradient_reaches_what_is_only_compared_with() -> None:
    live = [(-_normal(2, 3).abs()).requires_grad_() for _ in range(5)]
    total, _, metrics = dpo_loss(*live[:4])
    assert [g is not None for g in torch.autograd.grad(total, live[:4], allow_unused=True)] == [
        True,
        True,
        False,
        False,
    ]
    logp, old, gains, ref, weights = live
    valid = torch.ones(2, 3, dtype=torch.bool)
    total, _, more = policy_loss(logp, old, gains, valid, weights=weights, reference_logp=ref, kl=0.1)
    assert [g is not None for g in torch.autograd.grad(total, live, allow_unused=True)] == [True] + [False] * 4
    assert not any(m.requires_grad for m in (metrics | more).values())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_policy_loss_is_its_formula(dual: float | None, weighted: bool) -> None:
    shape = (8, 8)
    logp, old, ref = (-_normal(*shape).abs() for _ in range(3))
    gains, entropy = _normal(*shape), _normal(*shape).abs()
    valid = torch.rand(shape, generator=DRAW) > 0.3
    weights = torch.rand(shape, generator=DRAW) if weighted else None
    terms: dict[str, Any] = {"reference_logp": ref, "kl": 0.05, "entropy": entropy, "entropy_bonus": 0.01}
    total, count, metrics = policy_loss(
        logp, old, gains, valid, clip=(0.2, 0.3), dual_clip=dual, weights=weights, **terms
    )
    loss = clipped = 0.0
    sums = {"ratio": 0.0, "kl": 0.0, "entropy": 0.0}
    for b, t in valid.nonzero().tolist():
        ratio, a = math.exp(logp[b, t] - old[b, t]), float(gains[b, t])
        cut = min(max(ratio, 0.8), 1.3)
        gain = min(ratio * a, cut * a)
        stopped = gain != ratio * a
        if dual is not None and a < 0 and gain < dual * a:
            gain, stopped = dual * a, True
        clipped += stopped
        r = float(ref[b, t] - logp[b, t])
        of = {"ratio": ratio, "kl": math.exp(r) - r - 1, "entropy": float(entropy[b, t])}
        sums = {name: sums[name] + value for name, value in of.items()}
        one = -gain + 0.05 * of["kl"] - 0.01 * of["entropy"]
        loss += one if weights is None else one * float(weights[b, t])
    assert int(count) == int(valid.sum())
    assert float(total) == pytest.approx(loss)
    assert 0 < float(metrics["clipped"]) == clipped
    assert {name: float(metrics[name]) for name in sums} == pytest.approx(sums)


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.0), (0.0, 0.2), (0.0, 0.0)])
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(clip: tuple[float, float]) -> None:
    """Also where a ratio of 1 is a limit of the clip."""
    logp, gains = -_normal(2, 3).abs(), _normal(2, 3)
    valid = torch.tensor([[True, True, False], [True, False, True]])
    live = logp.clone().requires_grad_()
    total, _, _ = policy_loss(live, logp, gains, valid, clip=clip)
    (grad,) = torch.autograd.grad(total, live)
    torch.testing.assert_close(grad, torch.where(valid, -gains, 0.0))


def test_beyond_the_clip_nothing_is_pushed_further() -> None:
    live = torch.tensor([[0.5, 0.5, -0.5, -0.5, 1.2, 1.2]], requires_grad=True)
    gains = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])
    for dual, last in ((None, False), (3.0, True)):
        valid = torch.ones(1, 6, dtype=torch.bool)
        total, _, _ = policy_loss(live, torch.zeros(1, 6), gains, valid, dual_clip=dual)
        (grad,) = torch.autograd.grad(total, live)
        assert (grad[0] == 0).tolist() == [True, False, False, True, True, last]


@pytest.mark.parametrize("gain", [1.0, 0.0, -1.0])
def test_a_token_that_the_old_policy_forbade_costs_no_step(gain: float) -> None:
    """Its ratio would be inf, and the gradient of all tokens NaN."""
    live = torch.tensor([[-1.0, -2.0, -1.0]], requires_grad=True)
    old, ref = torch.tensor([[-torch.inf, -2.0, -120.0]]), torch.tensor([[-1.0, -2.0, 110.0]])
    valid = torch.ones(1, 3, dtype=torch.bool)
    total, _, metrics = policy_loss(live, old, torch.full((1, 3), gain), valid, reference_logp=ref, kl=0.1)
    (grad,) = torch.autograd.grad(total, live)
    assert torch.isfinite(total) and grad.isfinite().all() and all(m.isfinite() for m in metrics.values())
    assert grad[0, 1] == -gain
    # where the policy is the likelier one by far, the penalty still pulls
    _, _, metrics = policy_loss(live, live, live, valid, reference_logp=torch.full((1, 3), -60.0), kl=0.1)
    assert float(metrics["kl"]) == pytest.approx(59 + 58 + 59 - 3)


def test_what_is_not_valid_may_hold_anything() -> None:
    logp = torch.tensor([[-1.0, torch.nan]], requires_grad=True)
    valid = torch.tensor([[True, False]])
    bad = torch.tensor([[-1.0, torch.inf]])
    terms: dict[str, Any] = {"reference_logp": bad, "kl": 1.0, "entropy": bad, "entropy_bonus": 1.0, "weights": bad}
    total, _, metrics = policy_loss(logp, bad, bad, valid, **terms)
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
    with pytest.raises(ValueError, match=r"weights \[2\]"):
        policy_loss(t, t, t, valid, weights=t[0])
    with pytest.raises(ValueError, match=r"valid is torch\.int64"):
        policy_loss(t, t, t, valid.long())
    with pytest.raises(ValueError, match=r"dual_clip is 0\.2"):
        policy_loss(t, t, t, valid, dual_clip=0.2)


def test_group_advantages() -> None:
    found = group_advantages(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[-1.0, 1.0], [0.0, 0.0]]), atol=1e-5, rtol=0)
    assert group_advantages(torch.tensor([[0, 1]]), normalize=False).tolist() == [[-0.5, 0.5]]
    with pytest.raises(ValueError, match="prompts"):
        group_advantages(torch.zeros(3))


# ------------------------------------------------------------------------------------------------ from documents


CONFIG = llama.Config(61, 16, 24, 2, 4, 2)


def _documents(*lengths: int) -> list[Tensor]:
    return [torch.randint(61, (length,), generator=DRAW) for length in lengths]


def _packed(documents: list[Tensor], weights: list[Tensor], length: int = 16) -> dict[str, Tensor]:
    made = fnmodels.pack(documents, length, split=False, weights=weights)
    names = ("tokens", "positions", "segment_ids", "labels")
    return {name: getattr(made, name) for name in names} | {"shares": made.weights.double()}


def _alone(params: Any, document: Tensor) -> Tensor:
    """[T - 1], log-probabilities of a document's tokens after the first, from its logits alone."""
    logits = fnmodels.forward(params, *fnmodels.prepare(CONFIG, document[None]), config=CONFIG, kernel="math")[0]
    return torch.stack([logits[t].log_softmax(-1)[document[t + 1]] for t in range(len(document) - 1)])


def _same_gradients(loss: Any, wanted: Any, batch: dict[str, Tensor], cuts: list[list[dict[str, Tensor]]]) -> None:
    """(sum, count) of parts, whole and cut, have the mean and the gradients of `wanted(params)`."""
    params, optimizer = generic_params(CONFIG, torch.float64), sgd(0.1)
    leaves = fnmodels.tree.map(lambda p: p.detach().requires_grad_(), params)
    mean = wanted(leaves)
    grads = torch.autograd.grad(mean, fnmodels.tree.leaves(leaves))
    for parts in ([batch], *cuts):
        sums = gradient_sums(loss, optimizer)(params, parts, divide=False)
        torch.testing.assert_close(sums.total / sums.count, mean.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close([g / sums.count for g in sums.grads], list(grads), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("over", ["tokens", "answers", "sums"])
def test_policy_losses_of_packed_rows_are_those_of_answers(over: str) -> None:
    """The mean over tokens, over answers of their tokens' means, and of their tokens' sums: one answer at a time."""
    documents, prompt = _documents(9, 5, 16, 3, 12), 2
    learnt = [torch.arange(len(d)) >= prompt for d in documents]
    shares = [mask / mask.sum() for mask in learnt]
    batch = _packed(documents, shares)
    gains, olds = [_normal(1).item() for _ in documents], [_normal(len(d)) - 4 for d in documents]
    given = [
        _packed(documents, [t.to(torch.float64) for t in of])["shares"]
        for of in ([mask * gain for mask, gain in zip(learnt, gains, strict=True)], olds)
    ]
    batch |= {"advantages": given[0], "old_logp": given[1]}
    clip: dict[str, Any] = {"clip": (0.2, 0.28), "dual_clip": 3.0}

    def loss(params: Any, part: dict[str, Tensor]) -> tuple[Any, ...]:
        logp, _, _ = token_logprobs(params, part, config=CONFIG, chunk=7)
        share = part["shares"]
        total, count, sums = policy_loss(
            logp, part["old_logp"], part["advantages"], share > 0, weights=share if over == "answers" else None, **clip
        )
        return total, count if over == "tokens" else share.sum(), sums

    def wanted(params: Any) -> Tensor:
        means, sums = [], []
        for document, gain, old in zip(documents, gains, olds, strict=True):
            ratio = (_alone(params, document) - old[1:])[prompt - 1 :].exp()
            one = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain)
            one = -(one if gain > 0 else one.clamp(min=3 * gain))
            sums, means = [*sums, one.sum()], [*means, one.mean()]
        if over == "tokens":
            return torch.stack(sums).sum() / sum(len(d) - prompt for d in documents)
        return torch.stack(means if over == "answers" else sums).mean()

    _same_gradients(loss, wanted, batch, [microbatches(batch, 2), microbatches(batch, 3)])


def test_dpo_of_packed_pairs_is_that_of_each_document_alone() -> None:
    """A row holds a pair: its first document is the one that was chosen."""
    pairs, prompt = [_documents(9, 5), _documents(6, 8), _documents(3, 3)], 2
    documents = [d for pair in pairs for d in pair]
    batch = _packed(documents, [(torch.arange(len(d)) >= prompt) * 1.0 for d in documents])
    assert len(batch["tokens"]) == len(pairs)
    reference = fnmodels.tree.map(lambda p: 0.9 * p, generic_params(CONFIG, torch.float64))

    def answers(params: Any, part: dict[str, Tensor]) -> Tensor:
        logp = token_logprobs(params, part, config=CONFIG, chunk=7)[0]
        return document_sums(logp * (part["shares"] > 0), part["segment_ids"], 2)

    def loss(params: Any, part: dict[str, Tensor]) -> tuple[Any, ...]:
        ours, theirs = answers(params, part), answers(reference, part)
        return dpo_loss(ours[:, 0], ours[:, 1], theirs[:, 0], theirs[:, 1], beta=0.3)

    def wanted(params: Any) -> Tensor:
        losses = []
        for pair in pairs:
            chosen, rejected = ((_alone(params, d) - _alone(reference, d))[prompt - 1 :].sum() for d in pair)
            losses.append(torch.log1p((-0.3 * (chosen - rejected)).exp()))
        return torch.stack(losses).mean()

    _same_gradients(loss, wanted, batch, [microbatches(batch, 2), microbatches(batch, 3)])
    optimizer = adamw(0.01)
    step, state = make_step(loss, optimizer, accumulate=3), init_state(reference, optimizer)
    for _ in range(6):
        state, metrics = step(state, batch)
    assert metrics["aux"]["accuracy"] == metrics["count"] == 3
