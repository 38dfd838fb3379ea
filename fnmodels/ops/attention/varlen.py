"""kernel="varlen": torch's variable-length flash attention over packed documents, on CUDA in fp16 and bf16."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.convert import to_cu_seqlens
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.rules import And, BidirectionalWindow, Causal, Everything, Rule, Window
from fnmodels.ops import torch_internals
from fnmodels.ops.torch_compilation import mark_dynamic


@tree.pytree
@dataclass(frozen=True)
class ByDocument:
    """The mask form of "varlen": the documents of a batch one after another, see `fnmodels.inputs.convert.Ragged`.

    Compiled blocks take it as an argument, with symbols for the numbers of documents and tokens. longest: the
    length of the longest document, rounded up to a power of two, at most S, so that few graphs are compiled; 0 without
    documents. shape: the batch's, [B, S]. window: see `varlen_window`.
    """

    offsets: Tensor
    tokens: Tensor | None
    longest: int = tree.static()
    shape: tuple[int, int] = tree.static()
    window: tuple[int, int] = tree.static()


def by_document(layout: Layout, window: tuple[int, int], device: torch.device | str) -> ByDocument:
    documents = to_cu_seqlens(layout, device=device)
    if not torch.compiler.is_compiling():
        for sizes in (documents.offsets, documents.tokens):
            if sizes is not None:
                mark_dynamic(sizes, 0, required=False)
    longest = min(1 << (documents.longest - 1).bit_length(), layout.length) if documents.longest else 0
    return ByDocument(documents.offsets, documents.tokens, longest, (len(layout.rows), layout.length), window)


def varlen_window(rule: Rule) -> tuple[int, int] | None:
    """(keys before, keys after) that a query sees besides its own, -1 for all; None if the rule is no such window."""
    match rule:
        case Everything():
            return -1, -1
        case Causal():
            return -1, 0
        case Window(size):
            return size - 1, -1
        case BidirectionalWindow(size):
            return size, size
        case And(left, right):
            first, second = varlen_window(left), varlen_window(right)
            if first is None or second is None:
                return None
            return _narrower(first[0], second[0]), _narrower(first[1], second[1])
    return None


def _narrower(one: int, other: int) -> int:
    return other if one < 0 else one if other < 0 else min(one, other)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, documents: ByDocument, *, scale: float) -> Tensor:
    """Shapes as in `ops.attention.select`; self-attention: queries and keys are the same tokens.

    ValueError for documents of another batch.
    """
    if q.shape[:2] != documents.shape:
        raise ValueError(f"The documents are of a batch {list(documents.shape)}, and q is {list(q.shape)}.")
    if not documents.longest:  # The kernel needs a document. The empty sums keep the graph connected, with gradient 0.
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + sum(t[:0].sum() for t in (q, k, v))
    # The kernel needs one head dim, a multiple of 8. Zero padding does not change scores; the output is truncated.
    value_width, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    width += -width % 8
    flat = [F.pad(t, (0, width - t.shape[-1])).flatten(0, 1) for t in (q, k, v)]
    if documents.tokens is not None:
        flat = [t.index_select(0, documents.tokens) for t in flat]
    offsets, longest = documents.offsets, documents.longest
    call = torch_internals.varlen_attention(grouped=q.shape[-2] != k.shape[-2])
    out = call(*flat, offsets, offsets, longest, longest, scale=scale, window_size=documents.window)[..., :value_width]
    if documents.tokens is not None:
        out = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:]).index_copy(0, documents.tokens, out)
    return out.unflatten(0, q.shape[:2])
