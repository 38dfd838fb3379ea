"""Further tokens of a prompt that a client asks about: `target_prompt_logprobs`, dense or in compressed sparse rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnmodels.models.common.config_json import shown

from ..body import Body
from ..scores import Cells
from .wire import tensor_message

NAME = "target_prompt_logprobs"
NOTHING = -1  # as an id: nothing is asked


@dataclass(frozen=True)
class Targets:
    """Cells of a table [tokens - 1, K] with ids, and its layout, which the answer repeats.

    asked: which of the listed cells have an id. rows, columns: of a sparse table, as in `wire.dense`; None: it is
    dense, and all cells are listed.
    """

    cells: Cells
    asked: Tensor
    shape: tuple[int, int]
    rows: Tensor | None
    columns: Tensor | None

    def message(self, nats: Tensor) -> bytes:
        """The message Tensor with the log-probabilities of the cells, 0 where nothing was asked."""
        found = torch.zeros(len(self.asked), dtype=torch.float32)
        found[self.asked] = nats.float()
        return tensor_message(found.numpy(), self.shape, self.rows, self.columns)


def targets_of(body: Body, tokens: int, vocab: int) -> Targets | None:
    """The field of a request, whose prompt has so many tokens. ApiError for one of another form."""
    given = body.object(NAME)
    if given is None:
        return None
    dtype, shape = given.text("dtype"), given.take("shape")
    if dtype != "int64":
        raise given.wrong("dtype", '"int64"')
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int for size in shape):
        raise given.wrong("shape", "[tokens of the prompt - 1, K]")
    if shape[0] != tokens - 1 or not 1 <= shape[1] < 2**31:
        raise given.wrong("shape", f"[{tokens - 1}, K], for the prompt has {tokens} tokens, and K at least 1")
    ids = _integers(given, "data")
    if bool(((ids < NOTHING) | (ids >= vocab)).any()):
        raise given.wrong("data", f"token ids from 0 to {vocab - 1}, or {NOTHING} for none")
    sparse = "sparse_crow_indices" in given or "sparse_col_indices" in given
    rows = _integers(given, "sparse_crow_indices") if sparse else None
    columns = _integers(given, "sparse_col_indices") if sparse else None
    given.finish()
    if rows is None or columns is None:
        if len(ids) != shape[0] * shape[1]:
            raise given.wrong("data", f"{shape[0] * shape[1]} ids, as its shape {shown(shape)} says")
        places = torch.arange(shape[0]).repeat_interleave(shape[1])
    else:
        _check_sparse(given, rows, columns, len(ids), shape)
        places = torch.repeat_interleave(rows.diff())
    asked = ids != NOTHING
    if not asked.any():
        raise given.wrong("data", f"token ids, of which at least one is not {NOTHING}")
    return Targets(Cells(places[asked], ids[asked]), asked, (shape[0], shape[1]), rows, columns)


def _check_sparse(given: Body, rows: Tensor, columns: Tensor, count: int, shape: Sequence[int]) -> None:
    ordered = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == count and bool((rows.diff() >= 0).all())
    if not ordered:
        raise given.wrong("sparse_crow_indices", f"{shape[0] + 1} ascending numbers from 0 to {count}, the ids in data")
    if len(columns) != count or bool(((columns < 0) | (columns >= shape[1])).any()):
        raise given.wrong("sparse_col_indices", f"{count} numbers from 0 to {shape[1] - 1}")


def _integers(given: Body, name: str) -> Tensor:
    values: Any = given.take(name)
    if not isinstance(values, list) or not all(type(one) is int and abs(one) < 2**63 for one in values):
        raise given.wrong(name, "a list of integers")
    return torch.from_numpy(np.asarray(values, np.int64))
