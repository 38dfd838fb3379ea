"""Parameters with adapters: nodes of the tree that F.linear and F.embedding apply in a parameter's place."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.ops.linear import linear
from fnmodels.tree import pytree, static
from params.sharding import sharding_of


class _AppliedByLinear:
    """A weight that F.linear applies by its method `linear`, and F.embedding by `look_up` where it has one."""

    weight: Any

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight, to which a model casts what it multiplies."""
        dtype: torch.dtype = self.weight.dtype
        return dtype

    @property
    def ndim(self) -> int:
        """The dimensions of the weight: 2, or 3 for experts."""
        return int(self.weight.ndim)

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        shape: torch.Size = self.weight.shape
        return shape

    def to(self, dtype: torch.dtype) -> Self:
        """The weight and its adapter in another dtype, in which a router computes.

        Args:
            dtype: That of all floating leaves.

        Returns:
            The node of the cast leaves.
        """
        leaves = {name: getattr(self, name, None) for name in ("weight", "a", "b", "magnitude", "factor")}
        return replace(self, **{name: leaf.to(dtype) for name, leaf in leaves.items() if leaf is not None})  # type: ignore[type-var]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.linear(x, self, bias) and F.embedding(ids, self); torch raises for other functions, naming the class."""
        method = {F.linear: "linear", F.embedding: "look_up"}.get(func, "")
        if not hasattr(cls, method) or isinstance(args[0], cls):
            return NotImplemented
        return getattr(args[1], method)(args[0], *args[2:], **(kwargs or {}))


@pytree
@dataclass(frozen=True, eq=False)
class Lora(_AppliedByLinear):
    """A weight [out, in] with an adapter: weight + scale b a.

    Experts' weights [E, out, in] have a [E, rank, in], b [E, out, rank] and magnitude [E, out]; layers with experts
    read `merged`.

    Args:
        weight: [out, in], frozen; None in a tree of adapters alone.
        a: [rank, in].
        b: [out, rank].
        scale: alpha / rank, or alpha / sqrt(rank).
        magnitude: [out], with which row i of the sum is multiplied by magnitude[i] / its norm (DoRA, arXiv 2402.09353);
            the norm is taken as a constant by derivatives. None: LoRA.
    """

    weight: Any
    a: Any
    b: Any
    scale: float = static(default=1.0)
    magnitude: Any = None
    invariant: ClassVar[bool] = True  # its products are those of fnmodels.ops.linear

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product that F.linear gives for the merged weight.

        Args:
            x: [..., in].
            bias: [out]; None: no bias.

        Returns:
            [..., out].
        """
        low = self.scale * linear(linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        if self.magnitude is None:
            return linear(x, self.weight, bias) + low
        y = (linear(x, self.weight) + low) * (1 / self.row_norms()).to(x.dtype) * self.magnitude.to(x.dtype)
        return y if bias is None else y + bias

    def look_up(self, ids: Tensor, **_: Any) -> Tensor:
        """Rows of an embedding with an adapter.

        Args:
            ids: int64, any shape.
            **_: Ignored: what F.embedding takes beside.

        Returns:
            [*ids.shape, in].

        Raises:
            UnsupportedError: The adapter is DoRA.
        """
        if self.magnitude is not None:
            raise UnsupportedError("An embedding has no DoRA: take plain LoRA for it.")
        rows = F.embedding(ids, self.weight)
        return rows + (self.scale * (F.embedding(ids, self.b) @ self.a)).to(rows.dtype)

    def unbind(self) -> "list[Lora]":
        """The weights of experts, each with its adapter.

        Returns:
            A node for each expert.
        """
        norms = [None] * len(self.a) if self.magnitude is None else self.magnitude.unbind()
        parts = zip(self.weight.unbind(), self.a.unbind(), self.b.unbind(), norms, strict=True)
        return [Lora(weight, a, b, self.scale, magnitude) for weight, a, b, magnitude in parts]

    def row_norms(self) -> Tensor:
        """The norm of each row of weight + scale b a, which DoRA divides by.

        Returns:
            [out] or [E, out], detached, in fp32 or wider.
        """
        weight, a, b = (leaf.detach() for leaf in (_plain(base_of(self.weight, merged=True)), self.a, self.b))
        return _sum(weight, a, b, self.scale).norm(dim=-1)

    def merged(self) -> Tensor:
        """The weight with the adapter added.

        Returns:
            The weight's shape and dtype; the sum is taken in fp32 or wider.

        Raises:
            UnsupportedError: The weight is a quantized one that is sharded over a mesh.
        """
        if (sharding := sharding_of(self.weight)) is not None:
            if hasattr(self.weight, "dequantized"):
                raise UnsupportedError(
                    "A weight that is kept as a file stores it is not merged over a mesh: save the adapters, and merge "
                    "them in one process."
                )
            with torch.no_grad():  # with gradients enabled, to_local would return views
                weight, a, b = (leaf.to_local() for leaf in (base_of(self.weight, merged=True), self.a, self.b))
            return sharding.distribute(Lora(weight, a, b, self.scale).merged())
        weight = _plain(base_of(self.weight, merged=True))
        total = _sum(weight, self.a, self.b, self.scale)
        if self.magnitude is not None:
            total = total * (self.magnitude / self.row_norms())[..., None]
        return total.to(weight.dtype)


def _plain(weight: Any) -> Tensor:
    """The weight, dequantized if it is kept as a file stores it."""
    plain: Tensor = weight.dequantized() if hasattr(weight, "dequantized") else weight
    return plain


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale b a in fp32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + scale * (b.to(wide) @ a.to(wide))


@pytree
@dataclass(frozen=True, eq=False)
class RowLora(_AppliedByLinear):
    """A weight [out, in] with N adapters, of which each row of a batch reads its own; see `per_row`.

    Args:
        weight: [out, in].
        a: [N, rank, in].
        b: [N, out, rank], with the scale in it.
        rows: int64 [B], the number of each row's adapter.
        factor: [N, out], multiplies the outputs (DoRA); None: 1.
    """

    weight: Any
    a: Any
    b: Any
    rows: Any
    factor: Any = None
    invariant: ClassVar[bool] = False

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product that F.linear gives for each row's merged weight.

        Args:
            x: [B, S, in].
            bias: [out]; None: no bias.

        Returns:
            [B, S, out].

        Raises:
            ValueError: The inputs have another number of rows.
        """
        if x.ndim != 3 or x.shape[0] != len(self.rows):
            raise ValueError(
                f"Adapters per row are for {len(self.rows)} rows, inputs [{len(self.rows)}, S, in], and these are "
                f"{list(x.shape)}."
            )
        a, b = (leaf[self.rows].to(x.dtype) for leaf in (self.a, self.b))
        y = linear(x, self.weight) + (x @ a.mT) @ b.mT
        y = y if self.factor is None else y * self.factor[self.rows].to(x.dtype)[:, None]
        return y if bias is None else y + bias


