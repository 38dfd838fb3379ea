"""The model that is tested, and the batches of documents that the checks give it."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..tree import Tree


@dataclass(frozen=True)
class Subject:
    """The model to test.

    Args:
        params: The tree of parameters.
        prepare: (tokens, positions, segment_ids) -> batch, from [B, S] int tensors; segment 0 is padding, documents
            count from 1, and positions restart in each document unless a check states otherwise. A per-token tensor of
            the batch has the sequence in dimension 1, or is a dense mask [B or 1, ., S, S].
        forward: (params, batch) -> logits [B, S, V], with kernels that support torch.func.
        vocab_size: Token ids are drawn from 0 <= id < vocab_size.
        sees: (t, u) -> whether the logits at index t of a single document depend on its token u, over all layers; by
            default u <= t. Other models: encoders, and windows that the layers together do not reach beyond.
        rotary: (batch) -> pairs of a rotary table [B, S, R/2, 2] (cos, sin) and its frequencies, fp64 [R/2] in radians
            per position. Without it `check_rotary_tables` checks nothing.
        tolerance: Relative to the largest logit compared; ten times as much for gradients.
        exact: Whether a document's logits keep their bits when tokens of another document change. False if tokens of
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
        """Random token ids.

        Args:
            *shape: The sizes.
            seed: Of the ids.

        Returns:
            int64 of this shape.
        """
        return torch.randint(self.vocab_size, shape, generator=torch.Generator().manual_seed(seed))

    def logits(self, tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> Tensor:
        """The model's logits: prepare, then forward.

        Args:
            tokens: int64 [B, S].
            positions: int64 [B, S].
            segment_ids: int64 [B, S].

        Returns:
            [B, S, V].
        """
        return self.forward(self.params, self.prepare(tokens, positions, segment_ids))

    def alone(self, tokens: Tensor) -> Tensor:
        """The model's logits of full documents, one per row.

        Args:
            tokens: int64 [B, S].

        Returns:
            [B, S, V].
        """
        return self.logits(tokens, *full_documents(tokens))


def full_documents(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(positions, segment_ids) [B, S] of one document per row, without padding."""
    return torch.arange(tokens.shape[1]).expand(tokens.shape), torch.ones_like(tokens)


def rows_of_documents(*lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
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


def named_tensors(params: Tree, batch: Tree) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor of params and of a batch."""
    for name, part in (("params", params), ("batch", batch)):
        yield from ((f"{name}.{k}", leaf) for k, leaf in tree.flatten(part).items() if isinstance(leaf, Tensor))
