"""What a run learns from: rows of one source or of several in given proportions, and the batch of each step."""

from dataclasses import dataclass

import torch

from .rows import Batch, Rows, documents, gather
from .sampling import choose, share


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources of equally long rows; of every sum(weights) rows learnt from, source n gives weights[n]."""

    names: tuple[str, ...]
    rows: tuple[Rows, ...]
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, rows, weight in zip(self.names, self.rows, self.weights, strict=True):
            if rows.count < 1 or weight < 1 or rows.length != self.length:
                raise ValueError(
                    f"source {name} has {rows.count} rows of {rows.length} tokens and the weight {weight}: rows, and "
                    f"their share, are at least 1, and their length is that of {self.names[0]}, {self.length}"
                )

    @property
    def length(self) -> int:
        return self.rows[0].length

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(rows.count for rows in self.rows)

    @property
    def fill(self) -> float:
        """The share of tokens that are not padding in what the sources give together."""
        shares = [weight * rows.fill for weight, rows in zip(self.weights, self.rows, strict=True)]
        return sum(shares) / sum(self.weights)


@dataclass(frozen=True)
class Seen:
    """One row of a batch: which source, the how manieth time through it (from 0), which of its rows and documents."""

    source: str
    epoch: int
    row: int
    documents: tuple[int, ...]


def alone(rows: Rows, name: str = "") -> Mixture:
    return Mixture((name,), (rows,), (1,))


def batch(mixture: Mixture, seed: int, step: int, batch_rows: int, *, rank: int = 0, ranks: int = 1) -> Batch:
    """The rows [B,S] of step `step` (from 0), a function of what is named here and of nothing that happened before.

    `batch_rows` is over all ranks. A data-parallel rank gets its part of the same batch: a run that is resumed with
    another number of ranks goes on exactly where it was. A ValueError where the batch does not divide.
    """
    chosen = share(choose(mixture.counts, mixture.weights, seed, step, batch_rows), rank, ranks)
    parts = [gather(mixture.rows[source], [row]) for source, row, _ in chosen]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def seen(mixture: Mixture, seed: int, step: int, batch_rows: int, *, rank: int = 0, ranks: int = 1) -> list[Seen]:
    """What stands in the batch that `batch` returns for the same arguments."""
    chosen = share(choose(mixture.counts, mixture.weights, seed, step, batch_rows), rank, ranks)
    return [
        Seen(mixture.names[source], epoch, row, tuple(documents(mixture.rows[source], row)))
        for source, row, epoch in chosen
    ]


def epochs(mixture: Mixture, steps: int, batch_rows: int) -> dict[str, float]:
    """How often each source was gone through in the first `steps` steps."""
    rows = steps * batch_rows / sum(mixture.weights)
    sources = zip(mixture.names, mixture.counts, mixture.weights, strict=True)
    return {name: rows * weight / count for name, count, weight in sources}
