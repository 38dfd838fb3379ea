import itertools
import math

import pytest
import torch

from train.optim.schedules import warmup_stable_decay


@pytest.mark.parametrize(
    ("total", "warmup", "decay_ratio", "expected"),
    [
        (10, 2, None, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (10, 2, 0.5, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (5, 10, None, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (4, 0, 0.0, [1, 1, 1, 1]),
        (4, 0, None, [1, 0.75, 0.5, 0.25]),
    ],
)
def test_reference_tables(total, warmup, decay_ratio, expected):
    rates = [warmup_stable_decay(s, total=total, warmup=warmup, decay_ratio=decay_ratio) for s in range(1, total + 1)]
    assert rates == pytest.approx(expected)


def test_base_0_begins_at_0_and_is_otherwise_the_same_curve():
    rates = [warmup_stable_decay(s, total=10, warmup=2, base=0) for s in range(10)]
    assert rates == pytest.approx([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])
    assert warmup_stable_decay(0, total=10, warmup=0, base=0) == 1


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_past_the_end_it_stays_at_the_floor(shape):
    rate = lambda s: warmup_stable_decay(s, total=10, warmup=2, shape=shape, floor=0.1)  # noqa: E731
    assert [rate(s) for s in (11, 12, 50, 10**6)] == pytest.approx([0.1] * 4)
    assert all(rate(s) > rate(s + 1) for s in range(3, 11))
    assert rate(1) > 0


@pytest.mark.parametrize("decay_ratio", [None, 0.0])
def test_an_empty_decay_stays_at_1(decay_ratio):
    warmup = 4 if decay_ratio is None else 1
    assert warmup_stable_decay(100, total=4, warmup=warmup, decay_ratio=decay_ratio) == 1


def test_constant_and_cosine_are_settings_of_it():
    constant = [warmup_stable_decay(s, total=10, warmup=2, decay_ratio=0.0) for s in range(1, 30)]
    assert constant == [0.5] + [1.0] * 28
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    for s in range(21):
        ours = warmup_stable_decay(s, total=20, warmup=0, shape="cosine", floor=0.1, base=0)
        assert ours == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_shapes_halfway_through_the_decay():
    at = {s: warmup_stable_decay(9, total=16, warmup=0, shape=s, floor=0.2) for s in ("linear", "sqrt", "cosine")}
    assert at == pytest.approx({"linear": 0.6, "sqrt": 0.2 + 0.8 * (1 - math.sqrt(0.5)), "cosine": 0.6})


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("base", [0, 1])
def test_a_tensor_gives_the_same_rate_as_a_number(shape, base):
    for s in range(14):
        args = dict(total=10, warmup=3, decay_ratio=0.4, shape=shape, floor=0.05, base=base)
        rate = warmup_stable_decay(torch.tensor(s), **args)
        assert isinstance(rate, torch.Tensor) and rate.shape == ()
        assert float(rate) == pytest.approx(warmup_stable_decay(s, **args), abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"shape": "cubic"}, "cubic"),
        ({"base": 2}, "base"),
        ({"total": 0}, "total"),
        ({"total": 10.5}, "total is 10.5"),
        ({"total": math.nan}, "total is nan"),
        ({"warmup": -1}, "warmup is -1"),
        ({"warmup": 0.1}, "warmup is 0.1; they must be whole numbers of steps"),  # a share, in other trainers
        ({"decay_ratio": 1.5}, "decay_ratio"),
        ({"decay_ratio": math.nan}, "decay_ratio"),
        ({"floor": 1.5}, "floor is 1.5; it must lie between 0 and 1"),
        ({"floor": -0.1}, "floor is -0.1"),
    ],
)
def test_wrong_arguments_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        warmup_stable_decay(1, **({"total": 10, "warmup": 2} | wrong))


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("total", [10**4, 10**6, 3 * 10**7])
def test_no_step_of_a_long_run_has_rate_0(shape, total):
    """Of a tensor it is computed in fp32, in which 1 + cos of almost pi is 0 from 13,000 steps on."""
    args = dict(total=total, warmup=10, shape=shape)
    assert warmup_stable_decay(1, **args) > 0
    exact = {"linear": 1, "sqrt": 0.5, "cosine": (math.pi / 2) ** 2 / (total - 10)}[shape] / (total - 10)
    for last in (warmup_stable_decay(total, **args), float(warmup_stable_decay(torch.tensor(total), **args))):
        assert last == pytest.approx(exact, rel=1e-3)


def test_every_curve_is_its_pieces():
    """Against the definition, piece by piece, for all warmups and shares of the decay."""
    for total, warmup, ratio, shape, base in itertools.product(
        (1, 7, 20), (0, 1, 5, 30), (None, 0, 0.3, 0.55, 1), ("linear", "sqrt", "cosine"), (0, 1)
    ):
        args = dict(total=total, warmup=warmup, decay_ratio=ratio, shape=shape, floor=0.1, base=base)
        decay = total - min(warmup, total)
        decay = decay if ratio is None else min(decay, round(total * ratio))
        for step in range(base, total + 4):
            progress = min(1, max(0, step - base - (total - decay)) / decay) if decay else 0
            fall = {"linear": progress, "sqrt": progress**0.5, "cosine": (1 - math.cos(math.pi * progress)) / 2}[shape]
            expected = min(1, step / min(warmup, total) if warmup else 1) * (1 - 0.9 * fall)
            assert warmup_stable_decay(step, **args) == pytest.approx(expected, abs=1e-12), (step, args)
