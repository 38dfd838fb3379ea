"""Sequence packing: documents into rows of equal length and back, on the host, with every dropped token counted.

R rows, S tokens per row, N documents, T tokens in all of them, P pieces (a piece is one document's tokens in one row).

    packed = pack(documents, 1024)                      # one stream cut every 1024 tokens, as in pre-training
    packed = pack(documents, 1024, method="first_fit")  # unsplit documents, in close to the fewest rows
    unpack(packed)                                      # the documents again
    unpack(packed, logp)                                # any [R,S] tensor in the packed order, by document
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

IGNORE = -100  # the label that losses ignore

Document = Tensor | Sequence[int]


@dataclass(frozen=True)
class PackingReport:
    """Packing statistics: tokens == tokens_kept + tokens_dropped, rows * length == tokens_kept + pads."""

    rows: int
    length: int
    documents: int
    documents_empty: int
    documents_split: int  # in more than one piece
    documents_dropped: int  # longer than a row, with split=False and overlong="drop"
    tokens: int
    tokens_kept: int
    tokens_dropped: int
    pads: int
    labels: int  # targets of the loss: one less than the tokens of every document
    overall_fill: float  # tokens_kept / (rows * length); 0.0 without rows
    fill: tuple[float, ...] = field(repr=False)  # the same for each row


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of packed documents: tensors [R,S], all in the same order.

    `labels[b,t]` is the token that follows `tokens[b,t]` in its document, -100 at a document's end and on padding.
    Where the end of a row splits a document, the last token of the row keeps its label, the first token of the next
    piece. `positions` count from the start of the document, so the second piece of a split document begins above 0; it
    is a segment of its own, because the keys before it are in another row.
    `weights` are aligned to `labels`, not to `tokens`.
    """

    tokens: Tensor  # int64, pad_id on padding
    positions: Tensor  # int64, 0 on padding
    segment_ids: Tensor  # int64, 0 on padding, from 1 in the order of the row
    labels: Tensor  # int64
    weights: Tensor | None  # fp32, 0 wherever labels is -100
    pieces: Tensor  # int64 [P,5]: document, offset in it, row, index in the row, length; sorted by row and index
    report: PackingReport = field(compare=False)

    def batch(self) -> dict[str, Tensor]:
        """The batch of a loss, of all rows: tokens, positions, segment_ids and labels, and weights if there are any."""
        names = ("tokens", "positions", "segment_ids", "labels", *(() if self.weights is None else ("weights",)))
        return {name: getattr(self, name) for name in names}


def pack(
    documents: Iterable[Document],
    length: int,
    *,
    method: Literal["concat", "first_fit"] = "concat",
    split: bool = True,
    overlong: Literal["raise", "drop"] = "raise",
    weights: Iterable[Tensor | Sequence[float]] | None = None,
    pad_id: int = 0,
) -> Packed:
    """Packs token documents into rows of one length; rows that are not full are padded at the end.

    No end-of-document token is added: documents that should end with one must contain it.

    Args:
        documents: Token ids of each document, 1-D.
        length: Tokens per row, S.
        method: "concat" has the order of the documents: with `split` they form one stream, cut every `length` tokens
            (only the last row has padding); without, a document that does not fit in the rest of a row starts the next
            row. "first_fit" is first-fit decreasing: the longest pieces first, each in the first row with room; at most
            11/9 of the fewest possible rows + 6/9 (Dosa 2007). Rows are then sorted by their longest piece (shuffle
            them); inside a row documents are in their order.
        split: Whether documents may be cut; with "first_fit" only documents longer than a row are.
        overlong: Without `split`, what a document longer than `length` does: "raise", or "drop", which counts it in the
            report.
        weights: For each document a value per token: the loss weight of PREDICTING that token (0 on a prompt). They are
            therefore shifted like labels; the weight of a document's first token, which nothing predicts, is unused.
            None: no weights.
        pad_id: The token at padding.

    Returns:
        The rows: tokens, positions, segment_ids, labels [R, S], and a report of padding and cuts; `.batch()` is the
        dict of a loss.

    Raises:
        ValueError: A document is longer than a row and may not be cut, or an argument is out of range.
    """
    if length < 1:
        raise ValueError(f"length is {length}: a row holds at least 1 token.")
    if method not in ("concat", "first_fit"):
        raise ValueError(f'method is {method!r}: it is "concat" or "first_fit".')
    if overlong not in ("raise", "drop"):
        raise ValueError(f'overlong is {overlong!r}: it is "raise" or "drop".')
    flat, lengths = _tokens(documents)
    flat_weights = None if weights is None else _weights(weights, lengths)

    too_long = (lengths > length) & (not split)
    if overlong == "raise":
        _refuse_overlong(lengths, too_long, length)
    kept_lengths = lengths.masked_fill(too_long, 0)
    stream = method == "concat" and split
    document, offset, size = _split(kept_lengths, length, stream=stream)
    if stream:
        row = (_exclusive_cumsum(kept_lengths)[document] + offset) // length
    elif method == "concat":
        row = torch.tensor(_next_fit(size.tolist(), length), dtype=torch.int64)
    else:
        row = torch.tensor(_first_fit_decreasing(size.tolist(), length), dtype=torch.int64)
    rows = int(row.max()) + 1 if len(row) else 0

    order = row.argsort(stable=True)
    document, offset, size, row = document[order], offset[order], size[order], row[order]
    row_tokens = torch.zeros(rows, dtype=torch.int64).index_add_(0, row, size)
    start = _exclusive_cumsum(size) - _exclusive_cumsum(row_tokens)[row]
    segment = torch.arange(1, len(row) + 1) - _exclusive_cumsum(torch.bincount(row, minlength=rows))[row]

    source, target = _ranges(_exclusive_cumsum(lengths)[document] + offset, size), _ranges(row * length + start, size)
    is_last = torch.zeros(len(flat), dtype=torch.bool)
    is_last[(lengths.cumsum(0) - 1)[lengths > 0]] = True
    labels = flat.roll(-1).masked_fill(is_last, IGNORE)

    def scatter(values: Tensor, fill: int) -> Tensor:
        return torch.full((rows * length,), fill, dtype=values.dtype).index_copy_(0, target, values).view(rows, length)

    return Packed(
        tokens=scatter(flat[source], pad_id),
        positions=scatter(_ranges(offset, size), 0),
        segment_ids=scatter(segment.repeat_interleave(size), 0),
        labels=scatter(labels[source], IGNORE),
        weights=None if flat_weights is None else scatter(flat_weights.roll(-1).masked_fill(is_last, 0)[source], 0),
        pieces=torch.stack([document, offset, row, start, size], dim=1),
        report=_report(lengths, kept_lengths, document, row_tokens, length),
    )


