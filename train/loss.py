"""Losses: each returns (sum, count), so that whoever splits a batch divides once by the global count.

The head is where a language model's memory goes: [B, S, V] logits and their gradient are larger than everything else
together. `head_loss` therefore takes the tokens in chunks and, where a gradient is wanted, makes it on the spot: the
gradient of a cross entropy is known as soon as the logits are, so the backward has only to scale it. Nothing is
computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fnmodels
from fnmodels import tree
from fnmodels.mask import Layout
from fnmodels.ops.attention import Kernel
from fnmodels.ops.experts import Experts
from fnmodels.tree import Tree

from .balance import Balance, balance_terms
from .parallel.vocab import Part, Vocab, opened

IGNORE = -100
CHUNK = 512  # tokens; on a CPU, buffers that stay under malloc's 32 MiB mmap threshold at usual vocabularies are reused
ROWS = 64  # tokens; see `_loss_and_slope`

Head = Callable[[list[Tensor], Tensor], Tensor]


def next_token_loss(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    layer_fn: Any = None,
    chunk: int | None = CHUNK,
    length: int | Tensor | None = None,
    experts: str | Experts = "auto",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    balance: Balance | None = None,
    aux: bool = False,
) -> tuple[Any, ...]:
    """(sum of the tokens' cross entropies in nats, fp32 at least; count of labels that count, int64[, aux]).

    batch: tokens, positions, segment_ids, labels, each [B, S]; labels[b, t] is the target predicted at t (already
    shifted), int64, and -100 is ignored. Where it has `weights` [B, S], as `fnmodels.pack` makes them, each token's
    loss is multiplied by its own, and a label of weight 0 does not count. Where it has `routing`, int64 [B, S, sparse
    layers, k], the experts are those, as in `fnmodels.forward`. kernel, layout, layer_fn, experts: see there. length:
    see `fnmodels.prepare`. chunk: see `head_loss`. label_smoothing, z_loss: see `cross_entropy`. balance: what a model
    with experts adds to the sum. aux: return sums of what its routers did too: {"counts": [sparse layers, E] tokens per
    expert, and for coefficients of `balance` that are not 0 "sequence_balance", "batch_balance", "router_z"}.
    """
    how: dict[str, Any] = {"config": config, "kernel": kernel, "layout": layout, "layer_fn": layer_fn, "length": length}
    how["experts"] = experts
    routed = aux or balance is not None
    if routed and not getattr(fnmodels.family_of(config), "ROUTED", False):
        raise ValueError(f"balance and aux are for models with experts, and {config.model_type} has none.")
    taps = ("layers.*.router_logits", "layers.*.expert_indices", "layers.*.counts") if routed else ()
    found = hidden_states(params, batch, **how, taps=taps)
    x, tapped = found if routed else (found, {})
    total, count = head_loss(
        params,
        x,
        batch["labels"],
        config=config,
        chunk=chunk,
        weights=batch.get("weights"),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    if not routed:
        return total, count
    labelled = counted(batch["labels"], batch.get("weights")).sum(1)
    added, sums = balance_terms(tapped, batch["segment_ids"] > 0, labelled, balance or Balance())
    return (total + added, count, sums) if aux else (total + added, count)


def hidden_states(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    kernel: Kernel,
    layout: Layout | None,
    layer_fn: Any,
    length: int | Tensor | None,
    experts: str | Experts = "auto",
    taps: tuple[str, ...] = (),
) -> Any:
    """`fnmodels.hidden` of a batch as `next_token_loss` takes it, after a check of its keys and labels."""
    missing = [name for name in ("tokens", "positions", "segment_ids", "labels") if name not in batch]
    if missing:
        raise ValueError(f"The batch has no {' and no '.join(missing)}; its keys are {sorted(batch)}.")
    check_labels(batch["labels"], batch["tokens"].shape[:2], "tokens")
    inputs, masks, freqs_cis = fnmodels.prepare(
        config,
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        length=length,
    )
    how: dict[str, Any] = {"kernel": kernel, "layout": layout, "layer_fn": layer_fn, "experts": experts, "taps": taps}
    return fnmodels.hidden(params, replayed(inputs, batch), masks, freqs_cis, config=config, **how)


def replayed(inputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What `prepare` made of the batch, with the choice of experts that the batch may hold."""
    return {**inputs, "routing": batch["routing"]} if "routing" in batch else inputs


@dataclass(frozen=True)
class Terms:
    """What a token's loss has beside -log p(label); see `cross_entropy`. part: logits are of that part alone."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    part: Part | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1.")
        if self.z_loss < 0.0:
            raise ValueError(f"z_loss is {self.z_loss}; it must be at least 0.")


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(sum, count) over labels [...] that are not -100; logits [..., V], taken in fp32 at least. Plain operations.

    weights [...]: multiplies each token's loss; a label of weight 0 does not count. label_smoothing: this share of the
    target is spread evenly over the vocabulary (arXiv 1512.00567). z_loss: times log(sum(exp(logits)))^2, which keeps
    logits from drifting (PaLM, arXiv 2204.02311, with 1e-4).
    """
    return _cross_entropy(logits, labels, weights, Terms(label_smoothing, z_loss)), count_labels(labels, weights)


def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None, terms: Terms) -> Tensor:
    wide, targets = logits.flatten(0, -2).to(_wide(logits)), labels.flatten()
    if terms.part is not None:
        return _partial_cross_entropy(wide, targets, weights, terms, terms.part)
    plain = weights is None and not terms.z_loss
    losses = F.cross_entropy(
        wide,
        targets,
        ignore_index=IGNORE,
        reduction="sum" if plain else "none",
        label_smoothing=terms.label_smoothing,
    )
    if plain:
        return losses
    if terms.z_loss:
        losses = losses + terms.z_loss * torch.where(targets != IGNORE, wide.logsumexp(-1).square(), 0.0)
    return (losses if weights is None else losses * weights.flatten()).sum()


