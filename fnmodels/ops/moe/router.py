"""MoE routers: the choice of k experts per token and their weights.

    route(logits [..., E], indices=None) -> (weights [..., k], indices [..., k] int64)

Scores are computed in fp32 at least and not cast before the choice: experts whose scores are equal in bf16 would be
chosen by index. torch.topk breaks ties. With `indices` (a replay) nothing is chosen, and the weights come from the live
scores of those experts; the choice itself has no gradient. Logits must be finite.

    function         scores           chosen by              weights                          used by
    softmax_top_k    softmax over E   score + bias, groups   score, optionally renormalized   Mixtral, Qwen, ERNIE 4.5
    top_k_softmax    logits           logit                  softmax over the chosen logits   gpt-oss
    sqrt_softplus_top_k  sqrt(softplus)  score + bias, or id score, renormalized           DeepSeek V4
    sigmoid_top_k    sigmoid          score + bias, groups   score, optionally renormalized   DeepSeek V3, GLM 4.5
    top_k_sigmoid    logits           logit                  sigmoid of the chosen logits     Llama 4, Cohere 2
    sparse_mixer     logits           logit, one by one       softmax over scores near it      Phi-3.5-MoE

The weights have the scores' dtype; `ops.moe.layer.moe` casts them as the family's `RouterDtypes` say.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, softmax

Width = Literal["model", "wide"]


@dataclass(frozen=True)
class RouterDtypes:
    """The dtypes of a family's router: "model" is the activations' dtype, "wide" the same but fp32 at least.

    param: router weight and bias. projection: the logits. score: the scores that the choice is made by. output: the
    returned weights. A family declares them as its trait `router`, and tests verify that it computes so.
    """

    param: Width
    projection: Width
    score: Width
    output: Width

    def output_dtype(self, model: torch.dtype) -> torch.dtype:
        """The dtype of the returned weights for activations of dtype `model`."""
        return model if self.output == "model" else torch.promote_types(model, torch.float32)


def softmax_top_k(
    logits: Tensor,
    indices: Tensor | None = None,
    *,
    k: int,
    bias: Tensor | None = None,
    renormalize: bool = False,
    norm_min: float = 0.0,
    scale: float | Tensor = 1.0,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """The k most probable experts (arXiv 2101.03961).

    bias [E] takes part in the choice only. renormalize: the k weights are divided by their sum, or by `norm_min` if
    that is greater, before `scale`, a number or one for each expert, [E]. groups (n, m): only experts of the m out of n
    groups with the greatest single score can be chosen (arXiv 2405.04434).
    """
    scores = softmax(upcast(logits))
    if indices is None:
        # A group's score is its best expert's (DeepSeek V3 adds the best two instead).
        indices = choose(scores if bias is None else scores + bias, k, groups=groups, best=1)
    weights = scores.gather(-1, indices)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=norm_min) if norm_min else total)
    return _scaled(weights, scale[indices] if isinstance(scale, Tensor) else scale), indices


def sigmoid_top_k(
    logits: Tensor,
    indices: Tensor | None = None,
    *,
    k: int,
    bias: Tensor | None = None,
    renormalize: bool = False,
    norm_eps: float = 1e-20,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """The k experts with the largest sigmoid + `bias` [E]; the bias affects only the choice (arXiv 2412.19437).

    groups (n, m): only experts of the m out of n groups with the largest sum of their two best scores can be chosen.
    renormalize: weights are divided by their sum + `norm_eps`, then multiplied by `scale`.
    """
    scores = elementwise(torch.sigmoid, upcast(logits))
    if indices is None:
        indices = choose(scores if bias is None else scores + bias, k, groups=groups, best=2)
    weights = scores.gather(-1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + norm_eps) if renormalize else weights
    return _scaled(weights, scale), indices


def capped_sigmoid_top_k(
    logits: Tensor, indices: Tensor | None = None, *, softcap: float, **choice: Any
) -> tuple[Tensor, Tensor]:
    """`sigmoid_top_k` of softcap tanh(logits / softcap)."""
    return sigmoid_top_k(elementwise(torch.tanh, upcast(logits) / softcap) * softcap, indices, **choice)


def sqrt_softplus_top_k(
    logits: Tensor,
    indices: Tensor | None = None,
    *,
    k: int,
    bias: Tensor | None = None,
    hashed: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The k experts with the largest sqrt(softplus) + `bias` [E], which affects only the choice (DeepSeek V4).

    hashed: int64 [..., k], experts that are chosen by the token's id instead. The weights sum to `scale`.
    """
    scores = elementwise(F.softplus, upcast(logits)).sqrt()
    if indices is None:
        indices = hashed if hashed is not None else choose(scores if bias is None else scores + bias, k)
    weights = scores.gather(-1, indices)
    return _scaled(weights / (weights.sum(-1, keepdim=True) + 1e-20), scale), indices