def _refuse_overlong(lengths: Tensor, too_long: Tensor, length: int) -> None:
    if not too_long.any():
        return
    first, count = int(too_long.nonzero()[0]), int(too_long.sum())
    raise ValueError(
        f"document {first} has {int(lengths[first])} tokens and a row has {length} ({count} documents are longer): "
        'pass split=True to cut them, or overlong="drop" to leave them out and have them counted.'
    )


def _report(lengths: Tensor, kept_lengths: Tensor, document: Tensor, row_tokens: Tensor, length: int) -> PackingReport:
    """lengths, kept_lengths [documents], the second 0 where one is dropped; document [pieces]; row_tokens [rows]."""
    rows, tokens, kept = len(row_tokens), int(lengths.sum()), int(kept_lengths.sum())
    return PackingReport(
        rows=rows,
        length=length,
        documents=len(lengths),
        documents_empty=int((lengths == 0).sum()),
        documents_split=int((torch.bincount(document, minlength=len(lengths)) > 1).sum()),
        documents_dropped=int((kept_lengths < lengths).sum()),
        tokens=tokens,
        tokens_kept=kept,
        tokens_dropped=tokens - kept,
        pads=rows * length - kept,
        labels=int((kept_lengths - 1).clamp(min=0).sum()),
        overall_fill=kept / (rows * length) if rows else 0.0,
        fill=tuple((row_tokens / length).tolist()),
    )


def unpack(packed: Packed, values: Tensor | None = None) -> list[Tensor]:
    """The documents of packed rows, or values of their tokens.

    Args:
        packed: The result of `pack`.
        values: [R, S, ...] in the packed order (labels, log-probabilities, ...); None: the tokens.

    Returns:
        [T, ...] of each document in the order passed to `pack`; empty and dropped documents are empty tensors.

    Raises:
        ValueError: The values have other rows.
    """
    values = packed.tokens if values is None else values
    if values.shape[:2] != packed.tokens.shape:
        raise ValueError(f"values are {tuple(values.shape)}: they begin with the packed {tuple(packed.tokens.shape)}.")
    document, offset, row, start, size = packed.pieces.unbind(1)
    lengths = torch.zeros(packed.report.documents, dtype=torch.int64).index_add_(0, document, size)
    source = _ranges(row * packed.report.length + start, size)
    target = _ranges(_exclusive_cumsum(lengths)[document] + offset, size)
    order = torch.empty_like(source).index_copy_(0, target, source)
    return list(values.flatten(0, 1)[order.to(values.device)].split(lengths.tolist()))


def _tokens(documents: Iterable[Document]) -> tuple[Tensor, Tensor]:
    """(all tokens concatenated [T], the length of each document [N]), int64 on the CPU."""
    tensors = [torch.as_tensor(document) for document in documents]
    for index, tensor in enumerate(tensors):
        if tensor.dim() != 1:
            raise ValueError(f"document {index} is {tuple(tensor.shape)}: a document is one line of token ids.")
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            raise ValueError(f"document {index} holds {tensor.dtype}: token ids are integers.")
    lengths = torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64)
    flat = torch.cat([tensor.to("cpu", torch.int64) for tensor in tensors]) if tensors else lengths
    if len(flat) and int(flat.min()) < 0:
        index_of_min = int(flat.argmin())
        index = int(torch.searchsorted(lengths.cumsum(0), index_of_min, right=True))
        raise ValueError(f"document {index} holds the token id {int(flat[index_of_min])}: token ids are 0 or more.")
    return flat, lengths


