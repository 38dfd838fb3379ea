"""Value and reward heads: their losses and advantages against definitions written out, and a critic that learns."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from tests.support.cases import cases, generic_params
from train import adamw, next_token_loss
from train.engine import Engine
from train.losses import OutputLoss, advantages, reward_loss, token_values, value_loss

CONFIG = next(case.config for case in cases() if case.name == "llama_tied")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed() -> dict[str, Tensor]:
    made = fnmodels.pack([torch.arange(1, 1 + length) for length in (7, 4, 5)], 16)
    return made.batch()


def test_the_value_loss_is_the_larger_of_two_errors() -> None:
    values, old, returns = (numbers(2, 5, seed=seed) for seed in range(3))
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    total, count, metrics = value_loss(values, old, returns.where(valid, torch.nan), valid, clip=0.3)
    expected, clipped = 0.0, 0
    for v, o, r in zip(values[valid], old[valid], returns[valid], strict=True):
        near = (o + (v - o).clamp(-0.3, 0.3) - r) ** 2
        expected += 0.5 * float(torch.maximum((v - r) ** 2, near))
        clipped += int(near > (v - r) ** 2)
    assert float(total) == pytest.approx(expected, rel=1e-5) and int(count) == 7
    assert int(metrics["clipped"]) == clipped > 0
    torch.testing.assert_close(metrics["value"], values[valid].sum())
    plain, *_ = value_loss(values, old, returns, valid, clip=None)
    torch.testing.assert_close(plain, 0.5 * ((values - returns) ** 2)[valid].sum())


def test_advantages_are_the_sum_of_discounted_errors() -> None:
    rewards, values = numbers(2, 6), numbers(2, 6, seed=1)
    valid = torch.tensor([[True] * 6, [True, True, False, True, True, False]])  # the second is interrupted, and ends
    found, returns = advantages(rewards, values, valid, gamma=0.9, lam=0.8)
    for row in range(2):
        at = valid[row].nonzero()[:, 0].tolist()
        for number, column in enumerate(at):
            expected = 0.0
            for later, other in enumerate(at[number:]):
                after = number + later + 1
                value = float(values[row, at[after]]) if after < len(at) else 0.0
                error = float(rewards[row, other]) + 0.9 * value - float(values[row, other])
                expected += (0.9 * 0.8) ** later * error
            assert float(found[row, column]) == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(returns[valid], (found + values)[valid])
    assert not found[~valid].any() and not returns[~valid].any()


def test_a_reward_is_the_value_of_the_last_token() -> None:
    config, params = P.new_head(CONFIG, generic_params(CONFIG), head="classification", num_labels=1)
    batch = packed()
    prepared = fnmodels.prepare(config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"])
    of_tokens = token_values(params, batch, config=config)
    scores = fnmodels.pool(of_tokens[..., None], prepared[0]["documents"], how="last")
    assert scores.shape == (3, 1)
    torch.testing.assert_close(scores, fnmodels.forward(params, *prepared, config=config))
    total, count, metrics = reward_loss(scores[:2, 0], scores[1:, 0], margin=0.1)
    pairs = [float(scores[i, 0] - scores[i + 1, 0]) for i in range(2)]
    expected = sum(torch.nn.functional.softplus(torch.tensor(0.1 - gap)) for gap in pairs)
    torch.testing.assert_close(total, torch.as_tensor(expected))
    assert int(count) == 2 and int(metrics["accuracy"]) == sum(gap > 0 for gap in pairs)


def test_a_critic_learns_its_returns_and_leaves_the_given_params() -> None:
    given = generic_params(CONFIG)
    config, params = P.new_head(CONFIG, given, head="tokens", num_labels=1)
    assert params["norm"] is given["norm"] and not params["score_bias"].any() and params["score"].any()
    batch = packed()
    valid = batch["segment_ids"] > 0
    returns = batch["positions"].float() / 10

    def judge(found: dict[str, Tensor], batch: Any) -> tuple[Any, ...]:
        return value_loss(found["values"], returns, returns, batch["segment_ids"] > 0, clip=None)

    values = functools.partial(token_values, config=config)
    loss = OutputLoss(lambda params, batch: {"values": values(params, batch)}, judge)
    engine = Engine(config, params, adamw(1e-2))
    for _ in range(25):
        found = engine.forward_backward([batch], loss)
        engine.optim_step()
    assert float(found["total"]) / int(found["count"]) < 1e-3
    assert found["outputs"][0]["values"].shape == valid.shape and not found["outputs"][0]["values"][~valid].any()


def test_refusals() -> None:
    params = generic_params(CONFIG)
    with pytest.raises(ValueError, match="head is 'lm' with 0; params"):
        token_values(params, packed(), config=CONFIG)
    config, valued = P.new_head(CONFIG, params, head="tokens", num_labels=1)
    with pytest.raises(ValueError, match="the model's head is 'tokens'"):
        next_token_loss(valued, packed(), config=config)
    with pytest.raises(ValueError, match="clip is 0"):
        value_loss(*[torch.zeros(1, 1)] * 3, torch.ones(1, 1, dtype=torch.bool), clip=0)
