"""Keys of windows that layers share (DeepSeek V4.1's CSA2), beside which each layer attends to its own last tokens.

A layer is one of three:

    full      makes keys of windows of r tokens, key = norm(sum_j softmax_j(gate_j) number_j), which are values too, and
              index keys, norm(project(key)), both rotated for the window's first position; it chooses among them
    reindex   chooses anew, by queries of its own, among the keys of the full layer before it
    reuse     reads the keys and the choice of the layer before it

Of one full layer on, choices are among `candidates`: the keys of the blocks of windows that this layer scores highest.
A choice names windows by the position of their last token in the document (`fnmodels.ops.indexer`). It has no gradient,
keys have those of all layers that read them. Windows overlap nowhere, and a window of one token is that token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.windows import Windows
from fnmodels.ops.indexer import Indexer, choose, index_queries, index_scores, pieces
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm_fp32_weight

from ..attention.windows import WindowKeys
from .candidates import candidates
from .tokens_and_windows import windows_of


@dataclass(frozen=True)
class SharedKeys:
    """What a layer leaves for those after it.

    windows: whose keys have heads' width. index: index keys [B, C, d]. choices: int64 [B, Q, k], the last choice.
    among: bool [B, Q, C], the windows that later choices are among; None: all that a query sees.
    """

    windows: WindowKeys
    index: Tensor
    choices: Tensor | None = None
    among: Tensor | None = None

    def last_choice(self) -> Tensor:
        """`choices`. ValueError where no layer has chosen."""
        if self.choices is None:
            raise ValueError("No layer has chosen among these keys: a full or reindex layer does, before others read.")
        return self.choices


@dataclass(frozen=True)
class Blocks:
    """Settings of candidates: of `count` blocks of `size` windows."""

    count: int
    size: int


def index_of(weights: Mapping[str, Any], keys: Tensor, *, eps: float) -> Tensor:
    """Index keys [B, C, d] of a full layer's normed keys [B, C, H] before they are rotated.

    weights: "k_proj" [d, H] and "k_scale" [d]. No gradient reaches the keys.
    """
    return rms_norm_fp32_weight(linear(keys.detach(), weights["k_proj"]), weights["k_scale"], eps=eps)


def choose_shared(
    weights: Mapping[str, Any],
    inputs: tuple[Tensor, Tensor],
    table: Tensor,
    shared: SharedKeys,
    windows: Windows,
    *,
    indexer: Indexer,
    blocks: Blocks | None = None,
    choices: Tensor | None = None,
) -> SharedKeys:
    """`shared` with the choice of a full or reindex layer. weights: "q_b_proj" [h d, rank], "weights_proj" [h, D].

    inputs: x [B, Q, D], and what queries are projected from, [B, Q, rank]. table: of the queries, [B, Q, R/2, 2].
    blocks: of the layer that finds candidates for those after it; its own choice is among all windows. choices: a
    choice made before, which replaces the layer's own; else each query has `indexer.count` names, -1 where there are
    fewer windows.
    """
    (x, latent), among = inputs, shared.among
    if not shared.index.shape[1]:  # rows shorter than a window
        none = torch.full((*x.shape[:2], indexer.count), -1, dtype=torch.int64, device=x.device)
        among = among if blocks is None else none[..., :0] >= 0
        return replace(shared, choices=none if choices is None else choices, among=among)
    with torch.no_grad():
        keys = windows_of(shared.windows, windows, among)
        if choices is None:
            choices = choose(weights, x, latent, shared.index, table, keys, indexer)
            choices = F.pad(choices, (0, indexer.count - choices.shape[-1]), value=-1)
        if blocks is not None:
            q, share = index_queries(weights, x, latent, shared.index.shape[-1], table, indexer)
            size = blocks.size * windows.ratio
            parts = pieces(q.shape[1], q.shape[0] * q.shape[2] * shared.index.shape[1])

            def scores(rows: slice) -> Tensor:
                return index_scores(q[:, rows], share[:, rows], shared.index)

            among = candidates(scores, parts, keys, count=blocks.count, size=size)
    return replace(shared, choices=choices, among=among)
