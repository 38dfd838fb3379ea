"""What a layer leaves for later ones beside the residual stream: methods of a `Context`; see `carried`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fnmodels.ops.slots import Entry


class Passing:
    """Methods of a `Context` by which layers leave tensors for later ones."""

    tensors: Mapping[str, Any]
    aux: dict[str, Any]

    def lend(self, **tensors: Tensor) -> None:
        """Lends tensors to later layers, whose kind has the word "reads"; see `lent_like` of families."""
        self.aux["kv"] = tensors

    def lent(self) -> Entry:
        """What the last layer of the kind `LayerKind.beside` has lent."""
        value: Entry = self.tensors["kv"]
        return value

    def leave(self, value: Tensor) -> None:
        """Leaves value [B, S, ..., D] for the next layer, whose kind has the word "joins"; see `left_shape`."""
        self.aux["left"] = value

    def left(self) -> Tensor:
        """The tensor that the layer before has left for this one."""
        value: Tensor = self.tensors["left"]
        return value
