"""Distillation: torch's divergence, and from parameters the same in chunks."""

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
from fnmodels import tree
from tests.support.cases import batch_of, cases, generic_params, segments
from train import Balance, adamw, distill, init_state, make_step, next_token_loss
from train.losses import distillation_loss

CONFIG = next(case for case in cases() if case.name == "llama").config
TEACHER_CONFIG = next(case for case in cases() if case.name == "qwen3").config
DRAW = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distillation_is_torchs_divergence(direction: str) -> None:
    student, teacher = _normal(2, 3, 7).requires_grad_(), _normal(2, 3, 7).requires_grad_()
    valid = torch.tensor([[True, True, False], [False, True, True]])
    total, count = distillation_loss(student, teacher, valid, direction=direction, temperature=2.0)
    p, q = (torch.distributions.Categorical(logits=z / 2.0) for z in (teacher, student))
    kl = torch.distributions.kl_divergence(*((p, q) if direction == "forward" else (q, p)))
    torch.testing.assert_close(total, 4.0 * kl[valid].sum())
    assert int(count) == 4
    assert torch.autograd.grad(total, teacher, allow_unused=True) == (None,)
    with pytest.raises(ValueError, match="direction"):
        distillation_loss(student, teacher, valid, direction="sideways")
    with pytest.raises(ValueError, match=r"valid must be \[2, 3\]"):
        distillation_loss(student, teacher, valid[0])


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_token_that_both_models_forbid_adds_nothing(direction: str) -> None:
    student, teacher, valid = _normal(4, 6), _normal(4, 6), torch.ones(4, dtype=torch.bool)
    forbidden = torch.full((4, 1), -torch.inf, dtype=torch.float64)
    found = []
    for more in (forbidden[:, :0], forbidden):
        leaf = student.clone().requires_grad_()
        ours, theirs = torch.cat((leaf, more), 1), torch.cat((teacher, more), 1)
        total, _ = distillation_loss(ours, theirs, valid, direction=direction)
        found.append((total, torch.autograd.grad(total, leaf)[0]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    barred = teacher.clone()
    barred[:, 0] = -torch.inf
    total, _ = distillation_loss(student, barred, valid, direction=direction)
    p, q = (torch.distributions.Categorical(logits=z) for z in (barred, student))
    kl = torch.distributions.kl_divergence(*((p, q) if direction == "forward" else (q, p)))
    torch.testing.assert_close(total, kl.sum())  # of the student inf, of the teacher not


def _batch(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    made = batch_of(CONFIG, segments((7, 5), (-2, 10), (9, -3)))
    weights = torch.rand(made.tokens.shape, generator=DRAW, dtype=dtype) * (torch.arange(12) != 3)
    return made.batch() | {"weights": weights}


def _logits(params: Any, batch: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    where = {name: batch[name] for name in ("positions", "segment_ids")}
    return fnmodels.forward(params, *fnmodels.prepare(config, batch["tokens"], **where), config=config)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("chunk", [None, 5, 1000])
def test_from_parameters_it_is_that_of_all_the_logits(direction: str, chunk: int | None) -> None:
    student = tree.map(torch.Tensor.double, generic_params(CONFIG))
    teacher, batch = tree.map(torch.Tensor.double, generic_params(TEACHER_CONFIG)), _batch()
    found, loss = [], functools.partial(distill, config=CONFIG, teacher=teacher, teacher_config=TEACHER_CONFIG)
    for dense in (True, False):
        leaves = tree.map(lambda p: p.detach().requires_grad_(), student)
        if dense:
            ours, theirs = _logits(leaves, batch, CONFIG), _logits(teacher, batch, TEACHER_CONFIG)
            valid = (batch["labels"] >= 0) & (batch["weights"] != 0)
            total, count = torch.zeros((), dtype=torch.float64), valid.sum()
            for b, t in valid.nonzero().tolist():
                one = distillation_loss(ours[b, t], theirs[b, t], valid[b, t], direction=direction, temperature=2.0)
                total = total + one[0] * batch["weights"][b, t]
            agree = (valid & (ours.argmax(-1) == theirs.argmax(-1))).sum()
        else:
            total, count, sums = loss(leaves, batch, direction=direction, temperature=2.0, chunk=chunk)
            agree = sums["agree"]
        found.append((total.detach(), count, agree, *torch.autograd.grad(total, tree.leaves(leaves))))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


class _Largest(TorchDispatchMode):
    """The most numbers that a tensor made under it has."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        self.size = max(self.size, *sizes, 0)
        return out


def test_the_step_takes_it_and_learns_the_teacher_in_chunks() -> None:
    config = fnmodels.models.decoder.llama.Config(4096, 8, 8, 1, 2, 2)
    teacher, optimizer = generic_params(config), adamw(0.01)
    batch = {name: value for name, value in _batch(torch.float32).items() if name != "weights"}
    loss = functools.partial(distill, config=config, teacher=teacher, chunk=4)
    state, step = init_state(tree.map(lambda p: p * 0.9, teacher), optimizer), make_step(loss, optimizer, accumulate=2)
    with _Largest() as seen:
        losses = []
        for _ in range(8):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0] and metrics["aux"]["agree"] <= metrics["count"]
    assert seen.size == 4096 * 8  # the head's own size: no logits of all 36 tokens


def test_routers_are_balanced_as_in_the_next_tokens_loss() -> None:
    config = next(case for case in cases() if case.name == "deepseek_v3").config
    params, teacher = generic_params(config), tree.map(lambda p: p * 0.9, generic_params(config))
    batch = {name: value for name, value in _batch().items() if name != "weights"}
    batch["tokens"] = batch["tokens"] % config.vocab_size
    batch["labels"] = batch["labels"].where(batch["labels"] < config.vocab_size, -100)
    how: dict[str, Any] = {"config": config, "balance": Balance(sequence=0.5, z=0.25)}
    *_, expected = next_token_loss(params, batch, **how, aux=True)
    total, _, sums = distill(params, batch, teacher=teacher, **how, aux=True)
    plain, _, (*names,) = distill(params, batch, teacher=teacher, config=config)
    assert names == ["agree"] and sums.keys() == {"agree", *expected}
    assert all(torch.equal(sums[name], value) for name, value in expected.items())
    added = 0.5 * expected["sequence_balance"] + 0.25 * expected["router_z"]
    torch.testing.assert_close(total, plain + added)


def test_what_cannot_be_learnt_from_is_named() -> None:
    batch, params = _batch(), generic_params(CONFIG)
    other = fnmodels.models.decoder.llama.Config(CONFIG.vocab_size + 1, 8, 8, 1, 2, 2)
    with pytest.raises(ValueError, match="teacher's vocabulary has"):
        distill(params, batch, config=CONFIG, teacher=params, teacher_config=other)
    with pytest.raises(ValueError, match="temperature is 0"):
        distill(params, batch, config=CONFIG, teacher=params, temperature=0.0)
    with pytest.raises(ValueError, match="balance and aux are for models with experts, and llama has none"):
        distill(params, batch, config=CONFIG, teacher=params, aux=True)
