"""Conversion of document lengths, end tokens and positions to segment ids, and of segment ids to positions.

`segment_ids [B,S]` are the document of each token (from 1 along the row; 0 and below is padding: the converters write
0, and -1 from elsewhere means the same) and feed masks; `positions [B,S]` feed rotary tables. Neither follows from the
other: positions may continue across documents, and a row may begin inside one. Models never call these converters: the
caller, who knows which source (lengths, end tokens, restarting positions) is correct, converts once.

Functions take any leading dimensions ([B,S], or [S] under vmap) and read no values, so that they run under vmap and
compile without a device sync; those that do read values say "host-side". Results are int64 on the input's device.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor


def segments_from_lengths(
    lengths: Tensor | Sequence[int] | Sequence[Sequence[int]], length: int | None = None
) -> Tensor:
    """Segment ids from the lengths of documents; the rest of a row is 0.

    Lists, and any call without `length`, are checked on the host. The values of a tensor are not read if `length` is
    set, and tokens beyond `length` are cut off.

    Args:
        lengths: Tokens of each document, [N] or [B, N] (or ragged lists). The id of a document is its index + 1, so
            that a document of length 0 leaves a gap in the ids.
        length: Tokens of a row, S; None: those of the longest row.

    Returns:
        int64 [S] or [B, S].

    Raises:
        ValueError: A length is negative, or a row is longer than `length`.
    """
    read = length is None or not isinstance(lengths, Tensor)
    lengths = integers("lengths", lengths if isinstance(lengths, Tensor) else _ragged(lengths))
    ends, total = lengths.cumsum(-1), lengths.sum(-1, keepdim=True)
    if read:
        if (lengths < 0).any():
            raise ValueError(f"a document has {int(lengths.min())} tokens: a length is 0 or more.")
        longest = int(total.max()) if total.numel() else 0
        if length is not None and longest > length:
            raise ValueError(f"the documents of a row have {longest} tokens together and the row has only {length}.")
        length = longest if length is None else length
    assert length is not None
    # The id at t is 1 + the number of documents that end at or before t: mark the ends, then sum along the row.
    marks = lengths.new_zeros((*lengths.shape[:-1], length + 1)).scatter_add(
        -1, ends.clamp(max=length), torch.ones_like(ends)
    )
    inside = torch.arange(length, device=lengths.device) < total
    return (marks.cumsum(-1)[..., :length] + 1).where(inside, 0)


def segments_from_eos(tokens: Tensor, eos_ids: int | Sequence[int], *, valid: Tensor | None = None) -> Tensor:
    """Segment ids from tokens that end documents; the next token begins another document.

    A tokenizer that pads WITH an end id leaves no trace of padding in the tokens: then use the lengths. Only an end id
    ends a document: two in a row make a document of one token, and padding inside a document does not split it.

    Args:
        tokens: int64 [B, S].
        eos_ids: The ids that end a document.
        valid: [B, S], False (or 0) on padding, wherever that is; with a pad id that is no end id it is `tokens !=
            pad_id`. None: there is no padding.

    Returns:
        int64 [B, S], documents from 1, 0 at padding.

    Raises:
        ValueError: There are no eos_ids.
    """
    ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    if not ids:
        raise ValueError("eos_ids is empty: name at least one token id that ends a document.")
    tokens, valid = integers("tokens", tokens), _valid(valid, tokens)
    ends = ((tokens[..., None] == torch.tensor(ids, device=tokens.device)).any(-1) & valid).long()
    return (ends.cumsum(-1) - ends + 1).where(valid, 0)


def segments_from_positions(positions: Tensor, *, valid: Tensor | None = None, strict: bool = False) -> Tensor:
    """Segment ids from positions: a document continues while each position is the previous one + 1.

    [4,5,6,0,1,2,3,7,8,9,10] -> [1,1,1,2,2,2,2,3,3,3,3]: three documents, two of which begin in the middle.

    Positions are ambiguous: adjacent documents [4,5,6] and [7,8] look like ONE document [4,5,6,7,8], so that requests
    whose positions happen to be consecutive are merged and see each other. Where that can happen (chunked requests),
    store the lengths and use `segments_from_lengths`.

    With valid=None padding is guessed, anywhere in the row: negative positions, and isolated tokens (which continue
    neither the previous token nor into the next) with a neighbor at the same position. [0,0,0,1,2] begins with two
    pads, [0,1,2,0,0,0] and [0,1,2,2,2,2] end in three. The guess fails for adjacent documents of one token, for such a
    document beside another that begins at the same position, and for a single pad: [0,1,0] is read as two documents.
    Pass `valid` where those occur.

    Args:
        positions: int [B, S].
        valid: [B, S], False (or 0) at padding, whose positions are ignored; a document continues across padding in its
            middle. None: padding is guessed.
        strict: Whether only rows are accepted (on the host) that are unambiguous if every document starts at 0 and
            padding has position 0 or less. Ambiguous are, without `valid`, isolated tokens, which are padding or a
            document of one token ([0,0,0,1,2], and the last of [0,1,0]). So are documents that begin at another
            position, the row's first included: any + 1 after it may be another such beginning, as in [4,5,6,7,8].

    Returns:
        int64 [B, S], documents from 1, 0 at padding.

    Raises:
        ValueError: With `strict`, a row is ambiguous; it names row and index.
    """
    positions = integers("positions", positions)
    if valid is None:
        isolated, repeated = _isolated(positions)
        valid = (positions >= 0) & ~(isolated & repeated)
    else:
        isolated, valid = torch.zeros_like(positions, dtype=torch.bool), _valid(valid, positions)
    begins = (positions != previous(positions, valid, first=positions) + 1) & valid
    if strict:
        place = _first(isolated)
        if place is not None:
            raise ValueError(
                f"row {place[0]}, index {place[1]}: the position {int(torch.atleast_2d(positions)[place])} stands "
                "alone, which is padding or a document of one token: say which with valid=."
            )
        place = _first(begins & (positions != 0))
        if place is not None:
            raise ValueError(
                f"row {place[0]}, index {place[1]}: a document begins at a position other than 0, so positions do not "
                "show where documents of this row end. Use segments_from_lengths, or strict=False to take every "
                "+ 1 as the same document."
            )
    return begins.cumsum(-1).where(valid, 0)


def segments(
    *,
    tokens: Tensor | None = None,
    eos_ids: int | Sequence[int] | None = None,
    positions: Tensor | None = None,
    rule: Literal["eos", "positions", "agree"] | None = None,
    valid: Tensor | None = None,
    strict: bool = False,
) -> Tensor:
    """Segment ids from end tokens or from positions; with both, `rule` chooses.

    There is no default between the two: they disagree on rows that begin inside a document, on truncated text, and on
    padding.

    Args:
        tokens: int64 [B, S], with `eos_ids`.
        eos_ids: The ids that end a document.
        positions: int [B, S].
        rule: "eos", "positions", or "agree", which computes both on the host and compares them; None where there is
            only one source.
        valid: [B, S], False (or 0) at padding; see `segments_from_eos` and `segments_from_positions`.
        strict: As for `segments_from_positions`.

    Returns:
        int64 [B, S], documents from 1, 0 at padding.

    Raises:
        ValueError: Sources are missing or `rule` does not fit them, or with "agree" they differ; it names the first row
            and index.
    """
    sources = [name for name, value in (("eos", eos_ids), ("positions", positions)) if value is not None]
    needs = {"eos": ["eos"], "positions": ["positions"], "agree": ["eos", "positions"], None: sources}
    if rule not in needs:
        raise ValueError(f'rule is {rule!r}: it is "eos", "positions" or "agree".')
    if not sources or not set(needs[rule]) <= set(sources):
        needed = " and ".join(needs[rule]) or "eos or positions"
        raise ValueError(f"rule is {rule!r} and needs {needed}, given is {' and '.join(sources) or 'neither'}.")
    if rule is None and len(sources) == 2:
        raise ValueError(
            'both eos_ids and positions are given: say with rule="eos", "positions" or "agree" which decides.'
        )
    ids = []
    for name in needs[rule]:
        if name == "positions" and positions is not None:
            ids.append(segments_from_positions(positions, valid=valid, strict=strict))
        elif tokens is not None and eos_ids is not None:
            ids.append(segments_from_eos(tokens, eos_ids, valid=valid))
        else:
            raise ValueError("eos_ids are given without tokens: pass the tokens [B,S] to find them in.")
    if len(ids) == 2:
        place = _first(ids[0] != ids[1])
        if place is not None:
            eos, pos = (int(torch.atleast_2d(each)[place]) for each in ids)
            raise ValueError(
                f"row {place[0]}, index {place[1]}: end tokens give segment {eos} and positions segment {pos} (0 is "
                "padding). Say which is right with rule=, and where padding is with valid=."
            )
    return ids[0]


def positions_from_segments(segment_ids: Tensor, *, start: int | Tensor = 0) -> Tensor:
    """Positions that restart at 0 with every document.

    A document is a run of one id: padding inside it is skipped without being counted, and an id that reappears after
    another document restarts at 0.

    Args:
        segment_ids: int [B, S], 0 or less is padding.
        start: An int, or [B], the position of the row's first real token, for rows that begin inside a document; it
            shifts the row's first document only.

    Returns:
        int64 [B, S]; padding gets 0.
    """
    segment_ids = integers("segment_ids", segment_ids)
    valid = segment_ids > 0
    begins = valid & (segment_ids != previous(segment_ids, valid, first=0))
    count = valid.cumsum(-1) - 1  # real tokens before this one
    restart = count.where(begins, 0).clamp(min=0).cummax(-1).values
    start = start[..., None] if isinstance(start, Tensor) else start
    moved = (begins.cumsum(-1) == 1) * start
    return (count - restart + moved).where(valid, 0)


def text_order(positions: Tensor, segment_ids: Tensor) -> Tensor:
    """The rank of each token within its document, from positions of several axes.

    Causal masks and windows count these where rotary positions have axes for time, height and width: the tokens of an
    image share a time, but are generated one after another. Tokens are sorted by the first axis, then the second, ...
    (raster order): by values and not by index in the row, so that a permutation does not change the result. Only tokens
    of one document with equal positions on every axis keep their order in the row.

    Args:
        positions: int [B, S, A].
        segment_ids: int [B, S], 0 or less is padding.

    Returns:
        int64 [B, S], from 0 in each document; padding gets 0.
    """
    order = torch.arange(segment_ids.shape[-1], device=segment_ids.device).expand(segment_ids.shape)
    for key in (*reversed(positions.unbind(-1)), segment_ids):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    counted = positions_from_segments(segment_ids.gather(-1, order))
    return torch.zeros_like(counted).scatter(-1, order, counted)


def _ragged(lengths: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    items: Sequence[Any] = lengths
    rows = [row for row in items if hasattr(row, "__len__") and getattr(row, "ndim", 1) > 0]  # 0-d tensors are numbers
    longest = max((len(row) for row in rows), default=0)
    made = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows] if rows else lengths)
    return made if made.numel() else made.long()


def integers(name: str, values: Tensor) -> Tensor:
    """`values` as int64, because differences of positions wrap around in unsigned and narrow types.

    ValueError, which calls them `name`, for a dtype that is not an integer type.
    """
    if values.is_floating_point() or values.is_complex() or values.dtype is torch.bool:
        raise ValueError(f"{name} must be integers, not {values.dtype}.")
    return values.long()


def _valid(valid: Tensor | None, like: Tensor) -> Tensor:
    if valid is None:
        return torch.ones_like(like, dtype=torch.bool)
    if valid.shape != like.shape:
        raise ValueError(f"valid is {tuple(valid.shape)}: it has one value for each token, {tuple(like.shape)}.")
    return valid != 0  # also the 0/1 integers of a Hugging Face attention_mask


def previous(values: Tensor, valid: Tensor, *, first: Tensor | int) -> Tensor:
    """The value at the last valid token before each token; `first` where there is none."""
    if values.shape[-1] == 1:
        return first.expand(values.shape) if isinstance(first, Tensor) else torch.full_like(values, first)
    index = torch.arange(values.shape[-1], device=values.device)
    last = index.where(valid, -1).cummax(-1).values.roll(1, -1).masked_fill(index == 0, -1)
    return torch.where(last >= 0, values.gather(-1, last.clamp(min=0)), first)


def _isolated(positions: Tensor) -> tuple[Tensor, Tensor]:
    """bool (isolated, repeated): neither continues the previous token nor into the next; has a neighbor's position."""
    index = torch.arange(positions.shape[-1], device=positions.device)
    before, inside = positions.roll(1, -1), index > 0
    follows = (positions == before + 1) & (before >= 0) & inside
    same = (positions == before) & inside
    return (positions >= 0) & ~follows & ~follows.roll(-1, -1), same | same.roll(-1, -1)


