"""Token embedding: table lookups with range errors in plain words.

Embeddings of n-grams by tables that hashes of token ids index (LongCat-Flash-Lite, arXiv 2601.21204).

    id of head h of order n at t:  (u_t + sum_{j < n} u_{t-j} V^j) mod size_h       of the vocabulary V
    embedding:                     (e_t + sum_h project_h(table_h[id_h])) / (1 + number of heads)

A token that the document does not have counts as 0, and so does whatever stands before a token that ends a text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import linear
from .unread import gradients_are_unread


def embed_tokens(table: Tensor, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Embeddings [B, S, D] of `prepare`'s inputs or token ids [B, S]; vectors [B, S, D] are returned unchanged."""
    tokens = inputs["tokens"] if isinstance(inputs, (dict, Mapping)) else inputs
    if (tokens.is_floating_point() and tokens.ndim < 3) or tokens.dtype is torch.bool or tokens.is_complex():
        raise ValueError(f"Token ids [B, S] are integers, not {tokens.dtype}; vectors [B, S, D] are floating.")
    return tokens if tokens.is_floating_point() else look_up(table, tokens.long(), "token ids")


def look_up(table: Tensor, ids: Tensor, name: str) -> Tensor:
    """[B, S, D], the rows `ids` [B, S] of `table` [rows, D]. On the CPU, ValueError for an id out of range.

    name: what the ids are, for the message.
    """
    try:
        unread = isinstance(table, Tensor) and table.requires_grad and gradients_are_unread(table)
        found: Tensor = _LookUp.apply(table, ids) if unread else F.embedding(ids, table)
        return found
    except IndexError:  # torch's message names neither the id nor the table
        raise ValueError(
            f"The {name} go from {int(ids.min())} to {int(ids.max())}, but the model knows those from 0 to "
            f"{table.shape[0] - 1}."
        ) from None


@dataclass(frozen=True)
class NgramHash:
    """The hash that maps n-grams to rows of tables.

    size: the tokens of the longest n-gram, at least 2. heads: tables of each order from 2 to `size`. rows: table i has
    rows + 2 i + 1. vocabulary: the base of the hash. end: the token id that ends a text; None: there is none.
    """

    size: int
    heads: int
    rows: int
    vocabulary: int
    end: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each table, those of bigrams first."""
        return tuple(self.rows + 2 * i + 1 for i in range((self.size - 1) * self.heads))


def ngram_rows(tokens: Tensor, preceding: Tensor, how: NgramHash) -> list[Tensor]:
    """The row of each token in each table, int64 [B, S] each.

    tokens: int64 [B, S]. preceding: int64 [B, S, size - 1], of `fnmodels.inputs.segments.preceding_tokens`.
    """
    near = preceding.clamp(min=0)
    if how.end is not None:
        past = (preceding == how.end).cumsum(-1) > 0  # no text reads tokens before the end of another
        near = near.where(~past, 0)
    found = []
    for i, size in enumerate(how.sizes):
        ids = tokens
        for j in range(1, i // how.heads + 2):
            ids = ids + near[..., j - 1] * pow(how.vocabulary, j, size)
        found.append(ids % size)
    return found


def add_ngrams(x: Tensor, tables: Sequence[Tensor], projections: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Embeddings x [B, S, D] with those of n-grams. tables: [rows, d] each; projections: [D, d] each."""
    for table, projection, ids in zip(tables, projections, rows, strict=True):
        x = x + linear(look_up(table, ids, "rows of n-grams"), projection)
    return x / (1 + len(tables))


class _LookUp(torch.autograd.Function):
    """F.embedding whose gradient is a node of the graph without a value; see `unread_gradients`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.rows = len(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            unread: Tensor = _UnreadSum.apply(grad_output, ids, ctx.rows)
            return unread, None
        return torch.ops.aten.embedding_dense_backward(grad_output, ids, ctx.rows, -1, False), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        _refuse()


class _UnreadSum(torch.autograd.Function):
    """The sums of grad_output [B, S, D] over equal ids, [rows, D], without their values: NaN everywhere."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_output: Tensor, ids: Tensor, rows: int) -> Tensor:
        return grad_output.new_full((), torch.nan).expand(rows, grad_output.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return F.embedding(ctx.saved_tensors[0], grad_output), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError("Gradients that are never read have no values to differentiate forward.")
