"""`Documents`: which documents a batch holds, for results of one row per document; and `pool`, which reads it.

found = fnmodels.documents(segment_ids)                     # once per batch, on the host
embeddings = fnmodels.pool(hidden, found, how="mean")       # [N, D], differentiable
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels import tree

from .segments import integers, positions_from_segments

POOLINGS = ("first", "last", "mean", "mean_sqrt_len", "weighted_mean", "max", "sum")


@tree.pytree
@dataclass(frozen=True)
class Documents:
    """The N documents of a batch [B, S], in the order of their rows, then of their segment ids; all int64.

    Args:
        row: [N], the row of each document.
        segment: [N], its segment id.
        first: [N], the index in the row of its token with the lowest position.
        last: [N], the index in the row of its token with the highest position.
        number: [B, S], the document of each token, N at padding.
        rank: [B, S], the position of each token in its document, which only "weighted_mean" reads.
    """

    row: Tensor
    segment: Tensor
    first: Tensor
    last: Tensor
    number: Tensor
    rank: Tensor

    def __len__(self) -> int:
        return int(self.row.shape[0])


def documents(segment_ids: Tensor, positions: Tensor | None = None) -> Documents:
    """The documents of a batch. It reads values, so call it outside of transforms.

    Args:
        segment_ids: int [B, S], where 0 and less is padding.
        positions: int [B, S]; they say which token is the first and the last, so that permuted tokens have the same
            documents. None: counted from the first token of each document.

    Returns:
        The `Documents`.

    Raises:
        ValueError: Tensors are not integers [B, S].
    """
    ids = integers("segment_ids", segment_ids)
    if ids.ndim != 2:
        raise ValueError(f"segment_ids must be [B, S], not {list(ids.shape)}.")
    rank = positions_from_segments(ids) if positions is None else integers("positions", positions)
    if rank.ndim == 3:  # axes for time, height and width: the order of the text is that of the row
        rank = positions_from_segments(ids)
    if rank.shape not in (ids.shape, (1, ids.shape[1])):
        raise ValueError(f"positions must be {list(ids.shape)} like the segment_ids, not {list(rank.shape)}.")
    rank = rank.expand(ids.shape)
    rows, columns = (ids > 0).nonzero(as_tuple=True)
    # One number for each (row, segment): torch's unique of pairs takes four times as long.
    segments, nth = ids[rows, columns].unique(return_inverse=True)
    found, numbers = (rows * len(segments) + nth).unique(return_inverse=True)
    number = torch.full_like(ids, len(found))
    number[rows, columns] = numbers
    ends = []
    for sign in (1, -1):  # a stable sort of the tokens by position, then by document: its first one of each is wanted
        order = (sign * rank[rows, columns]).argsort(stable=True)
        order = order[numbers[order].argsort(stable=True)]
        begins = torch.searchsorted(numbers[order], torch.arange(len(found), device=ids.device))
        ends.append(columns[order[begins]])
    first, last = ends
    row, segment = found // max(len(segments), 1), segments[found % max(len(segments), 1)]
    return Documents(row, segment, first, last, number, rank)


def numbers_in_rows(segment_ids: Tensor) -> Tensor:
    """For each token of segment_ids [B, S], the number of its document in its row, from 0; reads no values.

    Documents count in the order of their segment ids, padding among them.
    """
    ids, order = segment_ids.sort(dim=1, stable=True)
    begins = torch.zeros_like(order)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.zeros_like(order).scatter(1, order, begins.cumsum(1))


def first_tokens(segment_ids: Tensor, positions: Tensor) -> Tensor:
    """Whether each token has the lowest position of its document, as `Documents.first`; reads no values.

    Args:
        segment_ids: int [B or 1, S], where 0 and less is padding.
        positions: int [B or 1, S], from any number on and in any order.

    Returns:
        bool [B, S], with one token in each document.
    """
    segment_ids, positions = torch.broadcast_tensors(segment_ids, positions)
    order = positions.argsort(dim=1, stable=True)  # and by document: its first token is the first of these
    order = order.gather(1, segment_ids.gather(1, order).argsort(dim=1, stable=True))
    ids = segment_ids.gather(1, order)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.zeros_like(begins).scatter(1, order, begins & (ids > 0))


def sums_of_documents(values: Tensor, number: Tensor) -> Tensor:
    """For each token, the sum of values [B, S] over its document. number [B, S]: those of `numbers_in_rows`."""
    return torch.zeros_like(values).scatter_add(1, number, values).gather(1, number)


def share_of_document(flags: Tensor, segment_ids: Tensor) -> Tensor:
    """For each token, the share of its document's tokens that have a flag; reads no values.

    Args:
        flags: bool [B, S].
        segment_ids: int [B, S], in any order; padding has the shares of its segment ids, which mean nothing.

    Returns:
        Shares from 0 to 1, fp32 [B, S].
    """
    number = numbers_in_rows(segment_ids)
    counted, every = (sums_of_documents(t.float(), number) for t in (flags, torch.ones_like(flags)))
    return counted / every


def pool(hidden: Tensor, documents: Documents, *, how: str = "mean") -> Tensor:
    """Pools hidden states to one vector per document; differentiable, and padding is never read.

    Args:
        hidden: Hidden states [B, S, D].
        documents: The documents of the batch.
        how: "first" and "last" take the hidden state of that token; "mean", "max", "sum", "mean_sqrt_len" (the sum
            divided by the square root of the number of tokens) and "weighted_mean" (token i of n weighs i) read all of
            its tokens.

    Returns:
        [N, D] in the dtype of `hidden`; sums are in fp32 at least.

    Raises:
        ValueError: `how` is another word, or the hidden states are of other tokens.
    """
    if how not in POOLINGS:
        raise ValueError(f"how is {how!r}; it must be one of {', '.join(POOLINGS)}.")
    number, count = documents.number, len(documents)
    if hidden.shape[:2] != number.shape or hidden.ndim != 3:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, but the documents are of tokens [B, S] {list(number.shape)}."
        )
    if how in ("first", "last"):
        return hidden[documents.row, documents.first if how == "first" else documents.last]
    width, index = hidden.shape[-1], number.flatten()
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    flat = wide.where((number < count)[..., None], 0).flatten(0, 1)
    if how == "max":
        lowest = flat.new_full((count + 1, width), -torch.inf)
        spread = index[:, None].expand(-1, width)
        return lowest.scatter_reduce(0, spread, flat, "amax")[:count].to(hidden.dtype)
    weights = documents.rank.flatten() + 1 if how == "weighted_mean" else torch.ones_like(index)
    weights = weights.to(wide.dtype)[:, None]
    total = flat.new_zeros(count + 1, width).index_add(0, index, flat * weights)[:count]
    if how == "sum":
        return total.to(hidden.dtype)
    sizes = flat.new_zeros(count + 1, 1).index_add(0, index, weights)[:count]
    return (total / (sizes.sqrt() if how == "mean_sqrt_len" else sizes)).to(hidden.dtype)


class TokenVectors(NamedTuple):
    """The vectors of the tokens of N documents.

    Args:
        vectors: [N, L, D], zeros behind a document's last token.
        valid: bool [N, L], True at tokens.
    """

    vectors: Tensor
    valid: Tensor


def token_vectors(hidden: Tensor, documents: Documents) -> TokenVectors:
    """The tokens of each document in the order of their positions, which late interaction compares (arXiv 2004.12832).

    The longest document gives L, so that values are read: call it outside of transforms. It is differentiable.

    Args:
        hidden: Hidden states [B, S, D].
        documents: The documents of the batch.

    Returns:
        Vectors [N, L, D] and valid [N, L], for `max_sim`.
    """
    rows, columns = (documents.number < len(documents)).nonzero(as_tuple=True)
    number, rank = documents.number[rows, columns], documents.rank[rows, columns]
    order = rank.argsort(stable=True)
    order = order[number[order].argsort(stable=True)]
    number = number[order]
    sizes = torch.bincount(number, minlength=len(documents))
    place = torch.arange(len(number), device=number.device) - (sizes.cumsum(0) - sizes)[number]
    longest = int(sizes.max()) if len(sizes) else 0
    vectors = hidden.new_zeros(len(documents), longest, hidden.shape[-1])
    vectors = vectors.index_put((number, place), hidden[rows[order], columns[order]])
    return TokenVectors(vectors, torch.arange(longest, device=number.device) < sizes[:, None])


def max_sim(queries: TokenVectors, texts: TokenVectors) -> Tensor:
    """The scores of late interaction (ColBERT, arXiv 2004.12832, equation 3).

    A score is the sum, over a query's tokens, of the largest product with any token of the text. Vectors are compared
    as they are: normalize them before.

    Args:
        queries: The tokens of the queries.
        texts: The tokens of the texts.

    Returns:
        [queries, texts].
    """
    products = torch.einsum("qid,tjd->qtij", queries.vectors, texts.vectors)
    best = products.masked_fill(~texts.valid[None, :, None], -torch.inf).amax(-1)
    return best.where(queries.valid[:, None], 0).sum(-1)