def _first(where: Tensor) -> tuple[int, int] | None:
    """Row and index of the first True (host-side); a single row [S] is row 0."""
    places = torch.atleast_2d(where).nonzero()
    return (int(places[0, 0]), int(places[0, 1])) if len(places) else None


NONE = -1  # in place of a token that a document does not have


def preceding_tokens(
    tokens: Tensor,
    positions: Tensor,
    segment_ids: Tensor,
    count: int,
    *,
    before: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """The ids of the tokens at the positions before each token's, in its document alone.

    They are found by positions and segments and not by places in the row, so that any order of the tokens has the same.

    Args:
        tokens: int64 [B, S].
        positions: int64 [B or 1, S]; those of a document differ.
        segment_ids: int64 [B or 1, S]; 0 or less is padding, which has none before it.
        count: How many tokens before.
        before: (tokens, positions, segment ids), each [B, C], of earlier calls: what stands in a cache. Their empty
            slots have the segment 0.

    Returns:
        int64 [B, S, count], the nearest first; -1 where the document has no token.

    Raises:
        ValueError: count is below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; n-grams read at least one token before each.")
    tokens = integers("tokens", tokens)
    positions = integers("positions", positions).expand(tokens.shape)
    segment_ids = integers("segment_ids", segment_ids).expand(tokens.shape)
    ids, places, documents = tokens, positions, segment_ids
    if before is not None:
        new = (tokens, positions, segment_ids)
        ids, places, documents = (torch.cat(pair, dim=1) for pair in zip(before, new, strict=True))
    if not ids.shape[1]:
        return tokens.new_zeros(*tokens.shape, count)
    span = places.amax(dim=1, keepdim=True).clamp(min=0) + 1
    keys = documents.clamp(min=0) * span + places  # of a token: its document, then its position there
    keys, order = keys.where(documents > 0, NONE).sort(dim=1, stable=True)
    ids = ids.gather(1, order)
    back = torch.arange(1, count + 1, device=tokens.device)
    sought_keys = (segment_ids.clamp(min=0) * span + positions)[..., None] - back
    exists = (segment_ids > 0)[..., None] & (positions[..., None] >= back)
    at = torch.searchsorted(keys, sought_keys.flatten(1).contiguous()).clamp(max=keys.shape[1] - 1)
    same = (keys.gather(1, at) == sought_keys.flatten(1)).unflatten(1, tuple(sought_keys.shape[1:]))
    return ids.gather(1, at).unflatten(1, tuple(sought_keys.shape[1:])).where(exists & same, NONE)
