"""Streams that are mixed by gates equal the formula, number by number; gradients are those of finite differences."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.streams import gated

N, D, RANK, EPS = 3, 4, 5, 1e-2


def drawn() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"scale": (N * D,), "down_proj": (RANK, N * D), "up_proj": (N * D, RANK), "inject": (N, N * D)}
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    x, y = (torch.randn(2, 3, *s, D, generator=generator, dtype=torch.float64) for s in ((N,), ()))
    return weights, x, y


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def by_loops(weights: dict[str, Tensor], x: list[list[float]], y: list[float]) -> tuple[list[float], list[list[float]]]:
    """(what a sublayer reads, the streams after it) of one token."""
    w = {name: value.tolist() for name, value in weights.items()}
    h = []
    for j in range(N):
        root = math.sqrt(sum(v * v for v in x[j]) / D + EPS)
        h += [v / root * (1 + w["scale"][j * D + i]) for i, v in enumerate(x[j])]
    down = [sum(a * b for a, b in zip(row, h, strict=True)) / N for row in w["down_proj"]]
    inner = [v * sigmoid(v) for v in down]
    gates = [sigmoid(sum(a * b for a, b in zip(row, inner, strict=True))) for row in w["up_proj"]]
    read = [sum(gates[j * D + i] * h[j * D + i] for j in range(N)) / N for i in range(D)]
    share = [2 * sigmoid(sum(a * b for a, b in zip(row, h, strict=True)) / N) for row in w["inject"]]
    return read, [[x[j][i] + share[j] * y[i] for i in range(D)] for j in range(N)]


def check_against_loops() -> None:
    """AssertionError where what a sublayer reads, or the streams after it, differ from loops."""
    weights, x, y = drawn()
    for exact in (False, True):
        with invariant_rows(exact):
            h = gated.normed(weights, x, eps=EPS)
            read, after = gated.mixed(weights, h), gated.written(weights, x, h, y)
            assert torch.equal(gated.folded(weights, x, eps=EPS), read)
        for b in range(2):
            for t in range(3):
                want = by_loops(weights, x[b, t].tolist(), y[b, t].tolist())
                assert torch.allclose(read[b, t], torch.tensor(want[0], dtype=torch.float64), atol=1e-12)
                assert torch.allclose(after[b, t], torch.tensor(want[1], dtype=torch.float64), atol=1e-12)


def test_gated_streams_equal_loops() -> None:
    check_against_loops()


MIXED, NORMED, WRITTEN = gated.mixed, gated.normed, gated.written
Weights = dict[str, Tensor]


def turned(weights: Weights) -> Weights:
    """Gates of the streams in another order."""
    return weights | {"up_proj": weights["up_proj"].unflatten(0, (N, D)).roll(1, 0).flatten(0, 1)}


def normed_together(weights: Weights, x: Tensor, *, eps: float) -> Tensor:
    """One norm of all streams, not of each."""
    h = x.flatten(-2) * (x.flatten(-2).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (h * (1 + weights["scale"])).unflatten(-1, x.shape[-2:])


BUGS: dict[str, tuple[str, Any]] = {
    "gates of another stream": ("mixed", lambda w, h: MIXED(turned(w), h)),
    "what is mixed has no norm": ("mixed", lambda w, h: MIXED(w, h / (1 + w["scale"].unflatten(0, (N, D))))),
    "a sum in place of the mean": ("mixed", lambda w, h: MIXED(w, h) * N),
    "one norm of all streams": ("normed", normed_together),
    "the norm's scale is not centred": ("normed", lambda w, x, **how: NORMED(w | {"scale": w["scale"] - 1}, x, **how)),
    "shares of another stream": (
        "written",
        lambda w, x, h, y: WRITTEN(w | {"inject": w["inject"].roll(1, 0)}, x, h, y),
    ),
    "the stream is replaced": ("written", lambda w, x, h, y: WRITTEN(w, x, h, y) - x),
    "each stream gets the same": ("written", lambda w, x, h, y: x + y.unsqueeze(-2)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_gated_streams_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = BUGS[bug]
    monkeypatch.setattr(gated, name, wrong)
    with pytest.raises(AssertionError):
        check_against_loops()


def test_gradients_of_gated_streams() -> None:
    weights, x, y = drawn()
    names = list(weights)

    def after(x: Tensor, y: Tensor, *leaves: Tensor) -> Tensor:
        own = dict(zip(names, leaves, strict=True))
        h = gated.normed(own, x, eps=EPS)
        return gated.written(own, x, h, y * gated.mixed(own, h))

    inputs = [t.clone().requires_grad_() for t in (x[:1, :2], y[:1, :2], *weights.values())]
    assert torch.autograd.gradcheck(after, inputs)