def _weights(weights: Iterable[Tensor | Sequence[float]], lengths: Tensor) -> Tensor:
    """All weights concatenated [T], fp32, after a check that they match the documents."""
    tensors = [torch.as_tensor(weight, dtype=torch.float32, device="cpu") for weight in weights]
    if len(tensors) != len(lengths):
        raise ValueError(f"weights are for {len(tensors)} documents and there are {len(lengths)}: each has its own.")
    for index, (tensor, length) in enumerate(zip(tensors, lengths.tolist(), strict=True)):
        if tensor.shape != (length,):
            raise ValueError(f"weights of document {index} are {tuple(tensor.shape)}: it has {length} tokens.")
    return torch.cat(tensors) if tensors else torch.zeros(0)


def _split(lengths: Tensor, length: int, *, stream: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pieces (document, offset, size), each [P]: split every `length` tokens of all documents, or of each."""
    # tokens of earlier documents in the row where each document begins
    before = _exclusive_cumsum(lengths) % length if stream else torch.zeros_like(lengths)
    counts = torch.where(lengths > 0, (before + lengths - 1) // length + 1, 0)
    document = torch.arange(len(lengths)).repeat_interleave(counts)
    # a piece's row begins here in its document: below 0 where earlier documents fill the beginning of the row
    row_start = _ranges(torch.zeros_like(counts), counts) * length - before[document]
    offset = row_start.clamp(min=0)
    return document, offset, torch.minimum(row_start + length, lengths[document]) - offset


def places_in_rows(
    sizes: Sequence[int], length: int | None, item: str
) -> tuple[list[tuple[int, slice, int]], tuple[int, int]]:
    """([(row, slice of it, number in it from 1)] of each item, (rows, tokens of a row)), in the order of the items.

    length: None puts each item in a row of its own; otherwise an item that does not fit in the rest of a row starts the
    next. ValueError for an item longer than a row, called by `item` and its index.
    """
    width = max(sizes) if length is None else length
    if max(sizes) > width:
        i = sizes.index(max(sizes))
        raise ValueError(f"{item} {i} has {sizes[i]} tokens, which is more than the {width} of a row.")
    rows = range(len(sizes)) if length is None else _next_fit(sizes, width)
    places: list[tuple[int, slice, int]] = []
    for row, size in zip(rows, sizes, strict=True):
        follows = bool(places) and places[-1][0] == row
        start, number = (places[-1][1].stop, places[-1][2] + 1) if follows else (0, 1)
        places.append((row, slice(start, start + size), number))
    return places, (rows[-1] + 1, width)


def packed_tokens(tokens: list[Tensor], length: int | None, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [B, S, width], positions, segment_ids [B, S]) of clips' tokens [T, width]; name: of the caller.

    ValueError without clips, and for a clip that is longer than a row.
    """
    if not tokens:
        raise ValueError(f"{name} needs at least one clip.")
    places, shape = places_in_rows([len(one) for one in tokens], length, "Clip")
    rows = tokens[0].new_zeros(*shape, tokens[0].shape[-1])
    positions = torch.zeros(shape, dtype=torch.long, device=rows.device)
    segment_ids = positions.clone()
    for one, (row, here, number) in zip(tokens, places, strict=True):
        rows[row, here], segment_ids[row, here] = one, number
        positions[row, here] = torch.arange(len(one), device=rows.device)
    return rows, positions, segment_ids


def _next_fit(sizes: Sequence[int], length: int) -> list[int]:
    rows, row, free = [], -1, 0
    for size in sizes:
        if size > free:
            row, free = row + 1, length
        free -= size
        rows.append(row)
    return rows


def _first_fit_decreasing(sizes: list[int], length: int) -> list[int]:
    """The row of each piece, in O(P log P): a max-tree over the free space of rows, all of which begin empty."""
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    free = [length] * (2 * leaves)  # node n has children 2n and 2n + 1; row r is node leaves + r
    rows = [0] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size, node = sizes[piece], 1
        while node < leaves:
            node *= 2
            if free[node] < size:
                node += 1
        rows[piece] = node - leaves
        free[node] -= size
        while node > 1:
            node //= 2
            largest = max(free[2 * node], free[2 * node + 1])
            if free[node] == largest:
                break
            free[node] = largest
    return rows


def _exclusive_cumsum(values: Tensor) -> Tensor:
    return values.cumsum(0) - values


def _ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """The ranges [start, start + size) concatenated."""
    return (starts - _exclusive_cumsum(sizes)).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
