"""Property checks for functional models: the ones our own contract tests run over every family, for yours too.

    from fnmodels.testing import Subject, check_all

    subject = Subject(params, prepare, forward, vocab_size=64)
    check_all(subject)                       # raises AssertionError with a sentence, at the first property that fails

A model here is any pure `forward(params, batch) -> logits [B, S, V]` with a `prepare(tokens, positions, segment_ids) ->
batch` that turns [B, S] integers into whatever tree of batch-leading tensors the model reads (masks, tables, ...). Each
check builds its own small batches, calls both, and compares two computations that must agree; none needs a reference
model. `docs/testing.md` shows them on a model of 30 lines, and five bugs that they catch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tree
from .batch import permute, rows, split
from .segments import positions_from_segments, segments_from_lengths
from .tree import Tree


@dataclass(frozen=True)
class Subject:
    """What is tested. The tolerance is relative to the largest logit compared, ten times it for gradients.

    prepare(tokens, positions, segment_ids) -> batch: [B, S] int tensors in; segment 0 is padding, documents from 1 on,
        positions restart in each document unless a check says otherwise.
    forward(params, batch) -> logits [B, S, V], through kernels that support torch.func.
    causal: logits at t depend on nothing later.
    """

    params: Tree
    prepare: Callable[[Tensor, Tensor, Tensor], Tree]
    forward: Callable[[Tree, Tree], Tensor]
    vocab_size: int
    causal: bool = True
    tolerance: float = 1e-5

    def tokens(self, *shape: int, seed: int = 0) -> Tensor:
        """Random token ids."""
        return torch.randint(self.vocab_size, shape, generator=torch.Generator().manual_seed(seed))

    def logits(self, tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> Tensor:
        """prepare, then forward."""
        return self.forward(self.params, self.prepare(tokens, positions, segment_ids))

    def alone(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of whole documents, one per row."""
        return self.logits(tokens, *_whole(tokens))


def _whole(tokens: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return positions, torch.ones_like(tokens)


def _assert_close(got: Tensor, want: Tensor, tolerance: float, sentence: str) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{sentence} (shapes {tuple(got.shape)} against {tuple(want.shape)})")
    if not (got.isfinite().all() and want.isfinite().all()):
        raise AssertionError(f"{sentence} (some values are not finite)")
    if not got.numel():
        return
    scale = max(1.0, float(want.abs().max()))
    worst = float((got - want).abs().max())
    if worst > tolerance * scale:
        raise AssertionError(f"{sentence} (largest difference {worst:.3g}, allowed {tolerance * scale:.3g})")


def check_history_independence(subject: Subject) -> None:
    """f(x), f(longer x), f(x): the last equals the first bit for bit. Nothing is kept between calls."""
    short, long = subject.tokens(2, 8), subject.tokens(2, 24, seed=1)
    first = subject.alone(short)
    subject.alone(long)
    again = subject.alone(short)
    if not torch.equal(first, again):
        raise AssertionError("A call changes what a later call returns: something is cached outside of the arguments.")


def check_inputs_unchanged(subject: Subject) -> None:
    """No tensor of the parameters or of the batch is written to."""
    batch = subject.prepare(subject.tokens(2, 8), *_whole(subject.tokens(2, 8)))
    watched = {f"params.{k}": t for k, t in tree.flatten(subject.params).items()}
    watched |= {f"batch.{k}": t for k, t in tree.flatten(batch).items()}
    before = {path: (tensor._version, tensor.clone()) for path, tensor in watched.items()}
    subject.forward(subject.params, batch)
    for path, tensor in watched.items():
        version, value = before[path]
        if tensor._version != version or not torch.equal(tensor, value):
            raise AssertionError(f"The forward pass writes into its input {path!r}.")


def check_threads(subject: Subject) -> None:
    """Two threads that call at once get what each gets alone."""
    inputs = [subject.tokens(2, 8), subject.tokens(2, 17, seed=1)]
    want = [subject.alone(tokens) for tokens in inputs]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(subject.alone, inputs * 4))
    for index, value in enumerate(got):
        _assert_close(value, want[index % 2], subject.tolerance, "Two threads that call at once disturb each other")


