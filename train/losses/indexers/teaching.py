"""`TeachIndexers`, a context in which a layer compares its indexer's scores with what its attention looks at.

Attention's weights, summed over heads and divided by their sum, are the distribution that the softmax of the scores
learns: the divergence has no gradient but of the indexer's parameters (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fnmodels.inputs.convert import to_dense
from fnmodels.inputs.mask import Mask
from fnmodels.models.common.context import Context
from fnmodels.ops.attention.choice import Choice
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.indexer import Indexer, index_keys, index_queries, index_scores, keys_of_ranks, pieces
from fnmodels.ops.mla import query_latent
from fnmodels.options import ForwardOptions
from train.comm import collectives
from train.comm.region import Region

TAP = "indexer_kl"


@dataclass(frozen=True)
class TeachIndexers:
    """The `context` of a forward pass that taps "indexer_kl" [B, S] of each layer with an indexer, in nats.

    Attributes:
        dense: Attention sees all keys, and the divergence is over them; else over the chosen ones.
        region: Of tensor parallelism, whose ranks each have some heads; None: all heads are here.
    """

    dense: bool
    region: Region | None = None

    def over_heads(self, region: Region) -> TeachIndexers:
        """The same where each rank of the region has some heads. ValueError where ranks have other positions too."""
        if region.sequence:
            raise ValueError(
                "Indexers are trained on all positions of a row, of which each process of sequence=True has some: take "
                "sequence=False, or cp in place of tp."
            )
        return replace(self, region=region)

    def __call__(self, options: ForwardOptions, taps: tuple[str, ...], tensors: Mapping[str, Any]) -> Context:
        """The context of one call of a layer."""
        return _Teaching(self, options, taps, tensors)


class _Scores(NamedTuple):
    """An indexer's queries [B, Q, heads, d], weights of heads [B, Q, heads] and keys [B, K, d], with gradients."""

    q: Tensor
    share: Tensor
    k: Tensor


class _Teaching(Context):
    def __init__(self, teach: TeachIndexers, *given: Any) -> None:
        super().__init__(*given)
        if "cache" in self.tensors or self.options.invariant:
            raise ValueError('Indexers are trained on full rows, without a cache and without kernel="invariant".')
        self.teach = teach
        self.learner: _Scores | None = None
        self.seen: Any = None

    def choose(self, weights: Mapping[str, Any], x: Tensor, freqs: Tensor, mask: Any, *, indexer: Indexer) -> Any:
        self.seen = mask if self.teach.dense else super().choose(weights, x, freqs, mask, indexer=indexer)
        if "indexer" in weights:
            with torch.no_grad():
                latent = query_latent(weights, x, indexer.latent_eps)
            self.learner = self._scores(weights["indexer"], x.detach(), latent, freqs, indexer)
        return self.seen

    def _scores(self, own: Any, x: Tensor, latent: Tensor, freqs: Tensor, indexer: Indexer) -> _Scores:
        k, ranks = index_keys(own, x, freqs, indexer), keys_of_ranks(self.options.kernel)
        return _Scores(
            *index_queries(own, x, latent, k.shape[-1], freqs, indexer), k if ranks is None else ranks.gather(k)
        )

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, **scoring: Any) -> Tensor:
        out = super()._attention(q, k, v, mask, scale=scale, **scoring)
        if self.learner is not None:
            ranks, seen = keys_of_ranks(self.options.kernel), self.seen
            k = k.detach() if ranks is None else ranks.gather(k.detach())
            seen = ranks.mask(seen) if ranks is not None and isinstance(seen, Mask) else seen
            sinks = scoring.get("sinks")
            self.aux[TAP] = self._divergences(q.detach(), k, seen, scale, None if sinks is None else sinks.detach())
        return out

    def _divergences(self, q: Tensor, k: Tensor, seen: Any, scale: float, sinks: Tensor | None) -> Tensor:
        """[B, Q], few queries at a time, whose scores are computed again in the backward pass."""
        learner, parts = self.learner, []
        assert learner is not None
        heads = max(q.shape[2], learner.q.shape[2])
        for rows in pieces(q.shape[1], q.shape[0] * heads * k.shape[1]):
            allowed = _allowed(seen, rows)
            with torch.no_grad():
                mass = _looked_at(q[:, rows], k, allowed, scale, sinks)
                mass = mass if self.teach.region is None else collectives.summed(mass, self.teach.region.group)
            given = learner.q[:, rows], learner.share[:, rows], learner.k, allowed, mass
            whole = not torch.is_grad_enabled() or learner.q[:, rows].shape == learner.q.shape
            parts.append(divergence(*given) if whole else checkpoint(divergence, *given, use_reentrant=False))
        return torch.cat(parts, dim=1)


def _allowed(seen: Any, rows: slice) -> Tensor:
    """bool [B or 1, Q, K] of these queries."""
    if isinstance(seen, Mask):
        return seen.select(rows, slice(None)).dense()[:, 0]
    if isinstance(seen, Choice):
        return Choice(seen.index[:, rows], seen.seen[:, rows], seen.keys).dense()[:, 0]
    return to_dense(seen)[:, :, rows].any(dim=1)


def _looked_at(q: Tensor, k: Tensor, allowed: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """fp32 [B, Q, K]: the weights of attention of q [B, Q, N, H] on k [B, K, G, H], summed over heads.

    sinks: [N] or None; what a head gives to its sink it takes from its keys.
    """
    groups = k.shape[2]
    rows = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, G, R, Q, H]
    scores = upcast(rows @ k.permute(0, 2, 3, 1).unsqueeze(2)) * scale
    scores = scores.masked_fill(~allowed[:, None, None], -torch.inf)
    if sinks is not None:
        sunk = upcast(sinks).unflatten(0, (groups, -1))[..., None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sunk), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return weights.nan_to_num(0).sum((1, 2))  # NaN for a query without keys


def divergence(q: Tensor, share: Tensor, k: Tensor, allowed: Tensor, mass: Tensor) -> Tensor:
    """[B, Q]: KL(p || softmax of the indexer's scores over the allowed keys), p being `mass` divided by its sum.

    q [B, Q, heads, d], share [B, Q, heads], k [B, K, d]: see `index_scores`. allowed: bool [B or 1, Q, K]. mass: fp32
    [B, Q, K], not negative, 0 where not allowed. 0 for a query that is allowed no key.
    """
    scores = index_scores(q, share, k).masked_fill(~allowed, torch.finfo(torch.float32).min)
    p = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    return (torch.special.xlogy(p, p) - p * scores.log_softmax(-1)).sum(-1)
