"""The dtype in which norms, softmaxes and sums are computed."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in fp32, or its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