def check_microbatches(subject: Subject) -> None:
    """The forward of a batch is the concatenation of the forwards of its rows, whose masks differ."""
    lengths = [[8], [3, 5], [2, 3], [1]]
    segment_ids = segments_from_lengths(lengths, 8)
    positions = positions_from_segments(segment_ids)
    batch = subject.prepare(subject.tokens(4, 8), positions, segment_ids)
    valid, whole = segment_ids > 0, subject.forward(subject.params, batch)
    for n in (2, 4):
        parts = torch.cat([subject.forward(subject.params, part) for part in split(batch, n)])
        message = f"A batch in {n} microbatches differs from the whole batch"
        _assert_close(parts[valid], whole[valid], subject.tolerance, message)


def check_permutation(subject: Subject) -> None:
    """Permuting the tokens with everything that belongs to them permutes the logits: nothing depends on an index."""
    lengths = [[12], [5, 4], [7]]
    segment_ids = segments_from_lengths(lengths, 12)
    positions = positions_from_segments(segment_ids)
    tokens = subject.tokens(3, 12)
    want = subject.logits(tokens, positions, segment_ids)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = [permute(t, order) for t in (tokens, positions, segment_ids)]
    valid = moved[2] > 0
    message = "Permuted along the sequence, tokens get other logits: something depends on the index of a token"
    _assert_close(subject.logits(*moved)[valid], permute(want, order)[valid], subject.tolerance, message)


def check_padding(subject: Subject) -> None:
    """Left padding, right padding and none agree at the real tokens."""
    tokens = subject.tokens(2, 7)
    want = subject.alone(tokens)
    for left, right in ((0, 4), (4, 0), (2, 3)):
        padded = [torch.nn.functional.pad(t, (left, right)) for t in (tokens, *_whole(tokens))]
        got = subject.logits(*padded)[:, left : left + 7]
        message = f"Padded by {left} on the left and {right} on the right, real tokens get other logits"
        _assert_close(got, want, subject.tolerance, message)


def check_packing(subject: Subject) -> None:
    """Documents packed in one row equal the documents alone, in logits and parameter gradients; none sees another."""
    lengths = [5, 1, 7, 3]
    segment_ids = segments_from_lengths([lengths], sum(lengths) + 2)
    positions = positions_from_segments(segment_ids)
    tokens = subject.tokens(1, segment_ids.shape[1])
    documents = list(tokens[:, : sum(lengths)].split(lengths, dim=1))

    def packed(params: Tree) -> Tensor:
        return subject.forward(params, subject.prepare(tokens, positions, segment_ids))[:, : sum(lengths)]

    def separate(params: Tree) -> Tensor:
        return torch.cat([subject.forward(params, subject.prepare(d, *_whole(d))) for d in documents], dim=1)

    message = "Packed in one row, documents differ from the same documents alone"
    _assert_close(packed(subject.params), separate(subject.params), subject.tolerance, message + " in their logits")
    for (path, got), want in _gradients(subject.params, packed, separate):
        _assert_close(got, want, 10 * subject.tolerance, f"{message} in the gradient of {path!r}")

    other = tokens.clone()
    other[:, : lengths[0]] = (other[:, : lengths[0]] + 1) % subject.vocab_size
    rest = slice(lengths[0], sum(lengths))
    before, after = (subject.logits(t, positions, segment_ids)[:, rest] for t in (tokens, other))
    if not torch.equal(before, after):
        raise AssertionError("Changing the first document of a row changes another: documents see each other.")


def check_packing_of_a_cut_document(subject: Subject) -> None:
    """A row that begins in the middle of a document: positions are taken as they are said, not counted anew."""
    tokens, segment_ids = subject.tokens(1, 9), segments_from_lengths([[4, 5]], 9)
    positions = torch.cat((torch.arange(6, 10), torch.arange(5)))[None]
    got = subject.logits(tokens, positions, segment_ids)
    parts = [(tokens[:, :4], positions[:, :4]), (tokens[:, 4:], positions[:, 4:])]
    want = torch.cat([subject.logits(t, p, torch.ones_like(t)) for t, p in parts], dim=1)
    message = "A row that begins in the middle of a document differs from that piece alone"
    _assert_close(got, want, subject.tolerance, message)