@pytree
@dataclass(frozen=True, eq=False)
class Replaced:
    """A parameter trained in full beside adapters (PEFT's modules_to_save): every function of torch reads `value`.

    Args:
        weight: The parameter of the base model, which is kept for others that share it.
        value: The trained one, of the same shape.
    """

    weight: Any
    value: Any
    invariant: ClassVar[bool] = True

    def merged(self) -> Tensor:
        """The trained value, as a plain tensor.

        Returns:
            `value`.
        """
        value: Tensor = self.value
        return value

    def __getattr__(self, name: str) -> Any:
        """Methods and properties of the trained tensor."""
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        def read(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(map(read, x))
            return x.value if isinstance(x, cls) else x

        function = linear if func is F.linear else func  # which knows invariant products
        return function(*map(read, args), **{name: read(x) for name, x in (kwargs or {}).items()})

    def __add__(self, other: Any) -> Tensor:
        return torch.add(self.value, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Tensor:
        return torch.mul(self.value, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        return torch.div(self.value, other)

    def __neg__(self) -> Tensor:
        return torch.neg(self.value)

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self.value[index]
        return found

    def __len__(self) -> int:
        return len(self.value)


@pytree
@dataclass(frozen=True, eq=False)
class TwoUses(_AppliedByLinear):
    """An embedding that is the output head too (a tied one), of which the two uses are trained differently.

    Args:
        weight: [V, D], the tied leaf.
        embed: A `Lora` or `Replaced` without its weight, for look-ups; None: the weight itself.
        head: The same for the head.
    """

    weight: Any
    embed: Any = None
    head: Any = None
    invariant: ClassVar[bool] = True

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The logits of the head.

        Args:
            x: [..., D].
            bias: [V]; None: no bias.

        Returns:
            [..., V].
        """
        return linear(x, with_base(self.head, self.weight), bias)

    def look_up(self, ids: Tensor, **_: Any) -> Tensor:
        """The embeddings of tokens.

        Args:
            ids: int64, any shape.
            **_: Ignored: what F.embedding takes beside.

        Returns:
            [*ids.shape, D].
        """
        return F.embedding(ids, with_base(self.embed, self.weight))

    def merged(self) -> Tensor:
        """Refuses: a tied leaf has one value, and its uses have two.

        Returns:
            Nothing, since it raises.

        Raises:
            UnsupportedError: Always; merging needs a config without tied embeddings.
        """
        raise UnsupportedError(
            "embed_tokens is embedding and head of this model, and its adapters make these differ: merging needs a "
            'config with tie_word_embeddings=False, and params["lm_head"], a copy of the embedding.'
        )


NODES = (Lora, RowLora, Replaced, TwoUses)


def base_of(leaf: Any, *, merged: bool = False) -> Any:
    """The parameter of the base model in a node, or the leaf itself; merged: with what is trained in it."""
    while isinstance(leaf, NODES):
        leaf = leaf.merged() if merged and not isinstance(leaf, RowLora) else leaf.weight
    return leaf


def with_base(node: Any, weight: Any) -> Any:
    """The node on this weight of the base model (None: without one), or the weight itself where there is no node."""
    if node is None:
        return weight
    inner = with_base(node.weight, weight) if isinstance(node.weight, NODES) else weight
    return replace(node, weight=inner)
