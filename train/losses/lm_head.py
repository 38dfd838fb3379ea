"""The loss of the LM head in chunks over tokens, without [B, S, V] logits in memory.

The logits and their gradient take more memory than the rest of a training step. `head_loss` computes the gradient of
each chunk in the forward pass, since the gradient of a cross entropy is known in closed form; the backward pass only
scales it, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fnmodels
from fnmodels import tree
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.ops.torch_internals import is_plain_eager, transformed
from fnmodels.tree import Tree

from .cross_entropy import (
    Terms,
    check_labels,
    check_targets,
    check_weights,
    count_labels,
    cross_entropy_sum,
    loss_and_grad,
    wide_of,
)
from .token_chunks import chunk_of
from .vocab_parallel import Part, opened

Head = Callable[[list[Tensor], Tensor], Tensor]
SMALL = 2**21  # logits of a single chunk for which a Function takes longer than what it saves


def head_name(config: DecoderConfig) -> str:
    """The entry of params that holds the head's weight; ValueError for a model without a head for tokens."""
    if (head := field_of(config, "head")) not in ("lm", "masked_lm"):
        raise ValueError(f"This loss is of tokens, but the model's head is {head!r}: it has no logits of tokens.")
    return "embed_tokens" if getattr(config, "tie_word_embeddings", False) else "lm_head"


def head_logits(params: Tree, x: Tensor, config: DecoderConfig) -> Tensor:
    """Logits [..., V] of hidden states x [B, S, D], or of a chunk of tokens [T, D], which the head takes as one row."""
    rows = x if x.ndim == 3 else x[None]
    return fnmodels.family_of(config).unembed(params, rows, config=config).reshape(*x.shape[:-1], -1)


