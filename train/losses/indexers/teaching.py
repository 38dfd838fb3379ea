"""`TeachIndexers`, a context in which a layer compares its indexer's scores with what its attention looks at.

Attention's weights, summed over heads and divided by their sum, are the distribution that the softmax of the scores
learns: the divergence has no gradient but of the indexer's parameters (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

Where blocks of keys are chosen by scores of keys, for each head of keys (MiniMax M3), the distribution is over keys,
and the divergence is the mean over these heads (arXiv 2606.13392). Where scores are of pools of keys (Qwen 3.8 Flash
Next, GLM 5.3 Flash), it is over complete blocks, each with the largest weight of its keys, as Megatron-LM trains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fnmodels import tree
from fnmodels.inputs.convert import to_dense
from fnmodels.inputs.mask import Mask
from fnmodels.models.common.context import Context
from fnmodels.ops.attention.choice import Choice
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.indexer import (
    Indexer,
    Keys,
    index_keys,
    index_queries,
    index_scores,
    keys_of,
    keys_of_ranks,
    pieces,
)
from fnmodels.ops.indexers.blocks import IndexScores
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
        choices: How many heads of keys with a choice of their own the ranks share; 0: the choice is of all heads.
    """

    dense: bool
    region: Region | None = None
    choices: int = 0

    def over_heads(self, region: Region, choices: int) -> TeachIndexers:
        """The same where each rank of the region has some heads."""
        return replace(self, region=region, choices=choices)

    def __call__(self, options: ForwardOptions, taps: tuple[str, ...], tensors: Mapping[str, Any]) -> Context:
        """The context of one call of a layer."""
        return _Teaching(self, options, taps, tensors)


@dataclass(frozen=True)
class _OfKeys:
    """An indexer's queries [B, Q, heads, d], weights of heads [B, Q, heads] and keys [B, K, d], with gradients."""

    q: Tensor
    share: Tensor
    k: Tensor
    groups: int = 1

    @property
    def products(self) -> int:
        """How many are computed for one query of each row."""
        return self.q.shape[0] * self.q.shape[2] * self.k.shape[1]

    def divergence(self, rows: slice, allowed: Tensor, mass: Tensor) -> Tensor:
        """[B, rows] of allowed bool [B or 1, 1, rows, K] and mass [B, 1, rows, K]."""
        return divergence(self.q[:, rows], self.share[:, rows], self.k, allowed[:, 0], mass[:, 0])


@dataclass(frozen=True)
class _OfBlocks:
    """The scores of an indexer that chooses blocks of `size` of these keys, for groups of heads; see `IndexScores`."""

    scored: IndexScores
    keys: Keys
    size: int
    groups: int

    @property
    def products(self) -> int:
        """How many are computed for one query of each row."""
        return self.scored.products

    def divergence(self, rows: slice, allowed: Tensor, mass: Tensor) -> Tensor:
        """[B, rows] of allowed bool [B or 1, groups or 1, rows, K] and mass [B, groups, rows, K]."""
        scores, blocks = self.scored.of(rows).transpose(1, 2) * self.scored.scale, self.scored.blocks
        if blocks is not None:  # of which complete ones are chosen by score
            complete = blocks.sums(self.keys.allowed(rows)).unsqueeze(1) >= self.size
            allowed, mass = complete & (blocks.sums(allowed) > 0), blocks.largest(mass)
        return group_divergence(scores, allowed, mass)


