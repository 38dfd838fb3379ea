"""Mixing of data sources by weight: the training batch of a step as a pure function of the seed and the step."""

from dataclasses import dataclass

import torch

from train.batch import Entries

from .rows import Rows, document_indices, make_batch
from .sampling import rank_slice, sample_rows


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources of rows of one length; of every sum(weights) training rows, source n contributes weights[n]."""

    names: tuple[str, ...]
    rows: tuple[Rows, ...]
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, rows, weight in zip(self.names, self.rows, self.weights, strict=True):
            if rows.count < 1 or weight < 1 or rows.length != self.length:
                raise ValueError(
                    f"source {name} has {rows.count} rows of {rows.length} tokens and the weight {weight}: both "
                    f"numbers must be at least 1, and the rows as long as those of {self.names[0]}, {self.length}"
                )

    @property
    def length(self) -> int:
        return self.rows[0].length

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(rows.count for rows in self.rows)

    @property
    def fill(self) -> float:
        """The fraction of tokens that are not padding, weighted over the sources."""
        fills = [weight * rows.fill for weight, rows in zip(self.weights, self.rows, strict=True)]
        return sum(fills) / sum(self.weights)


@dataclass(frozen=True)
class RowOrigin:
    """The origin of one row of a batch: source, epoch over that source (from 0), index of the row, its documents."""

    source: str
    epoch: int
    row: int
    documents: tuple[int, ...]


def batch(mixture: Mixture, seed: int, step: int, batch_rows: int, *, rank: int = 0, ranks: int = 1) -> Entries:
    """The batch of step `step` (from 0), tensors [B, S]: a pure function of its arguments, with no loader state.

    `batch_rows` counts the rows over all ranks. A data-parallel rank gets its contiguous slice of that batch, so that
    a run resumed on another number of ranks continues exactly. ValueError where `ranks` does not divide `batch_rows`.
    """
    chosen = rank_slice(sample_rows(mixture.counts, mixture.weights, seed, step, batch_rows), rank, ranks)
    rows = [make_batch(mixture.rows[source], [row]) for source, row, _ in chosen]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def batch_origins(
    mixture: Mixture, seed: int, step: int, batch_rows: int, *, rank: int = 0, ranks: int = 1
) -> list[RowOrigin]:
    """The origin of each row of the batch that `batch` returns for the same arguments."""
    chosen = rank_slice(sample_rows(mixture.counts, mixture.weights, seed, step, batch_rows), rank, ranks)
    return [
        RowOrigin(mixture.names[source], epoch, row, tuple(document_indices(mixture.rows[source], row)))
        for source, row, epoch in chosen
    ]


def epochs(mixture: Mixture, steps: int, batch_rows: int) -> dict[str, float]:
    """The number of epochs over each source after `steps` steps, by source name."""
    rows = steps * batch_rows / sum(mixture.weights)
    sources = zip(mixture.names, mixture.counts, mixture.weights, strict=True)
    return {name: rows * weight / count for name, count, weight in sources}
