"""How a forward pass runs, never what it computes: types of its options."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Block = Callable[..., tuple[Tensor, dict[str, Tensor]]]


LayerFn = Callable[[Block], Block]


# One of KERNELS, or a function of your own (one that fetches the keys of other ranks, say), which is called as
# kernel(q, k, v, mask, scale=, softcap=, sinks=, layout=) with the mask as it was given to `forward`.
Kernel = str | Callable[..., Tensor]
