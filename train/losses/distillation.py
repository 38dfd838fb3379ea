"""Distillation: a model learns the distributions of another one, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree
from train.dist.dtensor import is_dtensor

from .cross_entropy import counted
from .lm_head import CHUNK, head_name
from .model_loss import beside
from .moe_balance import Balance
from .next_token import model_states
from .policy import Sums, same_shape
from .token_chunks import per_token
from .vocab_parallel import HEAD_BIAS, Part, Vocab, opened

DIRECTIONS = ("forward", "reverse")


def distill(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    teacher: Tree,
    teacher_config: Any = None,
    direction: str = "forward",
    temperature: float = 1.0,
    chunk: int | None = CHUNK,
    length: int | Tensor | None = None,
    balance: Balance | None = None,
    aux: bool = False,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor, Sums]:
    """(sum over the labels that count of the divergence from the teacher in nats, count, {agree}): for `make_step`.

    teacher: parameters of a model with the same vocabulary, in full in every process of a mesh, and run by the last
    stage of a pipeline; teacher_config: its config where it is another one. direction, temperature: see
    `distillation_loss`. agree: tokens for which both find the same one likeliest. The rest is as in `next_token_loss`:
    labels say where something is learnt, and never what; balance and aux are of the student's routers, whose sums stand
    beside `agree`. Both models' logits exist for `chunk` tokens at a time, in the backward too; chunk=None holds all,
    in plain operations. Where the head is a `Vocab` (tensor parallelism) each process makes its shard of both models'
    logits.
    """
    theirs = config if teacher_config is None else teacher_config
    check_teacher(config, theirs, teacher, direction, temperature)
    given, reported = ForwardOptions(**options), aux or balance is not None
    found = model_states(params, batch, config=config, length=length, balance=balance, aux=reported, options=given)
    # A function that computes experts is the student's, whose experts may be sharded.
    own = dataclasses.replace(given, layer_fn=None, experts=given.experts if isinstance(given.experts, str) else "auto")
    with torch.no_grad():
        y = model_states(beside(params, teacher), batch, config=theirs, length=length, options=own).x
    x, table, part = found.x, params.get(head_name(config)), None
    if isinstance(table, Vocab):
        part, name = table.part, head_name(theirs)
        params, x = opened(params, head_name(config), x)
        rows = slice(part.first, part.first + part.rows)
        teacher = {**teacher, **{key: teacher[key][rows] for key in (name, HEAD_BIAS) if key in teacher}}

    def logits(weights: Tree, x: Tensor, config: Any) -> Tensor:
        rows = x if x.ndim == 3 else x[None]  # a chunk is a row of its own
        return fnmodels.family_of(config).unembed(weights, rows, config=config).reshape(*x.shape[:-1], -1)

    def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = logits(teacher, y, theirs)
        student = logits(params, x, config)
        if part is not None:
            return _of_parts(student, wanted, part, direction, temperature)
        divergence = token_divergence(student, wanted, direction=direction, temperature=temperature)
        return divergence, student.argmax(-1) == wanted.argmax(-1)

    divergence, agree = per_token(one, (x, y), batch["labels"].shape, chunk)
    valid, weights = counted(batch["labels"], batch.get("weights")), batch.get("weights")
    if weights is not None:
        divergence = divergence * torch.where(valid, weights, 0.0)
    total, count, *sums = found.added_to(torch.where(valid, divergence, 0.0).sum(), valid.sum())
    return total, count, {"agree": (agree & valid).sum()} | (sums[0] if sums else {})


def check_teacher(config: Any, theirs: Any, teacher: Tree, direction: str, temperature: float) -> None:
    """ValueError for a teacher of the config `theirs` from which a student of `config` cannot learn."""
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
    """(sum over valid tokens of the divergence in nats, count), of logits [..., V] of student and teacher.

    direction: "forward" KL(teacher || student), which covers the teacher's modes (arXiv 1503.02531); "reverse"
    KL(student || teacher), which seeks them (arXiv 2306.08543). Scaled by temperature^2, so that gradients keep
    their size (arXiv 1503.02531). No gradient reaches the teacher. `distill` does it in chunks, from parameters.
    """
    _check(direction, temperature)
    same_shape(student=student, teacher=teacher)
    if valid.shape != student.shape[:-1]:
        raise ValueError(f"valid must be {list(student.shape[:-1])} like the logits' tokens, not {list(valid.shape)}.")
    divergence = token_divergence(student, teacher.detach(), direction=direction, temperature=temperature)
    return torch.where(valid, divergence, 0.0).sum(), valid.sum()


def token_divergence(student: Tensor, teacher: Tensor, *, direction: str, temperature: float = 1.0) -> Tensor:
    """The divergence of `distillation_loss` for each token, [...]."""
    wide = torch.promote_types(student.dtype, torch.float32)
    p, q = (torch.log_softmax(z.to(wide) / temperature, -1) for z in (teacher, student))
    if direction == "reverse":
        p, q = q, p
    share = p.exp()
    # A token that both forbid (logit -inf) is as far from itself as inf from inf: what has no share adds nothing.
    return (share * torch.where(share > 0, p - q, 0.0)).sum(-1) * temperature**2


def _of_parts(
    student: Tensor, teacher: Tensor, part: Part, direction: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """(`token_divergence`, whether both find the same token likeliest) of logits [..., rows] of the vocabulary's part.

    KL(p || q) = sum_v p_v (z_v - y_v) - log(sum(exp(z))) + log(sum(exp(y))) of p's logits z and q's y: each part of the
    vocabulary gives three numbers per token, and its largest logits with their ids.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
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
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0.")