def _partial_cross_entropy(wide: Tensor, targets: Tensor, weights: Tensor | None, terms: Terms, part: Part) -> Tensor:
    """As `_cross_entropy`, of the vocabulary's part; the same in all processes."""
    valid = targets != IGNORE
    total, at, mean = part.totals(wide, torch.where(valid, targets, 0))
    losses = total - (1 - terms.label_smoothing) * at - terms.label_smoothing * mean
    losses = torch.where(valid, losses + terms.z_loss * total.square(), 0.0)
    return (losses if weights is None else losses * weights.flatten()).sum()


def count_labels(labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """How many labels count: a 0-d int64 tensor."""
    return counted(labels, weights).sum()


def counted(labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Which labels count: neither -100 nor of weight 0."""
    valid = labels != IGNORE
    return valid if weights is None else valid & (weights != 0)


def check_labels(labels: Tensor, shape: torch.Size, of: str) -> None:
    """Shape and dtype only: labels of another shape would broadcast, or be read in another order, without a word."""
    if labels.shape != shape:
        raise ValueError(f"labels must be {list(shape)} like the {of}, not {list(labels.shape)}.")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, not {str(labels.dtype).removeprefix('torch.')}.")


def head_name(config: Any) -> str:
    """The entry of params that makes logits."""
    return "embed_tokens" if getattr(config, "tie_word_embeddings", False) else "lm_head"


def head_loss(
    params: Tree,
    x: Tensor,
    labels: Tensor,
    *,
    config: Any,
    chunk: int | None = CHUNK,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of `family.unembed` on hidden states x [B, S, D], holding the logits of `chunk` tokens at a time.

    chunk=None holds all of [B, S, V] and consists of plain operations. With a number every transform of torch.func
    works too, but only plain reverse mode is chunked: vmap, jvp and second derivatives take the memory of chunk=None.
    Inside torch.compile the chunks are checkpointed instead. Where the head is a `Vocab` (tensor parallelism) each
    process makes its part of the logits.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be a number of tokens, at least 1, or None.")
    name = head_name(config)
    table, rows = params.get(name), None
    if isinstance(table, Vocab):
        rows = table.part
        params, x = opened(params, name, x)
    check_labels(labels, x.shape[:-1], "hidden states")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights must be {list(labels.shape)} like the labels, not {list(weights.shape)}.")
    terms, count = Terms(label_smoothing, z_loss, rows), count_labels(labels, weights)
    family = fnmodels.family_of(config)
    # The head never reads the layers, and what is not handed in gets no gradient buffer.
    rest = {name: value for name, value in params.items() if name != "layers"}
    flat = tree.flatten(rest)
    leaves = list(flat.values())

    def head(leaves: list[Tensor], x: Tensor) -> Tensor:
        values = iter(leaves)
        return family.unembed(tree.map(lambda _: next(values), rest), x, config=config)

    if chunk is None:
        return _cross_entropy(head(leaves, x), labels, weights, terms), count
    # detached, for a weight teaches nothing; without any, each valid label has 1
    factors = (labels != IGNORE).to(_wide(x)) if weights is None else weights.detach().to(_wide(x))
    tokens, targets, factors = x.flatten(0, 1)[None], labels.flatten()[None], factors.flatten()[None]
    needs = tuple(t.requires_grad for t in (tokens, *leaves))
    if torch.is_grad_enabled() and any(needs) and not torch.compiler.is_compiling():
        return _HeadLoss.apply(head, chunk, needs, terms, targets, factors, tokens, *leaves)[0], count
    loss = torch.zeros((), dtype=_wide(x), device=x.device)

    def one(x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return _cross_entropy(head(leaves, x), labels, weights, terms)

    for part in zip(*(t.split(chunk, 1) for t in (tokens, targets, factors)), strict=True):
        loss = loss + (checkpoint(one, *part, use_reentrant=False) if torch.compiler.is_compiling() else one(*part))
    return loss, count


_STATICS = 6  # arguments of _HeadLoss before x


class _HeadLoss(torch.autograd.Function):
    """Loss and, in the same pass over the chunks, its gradients: outputs here, so that setup_context can keep them.

    Outputs: (loss, gradient of x, gradients of the leaves); the gradient of what needs none, or is not used, is an
    empty tensor. They are differentiable: second derivatives, jvp and vmap go through `_dense`, the same function in
    plain operations.
    """

    @staticmethod
    def forward(
        head: Head,
        chunk: int,
        needs: tuple[bool, ...],
        terms: Terms,
        labels: Tensor,
        weights: Tensor,
        x: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        loss: Any = 0.0
        parts: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(leaves)
        for lo in range(0, x.shape[1], chunk):
            ins = [t.detach().requires_grad_(n) for t, n in zip((x[:, lo : lo + chunk], *leaves), needs, strict=True)]
            with torch.enable_grad():
                logits = head(ins[1:], ins[0])
            part, slope = _loss_and_slope(
                logits.detach(), labels[:, lo : lo + chunk], weights[:, lo : lo + chunk], terms
            )
            loss = loss + part
            wanted = [i for i, n in enumerate(needs) if n]
            grads = torch.autograd.grad(logits, [ins[i] for i in wanted], slope, allow_unused=True)
            del logits, slope
            for i, grad in zip(wanted, grads, strict=True):
                if grad is None:
                    continue
                if i == 0:
                    parts.append(grad)
                else:
                    sums[i - 1] = _accumulate(sums[i - 1], grad, last=lo == 0 and x.shape[1] <= chunk)
        empty = x.new_zeros(0)
        dx = torch.cat(parts, 1) if parts else empty
        d_leaves = [empty if s is None else s.to(leaf.dtype) for s, leaf in zip(sums, leaves, strict=True)]
        return torch.as_tensor(loss, dtype=_wide(x), device=x.device), dx, *d_leaves

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.head, ctx.chunk, ctx.needs, ctx.terms, *tensors = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        size = len(ctx.needs)
        labels, weights, *saved = ctx.saved_tensors
        primals, firsts = saved[:size], saved[size:]
        of_loss, *of_firsts = slopes
        if all(s is None for s in of_firsts):
            grads = [None if d.numel() == 0 or of_loss is None else d * of_loss.to(d.dtype) for d in firsts]
            return *(None,) * _STATICS, *grads
        outputs, pull, *_ = torch.func.vjp(_dense(ctx.head, labels, weights, ctx.needs, ctx.terms), *primals)
        given = [
            torch.zeros_like(out) if s is None or s.shape != out.shape else s
            for s, out in zip(slopes, outputs, strict=True)
        ]
        return *(None,) * _STATICS, *pull(tuple(given))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        size = len(ctx.needs)
        labels, weights, *saved = ctx.saved_tensors
        primals, firsts = saved[:size], saved[size:]
        moves = tangents[_STATICS:]
        given = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(primals, moves, strict=True))
        dense = _dense(ctx.head, labels, weights, ctx.needs, ctx.terms)
        loss, *rest = torch.func.jvp(dense, tuple(primals), given)[1]
        return loss, *(t if t.shape == d.shape else torch.zeros_like(d) for t, d in zip(rest, firsts, strict=True))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        head: Head,
        chunk: int,
        needs: tuple[bool, ...],
        terms: Terms,
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def run(labels: Tensor, weights: Tensor, *primals: Tensor) -> tuple[Tensor, ...]:
            return _dense(head, labels, weights, needs, terms)(*primals)

        outputs = torch.func.vmap(run, in_dims=tuple(in_dims[4:]))(*tensors)
        return outputs, (0,) * len(outputs)


def _dense(
    head: Head, labels: Tensor, weights: Tensor, needs: tuple[bool, ...], terms: Terms
) -> Callable[..., tuple[Tensor, ...]]:
    """(x, *leaves) -> (loss, gradients) as `_HeadLoss`, in plain operations and with all logits at once."""
    wanted = tuple(i for i, n in enumerate(needs) if n)

    def value(*primals: Tensor) -> Tensor:
        return _cross_entropy(head(list(primals[1:]), primals[0]), labels, weights, terms)

    def run(*primals: Tensor) -> tuple[Tensor, ...]:
        grads, loss = torch.func.grad_and_value(value, argnums=wanted)(*primals)
        found = dict(zip(wanted, grads, strict=True))
        return loss, *(found[i] if i in found else p.new_zeros(0) for i, p in enumerate(primals))

    return run


def _loss_and_slope(logits: Tensor, labels: Tensor, weights: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(sum of the losses, its gradient in the logits' dtype); logits [1, T, V], not part of any graph."""
    if logits.dtype == _wide(logits) or logits.device.type != "cpu" or terms.part is not None:
        loss, slope = _rows_loss_and_slope(logits, labels, weights, terms)
        return loss, slope.to(logits.dtype)
    # On a CPU the fp32 copy of bf16 logits must stay in the cache, or it costs four times as much as the rest.
    loss, slope = torch.zeros((), dtype=_wide(logits)), torch.empty_like(logits)
    for rows, target, factor, into in zip(*(t.split(ROWS, 1) for t in (logits, labels, weights, slope)), strict=True):
        part, made = _rows_loss_and_slope(rows, target, factor, terms)
        loss += part
        into.copy_(made)
    return loss, slope


def _rows_loss_and_slope(logits: Tensor, labels: Tensor, weights: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """As `_loss_and_slope`, at once and with the gradient in fp32 at least.

    One softmax gives both: log(sum(exp)) is the largest logit less the log of the largest probability. That costs two
    cheap maxima where a log-softmax would cost a second pass of exponentials.
    """
    valid, spread = labels != IGNORE, terms.label_smoothing
    z, target = logits.to(_wide(logits)), torch.where(valid, labels, 0)
    slope = torch.full_like(target, spread - 1, dtype=z.dtype)
    if terms.part is None:
        p, vocabulary = torch.softmax(z, -1), z.shape[-1]
        total = z.amax(-1) - p.amax(-1).log()  # log(sum(exp(z)))
        losses = total - (1 - spread) * z.gather(-1, target[..., None])[..., 0]
        if spread:
            losses = losses - spread * z.mean(-1)
    else:
        total, at, mean = terms.part.totals(z, target)
        p, vocabulary = (z - total[..., None]).exp(), terms.part.vocabulary
        losses = total - (1 - spread) * at - spread * mean
        target, own = terms.part.local(target)
        slope = slope * own
    if terms.z_loss:
        losses = losses + terms.z_loss * total.square()
        p.mul_((1 + 2 * terms.z_loss * total)[..., None])
    p.scatter_add_(-1, target[..., None], slope[..., None])
    if spread:
        p.sub_(spread / vocabulary)
    factors = torch.where(valid, weights, 0.0)
    p.mul_(factors[..., None])
    return (torch.where(valid, losses, 0.0) * factors).sum(), p


def _accumulate(total: Tensor | None, grad: Tensor, *, last: bool) -> Tensor:
    """Sums over chunks in fp32 at least; a lone chunk is passed on as it is."""
    if total is None:
        return grad if last else grad.to(_wide(grad), copy=True)
    return total.add_(grad)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