def head_loss(
    params: Tree,
    x: Tensor,
    labels: Tensor,
    *,
    config: DecoderConfig,
    chunk: int | str | None = "auto",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of the logits of hidden states, whose full logits need not exist at once.

    With chunks all torch.func transforms work, but only plain reverse mode saves memory: vmap, jvp and second
    derivatives use as much as chunk=None. Inside torch.compile several chunks are checkpointed instead. Where the head
    is a `Vocab` (tensor parallelism) each rank computes the logits of its vocabulary shard.

    Args:
        params: The parameters of the model, of which the final norm and the head are read.
        x: Hidden states [B, S, D], before the final norm.
        labels: int64 [B, S], -100 ignored.
        config: The model's config.
        chunk: Tokens whose logits exist at a time; "auto": at least 512 and 32 MiB of logits, on CUDA 2^27 logits;
            None: all [B, S, V], in plain operations, as a single chunk of at most `SMALL` logits is.
        weights: [B, S], multiplies each token's loss; a label of weight 0 does not count. None: all 1.
        label_smoothing: The share of the target that is spread uniformly over the vocabulary.
        z_loss: The coefficient of log(sum(exp(logits)))^2.

    Returns:
        The sum of the losses in nats, 0-d in fp32 at least, and the number of labels that count, 0-d int64.

    Raises:
        ValueError: Labels or weights have another shape, labels lie outside the vocabulary, or a coefficient is out of
            range.
    """
    check_targets(labels, config.vocab_size)
    options: Any = {"chunk": chunk, "weights": weights, "label_smoothing": label_smoothing, "z_loss": z_loss}
    return loss_of_targets(params, x, labels, config=config, **options)


def loss_of_targets(
    params: Tree,
    x: Tensor,
    labels: Tensor,
    *,
    config: DecoderConfig,
    chunk: int | str | None = "auto",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`head_loss` of labels whose values were checked before the model ran."""
    chunk = chunk_of(chunk, config.vocab_size, x.device, x.dtype)
    params, x, part = opened(params, head_name(config), x)
    check_labels(labels, x.shape[:-1], "hidden states")
    check_weights(weights, labels)
    terms, count = Terms(label_smoothing, z_loss, part), count_labels(labels, weights)
    family = fnmodels.family_of(config)
    # The head does not read the layers and the MTP heads; leaving them out saves their gradient buffers.
    rest = {name: value for name, value in params.items() if name not in ("layers", "mtp")}
    size = labels.numel()
    if chunk is not None and weights is not None:
        weights = weights.detach()  # weights are constants in chunks
    if chunk is None or is_plain(size, chunk, config, part):
        return cross_entropy_sum(family.unembed(rest, x, config=config), labels, weights, terms), count
    leaves = tree.leaves(rest)

    def head(leaves: list[Tensor], x: Tensor) -> Tensor:
        values = iter(leaves)
        return family.unembed(tree.map(lambda _: next(values), rest), x, config=config)

    # Without weights each valid label has 1.
    factors = (labels != IGNORE).to(wide_of(x)) if weights is None else weights.to(wide_of(x))
    tokens, targets, factors = x.flatten(0, 1)[None], labels.flatten()[None], factors.flatten()[None]
    needs = tuple(t.requires_grad for t in (tokens, *leaves))
    if torch.is_grad_enabled() and any(needs) and not torch.compiler.is_compiling():
        return _HeadLoss.apply(_Chunked(head, chunk, needs, terms), targets, factors, tokens, *leaves)[0], count
    loss = torch.zeros((), dtype=wide_of(x), device=x.device)

    fused = not torch.is_grad_enabled() and is_plain_eager(tokens, *leaves)

    def one(x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = head(leaves, x)
        if fused:  # the formula of `_HeadLoss`, so that evaluation has the bits of the training forward
            return loss_and_grad(logits, labels, weights, terms)[0]
        return cross_entropy_sum(logits, labels, weights, terms)

    again = torch.compiler.is_compiling() and size > chunk
    for rows in zip(*(t.split(chunk, 1) for t in (tokens, targets, factors)), strict=True):
        loss = loss + (checkpoint(one, *rows, use_reentrant=False) if again else one(*rows))
    return loss, count


def is_plain(tokens: int, chunk: int, config: DecoderConfig, part: Part | None) -> bool:
    """Whether `head_loss` takes plain operations. part: the shard of the vocabulary, over tensor parallelism."""
    return tokens <= chunk and tokens * config.vocab_size <= SMALL and (part is None or transformed())


@dataclass(frozen=True, eq=False)
class _Chunked:
    """The arguments of `_HeadLoss` that are no tensors. needs: whether x and each leaf require a gradient."""

    head: Head
    chunk: int
    needs: tuple[bool, ...]
    terms: Terms

    def dense(self, labels: Tensor, weights: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        """(x, *leaves) -> (loss, gradients) as in `_HeadLoss`, in plain operations with all logits at once."""
        wanted = tuple(i for i, n in enumerate(self.needs) if n)

        def value(*primals: Tensor) -> Tensor:
            return cross_entropy_sum(self.head(list(primals[1:]), primals[0]), labels, weights, self.terms)

        def run(*primals: Tensor) -> tuple[Tensor, ...]:
            grads, loss = torch.func.grad_and_value(value, argnums=wanted)(*primals)
            found = dict(zip(wanted, grads, strict=True))
            return loss, *(found[i] if i in found else p.new_zeros(0) for i, p in enumerate(primals))

        return run


class _HeadLoss(torch.autograd.Function):
    """The chunked loss with its gradients as further outputs of forward, so that setup_context can save them.

    Outputs: (loss, gradient of x, gradients of the leaves), with an empty tensor where an input requires no gradient or
    is unused. Second derivatives, jvp and vmap go through `dense`, the same function in plain operations.
    """

    @staticmethod
    def forward(how: _Chunked, labels: Tensor, weights: Tensor, x: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        chunk, needs = how.chunk, how.needs
        loss: Any = 0.0
        parts: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(leaves)
        for lo in range(0, x.shape[1], chunk):
            ins = [t.detach().requires_grad_(n) for t, n in zip((x[:, lo : lo + chunk], *leaves), needs, strict=True)]
            with torch.enable_grad():
                logits = how.head(ins[1:], ins[0])
            labeled = labels[:, lo : lo + chunk], weights[:, lo : lo + chunk]
            part, grad_logits = loss_and_grad(logits.detach(), *labeled, how.terms)
            loss = loss + part
            wanted = [i for i, n in enumerate(needs) if n]
            grads = torch.autograd.grad(logits, [ins[i] for i in wanted], grad_logits, allow_unused=True)
            del logits, grad_logits
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
        return torch.as_tensor(loss, dtype=wide_of(x), device=x.device), dx, *d_leaves

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.how, *tensors = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        labels, weights, primals, firsts = _saved(ctx)
        of_loss, *of_firsts = grad_outputs
        if all(s is None for s in of_firsts):
            grads = [None if d.numel() == 0 or of_loss is None else d * of_loss.to(d.dtype) for d in firsts]
            return *(None,) * 3, *grads
        outputs, pull, *_ = torch.func.vjp(ctx.how.dense(labels, weights), *primals)
        given = [
            torch.zeros_like(out) if s is None or s.shape != out.shape else s
            for s, out in zip(grad_outputs, outputs, strict=True)
        ]
        return *(None,) * 3, *pull(tuple(given))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        labels, weights, primals, firsts = _saved(ctx)
        given = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(primals, tangents[3:], strict=True))
        loss, *rest = torch.func.jvp(ctx.how.dense(labels, weights), tuple(primals), given)[1]
        return loss, *(t if t.shape == d.shape else torch.zeros_like(d) for t, d in zip(rest, firsts, strict=True))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], how: _Chunked, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def run(labels: Tensor, weights: Tensor, *primals: Tensor) -> tuple[Tensor, ...]:
            return how.dense(labels, weights)(*primals)

        outputs = torch.func.vmap(run, in_dims=tuple(in_dims[1:]))(*tensors)
        return outputs, (0,) * len(outputs)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """(labels, weights, x and the leaves, their gradients) that `_HeadLoss` saved."""
    labels, weights, *saved = ctx.saved_tensors
    size = len(ctx.how.needs)
    return labels, weights, saved[:size], saved[size:]


def _accumulate(total: Tensor | None, grad: Tensor, *, last: bool) -> Tensor:
    """Adds a chunk's gradient in fp32 at least. last: the only chunk, whose gradient is returned unchanged."""
    if total is None:
        return grad if last else grad.to(wide_of(grad), copy=True)
    return total.add_(grad)
