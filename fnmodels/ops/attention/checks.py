"""Checks of attention's arguments: shapes that a kernel would silently broadcast, and the layout of another batch."""

from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.convert import shape_of
from fnmodels.inputs.layout import Layout, document_layout, one_document_per_row
from fnmodels.inputs.layout import layout as layout_of
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Causal
from fnmodels.inputs.values import at_hand, has_values, unwrapped
from fnmodels.ops.invariant.attention import Tiles
from fnmodels.ops.torch_internals import undisturbed, versions

from .block_sparse import Plan
from .kernels import FORMS
from .sdpa import ByIndex

SHORT = 256  # tokens up to which the fused call on a CPU is as fast as blocks for rows of one document
PACKED = 128  # tokens from which blocks for rows of several documents gain more than finding their ranges takes


def check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Any, form: Any) -> None:
    """ValueError for shapes that a kernel would silently broadcast or truncate. form: the mask as it is read."""
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if len(of_q) != 4 or len(of_k) != 4 or of_k[:3] != of_v[:-1] or of_q[0] != of_k[0]:
        raise ValueError(
            f"q is {list(of_q)}, k {list(of_k)}, v {list(of_v)}: these are [B, Q, N, H], [B, K, G, H] and "
            "[B, K, G, Hv]."
        )
    batch, queries, heads, _ = of_q
    _, keys, groups, _ = of_k
    if heads % groups:
        raise ValueError(
            f"q has {heads} heads and k has {groups}: groups of queries share a head of keys, so that their "
            "number must divide."
        )
    if isinstance(mask, ByIndex):
        if queries != keys and isinstance(mask.rule, Causal):
            raise ValueError(f"The mask was made ready for as many queries as keys, not for {queries} and {keys}.")
        return
    if isinstance(mask, FORMS) or isinstance(form, Plan | Tiles):
        return  # a plan is checked where it is used
    rows, per_head, *seen = form.shape if isinstance(form, Tensor) else shape_of(mask)
    if seen[0] != queries or seen[1] != keys or (rows != batch and rows != 1) or (per_head != heads and per_head != 1):
        raise ValueError(
            f"The mask is {[rows, per_head, *seen]}, but q and k need [{batch}, {heads}, {queries}, {keys}], of which "
            "the first two may be 1: one for all rows, or heads. Queries and keys are never broadcast."
        )


def check_layout(mask: Mask, layout: Layout) -> None:
    """ValueError for the layout of another batch."""
    lengths = (mask.q_positions.shape[1], mask.kv_positions.shape[1])
    if lengths != (layout.length, layout.length):
        raise ValueError(
            f"The layout describes rows of {layout.length} tokens, the mask {lengths[0]} queries and "
            f"{lengths[1]} keys: make it of this batch, or leave it out."
        )
    _check_documents(mask, layout)


def layout_at_hand(mask: Mask) -> Layout | None:
    """The layout of a mask whose values lie on the host, for a call of eager mode that was given none.

    None where reading them would wait or cannot be done, where the keys are not the queries' tokens, and for short rows
    of more than one document, whose dense mask costs less than finding their ranges. It is noted on the mask, for
    later calls with the same batch, until its tensors are written to.
    """
    if mask.q_positions is not mask.kv_positions or mask.q_segments is not mask.kv_segments:
        return None
    positions, segments = at_hand(mask.q_positions), at_hand(mask.q_segments)
    if positions is None or segments is None:
        return None
    if positions.shape != segments.shape:
        return None
    noted: tuple[list[int], Layout | None] | None = vars(mask).get("_layout")
    writes = versions((positions, segments))
    if noted is not None and noted[0] == writes:
        return noted[1]
    how = document_layout if positions.shape[1] >= PACKED else one_document_per_row
    layout = undisturbed(how, positions, segments)
    if writes is not None:
        object.__setattr__(mask, "_layout", (writes, layout))
    return layout


def _check_documents(mask: Mask, layout: Layout) -> None:
    """ValueError if the layout is not that of the mask, checked where values can be read without a device sync.

    Not checked in traced graphs and under vmap, where a tensor has no value or many.
    """
    if torch.compiler.is_compiling():
        return
    mask = tree.map(unwrapped, mask)
    if not all(has_values(t) and t.is_cpu for t in tree.leaves(mask)):
        return
    if not undisturbed(_describes, layout, mask):
        raise ValueError(
            "The layout describes other documents than the mask: make it of this batch in this order, "
            "fnmodels.layout(masks), or leave it out."
        )


def _describes(layout: Layout, mask: Mask) -> bool:
    """Whether the layout is that of the mask, by a few comparisons for rows of one document."""
    positions, segments = mask.q_positions, mask.q_segments
    if not layout.plain or positions is not mask.kv_positions or segments is not mask.kv_segments:
        return layout_of({"": mask}) == layout
    rows, first = len(layout.rows), segments[:, :1]
    want = torch.tensor(layout.firsts) + torch.arange(layout.length)
    if (positions.shape[0], segments.shape[0]) != (rows, rows):
        return layout_of({"": mask}) == layout
    return torch.equal(positions, want) and bool(((segments == first) & (first > 0)).all())
