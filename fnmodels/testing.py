"""Property checks for functional models: `Subject`, `check_all` and one function per property.

    from fnmodels.testing import Subject, check_all

    subject = Subject(params, prepare, forward, vocab_size=64)
    check_all(subject)                       # raises AssertionError with a message at the first property that fails

A model is any pure `forward(params, batch) -> logits [B, S, V]` with a `prepare(tokens, positions, segment_ids) ->
batch` that converts [B, S] integers to a tree of batch-leading tensors (masks, tables, ...). Each check builds small
batches and compares two computations that must agree, without a reference model. The contract tests run the checks over
every family; `docs/testing.md` applies them to a model of 30 lines, with five bugs that they detect.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.inputs.order import Segments
from fnmodels.inputs.transforms import permute, rows
from fnmodels.ops.torch_internals import version

from . import tree
from .tree import Tree


@dataclass(frozen=True)
class Subject:
    """The model to test.

    prepare(tokens, positions, segment_ids) -> batch: from [B, S] int tensors; segment 0 is padding, documents count
        from 1, and positions restart in each document unless a check states otherwise. A per-token tensor of the batch
        has the sequence in dimension 1, or is a dense mask [B or 1, ., S, S].
    forward(params, batch) -> logits [B, S, V], with kernels that support torch.func.
    vocab_size: token ids are drawn from 0 <= id < vocab_size.
    sees(t, u): whether the logits at index t of a single document depend on its token u, over all layers; by default
        u <= t. Other models: encoders, and windows that the layers together do not reach beyond.
    rotary(batch): pairs of a rotary table [B, S, R/2, 2] (cos, sin) and its frequencies, fp64 [R/2] in radians per
        position. Without it `check_rotary_tables` checks nothing.
    tolerance: relative to the largest logit compared; ten times as much for gradients.
    exact: whether a document's logits keep their bits when tokens of another document change. False if tokens of
        several documents share a matmul whose size depends on them (experts in a loop): then `tolerance` applies.
    """

    params: Tree
    prepare: Callable[[Tensor, Tensor, Tensor], Tree]
    forward: Callable[[Tree, Tree], Tensor]
    vocab_size: int
    sees: Callable[[int, int], bool] = lambda t, u: u <= t
    rotary: Callable[[Tree], Iterable[tuple[Tensor, Tensor]]] = lambda batch: ()
    tolerance: float = 1e-5
    exact: bool = True

    def tokens(self, *shape: int, seed: int = 0) -> Tensor:
        """Random token ids of this shape."""
        return torch.randint(self.vocab_size, shape, generator=torch.Generator().manual_seed(seed))

    def logits(self, tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> Tensor:
        """Logits [B, S, V]: prepare, then forward."""
        return self.forward(self.params, self.prepare(tokens, positions, segment_ids))

    def alone(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of full documents, one per row."""
        return self.logits(tokens, *_whole(tokens))