class _Teaching(Context):
    def __init__(self, teach: TeachIndexers, *given: Any) -> None:
        super().__init__(*given)
        if "cache" in self.tensors or self.options.invariant:
            raise ValueError('Indexers are trained on full rows, without a cache and without kernel="invariant".')
        self.teach = teach
        self.learner: _OfKeys | _OfBlocks | None = None
        self.seen: Any = None

    def choose(self, weights: Mapping[str, Any], x: Tensor, freqs: Tensor, mask: Any, *, indexer: Indexer) -> Any:
        self.seen = mask if self.teach.dense else super().choose(weights, x, freqs, mask, indexer=indexer)
        if "indexer" in weights:
            x, freqs = x.detach(), tree.map(torch.detach, freqs)  # a table may be of learned frequencies
            with torch.no_grad():
                latent = query_latent(weights, x, indexer.latent_eps)  # or x, where queries have no latent
            self.learner = self._of_keys(weights["indexer"], x, latent, freqs, indexer)
        return self.seen

    def _of_keys(self, own: Any, x: Tensor, latent: Tensor, freqs: Tensor, indexer: Indexer) -> _OfKeys:
        k, ranks = index_keys(own, x, freqs, indexer), keys_of_ranks(self.options.kernel)
        return _OfKeys(
            *index_queries(own, x, latent, k.shape[-1], freqs, indexer), k if ranks is None else ranks.gather(k)
        )

    def chose_blocks(self, weights: Any, x: Any, freqs: Any, mask: Any, seen: Any, *, indexer: Any, groups: int) -> Any:
        self.seen = mask if self.teach.dense else seen
        if weights is not None:
            weights = self._of_all_choices(weights)
            ranks, read = keys_of_ranks(self.options.kernel), indexer.index(weights, x, freqs)
            keys = keys_of(mask if ranks is None else ranks.mask(mask))
            read = read if ranks is None else {name: ranks.gather(t) for name, t in read.items()}
            self.learner = _OfBlocks(indexer.scores(weights, x, read, freqs, keys), keys, indexer.size, groups)
        return self.seen

    def chose_windows(
        self, weights: Any, inputs: Any, mask: Any, freqs: Any, choices: Any, *, indexer: Any, keys: Any
    ) -> Any:
        (x, latent), k = inputs, keys().keys
        self.learner = _OfKeys(*index_queries(weights, x, latent, k.shape[-1], freqs["table"], indexer), k)
        return None if self.teach.dense else choices

    def saw_windows(
        self, q: Tensor, keys: Tensor, seen: Tensor | Choice, tokens: int, *, scale: float, sinks: Tensor | None
    ) -> None:
        if self.learner is not None:
            sinks = None if sinks is None else sinks.detach()
            self.aux[TAP] = self._divergences(q.detach(), keys.detach(), seen, scale, sinks, tokens)

    def _of_all_choices(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights with the queries of all heads that choose, which ranks of tp share: all compute the same."""
        region, choices = self.teach.region, self.teach.choices
        if region is None or not choices:
            return weights
        if choices % region.size:
            raise ValueError(
                f"{choices} heads of keys have a choice of blocks each, which tp={region.size} does not divide: train "
                "their indexers over fsdp or cp in place of tp."
            )
        own = weights["q_proj"]  # a tensor-parallel projection, which reads all positions of a row
        return {**weights, "q_proj": replace(own, weight=collectives.join(own.weight, 0, region.group))}

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, **scoring: Any) -> Tensor:
        out = super()._attention(q, k, v, mask, scale=scale, **scoring)
        if self.learner is not None:
            ranks, seen = keys_of_ranks(self.options.kernel), self.seen
            k = k.detach() if ranks is None else ranks.gather(k.detach())
            seen = ranks.mask(seen) if ranks is not None and isinstance(seen, Mask) else seen
            sinks = scoring.get("sinks")
            self.aux[TAP] = self._divergences(q.detach(), k, seen, scale, None if sinks is None else sinks.detach())
        return out

    def _divergences(
        self, q: Tensor, k: Tensor, seen: Any, scale: float, sinks: Tensor | None, first: int = 0
    ) -> Tensor:
        """[B, Q], few queries at a time, whose scores are computed again in the backward pass.

        first: the first of the keys that the indexer scores.
        """
        learner, parts = self.learner, []
        assert learner is not None
        for rows in pieces(q.shape[1], max(q.shape[0] * q.shape[2] * k.shape[1], learner.products)):
            allowed = _allowed(seen, rows, learner.groups)
            with torch.no_grad():
                mass, allowed = _looked_at(q[:, rows], k, allowed, scale, sinks)[..., first:], allowed[..., first:]
                mass = mass.sum(1, keepdim=True) if learner.groups == 1 else mass
                given = (rows, *self._of_all_heads(allowed, mass))
            whole = not torch.is_grad_enabled() or mass.shape[2] == q.shape[1]
            parts.append(
                learner.divergence(*given) if whole else checkpoint(learner.divergence, *given, use_reentrant=False)
            )
        return torch.cat(parts, dim=1)

    def _of_all_heads(self, allowed: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """(allowed, mass) with what the heads of other ranks of tp see: side by side, or added to one choice's."""
        region = self.teach.region
        if region is None:
            return allowed, mass
        if not self.teach.choices:
            return allowed, collectives.summed(mass, region.group)
        own = allowed.expand(mass.shape).to(mass.dtype)
        mass, seen = (collectives.all_gather(t, 1, region.group) for t in (mass, own))
        return seen > 0, mass


def _allowed(seen: Any, rows: slice, groups: int) -> Tensor:
    """bool [B or 1, groups or 1, Q, K] of these queries."""
    if isinstance(seen, Mask):
        return seen.select(rows, slice(None)).dense()[:, :1]
    if isinstance(seen, Choice):
        return Choice(seen.index[:, rows], seen.seen[:, rows], seen.keys, seen.groups).dense()
    dense = to_dense(seen)[:, :, rows]
    return dense.unflatten(1, (min(groups, dense.shape[1]), -1)).any(dim=2)


def _looked_at(q: Tensor, k: Tensor, allowed: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """fp32 [B, G, Q, K]: the weights of attention of q [B, Q, N, H] on k [B, K, G, H], summed over a group's heads.

    sinks: [N] or None; what a head gives to its sink it takes from its keys.
    """
    groups = k.shape[2]
    rows = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, G, R, Q, H]
    scores = upcast(rows @ k.permute(0, 2, 3, 1).unsqueeze(2)) * scale
    scores = scores.masked_fill(~allowed[:, :, None], -torch.inf)
    if sinks is not None:
        sunk = upcast(sinks).unflatten(0, (groups, -1))[..., None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sunk), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return weights.nan_to_num(0).sum(2)  # NaN for a query without keys


def divergence(q: Tensor, share: Tensor, k: Tensor, allowed: Tensor, mass: Tensor) -> Tensor:
    """[B, Q]: KL(p || softmax of the indexer's scores over the allowed keys), p being `mass` divided by its sum.

    q [B, Q, heads, d], share [B, Q, heads], k [B, K, d]: see `index_scores`. allowed: bool [B or 1, Q, K]. mass: fp32
    [B, Q, K], not negative, 0 where not allowed. 0 for a query that is allowed no key.
    """
    return _divergence(index_scores(q, share, k), allowed, mass)


def group_divergence(scores: Tensor, allowed: Tensor, mass: Tensor) -> Tensor:
    """[B, Q]: KL(p || softmax of the allowed scores), the mean over groups of heads.

    scores: fp32 [B, G, Q, C], of keys or blocks. allowed: bool [B, G or 1, Q, C]. mass: fp32 [B, G, Q, C], of which
    that of allowed entries, divided by its sum, is p. 0 for a query without an allowed entry.
    """
    return _divergence(scores, allowed, mass.where(allowed, 0)).mean(1)


def _divergence(scores: Tensor, allowed: Tensor, mass: Tensor) -> Tensor:
    """Over the last dimension, of which a row without an allowed entry gives 0."""
    scores = scores.masked_fill(~allowed, torch.finfo(torch.float32).min)
    p = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    return (torch.special.xlogy(p, p) - p * scores.log_softmax(-1)).sum(-1)
