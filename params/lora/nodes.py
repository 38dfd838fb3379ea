"""A weight with its adapter: nodes of the tree that `F.linear` applies."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.linear import linear
from fnmodels.tree import pytree, static
from params.sharding import sharding_of


class _AppliedByLinear:
    """A weight that F.linear alone applies, by its method `linear`."""

    weight: Any

    @property
    def dtype(self) -> torch.dtype:
        """That of the weight, to which a model casts what it multiplies."""
        dtype: torch.dtype = self.weight.dtype
        return dtype

    @property
    def ndim(self) -> int:
        """That of the weight: 2, or 3 for experts."""
        return int(self.weight.ndim)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.linear(x, self, bias); torch raises for every other function of a Lora, naming it."""
        if func is not F.linear or isinstance(args[0], cls):
            return NotImplemented
        return args[1].linear(args[0], *args[2:], **(kwargs or {}))


@pytree
@dataclass(frozen=True, eq=False)
class Lora(_AppliedByLinear):
    """A weight [out, in] with an adapter: weight + scale b a, where a is [rank, in] and b [out, rank].

    magnitude: [out], with which row i of that sum is multiplied by magnitude[i] / its norm (DoRA); the norm is taken as
    a constant by derivatives. Experts' weights [E, out, in] have a [E, rank, in], b [E, out, rank] and magnitude
    [E, out]; layers with experts read `merged`.
    """

    weight: Any
    a: Any
    b: Any
    scale: float = static(default=1.0)
    magnitude: Any = None
    invariant: ClassVar[bool] = True  # its products are those of fnmodels.ops.linear

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        low = self.scale * linear(linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        if self.magnitude is None:
            return linear(x, self.weight, bias) + low
        y = (linear(x, self.weight) + low) * (1 / self.row_norms()).to(x.dtype) * self.magnitude.to(x.dtype)
        return y if bias is None else y + bias

    def row_norms(self) -> Tensor:
        """[out] or [E, out], the norm of each row of weight + scale b a, detached; in fp32 or wider."""
        weight, a, b = (leaf.detach() for leaf in (self.weight, self.a, self.b))
        return _sum(weight, a, b, self.scale).norm(dim=-1)

    def merged(self) -> Tensor:
        """The weight with the adapter added, in the weight's dtype; the sum is taken in fp32 or wider."""
        sharding = sharding_of(self.weight)
        if sharding is not None:
            with torch.no_grad():  # with gradients enabled, to_local would return views
                weight, a, b = (leaf.to_local() for leaf in (self.weight, self.a, self.b))
            return sharding.distribute(Lora(weight, a, b, self.scale).merged())
        total = _sum(self.weight, self.a, self.b, self.scale)
        if self.magnitude is not None:
            total = total * (self.magnitude / self.row_norms())[..., None]
        return total.to(self.weight.dtype)


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale b a in fp32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + scale * (b.to(wide) @ a.to(wide))


@pytree
@dataclass(frozen=True, eq=False)
class RowLora(_AppliedByLinear):
    """A weight [out, in] with N adapters, of which row i of x [B, S, in] gets number rows[i]; see `per_row`.

    a [N, rank, in], b [N, out, rank] with the scale in it, rows [B] int64; factor [N, out] multiplies the outputs
    (DoRA), None for 1.
    """

    weight: Any
    a: Any
    b: Any
    rows: Any
    factor: Any = None
    invariant: ClassVar[bool] = False

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.ndim != 3 or x.shape[0] != len(self.rows):
            raise ValueError(
                f"Adapters per row are for {len(self.rows)} rows, inputs [{len(self.rows)}, S, in], and these are "
                f"{list(x.shape)}."
            )
        a, b = (leaf[self.rows].to(x.dtype) for leaf in (self.a, self.b))
        y = linear(x, self.weight) + (x @ a.mT) @ b.mT
        y = y if self.factor is None else y * self.factor[self.rows].to(x.dtype)[:, None]
        return y if bias is None else y + bias
