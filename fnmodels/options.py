"""`ForwardOptions`: how a forward pass runs (kernels, layer wrappers), never what it computes; and its types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypedDict

from torch import Tensor

from fnmodels.inputs.layout import Layout

Block = Callable[..., tuple[Tensor, dict[str, Any]]]  # aux: tensors, and with a cache the new entry, a dict


@dataclass(frozen=True)
class PerLayer:
    """A kernel or a layer_fn that depends on the layer.

    Layers for which equal values are chosen share a block, and so a compiled graph. kernel="invariant" is of all
    layers, and refused here.

    Args:
        choose: (index of the layer) -> the kernel or layer_fn to use there.
    """

    choose: Callable[[int], Any]

    def __call__(self, *args: Any, **more: Any) -> NoReturn:
        raise TypeError(
            "A PerLayer is read by functions that run layers, as kernel= or layer_fn=; what wraps a layer_fn (remat=, "
            "compile=, a mesh) takes one for all layers."
        )


LayerFn = Callable[[Block], Block]


# One of KERNELS, or a user's function (ring attention, say), called as kernel(q, k, v, mask, scale=, softcap=, sinks=,
# layout=) with the mask that was passed to `forward`.
Kernel = str | Callable[..., Tensor]


# A function with the signature given in `fnmodels.ops.moe.experts`.
Experts = Callable[..., Tensor]


# A function (value, name) -> value of the same shape and dtype, or the tensor that replaces the value.
Edit = Callable[..., Tensor] | Tensor


# (name, value) -> the value to use: how an operation shows a value to `Context.tap`.
Tap = Callable[[str, Tensor], Tensor]


def is_invariant(kernel: object) -> bool:
    """Whether this choice of a kernel is "invariant", which has effect on all layers, embedding and head together."""
    return kernel == "invariant"


def untapped(name: str, value: Tensor) -> Tensor:
    """The `Tap` of operations outside of a model."""
    return value


class ForwardKwargs(TypedDict, total=False):
    """The keywords of public functions that run layers: the fields of `ForwardOptions`."""

    kernel: Kernel
    """The attention kernel: "math", "sdpa", "blocks", "flex", "varlen", "sparse", "invariant" (batch-invariant), or a
    function; "auto" chooses by device, dtype, mask and layout. Or a `PerLayer` of them."""
    layout: Layout | None
    """`fnmodels.layout(masks)`, with which kernels skip blocks that are masked out; None: not known."""
    layer_fn: LayerFn | None
    """Called once per kind of layer with the bound block; returns the wrapped block (rematerialised, compiled,
    gathered). None: the block itself."""
    experts: str | Experts
    """The implementation of the expert MLPs, see `fnmodels.ops.moe.experts`."""
    context: Callable[..., Any] | None
    """A subclass of `fnmodels.models.common.context.Context`, which extends blocks; None: Context itself."""
    edits: Mapping[str, Edit] | None
    """{name of a tap: (value, name) -> value, or the tensor that replaces it}; None: no edits."""


@dataclass(frozen=True)
class ForwardOptions:
    """Options of running layers. Hashable, so that blocks bound with equal options are compiled once.

    kernel: the attention kernel, see `fnmodels.ops.attention.select`; or a `PerLayer` of them, as layer_fn may be.
    layout: `fnmodels.layout(masks)`; lets kernels skip blocks that are masked out.
    layer_fn: called once per kind with the bound block, a callable (layer, x, mask, freqs, **tensors) -> (x, aux);
        returns the wrapped one (rematerialised, compiled, FSDP-gathered), which must pass keywords on.
    experts: the implementation of the expert MLPs, see `fnmodels.ops.moe.experts`.
    context: a subclass of `fnmodels.models.common.context.Context`, which extends blocks without a change to any
        family; None for Context itself.
    edits: {name of a tap: edit}, applied where the tap is read, before it is recorded; see `fnmodels.edits`. Names are
        those of `taps`, "layers.3.mlp", "layers.*.mlp", "embed" or "hidden". Not part of equality, since blocks are
        bound without them.
    checked: whether the layout is known to be that of the masks, because it was made of them for this call.
    invariant: whether a token's bits shall depend on its document's tokens alone: kernel="invariant".
    """

    kernel: Kernel = "auto"
    layout: Layout | None = None
    layer_fn: LayerFn | None = None
    experts: str | Experts = "auto"
    context: Callable[..., Any] | None = None
    edits: Mapping[str, Edit] | None = field(default=None, compare=False)
    checked: bool = field(default=False, compare=False)
    invariant: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "invariant", is_invariant(self.kernel))  # read in every call of a block
        if self.edits is not None and not isinstance(self.edits, Mapping):
            raise TypeError(
                f"edits is a {type(self.edits).__name__}; it is a dict of the names of taps and their edits, such as "
                '{"layers.3.mlp": edit} with a function edit(value, name) -> value.'
            )

    def at(self, index: int) -> "ForwardOptions":
        """One layer's options, with what a `PerLayer` chooses there; ValueError where that is kernel="invariant"."""
        given = {"kernel": self.kernel, "layer_fn": self.layer_fn}
        chosen = {name: value.choose(index) for name, value in given.items() if isinstance(value, PerLayer)}
        if is_invariant(chosen.get("kernel")):
            raise ValueError(
                f'The PerLayer chooses kernel="invariant" for layer {index}, which has effect only for all layers, '
                'embedding and head together: pass kernel="invariant" itself.'
            )
        return replace(self, **chosen) if chosen else self

    @property
    def keywords(self) -> dict[str, Any]:
        """The fields that are keywords of the public functions."""
        return {name: getattr(self, name) for name in ForwardKwargs.__annotations__}

    @property
    def expert_path(self) -> str | Experts:
        """`experts`; "auto" is "dense" with kernel="math", which supports every transform, and else "invariant" so.

        A function with the attribute `invariant` computes experts as "invariant" does, within `invariant_rows`.
        """
        if self.invariant and self.experts not in ("auto", "invariant") and not getattr(self.experts, "invariant", 0):
            raise NotImplementedError(
                f'kernel="invariant" has experts of its own, and experts is {self.experts!r}: leave it out.'
            )
        named = {"math": "dense", "invariant": "invariant"}
        return named.get(str(self.kernel), "auto") if self.experts == "auto" else self.experts


USUAL = ForwardOptions()  # of calls without keywords