def _whole(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(tokens.shape[1]).expand(tokens.shape), torch.ones_like(tokens)


def _documents(*lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(positions, segment_ids) [B, S] of rows of documents; a negative length is padding.

    Independent of the converters in fnmodels.inputs, which the tested model may use itself.
    """
    positions, segment_ids = [], []
    for row in lengths:
        number = itertools.count(1)
        positions.append([t if n > 0 else 0 for n in row for t in range(abs(n))])
        segment_ids.append([i for n in row for i in [next(number) if n > 0 else 0] * abs(n)])
    return torch.tensor(positions), torch.tensor(segment_ids)


MIXED = ((-3, 5, 4), (12,), (7, 1, -4), (1, 10, -1))  # documents and padding on both sides; all rows differ


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
    """f(x), f(longer x), f(x): the last equals the first bit for bit, so no state is kept between calls."""
    short, long = subject.tokens(2, 8), subject.tokens(2, 40, seed=1)
    first = subject.alone(short)
    subject.alone(long)
    again = subject.alone(short)
    if not torch.equal(first, again):
        raise AssertionError("A call changes what a later call returns: something is cached outside of the arguments.")


def check_inputs_unchanged(subject: Subject) -> None:
    """Forward and backward neither write into tensors of params or batch nor add or remove entries."""
    for backward in (False, True):
        positions, segment_ids = _documents(*MIXED)
        batch = subject.prepare(subject.tokens(*positions.shape), positions, segment_ids)
        params = tree.map(lambda p, grad=backward: _leaf(p, grad), subject.params)
        before = {path: (leaf, version(leaf), leaf.detach().clone()) for path, leaf in _tensors(params, batch)}
        logits = subject.forward(params, batch)
        if backward:
            logits.square().sum().backward()
        after = dict(_tensors(params, batch))
        if after.keys() != before.keys():
            raise AssertionError(f"The forward pass changes the entries of its input: {before.keys() ^ after.keys()}.")
        for path, (leaf, writes, value) in before.items():
            if after[path] is not leaf or version(leaf) != writes or not torch.equal(leaf, value):
                which = "backward" if backward else "forward"
                raise AssertionError(f"The {which} pass writes into its input {path!r}.")


def _leaf(param: Tensor, requires_grad: bool) -> Tensor:
    return param.detach().clone().requires_grad_(requires_grad and param.is_floating_point())


def _tensors(params: Tree, batch: Tree) -> Iterator[tuple[str, Tensor]]:
    for name, part in (("params", params), ("batch", batch)):
        yield from ((f"{name}.{k}", leaf) for k, leaf in tree.flatten(part).items() if isinstance(leaf, Tensor))


def check_threads(subject: Subject) -> None:
    """Concurrent calls from two threads return the same logits as separate calls."""
    inputs = [subject.tokens(2, 8), subject.tokens(2, 8, seed=1), subject.tokens(2, 17, seed=2)]
    want = [subject.alone(tokens) for tokens in inputs]
    sentence = "Two threads that call at once disturb each other"
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(subject.alone, tokens) for tokens in inputs * 4]
    for call, value in zip(calls, want * 4, strict=True):
        if (error := call.exception()) is not None:
            raise AssertionError(f"{sentence} (one raises {error!r}, which it does not alone)") from error
        _assert_close(call.result(), value, subject.tolerance, sentence)


def check_microbatches(subject: Subject) -> None:
    """Logits of a batch equal the concatenated logits of its microbatches, for every split of its rows."""
    positions, segment_ids = _documents(*MIXED)
    batch = subject.prepare(subject.tokens(*positions.shape), positions, segment_ids)
    valid, whole = segment_ids > 0, subject.forward(subject.params, batch)
    size = len(positions)
    for number in range(size):
        for cuts in itertools.combinations(range(1, size), number):
            ends = list(itertools.pairwise((0, *cuts, size)))
            parts = [tree.map(lambda t, lo=lo, hi=hi: t[lo:hi], batch) for lo, hi in ends]
            got = torch.cat([subject.forward(subject.params, part) for part in parts])
            message = f"A batch in parts of {[hi - lo for lo, hi in ends]} rows differs from the whole batch"
            _assert_close(got[valid], whole[valid], subject.tolerance, message)


def check_permutation(subject: Subject) -> None:
    """Permuting all per-token tensors along the sequence permutes the logits: nothing depends on a token's index.

    Three orders: head-tail, as context parallelism balances its ranks; one random order; one random order per row.
    A batch with `Segments`, of a model that reads tokens in their order, must be refused by `fnmodels.permute`.
    """
    given = _documents(*MIXED)
    tokens = subject.tokens(*given[0].shape)
    if tree.contains(batch := subject.prepare(tokens, *given), Segments):
        _assert_refused(batch)
        return
    want = subject.logits(tokens, *given)
    (size, length), generator = tokens.shape, torch.Generator().manual_seed(0)
    random = [torch.randperm(length, generator=generator) for _ in range(size)]
    for order in (torch.arange(length).view(4, -1)[[0, 3, 1, 2]].flatten(), random[0], torch.stack(random)):
        moved = permute((tokens, *given), order)
        valid = moved[2] > 0
        message = "Permuted along the sequence, tokens get other logits: something depends on the index of a token"
        _assert_close(subject.logits(*moved)[valid], permute(want, order)[valid], subject.tolerance, message)


def _assert_refused(batch: Tree) -> None:
    try:
        permute(batch, torch.arange(sum(map(abs, MIXED[0]))).flip(0))
    except ValueError as error:
        if "in their order" in str(error):
            return
        raise
    raise AssertionError("A batch of a model that reads tokens in their order was permuted.")


def check_padding(subject: Subject) -> None:
    """Documents alone, and padded on the left, the right or both sides in a batch, have the same logits."""
    lengths, width = (9, 4, 1), 12
    documents = [subject.tokens(1, n, seed=n) for n in lengths]
    want = torch.cat([subject.alone(document)[0] for document in documents])
    for left in (0, 3, width):
        lefts = [min(left, width - n) for n in lengths]
        padded = ((-pads, n, pads + n - width) for pads, n in zip(lefts, lengths, strict=True))
        positions, segment_ids = _documents(*padded)
        valid = segment_ids > 0
        tokens = subject.tokens(*positions.shape, seed=1).masked_scatter(valid, torch.cat(documents, dim=1))
        message = f"With {lefts} pads on the left, and {width} tokens in every row, real tokens get other logits"
        _assert_close(subject.logits(tokens, positions, segment_ids)[valid], want, subject.tolerance, message)


PACKED = ((1, 6, 4, 1), (5, 4, -3), (-2, 1, 9), (3, -2, 6, -1))


def check_packing(subject: Subject) -> None:
    """Documents packed in rows equal the documents alone, in logits and parameter gradients; none attends to another.

    This includes two documents with consecutive positions, which only the segment ids separate.
    """
    positions, segment_ids = _documents(*PACKED)
    tokens, valid = subject.tokens(*positions.shape), segment_ids > 0
    documents = tokens[valid][None].split([n for row in PACKED for n in row if n > 0], dim=1)

    def packed(params: Tree) -> Tensor:
        return subject.forward(params, subject.prepare(tokens, positions, segment_ids))[valid]

    def separate(params: Tree) -> Tensor:
        return torch.cat([subject.forward(params, subject.prepare(d, *_whole(d)))[0] for d in documents])

    _assert_same_function(subject, packed, separate, "Packed in rows, documents differ from the same documents alone")

    (positions, segment_ids), tokens = _documents((5, 6, -1)), subject.tokens(1, 12)
    other = torch.where(segment_ids == 1, (tokens + 1) % subject.vocab_size, tokens)
    before, after = (subject.logits(t, positions, segment_ids)[segment_ids == 2] for t in (tokens, other))
    message = "Changing the first document of a row changes another: documents see each other"
    _assert_close(after, before, 0.0 if subject.exact else subject.tolerance, message)

    # Pieces with consecutive positions, [4 5 6 | 7 8]: only the segment ids separate them.
    positions, segment_ids = torch.arange(4, 9)[None], torch.tensor([[1, 1, 1, 2, 2]])
    tokens, ones = subject.tokens(1, 5), torch.ones_like(segment_ids)

    def in_one_row(params: Tree) -> Tensor:
        return subject.forward(params, subject.prepare(tokens, positions, segment_ids))

    def piece_by_piece(params: Tree) -> Tensor:
        pieces = zip(*(t.split([3, 2], dim=1) for t in (tokens, positions, ones)), strict=True)
        return torch.cat([subject.forward(params, subject.prepare(*piece)) for piece in pieces], dim=1)

    sentence = "Documents whose positions run on from one to the next differ from the same documents alone"
    _assert_same_function(subject, in_one_row, piece_by_piece, sentence)


def check_packing_of_a_cut_document(subject: Subject) -> None:
    """A row that begins in the middle of a document: the given positions and segment ids are used unchanged.

    The expected batch is sliced out of batches of full documents, where positions equal indices, so a prepare that
    recounts positions or searches for end tokens differs from it.
    """
    first, second = subject.tokens(1, 11), subject.tokens(1, 6, seed=1)
    cut = 7
    positions = torch.tensor([[7, 8, 9, 10, 0, 1, 2, 3, 4]])
    segment_ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    row = subject.prepare(torch.cat((first[:, cut:], second[:, 1:]), dim=1), positions, segment_ids)
    wholes = (
        subject.prepare(first, *_whole(first)),
        # after a document of one token, so that it is the second of its row here too
        subject.prepare(second, *_documents((1, 5))),
    )
    got = [_columns(row, 9, slice(0, 4)), _columns(row, 9, slice(4, 9))]
    want = [_columns(wholes[0], 11, slice(cut, 11)), _columns(wholes[1], 6, slice(1, 6))]
    for ours, theirs in zip(got, want, strict=True):
        _assert_same_entries(dict(_tensors({}, ours)), dict(_tensors({}, theirs)), subject.tolerance)

    def packed(params: Tree) -> Tensor:
        return subject.forward(params, row)

    def separate(params: Tree) -> Tensor:
        return torch.cat([subject.forward(params, part) for part in want], dim=1)

    sentence = "A row that begins in the middle of a document differs from that piece alone"
    _assert_same_function(subject, packed, separate, sentence)


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
        sentence = f"In a row that begins in the middle of a document {path!r} is not what the document's tokens have"
        _assert_close(leaf.double(), want[path].double(), tolerance, sentence)


def check_empty_rows(subject: Subject) -> None:
    """Rows of only padding, and documents of one token: finite logits and gradients; padding contributes to neither."""
    given = _documents((1, 1, -4), (-6,), (6,), (-5, 1))
    tokens = subject.tokens(*given[0].shape)

    def squares(params: Tree, keep: list[int]) -> Tensor:
        positions, segment_ids = (t[keep] for t in given)
        logits = subject.forward(params, subject.prepare(tokens[keep], positions, segment_ids))
        return logits[segment_ids > 0].square().sum()

    sentence = "A row of padding is not without effect"
    _assert_same_function(subject, lambda p: squares(p, [0, 1, 2, 3]), lambda p: squares(p, [0, 2, 3]), sentence)


def check_causality(subject: Subject) -> None:
    """Changing token u changes the logits at t if and only if `sees(t, u)`, for every t and u.

    Unchanged means bit for bit, or within the tolerance if the subject is not exact.
    """
    length = 10
    tokens = subject.tokens(1, length).expand(length, length)
    before = subject.alone(tokens)
    noise = 0.0 if subject.exact else subject.tolerance * max(1.0, float(before.abs().max()))
    moved = torch.zeros(length, length, dtype=torch.bool)
    for step in (1, 2, 3):  # row u has another token at u
        other = (tokens + step * torch.eye(length, dtype=torch.long)) % subject.vocab_size
        moved |= ((subject.alone(other) - before).abs() > noise).any(-1).cpu()
    for u, t in itertools.product(range(length), repeat=2):
        if moved[u, t] and not subject.sees(t, u):
            raise AssertionError(f"Changing token {u} moves the logits at {t}, which do not see it.")
        if subject.sees(t, u) and not moved[u, t]:
            raise AssertionError(f"Changing token {u} does not move the logits at {t}, which see it.")


def check_per_sample_gradients(subject: Subject) -> None:
    """vmap(grad) over rows with different masks equals a loop, and vmap the batch; one row is only padding."""
    positions, segment_ids = _documents((6,), (2, 3, -1), (-2, 4), (-6,))
    whole = subject.prepare(subject.tokens(*positions.shape), positions, segment_ids)
    batch, weights = rows(whole), rows((segment_ids > 0).float())

    def loss(params: Tree, row: Tree, weight: Tensor) -> Tensor:
        return (subject.forward(params, row) * weight[..., None]).square().mean(-1).sum()

    both = torch.func.grad_and_value(loss)
    grads, losses = torch.func.vmap(both, in_dims=(None, 0, 0))(subject.params, batch, weights)
    valid = (segment_ids > 0)[..., None]
    squares = subject.forward(subject.params, whole).masked_fill(~valid, 0).square().mean(-1).sum(-1)
    _assert_close(losses, squares, subject.tolerance, "vmap over the rows differs from the forward of the batch")
    for index in range(len(positions)):
        row, weight = (tree.map(lambda t, i=index: t[i], part) for part in (batch, weights))
        want, value = both(subject.params, row, weight)
        _assert_close(losses[index], value, subject.tolerance, "vmap differs from a loop over the rows")
        for path, gradient in tree.flatten(want).items():
            message = f"vmap(grad) differs from a loop over the rows in the gradient of {path!r}"
            _assert_close(tree.flatten(grads)[path][index], gradient, 10 * subject.tolerance, message)


def check_rotary_tables(subject: Subject) -> None:
    """Rotary tables are fp32 for any default dtype, and at position 10^6 differ from fp64 only by fp32 rounding.

    Sets the default dtype temporarily, since a model built under it takes its dtypes from there.
    """
    tokens = subject.tokens(1, 10)
    positions, segment_ids = torch.arange(10**6 - 9, 10**6 + 1)[None], torch.ones_like(tokens)
    for dtype in (torch.float32, torch.bfloat16):
        with _default_dtype(dtype):
            pairs = list(subject.rotary(subject.prepare(tokens, positions, segment_ids)))
        for table, frequencies in pairs:
            if table.dtype != torch.float32:
                raise AssertionError(f"With {dtype} as the default, a rotary table is {table.dtype}; it must be fp32.")
            angles = positions[..., None].to(table.device) * frequencies.double().to(table.device)
            unit = torch.view_as_complex(table.double().contiguous()).sgn()
            worst = float((unit / torch.polar(torch.ones_like(angles), angles)).angle().abs().max())
            if not worst <= 1e-6:
                raise AssertionError(f"At position 10^6 the phase of a rotary table is off by {worst:.3g} radians.")
    if pairs:
        near = _error_in_bf16(subject, tokens, torch.arange(10)[None])
        far = _error_in_bf16(subject, tokens, positions)
        if not far <= 4 * near:  # near 0 positions are exact in bf16: this is the other noise
            raise AssertionError(
                f"In bf16 logits are {far:.3g} off at position 10^6 and {near:.3g} at 0: angles round."
            )


def _error_in_bf16(subject: Subject, tokens: Tensor, positions: Tensor) -> float:
    batch = subject.prepare(tokens, positions, torch.ones_like(tokens))
    low = tree.map(lambda p: p.to(torch.bfloat16) if p.is_floating_point() else p, subject.params)
    high = tree.map(lambda p: p.float() if p.is_floating_point() else p, low)
    got, want = (subject.forward(params, batch).float() for params in (low, high))
    return float((got - want).square().mean().sqrt())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _assert_same_function(
    subject: Subject, first: Callable[[Tree], Tensor], second: Callable[[Tree], Tensor], sentence: str
) -> None:
    """Compares two functions of params: values, and gradients of a fixed random projection of the values."""
    got, gradient, *_ = torch.func.vjp(first, subject.params)
    want, wanted_gradient, *_ = torch.func.vjp(second, subject.params)
    _assert_close(got, want, subject.tolerance, f"{sentence}, in the logits")
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(0), dtype=want.dtype).to(want.device)
    (gradients,), (wanted,) = gradient(weights), wanted_gradient(weights)
    for (path, ours), theirs in zip(tree.flatten(gradients).items(), tree.leaves(wanted), strict=True):
        _assert_close(ours, theirs, 10 * subject.tolerance, f"{sentence}, in the gradient of {path!r}")


CHECKS: tuple[Callable[[Subject], None], ...] = (
    check_history_independence,
    check_inputs_unchanged,
    check_threads,
    check_rotary_tables,
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
    """Runs every check in order; the first that fails raises AssertionError."""
    for check in CHECKS:
        check(subject)
