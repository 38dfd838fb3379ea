"""Distillation: KL divergence between a student's and a teacher's token distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree
from train.comm.dtensor import is_dtensor
from train.loss import beside
from train.run_options import Balance

from .batch_checks import check_batch, checked_by
from .cross_entropy import counted, wide_of
from .lm_head import head_logits, head_name
from .next_token import model_states
from .policy import MetricSums, same_shape
from .softmax_stats import check_temperature
from .token_chunks import chunk_of, per_token
from .vocab_parallel import HEAD_BIAS, Part, opened

DIRECTIONS = ("forward", "reverse")


def _check_batch(batch: Mapping[str, Tensor], config: Any, options: Mapping[str, Any]) -> None:
    """Both models read the tokens and their positions, and the student's layers alone take `routing`."""
    check_batch(batch, config)
    if (teacher := options.get("teacher_config")) is not None:
        check_batch({name: x for name, x in batch.items() if name != "routing"}, teacher)


@checked_by(_check_batch)
def distill(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    teacher: Tree,
    teacher_config: Any = None,
    direction: str = "forward",
    temperature: float = 1.0,
    chunk: int | str | None = "auto",
    length: int | Tensor | None = None,
    balance: Balance | None = None,
    aux: bool = False,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor, MetricSums]:
    """A loss for `make_step`: the divergence between the next-token distributions of a student and a teacher.

    Labels only select the positions; everything else is as in `next_token_loss`. Where the head is a `Vocab` (tensor
    parallelism) each rank computes its vocabulary shard of both models' logits.

    Args:
        params: The student's parameters.
        batch: tokens, positions, segment_ids and labels, each [B, S], as for `next_token_loss`.
        config: The student's config.
        teacher: Parameters of a model with the same vocabulary, unsharded on every rank of a mesh; the last pipeline
            stage runs it.
        teacher_config: Its config, where it differs from the student's; None: `config`.
        direction: "forward" for KL(teacher || student), "reverse" for KL(student || teacher), see `distillation_loss`.
        temperature: Divides both models' logits; the divergence is multiplied by its square.
        chunk: Tokens whose logits of both models exist at a time, in the backward pass too; "auto" as for `head_loss`;
            None: all, in plain operations.
        length: The length that length-dependent rotary scalings read, see `fnmodels.prepare`.
        balance: Balance terms for the student's routers; None: none.
        aux: Whether the routers' sums are returned next to `agree`.
        **options: Keywords of `fnmodels.forward`; edits are of the student.

    Returns:
        The sum of the divergences over the labels that count, in nats; their number; and {agree: the number of tokens
        whose most likely token is the same for both}.

    Raises:
        ValueError: The vocabularies differ in size, the teacher has DTensors, a required entry is missing, or
            direction, temperature or balance are invalid.
    """
    theirs = config if teacher_config is None else teacher_config
    check_teacher(config, theirs, teacher, direction, temperature)
    given, reported = ForwardOptions(**options), aux or balance is not None
    found = model_states(params, batch, config=config, length=length, balance=balance, aux=reported, options=given)
    # An `experts` function is for the student, whose experts may be sharded.
    experts = given.experts if isinstance(given.experts, str) else "auto"
    own = dataclasses.replace(given, layer_fn=None, experts=experts, edits=None)
    with torch.no_grad():
        y = model_states(beside(params, teacher), batch, config=theirs, length=length, options=own).x
    params, x, part = opened(params, head_name(config), found.x)
    if part is not None:
        rows = slice(part.first, part.first + part.rows)
        teacher = {**teacher, **{key: teacher[key][rows] for key in (head_name(theirs), HEAD_BIAS) if key in teacher}}

    def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = head_logits(teacher, y, theirs)
        student = head_logits(params, x, config)
        if part is not None:
            return _of_parts(student, wanted, part, direction, temperature)
        divergence = token_divergence(student, wanted, direction=direction, temperature=temperature)
        return divergence, student.argmax(-1) == wanted.argmax(-1)

    size = chunk_of(chunk, config.vocab_size, x.device, x.dtype)
    divergence, agree = per_token(one, (x, y), batch["labels"].shape, size)
    valid, weights = counted(batch["labels"], batch.get("weights")), batch.get("weights")
    if weights is not None:
        divergence = divergence * torch.where(valid, weights, 0.0)
    total, count, *sums = found.added_to(torch.where(valid, divergence, 0.0).sum(), valid.sum())
    return total, count, {"agree": (agree & valid).sum()} | (sums[0] if sums else {})


