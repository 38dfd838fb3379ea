"""Rows of a batch are independent of each other and of padding, in values and gradients."""

import itertools

import torch
from torch import Tensor

from fnmodels.inputs.transforms import rows

from .. import tree
from ..tree import Tree
from .assertions import assert_close, assert_same_function
from .subject import MIXED, Subject, rows_of_documents


def check_microbatches(subject: Subject) -> None:
    """Logits of a batch equal the concatenated logits of its microbatches, for every split of its rows.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names what differs, and by how much.
    """
    positions, segment_ids = rows_of_documents(*MIXED)
    batch = subject.prepare(subject.tokens(*positions.shape), positions, segment_ids)
    valid, whole = segment_ids > 0, subject.forward(subject.params, batch)
    size = len(positions)
    for number in range(size):
        for cuts in itertools.combinations(range(1, size), number):
            ends = list(itertools.pairwise((0, *cuts, size)))
            parts = [tree.map(lambda t, lo=lo, hi=hi: t[lo:hi], batch) for lo, hi in ends]
            got = torch.cat([subject.forward(subject.params, part) for part in parts])
            message = f"A batch in parts of {[hi - lo for lo, hi in ends]} rows differs from the whole batch"
            assert_close(got[valid], whole[valid], subject.tolerance, message)


def check_padding(subject: Subject) -> None:
    """Documents alone, and padded on the left, the right or both sides in a batch, have the same logits.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names what differs, and by how much.
    """
    lengths, width = (9, 4, 1), 12
    documents = [subject.tokens(1, n, seed=n) for n in lengths]
    want = torch.cat([subject.alone(document)[0] for document in documents])
    for left in (0, 3, width):
        lefts = [min(left, width - n) for n in lengths]
        padded = ((-pads, n, pads + n - width) for pads, n in zip(lefts, lengths, strict=True))
        positions, segment_ids = rows_of_documents(*padded)
        valid = segment_ids > 0
        tokens = subject.tokens(*positions.shape, seed=1).masked_scatter(valid, torch.cat(documents, dim=1))
        message = f"With {lefts} pads on the left, and {width} tokens in every row, real tokens get other logits"
        assert_close(subject.logits(tokens, positions, segment_ids)[valid], want, subject.tolerance, message)


def check_empty_rows(subject: Subject) -> None:
    """Rows of only padding, and documents of one token: finite logits and gradients; padding contributes to neither.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names what is not finite or differs.
    """
    given = rows_of_documents((1, 1, -4), (-6,), (6,), (-5, 1))
    tokens = subject.tokens(*given[0].shape)

    def squares(params: Tree, keep: list[int]) -> Tensor:
        positions, segment_ids = (t[keep] for t in given)
        logits = subject.forward(params, subject.prepare(tokens[keep], positions, segment_ids))
        return logits[segment_ids > 0].square().sum()

    sentence = "A row of padding is not without effect"
    assert_same_function(subject, lambda p: squares(p, [0, 1, 2, 3]), lambda p: squares(p, [0, 2, 3]), sentence)


def check_per_sample_gradients(subject: Subject) -> None:
    """vmap(grad) over rows with different masks equals a loop, and vmap the batch; one row is only padding.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names what differs, and by how much.
    """
    positions, segment_ids = rows_of_documents((6,), (2, 3, -1), (-2, 4), (-6,))
    whole = subject.prepare(subject.tokens(*positions.shape), positions, segment_ids)
    batch, weights = rows(whole), rows((segment_ids > 0).float())

    def loss(params: Tree, row: Tree, weight: Tensor) -> Tensor:
        return (subject.forward(params, row) * weight[..., None]).square().mean(-1).sum()

    both = torch.func.grad_and_value(loss)
    grads, losses = torch.func.vmap(both, in_dims=(None, 0, 0))(subject.params, batch, weights)
    mapped, valid = tree.flatten(grads), (segment_ids > 0)[..., None]
    squares = subject.forward(subject.params, whole).masked_fill(~valid, 0).square().mean(-1).sum(-1)
    assert_close(losses, squares, subject.tolerance, "vmap over the rows differs from the forward of the batch")
    for index in range(len(positions)):
        row, weight = (tree.map(lambda t, i=index: t[i], part) for part in (batch, weights))
        want, value = both(subject.params, row, weight)
        assert_close(losses[index], value, subject.tolerance, "vmap differs from a loop over the rows")
        for path, gradient in tree.flatten(want).items():
            message = f"vmap(grad) differs from a loop over the rows in the gradient of {path!r}"
            assert_close(mapped[path][index], gradient, 10 * subject.tolerance, message)