def check_empty_rows(subject: Subject) -> None:
    """Rows of padding alone, and documents of one token: finite logits and gradients, and padding adds to neither."""
    segment_ids = segments_from_lengths([[1, 1], [], [6]], 6)
    positions = positions_from_segments(segment_ids)
    tokens = subject.tokens(3, 6)

    def loss(params: Tree, keep: slice) -> Tensor:
        parts = (tokens[keep], positions[keep], segment_ids[keep])
        logits = subject.forward(params, subject.prepare(*parts))
        return logits.masked_fill((parts[2] == 0)[..., None], 0).square().sum()

    for (path, got), want in _gradients(subject.params, lambda p: loss(p, slice(0, 3)), lambda p: _skipping(loss, p)):
        _assert_close(got, want, 10 * subject.tolerance, f"A row of padding changes the gradient of {path!r}")


def _skipping(loss: Callable[[Tree, slice], Tensor], params: Tree) -> Tensor:
    return loss(params, slice(0, 1)) + loss(params, slice(2, 3))


def check_causality(subject: Subject) -> None:
    """Later tokens change no logit; visible earlier ones do."""
    tokens, where = subject.tokens(1, 10), 6
    other = tokens.clone()
    other[:, where] = (other[:, where] + 1) % subject.vocab_size
    before, after = subject.alone(tokens), subject.alone(other)
    if subject.causal and not torch.equal(before[:, :where], after[:, :where]):
        raise AssertionError("A token changes logits before it: the model is not causal.")
    if torch.equal(before[:, where:], after[:, where:]):
        raise AssertionError("A token changes no logit at or after it: the model does not read its input.")


def check_per_sample_gradients(subject: Subject) -> None:
    """vmap(grad) over rows of different masks equals a loop."""
    segment_ids = segments_from_lengths([[6], [2, 3], [4]], 6)
    batch = rows(subject.prepare(subject.tokens(3, 6), positions_from_segments(segment_ids), segment_ids))
    weights = rows((segment_ids > 0).float())

    def loss(params: Tree, row: Tree, weight: Tensor) -> Tensor:
        return (subject.forward(params, row).square().mean(-1) * weight).sum()

    got = tree.flatten(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(subject.params, batch, weights))
    for index in range(3):
        row, weight = (tree.map(lambda t, i=index: t[i], part) for part in (batch, weights))
        for path, want in tree.flatten(torch.func.grad(loss)(subject.params, row, weight)).items():
            message = f"vmap(grad) differs from a loop over the rows in the gradient of {path!r}"
            _assert_close(got[path][index], want, 10 * subject.tolerance, message)


def _gradients(
    params: Tree, first: Callable[[Tree], Tensor], second: Callable[[Tree], Tensor]
) -> Iterator[tuple[tuple[str, Tensor], Tensor]]:
    """((path, gradient of the first), gradient of the second), of a fixed random projection of what they return."""

    def gradient(function: Callable[[Tree], Tensor]) -> dict[str, Tensor]:
        def scalar(params: Tree) -> Tensor:
            out = function(params)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
            return (out * weights.to(out.device)).sum()

        return tree.flatten(torch.func.grad(scalar)(params))

    return zip(gradient(first).items(), gradient(second).values(), strict=True)


CHECKS: tuple[Callable[[Subject], None], ...] = (
    check_history_independence,
    check_inputs_unchanged,
    check_threads,
    check_microbatches,
    check_permutation,
    check_padding,
    check_packing,
    check_packing_of_a_cut_document,
    check_empty_rows,
    check_causality,
    check_per_sample_gradients,
)


def check_all(subject: Subject) -> None:
    """Every check, in order; the first that fails raises AssertionError."""
    for check in CHECKS:
        check(subject)
