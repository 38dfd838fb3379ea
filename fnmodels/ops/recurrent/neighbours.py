"""A depthwise convolution over both neighbours of a token, which does not cross the borders of documents."""

import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import upcast


def depthwise(x: Tensor, weight: Tensor, segment_ids: Tensor) -> Tensor:
    """y [B, S, C]: y_t = sum over j of weight[:, j] x_(t + j - K // 2), of tokens of t's own document.

    x: [B, S, C]. weight: [C, K]. segment_ids: [B or 1, S], of tokens in their order; padding, of segment 0 or less, has
    no effect.
    """
    S, taps = x.shape[1], weight.shape[1]
    around = (taps // 2, (taps - 1) // 2)
    wide, factors = F.pad(upcast(x), (0, 0, *around)), upcast(weight)
    segments, y = F.pad(segment_ids, around), wide.new_zeros(())
    for j in range(taps):
        own = (segments[:, j : j + S] == segment_ids) & (segment_ids > 0)
        y = y + wide[:, j : j + S].where(own[..., None], 0) * factors[:, j]
    return y.to(x.dtype)
