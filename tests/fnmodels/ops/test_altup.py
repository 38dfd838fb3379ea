"""AltUp equals its definition, token by token and row by row; padding has a finite gradient."""

import pytest
import torch
from torch import Tensor

from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.streams import altup

N, D = 3, 8
EPS = 1e-2


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"router_norm": (D,), "modality": (N, D), "predict": (N * N, N), "correct": (N, N)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _router(weights: dict[str, Tensor], row: Tensor) -> Tensor:
    normed = row / (row.square().mean() + EPS).sqrt() * weights["router_norm"] / D
    return torch.tanh(weights["modality"] @ normed)


def _predicted(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
    maps = (weights["predict"] @ _router(weights, rows[0])).view(N, N)
    return torch.stack([rows[k] + sum(maps[k, j] * rows[j] for j in range(N)) for k in range(N)])


def test_prediction_and_correction_are_their_definitions() -> None:
    weights, x, y = _weights(), _values(2, 4, N, D), _values(2, 4, D, seed=2)
    predicted = altup.predict(weights, x, eps=EPS)
    corrected = altup.correct(weights, predicted, y, eps=EPS)
    for b in range(2):
        for s in range(4):
            wanted = _predicted(weights, x[b, s])
            torch.testing.assert_close(predicted[b, s], wanted)
            scales = 1 + weights["correct"] @ _router(weights, y[b, s])
            rows = torch.stack([wanted[k] + scales[k] * (y[b, s] - wanted[0]) for k in range(N)])
            torch.testing.assert_close(corrected[b, s], rows)
            turned = (weights["predict"] @ _router(weights, x[b, s, 0])).view(N, N).T  # a planted error
            assert (x[b, s] + turned @ x[b, s] - wanted).abs().max() > 0.1


def test_streams_begin_and_end_as_long_as_the_first() -> None:
    projections, x = _values(N - 1, D, D, seed=3), _values(1, 2, D)
    streams = altup.opened(projections, x)
    assert torch.equal(streams[..., 0, :], x)
    lengths = streams.square().mean(-1)
    torch.testing.assert_close(lengths, lengths[..., :1].expand_as(lengths))
    direction = streams[0, 0, 1] / streams[0, 0, 1].norm()
    torch.testing.assert_close(direction, torch.nn.functional.normalize(projections[0] @ x[0, 0], dim=0))
    rows = [x[0, 0]] + [m @ row for m, row in zip(projections, streams[0, 0, 1:], strict=True)]
    rows = [row * rows[0].norm() / row.norm() for row in rows]
    torch.testing.assert_close(altup.folded(projections, streams)[0, 0], sum(rows) / N)


def test_the_largest_of_a_normal_distribution_remain() -> None:
    x = _values(1, 1, 20_000)
    kept = altup.most_of_normal(x, 1.6448536)
    assert 0.045 < (kept > 0).double().mean() < 0.055
    cut = x.mean() + x.std(correction=0) * 1.6448536
    torch.testing.assert_close(kept, torch.relu(x - cut))


@pytest.mark.parametrize("how", [altup.most_of_normal, altup.folded])
def test_zeros_have_a_finite_gradient(how: object) -> None:
    x = torch.zeros(1, 2, N, D, dtype=torch.float64, requires_grad=True)
    y = altup.most_of_normal(x, 1.0) if how is altup.most_of_normal else altup.folded(_values(N - 1, D, D), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(gradient).all()


def test_batch_invariant_mode_is_the_same_function() -> None:
    weights, x, y = _weights(), _values(1, 5, N, D), _values(1, 5, D, seed=2)
    projections = _values(N - 1, D, D, seed=3)

    def whole() -> Tensor:
        predicted = altup.predict(weights, x + altup.opened(projections, y), eps=EPS)
        return altup.folded(projections, altup.correct(weights, predicted, altup.most_of_normal(y, 0.5), eps=EPS))

    plain = whole()
    with invariant_rows(True):
        torch.testing.assert_close(whole(), plain)