def check_teacher(config: DecoderConfig, theirs: Any, teacher: Tree, direction: str, temperature: float) -> None:
    """ValueError for another vocabulary size, a teacher with DTensors, or an invalid direction or temperature."""
    if theirs.vocab_size != config.vocab_size:
        raise ValueError(
            f"The teacher's vocabulary has {theirs.vocab_size} entries, the student's {config.vocab_size}."
        )
    _check(direction, temperature)
    for path, leaf in tree.flatten(teacher).items():
        if is_dtensor(leaf):
            raise ValueError(
                f"The teacher's {path} is a DTensor; each process needs all of its leaves, as plain tensors."
            )


def distillation_loss(
    student: Tensor, teacher: Tensor, valid: Tensor, *, direction: str = "forward", temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The divergence of a student's distributions from a teacher's, from logits; `distill` computes it from parameters.

    Args:
        student: Logits [..., V].
        teacher: Logits [..., V]; they get no gradient.
        valid: bool [...], the tokens that count.
        direction: "forward" is KL(teacher || student), which covers the teacher's modes (arXiv 1503.02531); "reverse"
            is KL(student || teacher), which seeks them (arXiv 2306.08543).
        temperature: Divides both logits. The divergence is multiplied by its square, which keeps the size of the
            gradients (arXiv 1503.02531).

    Returns:
        The sum over valid tokens in nats, and their number.

    Raises:
        ValueError: Shapes differ, direction is another word, or the temperature is not above 0.
    """
    _check(direction, temperature)
    same_shape(student=student, teacher=teacher)
    if valid.shape != student.shape[:-1]:
        raise ValueError(f"valid must be {list(student.shape[:-1])} like the logits' tokens, not {list(valid.shape)}.")
    divergence = token_divergence(student, teacher.detach(), direction=direction, temperature=temperature)
    return torch.where(valid, divergence, 0.0).sum(), valid.sum()


def token_divergence(student: Tensor, teacher: Tensor, *, direction: str, temperature: float = 1.0) -> Tensor:
    """The divergence of each token, before a sum and without a mask.

    Args:
        student: Logits [..., V].
        teacher: Logits [..., V]; they get no gradient.
        direction: "forward" for KL(teacher || student), "reverse" for KL(student || teacher).
        temperature: Divides both logits; the divergence is multiplied by its square.

    Returns:
        Nats [...].
    """
    wide = wide_of(student)
    p, q = (torch.log_softmax(z.to(wide) / temperature, -1) for z in (teacher, student))
    if direction == "reverse":
        p, q = q, p
    share = p.exp()
    # Where both logits are -inf, p - q is NaN; the term is 0 because the probability is 0.
    return (share * torch.where(share > 0, p - q, 0.0)).sum(-1) * temperature**2


def _of_parts(
    student: Tensor, teacher: Tensor, part: Part, direction: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """(`token_divergence`, whether the most likely tokens agree), both [...], from logits [..., rows] of one shard.

    KL(p || q) = sum_v p_v (z_v - y_v) - log(sum(exp(z))) + log(sum(exp(y))) for p's logits z and q's logits y. Each
    rank contributes three scalars per token, and the largest logit of each model with its id.
    """
    wide = wide_of(student)
    both = student.to(wide) / temperature, teacher.to(wide) / temperature
    z, y = both if direction == "reverse" else reversed(both)
    mine = [z.logsumexp(-1), y.logsumexp(-1), (z.softmax(-1) * (z - y)).sum(-1)]
    for logits in both:
        values, ids = logits.detach().max(-1)
        mine += [values, (ids + part.first).to(wide)]  # exact up to 2^24 ids
    each = part.region.joined(torch.stack(mine, -1)).unflatten(-1, (part.region.size, len(mine)))
    of_z, of_y, apart, *largest = each.unbind(-1)  # [..., size]
    divergence = (of_z.softmax(-1) * apart).sum(-1) - of_z.logsumexp(-1) + of_y.logsumexp(-1)
    ours, theirs = (i.gather(-1, v.argmax(-1, keepdim=True)) for v, i in (largest[:2], largest[2:]))
    return divergence * temperature**2, (ours == theirs)[..., 0]


def _check(direction: str, temperature: float) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f'direction is {direction!r}; it must be "forward" or "reverse".')
    check_temperature(temperature)
