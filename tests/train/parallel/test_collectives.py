"""Each collective, its gradient and its transforms, against the same map written out over all processes' values."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.support.ranks_pool import Ranks
from train.comm import collectives as C

Maps = tuple[Callable[[Tensor, ProcessGroup], Tensor], Callable[[list[Tensor], int], Tensor]]


def joined(xs: list[Tensor], dim: int) -> Tensor:
    return torch.cat(xs, dim)


def sent(rank: int, world: int) -> list[int]:
    """How many rows it sends to each; some are none."""
    return [(rank + other) % 3 for other in range(world)]


def _exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = sent(rank, world)
    return C.exchange(x[: sum(numbers)], numbers, [sent(other, world)[rank] for other in range(world)], group)


def _exchanged(xs: list[Tensor], rank: int) -> Tensor:
    parts = [x[: sum(sent(r, len(xs)))].split(sent(r, len(xs))) for r, x in enumerate(xs)]
    return torch.cat([part[rank] for part in parts])


MAPS: dict[str, Maps] = {
    "gather_rows": (lambda x, g: C.all_gather(x, 0, g), lambda xs, _: joined(xs, 0)),
    "gather_columns": (lambda x, g: C.all_gather(x, -1, g), lambda xs, _: joined(xs, 1)),
    "scatter_rows": (lambda x, g: C.reduce_scatter(x, 0, g), lambda xs, r: sum(xs).chunk(len(xs), 0)[r]),  # type: ignore[union-attr]
    "scatter_columns": (lambda x, g: C.reduce_scatter(x, 1, g), lambda xs, r: sum(xs).chunk(len(xs), 1)[r]),  # type: ignore[union-attr]
    "all_to_all": (
        lambda x, g: C.all_to_all(x, g, split=1, join=0),
        lambda xs, r: joined([x.chunk(len(xs), 1)[r] for x in xs], 0),
    ),
    "exchange": (_exchange, _exchanged),
}


def _values(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 12, generator=draw) for _ in range(dist.get_world_size())]


def linear_maps() -> None:
    """Forward, gradient, forward over reverse and vmap of a loss in which the processes' outputs differ."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    xs, moves = _values(0), _values(1)
    for name, (ours, written_out) in MAPS.items():

        def loss(x: Tensor, ours: Callable[[Tensor, ProcessGroup], Tensor] = ours) -> Tensor:
            return (ours(x.sin(), group) * (rank + 1)).cos().sum()

        def whole(*xs: Tensor, plain: Callable[[list[Tensor], int], Tensor] = written_out) -> Tensor:
            outs = [plain([x.sin() for x in xs], r) * (r + 1) for r in range(len(xs))]
            return torch.stack([out.cos().sum() for out in outs]).sum()

        torch.testing.assert_close(ours(xs[rank], group), written_out(xs, rank), msg=name)
        gradients = torch.func.grad(whole, argnums=tuple(range(len(xs))))
        torch.testing.assert_close(torch.func.grad(loss)(xs[rank]), gradients(*xs)[rank], msg=name)
        leaf = xs[rank].clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf)[0], gradients(*xs)[rank], msg=name)
        _, curved = torch.func.jvp(torch.func.grad(loss), (xs[rank],), (moves[rank],))
        _, expected = torch.func.jvp(gradients, tuple(xs), tuple(moves))
        torch.testing.assert_close(curved, expected[rank], msg=name)
        many = torch.stack((xs[rank], moves[rank]), 1)
        found = torch.func.vmap(torch.func.grad(loss), in_dims=1)(many)
        torch.testing.assert_close(found[1], gradients(*moves)[rank], msg=name)


def mirrors() -> None:
    """enter and leave, take and join, around what the processes share: every gradient is that of the whole, once."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    x, (w, *_) = _values(2)[0], _values(3)
    weights = [w * (r + 1) for r in range(dist.get_world_size())]

    def loss(x: Tensor) -> Tensor:
        y = C.leave((C.enter(x, group) * weights[rank]).tanh(), group)
        return C.join(C.take(y, 1, group).square(), 1, group).sum()

    def whole(x: Tensor) -> Tensor:
        y: Tensor = torch.stack([(x * w).tanh() for w in weights]).sum(0)
        return y.square().sum()

    torch.testing.assert_close(loss(x), whole(x))
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(whole)(x))
    curved = torch.func.jvp(torch.func.grad(loss), (x,), (w,))[1]
    torch.testing.assert_close(curved, torch.func.jvp(torch.func.grad(whole), (x,), (w,))[1])
    tangent = torch.func.jvp(loss, (x,), (w,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(whole, (x,), (w,))[1])


def narrow() -> None:
    """bf16 on the way out, fp32 on the way back: a sum that bf16 would round."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.full((2, 2), 1 / 3).requires_grad_()
    full = C.all_gather(x, 0, group, dtype=torch.bfloat16)
    assert full.dtype == torch.bfloat16
    gradient = 1.0 if dist.get_rank() else 2.0**-10
    (grad,) = torch.autograd.grad(full, x, torch.full_like(full, gradient))
    assert grad.dtype == torch.float32
    assert (grad == dist.get_world_size() - 1 + 2.0**-10).all()


def summed_wide() -> None:
    """Gradients in bf16 which add up to 1, in every order: bf16 itself would lose it in some of them."""
    group = dist.group.WORLD
    assert group is not None
    orders = torch.tensor(list(itertools.permutations((256.0, 1.0, -256.0, 0.0))), dtype=torch.bfloat16)
    x = torch.zeros(len(orders), dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(C.enter_all([x], group)[0], x, orders[:, dist.get_rank()])
    assert grad.dtype == torch.bfloat16 and (grad == 1).all()
    narrow = C.summed(orders[:, dist.get_rank()], group)
    assert not (narrow == 1).all()


def refusals() -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match=r"Dimension 0 of \[7, 2\] is not a multiple of the 2 processes"):
        C.reduce_scatter(torch.zeros(7, 2), 0, group)
    with pytest.raises(ValueError, match=r"Dimension 1 of \[2, 7\] is not a multiple of the 2 processes that share"):
        C.take(torch.zeros(2, 7), 1, group)
    with pytest.raises(ValueError, match=r"Dimension 1 of \[2, 7\] is not a multiple of the 2 processes"):
        C.all_to_all(torch.zeros(2, 7), group, split=1, join=0)
    with pytest.raises(ValueError, match="sent adds up to 3 rows, but x has 4"):
        C.exchange(torch.zeros(4, 1), [1, 2], [1, 2], group)


def test_values_gradients_and_transforms(ranks: Ranks) -> None:
    ranks(4)(linear_maps)
    ranks(4)(mirrors)


def test_dtypes_and_refusals(ranks: Ranks) -> None:
    ranks(4)(summed_wide)
    ranks(2)(narrow)
    ranks(2)(refusals)
