"""kernel="sparse": attention over chosen keys against a loop, in any pieces; gradients, transforms and refusals."""

import math

import pytest
import torch
from torch import Tensor

from fnmodels.ops.attention import sparse
from fnmodels.ops.attention.choice import Choice, every_key, named_once
from fnmodels.ops.attention.select import attention
from fnmodels.options import Kernel

B, Q, K, N, G, H, HV = 2, 7, 13, 6, 2, 5, 4
Inputs = tuple[Tensor, Tensor, Tensor]


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Inputs, Tensor, Choice]:
    """(q, k, v), sinks and a choice in which keys repeat, entries are hidden, and a query has no key."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, *s, generator=generator).to(dtype) for s in ((Q, N, H), (K, G, H), (K, G, HV)))
    seen = torch.rand(B, Q, 6, generator=generator) < 0.7
    seen[0, 3] = False
    index = torch.randint(0, K, seen.shape, generator=generator)
    return (q, k, v), torch.randn(N, generator=generator).to(dtype), named_once(index, seen, K)


def by_loops(q: Tensor, k: Tensor, v: Tensor, choice: Choice, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Query by query and head by head, over the set of its chosen keys."""
    out = q.new_zeros(B, Q, N, HV)
    for b in range(B):
        for t in range(Q):
            keys = sorted({int(i) for i, s in zip(choice.index[b, t], choice.seen[b, t], strict=True) if s})
            for n in range(N):
                scores = [0.3 * q[b, t, n] @ k[b, u, n * G // N] for u in keys]
                scores = scores if softcap is None else [softcap * torch.tanh(s / softcap) for s in scores]
                total = sum((s.exp() for s in scores), q.new_zeros(()) if sinks is None else sinks[n].exp())
                for s, u in zip(scores, keys, strict=True):
                    out[b, t, n] = out[b, t, n] + s.exp() / total * v[b, u, n * G // N]
    return out


@pytest.mark.parametrize("elements", [1, 1 << 21])
@pytest.mark.parametrize(("softcap", "sunk"), [(None, False), (2.0, True)])
def test_sparse_random_choice_equals_a_loop(
    softcap: float | None, sunk: bool, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients, in pieces of one query too."""
    monkeypatch.setattr(sparse, "_ELEMENTS", elements)
    inputs, sinks, choice = drawn()
    given = [t.requires_grad_() for t in (*inputs, sinks)][: 4 if sunk else 3]
    weight = torch.arange(B * Q * N * HV).view(B, Q, N, HV).sin()

    def results(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad((out * weight).sum(), given)]

    want = results(by_loops(*inputs, choice, softcap, sinks if sunk else None))
    options = {"scale": 0.3, "softcap": softcap, "sinks": sinks if sunk else None}
    got = results(attention(*inputs, choice, kernel="sparse", **options))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want, strict=True))
    assert not got[0][0, 3].any()


def test_sparse_half_precision_is_as_near_as_dense() -> None:
    inputs, _, choice = drawn(torch.bfloat16)
    exact = attention(*(t.double() for t in inputs), choice, kernel="math", scale=0.3)
    near = [(attention(*inputs, choice, kernel=k, scale=0.3) - exact).abs().max() for k in ("sparse", "math")]
    assert near[0] <= 1.5 * near[1] and attention(*inputs, choice, kernel="sparse", scale=0.3).dtype == torch.bfloat16


def test_sparse_any_mask_is_a_choice_of_all_visible_keys() -> None:
    (q, k, v), _, _ = drawn()
    mask = (torch.arange(K) <= torch.arange(Q)[:, None] + 3).expand(B, 1, Q, K)
    want = attention(q, k, v, mask, kernel="math", scale=0.3)
    assert torch.allclose(attention(q, k, v, mask, kernel="sparse", scale=0.3), want, atol=1e-13)
    assert torch.equal(every_key(mask).dense(), mask)
    with pytest.raises(ValueError, match="one choice for all heads, and this mask has 6"):
        attention(q, k, v, mask.expand(B, N, Q, K), kernel="sparse", scale=0.3)


def test_sparse_vmap_of_gradients_equals_a_loop_and_others_are_refused() -> None:
    (q, k, v), _, choice = drawn()

    def total(q: Tensor, k: Tensor, v: Tensor, index: Tensor, seen: Tensor) -> Tensor:
        one = Choice(index[None], seen[None], K)
        return attention(q[None], k[None], v[None], one, kernel="sparse", scale=0.3).square().sum()

    grad = torch.func.grad(total, (0, 1, 2))
    rows = (q, k, v, choice.index, choice.seen)
    for got, *want in zip(torch.func.vmap(grad)(*rows), *map(grad, *rows), strict=True):
        assert torch.allclose(got, torch.stack(want), atol=1e-12)
    with pytest.raises(NotImplementedError, match='kernel="math"'):
        torch.func.jvp(lambda q: total(q, *(t[0] for t in rows[1:])), (q[0],), (q[0],))
    with pytest.raises(NotImplementedError, match='kernel="math"'):
        torch.func.hessian(total)(*(t[0] for t in rows))


@pytest.mark.parametrize("kernel", ["sparse", "sdpa"])
def test_a_second_derivative_of_sinks_alone_is_refused(kernel: Kernel) -> None:
    (q, k, v), sinks, choice = drawn()
    mask = choice if kernel == "sparse" else choice.dense()

    def total(sinks: Tensor) -> Tensor:
        return attention(q, k, v, mask, kernel=kernel, scale=0.3, sinks=sinks).sin().sum()

    (first,) = torch.autograd.grad(total(sinks.requires_grad_()), sinks, create_graph=True)
    for second in (
        lambda: torch.autograd.grad(first.square().sum(), sinks),
        lambda: torch.func.grad(lambda s: torch.func.grad(total)(s).square().sum())(sinks),
    ):
        with pytest.raises(NotImplementedError, match=f'kernel="{kernel}" does not support .*: kernel="math"'):
            second()


def test_sparse_choice_of_another_batch_is_refused() -> None:
    (q, k, v), _, choice = drawn()
    with pytest.raises(ValueError, match=r"of 7 queries among 13 keys in 2 rows, and q and k are \[2, 6\]"):
        attention(q[:, :6], k, v, choice, kernel="sparse", scale=0.3)


def test_auto_gathers_where_it_pays() -> None:
    """Many heads share a head of keys, and keys are several times as many as are chosen: else a mask is faster."""
    index = torch.zeros(1, 1, 8, dtype=torch.int64)
    assert [Choice(index, index == 0, keys).pays(16, 1) for keys in (16, 24, 100)] == [False, True, True]
    assert not Choice(index, index == 0, 100).pays(16, 16) and not Choice(index, index == 0, 50).pays(16, 1, cost=3)


def test_choice_repeated_names_count_once() -> None:
    choice = named_once(torch.tensor([[[4, 2, 4, 0]]]), torch.tensor([[[True, True, True, False]]]), 5)
    assert int(choice.seen.sum()) == 2 and choice.dense()[0, 0, 0].tolist() == [False, False, True, False, True]
    assert math.prod(choice.shape) == 5