def top_k_softmax(logits: Tensor, indices: Tensor | None = None, *, k: int) -> tuple[Tensor, Tensor]:
    """The k experts with the largest logits, weighted by the softmax over these k logits."""
    indices = choose(logits, k) if indices is None else indices
    return softmax(upcast(logits).gather(-1, indices)), indices


def top_k_sigmoid(
    logits: Tensor, indices: Tensor | None = None, *, k: int, renormalize: bool = False
) -> tuple[Tensor, Tensor]:
    """The k experts with the largest logits, each weighted by the sigmoid of its logit.

    renormalize: the weights are divided by their sum.
    """
    indices = choose(logits, k) if indices is None else indices
    weights = elementwise(torch.sigmoid, upcast(logits).gather(-1, indices))
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, indices


def sparse_mixer(logits: Tensor, indices: Tensor | None = None, *, jitter: float) -> tuple[Tensor, Tensor]:
    """The two experts with the largest logits, by SparseMixer-v2 as it is in evaluation (arXiv 2409.12136).

    The weight of a chosen expert, of logit c, is that of the softmax over all experts not chosen before whose logit s
    is within the band (c - s) / max(|s|, c) <= 2 `jitter`. The band itself has no gradient.
    """
    scores = upcast(logits)
    indices = choose(scores, 2) if indices is None else indices
    experts, taken = torch.arange(scores.shape[-1], device=scores.device), torch.zeros_like(scores, dtype=torch.bool)
    weights, fixed = [], scores.detach()
    for expert in indices.unbind(-1):
        chosen = expert[..., None]
        top = fixed.gather(-1, chosen)
        far = (top - fixed) / fixed.abs().maximum(top) > 2 * jitter
        weights.append(softmax(scores.masked_fill(far | taken, -torch.inf)).gather(-1, chosen))
        taken = taken | (experts == chosen)
    return torch.cat(weights, -1), indices


def choose(
    scores: Tensor, k: int, *, groups: tuple[int, int] = (1, 1), best: int = 1, outside: float = -torch.inf
) -> Tensor:
    """[..., k] int64: indices of the largest `scores` [..., E], best first.

    groups (n, m): only experts of the m out of n groups of adjacent experts with the largest sums of their `best`
    largest scores; others count as `outside`, which is finite where they may still be chosen.
    """
    count, kept = groups
    if count > 1:
        grouped = scores.unflatten(-1, (count, -1))
        group_scores = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(-1)
        inside = group_scores.topk(kept, dim=-1).indices
        # comparisons rather than a scatter, which vmap would not support
        others = (inside[..., None] != torch.arange(count, device=scores.device)).all(-2)
        scores = grouped.masked_fill(others[..., None], outside).flatten(-2)
    return scores.topk(k, dim=-1).indices


def _scaled(weights: Tensor, scale: float | Tensor) -> Tensor:
    return weights * scale if isinstance(scale, Tensor) or scale != 1.0 else weights
