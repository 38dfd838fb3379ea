"""Logits depend on positions and on the tokens that are seen, never on the index of a token in its row."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fnmodels.inputs.order import Segments
from fnmodels.inputs.transforms import permute

from .. import tree
from ..tree import Tree
from .assertions import assert_close
from .subject import MIXED, Subject, rows_of_documents


def check_permutation(subject: Subject) -> None:
    """Permuting all per-token tensors along the sequence permutes the logits: nothing depends on a token's index.

    Three orders: head-tail, as context parallelism balances its ranks; one random order; one random order per row. A
    batch with `Segments`, of a model that reads tokens in their order, must be refused by `fnmodels.permute`.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names what differs, and by how much.
    """
    given = rows_of_documents(*MIXED)
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
        assert_close(subject.logits(*moved)[valid], permute(want, order)[valid], subject.tolerance, message)


def _assert_refused(batch: Tree) -> None:
    try:
        permute(batch, torch.arange(sum(map(abs, MIXED[0]))).flip(0))
    except ValueError as error:
        if "in their order" in str(error):
            return
        raise
    raise AssertionError("A batch of a model that reads tokens in their order was permuted.")


def check_causality(subject: Subject) -> None:
    """Changing token u changes the logits at t if and only if `sees(t, u)`, for every t and u.

    Unchanged means bit for bit, or within the tolerance if the subject is not exact.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names the two tokens.
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


def check_rotary_tables(subject: Subject) -> None:
    """Rotary tables are fp32 for any default dtype, and at position 10^6 differ from fp64 only by fp32 rounding.

    Sets the default dtype temporarily, since a model built under it takes its dtypes from there.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names the dtype, or the phase error in radians.
    """
    tokens = subject.tokens(1, 10)
    positions, segment_ids = torch.arange(10**6 - 9, 10**6 + 1)[None], torch.ones_like(tokens)
    for dtype in (torch.float32, torch.bfloat16):
        with _default_dtype(dtype):
            pairs = list(subject.rotary(subject.prepare(tokens, positions, segment_ids)))
        for table, frequencies in pairs:
            if table.dtype != torch.float32:
                raise AssertionError(f"With {dtype} as the default, a rotary table is {table.dtype}; it must be fp32.")
            angles = positions[..., None] * frequencies.cpu().double()
            unit = torch.view_as_complex(table.cpu().double().contiguous()).sgn()
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
