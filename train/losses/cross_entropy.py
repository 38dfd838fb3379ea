"""Cross entropy of token logits, and its gradient in closed form, without autograd.

Every loss returns a sum and a count, so that a step over microbatches divides once by the global count.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.packing import IGNORE
from fnmodels.inputs.values import has_values
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.torch_internals import traced

from .vocab_parallel import Part

ROWS = 64  # tokens; see `loss_and_grad`


@dataclass(frozen=True)
class Terms:
    """Label smoothing and z-loss of `cross_entropy`. part: the logits' vocabulary shard, if any."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    part: Part | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1.")
        if self.z_loss < 0.0:
            raise ValueError(f"z_loss is {self.z_loss}; it must be at least 0.")


def cross_entropy(
    logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The cross entropy of logits and labels as (sum, count), in plain differentiable operations.

    Args:
        logits: [..., V].
        labels: int64 [...], the target at each place; -100 is ignored.
        weights: [...], multiplies each token's loss; a label of weight 0 does not count. None: all 1.
        label_smoothing: The share of the target that is spread uniformly over the vocabulary (arXiv 1512.00567).
        z_loss: The coefficient of log(sum(exp(logits)))^2, which keeps logits from drifting (PaLM, arXiv 2204.02311,
            with 1e-4).

    Returns:
        The sum of the losses in nats, 0-d in fp32 at least, and the number of labels that count, 0-d int64.

    Raises:
        ValueError: Labels or weights have another shape, labels have another dtype or lie outside the vocabulary, or a
            coefficient is out of range.
    """
    check_labels(labels, logits.shape[:-1], "logits' tokens")
    check_targets(labels, logits.shape[-1])
    check_weights(weights, labels)
    return cross_entropy_sum(logits, labels, weights, Terms(label_smoothing, z_loss)), count_labels(labels, weights)


def cross_entropy_sum(logits: Tensor, labels: Tensor, weights: Tensor | None, terms: Terms) -> Tensor:
    wide, targets = upcast(logits.flatten(0, -2)), labels.flatten()
    if terms.part is not None:
        return _partial_cross_entropy(wide, targets, weights, terms, terms.part)
    plain = weights is None and not terms.z_loss
    losses = F.cross_entropy(
        wide, targets, ignore_index=IGNORE, reduction="sum" if plain else "none", label_smoothing=terms.label_smoothing
    )
    if plain:
        return losses
    if terms.z_loss:
        losses = losses + terms.z_loss * torch.where(targets != IGNORE, wide.logsumexp(-1).square(), 0.0)
    return _weighted(losses, targets != IGNORE, weights)


def _weighted(losses: Tensor, valid: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum. A weight is masked where the label does not count: it may be inf there (1 / length 0)."""
    return (losses if weights is None else losses * torch.where(valid, weights.flatten(), 0.0)).sum()


def _partial_cross_entropy(wide: Tensor, targets: Tensor, weights: Tensor | None, terms: Terms, part: Part) -> Tensor:
    """`cross_entropy_sum` on logits of one vocabulary shard; every rank of the group returns the full sum."""
    valid = targets != IGNORE
    total, at, mean = part.totals(wide, torch.where(valid, targets, 0))
    losses = total - (1 - terms.label_smoothing) * at - terms.label_smoothing * mean
    losses = torch.where(valid, losses + terms.z_loss * total.square(), 0.0)
    return _weighted(losses, valid, weights)


def count_labels(labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The number of labels that count, a 0-d int64 tensor."""
    return counted(labels, weights).sum()


def counted(labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mask of the labels that count: neither -100 nor of weight 0."""
    valid = labels != IGNORE
    return valid if weights is None else valid & (weights != 0)


def check_labels(labels: Tensor, shape: torch.Size, of: str) -> None:
    """ValueError unless labels are int64 of `shape`: another shape could broadcast silently."""
    if labels.shape != shape:
        raise ValueError(f"labels must be {list(shape)} like the {of}, not {list(labels.shape)}.")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, not {str(labels.dtype).removeprefix('torch.')}.")


def check_targets(labels: Tensor, size: int | None, name: str = "labels", of: str = "vocabulary") -> None:
    """ValueError for labels that are no integers, and for the first label that is neither -100 nor from 0 to size - 1.

    size None: of any size. name, of: what the labels are called, and of what they are entries, for the message. Tensors
    on the CPU are read, under transforms too. On other devices the read would wait for the device, whose kernel ends
    the process at such a label.
    """
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"{name} must be int64, not {str(labels.dtype).removeprefix('torch.')}.")
    if torch.compiler.is_compiling() or traced() or labels.device.type != "cpu":
        return
    known = torch.func.debug_unwrap(labels)  # of vmap too
    if not has_values(known) or not known.numel():
        return
    low, high = torch.aminmax(known.masked_fill(known == IGNORE, 0))
    if int(low) >= 0 and (size is None or int(high) < size):
        return
    wrong = (known < 0) & (known != IGNORE) | (known >= (known.max() + 1 if size is None else size))
    place = wrong.nonzero()[0].tolist()
    allowed = "it must be 0 or more" if size is None else f"the {of} has {size} entries, 0 to {size - 1}"
    raise ValueError(
        f"{name}{place or ''} is {int(known[tuple(place)])}, but {allowed}; {IGNORE} marks what is not to be learned."
    )


def check_weights(weights: Tensor | None, labels: Tensor) -> None:
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights must be {list(labels.shape)} like the labels, not {list(weights.shape)}.")


def loss_and_grad(logits: Tensor, labels: Tensor, weights: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(sum of the losses, its gradient in the logits' dtype); logits [1, T, V] outside any autograd graph."""
    if logits.dtype == wide_of(logits) or logits.device.type != "cpu" or terms.part is not None:
        loss, grad_logits = _rows_loss_and_grad(logits, labels, weights, terms)
        return loss, grad_logits.to(logits.dtype)
    # On a CPU the fp32 copy of bf16 logits must stay in cache: otherwise it takes four times as long as the rest.
    loss, grad_logits = torch.zeros((), dtype=wide_of(logits)), torch.empty_like(logits)
    blocks = (t.split(ROWS, 1) for t in (logits, labels, weights, grad_logits))
    for rows, target, factor, into in zip(*blocks, strict=True):
        part, made = _rows_loss_and_grad(rows, target, factor, terms)
        loss += part
        into.copy_(made)
    return loss, grad_logits


def _rows_loss_and_grad(logits: Tensor, labels: Tensor, weights: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(sum of the losses, its gradient in fp32 at least), for all tokens at once.

    One softmax gives both: log(sum(exp)) is the largest logit minus the log of the largest probability. That costs two
    cheap maxima, where a log-softmax would cost a second pass of exponentials.
    """
    valid, spread = labels != IGNORE, terms.label_smoothing
    z, target = upcast(logits), torch.where(valid, labels, 0)
    grad_logits = torch.full_like(target, spread - 1, dtype=z.dtype)
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
        grad_logits = grad_logits * own
    if terms.z_loss:
        losses = losses + terms.z_loss * total.square()
        p.mul_((1 + 2 * terms.z_loss * total)[..., None])
    p.scatter_add_(-1, target[..., None], grad_logits[..., None])
    if spread:
        p.sub_(spread / vocabulary)
    factors = torch.where(valid, weights, 0.0)
    p.mul_(factors[..., None])
    return (torch.where(valid, losses, 0.0) * factors).sum(), p


def wide_of(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
