"""Log-probability and entropy from logits, with a backward pass that recomputes the softmax in cache-sized blocks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE
from fnmodels.inputs.values import readable
from fnmodels.ops.dtypes import upcast

FLOOR = -1e30  # lower bound of log p: exp of it is 0, and products with it stay finite
BLOCK = 1 << 18  # elements of logits per block on a CPU: 1 MB in fp32


class Scores(torch.autograd.Function):
    """(logp, entropy) [T] of logits [T, V] and labels [T], as in `logprobs`; backward keeps only logits and labels.

    Plain operations would save four more tensors of the logits' size. The backward pass recomputes the probabilities in
    blocks of rows and uses the closed-form gradients: d logp = 1(label) - p, and d entropy = -p (log p + H). Second
    derivatives, jvp and vmap are those of plain operations.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        found = [scores(rows, target, temperature) for rows, target in _blocks(logits, labels)]
        logp, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logp, entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, labels, ctx.temperature = inputs
        ctx.save_for_backward(logits, labels)
        ctx.save_for_forward(logits, labels)

    @staticmethod
    def backward(ctx: Any, of_logp: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: plain operations, which autograd can record
            return _grad_logits(logits, labels, of_logp, of_entropy, ctx.temperature), None, None
        grad_logits = of_logp.new_empty(logits.shape, dtype=logits.dtype)
        for z, target, *grads, into in _blocks(logits, labels, of_logp, of_entropy, grad_logits):
            into.copy_(_grad_logits(z, target, grads[0], grads[1], ctx.temperature))
        return grad_logits, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        logits, labels = ctx.saved_tensors
        moved = upcast(tangent)
        one, zero = (torch.full_like(labels, value, dtype=moved.dtype) for value in (1, 0))
        of_logp, of_entropy = (_grad_logits(logits, labels, *g, ctx.temperature) for g in ((one, zero), (zero, one)))
        return (of_logp * moved).sum(-1), (of_entropy * moved).sum(-1)


def scores(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability of the label, entropy) [...] in nats from logits [..., V]; both 0 where the label is -100."""
    wide = upcast(logits)
    every = torch.log_softmax(wide if temperature == 1 else wide / temperature, -1)
    valid = labels != IGNORE
    logp = every.gather(-1, torch.where(valid, labels, 0)[..., None])[..., 0]
    entropy = _entropy(every.exp(), _finite(every))[..., 0]
    return torch.where(valid, logp, 0.0), torch.where(valid, entropy, 0.0)


def _grad_logits(logits: Tensor, labels: Tensor, of_logp: Tensor, of_entropy: Tensor, temperature: float) -> Tensor:
    """The gradient with respect to the logits, in their dtype, from the gradients of logp and entropy."""
    wide, valid = upcast(logits), labels != IGNORE
    every = torch.log_softmax(wide if temperature == 1 else wide / temperature, -1)
    p, every = every.exp(), _finite(every)
    entropy = _entropy(p, every)
    of_logp, of_entropy = (torch.where(valid, g, 0.0)[..., None] for g in (of_logp, of_entropy))
    # -p (of_logp + of_entropy (log p + entropy)), in two passes over the vocabulary
    grad_logits = p * torch.addcmul(-of_logp - of_entropy * entropy, every, -of_entropy)
    grad_logits.scatter_add_(-1, torch.where(valid, labels, 0)[..., None], of_logp)
    return (grad_logits if temperature == 1 else grad_logits / temperature).to(logits.dtype)


def _entropy(p: Tensor, logp: Tensor) -> Tensor:
    """[..., 1]. Divided by sum(p), because the rounding error of log-softmax's one sum scales all of p."""
    return -_total(p * logp) / _total(p)


def _total(x: Tensor) -> Tensor:
    """The sum over the last dimension, [..., 1], in one order: of a single row, torch gives each thread a part."""
    if torch.compiler.is_compiling() or x.shape[:-1].numel() != 1 or torch.get_num_threads() == 1:
        return x.sum(-1, keepdim=True)
    return x.expand(2, *x.shape).sum(-1, keepdim=True)[0]


def _finite(logp: Tensor) -> Tensor:
    """log p with -inf clamped, so that a token of probability 0 contributes 0 to the entropy and to its gradient."""
    return logp.clamp(min=FLOOR)


def _blocks(logits: Tensor, *rest: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in blocks of rows; on a CPU small enough that intermediate results stay in cache."""
    rows = max(1, BLOCK // logits.shape[-1]) if logits.device.type == "cpu" else max(1, logits.shape[0])
    return zip(*(t.split(rows) for t in (logits, *rest)), strict=True)


def check_temperature(temperature: float | Tensor) -> None:
    if isinstance(temperature, Tensor):
        if torch.compiler.is_compiling() or not readable(temperature) or bool((temperature > 0).all()):
            return
        raise ValueError(f"A temperature is {float(temperature.min())}; all must be above 0.")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0.")
