"""Documents packed in one row equal the same documents alone."""

import torch
from torch import Tensor

from .. import tree
from ..tree import Tree
from .assertions import assert_close, assert_same_function
from .subject import Subject, full_documents, named_tensors, rows_of_documents

PACKED = ((1, 6, 4, 1), (6, 4, -2), (-2, 1, 9), (4, -2, 4, -2))


def check_packing(subject: Subject) -> None:
    """Documents packed in rows equal the documents alone, in logits and parameter gradients; none attends to another.

    This includes two documents with consecutive positions, which only the segment ids separate.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names what differs, and by how much.
    """
    positions, segment_ids = rows_of_documents(*PACKED)
    tokens, valid = subject.tokens(*positions.shape), segment_ids > 0
    documents = tokens[valid][None].split([n for row in PACKED for n in row if n > 0], dim=1)

    def packed(params: Tree) -> Tensor:
        return subject.forward(params, subject.prepare(tokens, positions, segment_ids))[valid]

    # Documents of one length are rows of one batch, each without another beside it in its row.
    sizes = [document.shape[1] for document in documents]
    alike = {size: [i for i, other in enumerate(sizes) if other == size] for size in sizes}

    def separate(params: Tree) -> Tensor:
        found = dict[int, Tensor]()
        for numbers in alike.values():
            rows = torch.cat([documents[i] for i in numbers])
            found |= zip(numbers, subject.forward(params, subject.prepare(rows, *full_documents(rows))), strict=True)
        return torch.cat([found[i] for i in range(len(documents))])

    assert_same_function(subject, packed, separate, "Packed in rows, documents differ from the same documents alone")

    (positions, segment_ids), tokens = rows_of_documents((5, 6, -1)), subject.tokens(1, 12)
    other = torch.where(segment_ids == 1, (tokens + 1) % subject.vocab_size, tokens)
    before, after = (subject.logits(t, positions, segment_ids)[segment_ids == 2] for t in (tokens, other))
    message = "Changing the first document of a row changes another: documents see each other"
    assert_close(after, before, 0.0 if subject.exact else subject.tolerance, message)

    # Pieces with consecutive positions, [4 5 6 | 7 8]: only the segment ids separate them.
    positions, segment_ids = torch.arange(4, 9)[None], torch.tensor([[1, 1, 1, 2, 2]])
    tokens, ones = subject.tokens(1, 5), torch.ones_like(segment_ids)

    def in_one_row(params: Tree) -> Tensor:
        return subject.forward(params, subject.prepare(tokens, positions, segment_ids))

    def piece_by_piece(params: Tree) -> Tensor:
        pieces = zip(*(t.split([3, 2], dim=1) for t in (tokens, positions, ones)), strict=True)
        return torch.cat([subject.forward(params, subject.prepare(*piece)) for piece in pieces], dim=1)

    sentence = "Documents whose positions run on from one to the next differ from the same documents alone"
    assert_same_function(subject, in_one_row, piece_by_piece, sentence)


def check_packing_of_a_cut_document(subject: Subject) -> None:
    """A row that begins in the middle of a document: its positions and segment ids are used unchanged.

    The expected batch is sliced out of batches of full documents, where positions equal indices, so a prepare that
    recounts positions or searches for end tokens differs from it.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names what differs, and by how much.
    """
    first, second = subject.tokens(1, 11), subject.tokens(1, 6, seed=1)
    cut = 7
    positions = torch.tensor([[7, 8, 9, 10, 0, 1, 2, 3, 4]])
    segment_ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    row = subject.prepare(torch.cat((first[:, cut:], second[:, 1:]), dim=1), positions, segment_ids)
    wholes = (
        subject.prepare(first, *full_documents(first)),
        # after a document of one token, so that it is the second of its row here too
        subject.prepare(second, *rows_of_documents((1, 5))),
    )
    got = [_columns(row, 9, slice(0, 4)), _columns(row, 9, slice(4, 9))]
    want = [_columns(wholes[0], 11, slice(cut, 11)), _columns(wholes[1], 6, slice(1, 6))]
    for ours, theirs in zip(got, want, strict=True):
        _assert_same_entries(dict(named_tensors({}, ours)), dict(named_tensors({}, theirs)), subject.tolerance)

    def packed(params: Tree) -> Tensor:
        return subject.forward(params, row)

    def separate(params: Tree) -> Tensor:
        return torch.cat([subject.forward(params, part) for part in want], dim=1)

    sentence = "A row that begins in the middle of a document differs from that piece alone"
    assert_same_function(subject, packed, separate, sentence)


def _columns(batch: Tree, length: int, part: slice) -> Tree:
    """The batch restricted to a slice of the sequence dimension, of size `length`."""

    def cut(leaf: Tensor) -> Tensor:
        if leaf.ndim == 4 and leaf.shape[-2:] == (length, length):
            return leaf[..., part, part]
        return leaf[:, part] if leaf.ndim > 1 and leaf.shape[1] == length else leaf

    return tree.map(cut, batch)


def _assert_same_entries(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    if got.keys() != want.keys():
        raise AssertionError(f"The batch of a cut document has other entries than others: {got.keys() ^ want.keys()}.")
    for path, leaf in got.items():
        if path.endswith("windows.slots"):  # numbers of windows in the row
            continue
        sentence = f"In a row that begins in the middle of a document {path!r} is not what the document's tokens have"
        assert_close(leaf.cpu().double(), want[path].cpu().double(), tolerance, sentence)
