"""A loss in the form that a pipeline can run: some layers here, and behind the last of them a head."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

import fnmodels
from fnmodels.options import LayerFn
from fnmodels.tree import Tree
from train.loss_call import Batch
from train.losses.cross_entropy import check_labels, counted
from train.losses.distillation import check_teacher, distill, head_distill
from train.losses.lm_head import head_loss
from train.losses.logprobs import head_logprobs, token_logprobs
from train.losses.moe_balance import Balance, balance_terms
from train.losses.multi_token import check_ahead, heads_loss, mtp_loss
from train.losses.next_token import next_token_loss

from .joint_node import together
from .tree_split import numbered
from .types import Microbatch, Staged


def staged(loss_fn: Callable[..., Any] | Staged) -> Staged:
    """Of functools.partial(train.next_token_loss, config=config, ...), or of `train.mtp_loss` or `train.distill`.

    What is `Staged` is returned as it is.
    """
    if isinstance(loss_fn, Staged):
        return loss_fn
    if isinstance(loss_fn, functools.partial) and loss_fn.func is mtp_loss:
        return _further(loss_fn)
    if isinstance(loss_fn, functools.partial) and loss_fn.func is distill:
        return _taught(loss_fn)
    given, terms = _bound(loss_fn, next_token_loss, head_loss)

    def head(params: Tree, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return head_loss(params, x, batch["labels"], weights=batch.get("weights"), **terms)

    return Staged(given["config"], head, check=_labelled, **_of_layers_in(given))


def _further(loss_fn: Callable[..., Any]) -> Staged:
    """Of heads that predict further tokens, whose layers run behind the last stage's."""
    given, terms = _bound(loss_fn, mtp_loss, heads_loss)
    config = terms["config"]
    if not getattr(config, "num_nextn_predict_layers", 0):
        raise ValueError(
            f"mtp_loss is for models with heads that predict further tokens; {config.model_type} has none."
        )

    def check(batch: Batch) -> None:
        _labelled(batch)
        check_ahead(batch, config)

    return Staged(config, functools.partial(heads_loss, **terms), check=check, layered=True, **_of_layers_in(given))


def _taught(loss_fn: Callable[..., Any]) -> Staged:
    """Of a student, whose last stage runs all of the teacher."""
    given, terms = _bound(loss_fn, distill, head_distill)
    config = terms["config"]
    named = ("teacher", "teacher_config", "direction", "temperature")
    check_teacher(config, **{name: terms[name] for name in named if name in terms})
    second = terms.get("teacher_config") or config
    head = functools.partial(head_distill, **terms)
    return Staged(config, head, check=_labelled, aux=True, teacher_config=second, **_of_layers_in(given))


def _labelled(batch: Batch) -> None:
    if "labels" not in batch:
        raise ValueError(f"The batch has no labels; its keys are {sorted(batch)}.")
    check_labels(batch["labels"], batch["tokens"].shape[:2], "tokens")


def staged_outputs(function: Callable[..., Any] | Staged) -> Staged:
    """Of functools.partial(train.token_logprobs, config=config, ...); its head returns what the function does."""
    if isinstance(function, Staged):
        return function
    given, terms = _bound(function, token_logprobs, head_logprobs)

    def head(params: Tree, x: Tensor, batch: Batch) -> Any:
        return head_logprobs(params, x, batch["labels"], **terms)

    return Staged(given["config"], head, check=_labelled, **_of_layers_in(given))


def _bound(
    function: Callable[..., Any], whole: Callable[..., Any], head: Callable[..., Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """(what a functools.partial of `whole` has bound, that of it which `head` takes). ValueError for anything else."""
    given = function.keywords if isinstance(function, functools.partial) else {}
    if not isinstance(function, functools.partial) or function.func is not whole or "config" not in given:
        raise ValueError(
            "Over a pipeline the layers run on other ranks than the head, so the function must be "
            f"functools.partial(train.{whole.__name__}, config=config, ...), or a train.parallel.pipeline.types.Staged."
        )
    if given.get("layer_fn") is not None or given.get("layout") is not None:
        raise ValueError("Over a pipeline layer_fn and layout are the step's to set, so the loss must leave them open.")
    return given, {name: given[name] for name in inspect.signature(head).parameters if name in given}


def _of_layers_in(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("kernel", "length", "experts", "balance") if name in given}


def run_stage(
    params: Tree,
    x: Tensor | None,
    part: Microbatch,
    lo: int,
    hi: int,
    /,
    *,
    loss: Staged,
    layer_fn: LayerFn | None = None,
    outside: Callable[[Tree], Tree] | None = None,
    leaving: Callable[[Tensor], Tensor] | None = None,
    counts: bool = False,
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """((x [B, S, D], term), sums) of layers lo <= i < hi; of the last stage ((sum, count), sums). x None: the first.

    term: what these layers add to the loss, whose gradient x has in tow; the last stage's is in its sum.

    params: the stage's part. outside: makes of its leaves outside of the layers what is read (gathers them). leaving:
    makes x whole where `layer_fn` leaves it in parts (`TensorParallel.whole`), for the next stage.
    counts: return the counts of the experts. The terms of loss.balance are in sums as parts of means over all layers.
    """
    config, family = loss.config, fnmodels.family_of(loss.config)
    rest = {name: value for name, value in params.items() if name != "layers"}
    rest = rest if outside is None or not rest else outside(rest)
    x = family.embed(rest, part.inputs, config=config) if x is None else x
    names = ("router_logits", "expert_indices", "counts") if counts or loss.balance is not None else ()
    found = fnmodels.run_layers(
        {"layers": numbered(params["layers"])},
        x,
        part.masks,
        part.freqs_cis,
        lo,
        hi,
        config=config,
        kernel=loss.kernel,
        layout=part.layout,
        layer_fn=layer_fn,
        valid=part.inputs["valid"],
        routing=part.batch.get("routing"),
        experts=loss.experts,
        taps=tuple(f"layers.*.{name}" for name in names),
    )
    x, tapped = found if names else (found, {})
    added, sums = _balance(loss, part, tapped)
    if hi == len(family.kinds(config)):
        more: dict[str, Any] = {}
        if loss.teacher_config is not None:
            length = loss.length_of(part.batch["positions"])
            more = {"kernel": loss.kernel, "layout": part.layout, "length": length}
        if loss.layered:
            more = {"masks": part.masks, "freqs_cis": part.freqs_cis, "layout": part.layout, "layer_fn": layer_fn}
            more |= {"kernel": loss.kernel, "experts": loss.experts, "counts": bool(names)}
        total, count, *metrics = loss.head(together(rest), x, part.batch, **more)
        if loss.layered and names:
            sums["counts"] = torch.cat((sums["counts"], metrics.pop(0)))
        if loss.aux:
            sums |= {name: value.detach() for name, value in metrics[0].items()}
        return (total if added is None else total + added, count), sums
    x = x if leaving is None else leaving(x)
    if added is None:
        return (x, torch.zeros((), device=x.device)), sums
    return (_Carry.apply(x, added), added.detach()), sums


def _balance(loss: Staged, part: Microbatch, tapped: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What these layers add to the loss, and the sums of it: their share of `balance_terms`' means over all layers."""
    here = sum(tap.endswith(".counts") for tap in tapped)
    if not here:
        return None, {}
    labelled = counted(part.batch["labels"], part.batch.get("weights")).sum(1)
    added, sums = balance_terms(tapped, part.inputs["valid"], labelled, loss.balance or Balance())
    share = here / sum(kind.endswith("_moe") for kind in fnmodels.family_of(loss.config).kinds(loss.config))
    sums = {name: value.detach() * (1 if name == "counts" else share) for name, value in sums.items()}
    return (None if loss.balance is None else added * share), sums


class _Carry(torch.autograd.Function):
    """x, with a term of the loss in tow: its gradient is 1, wherever in the pipeline the loss itself is made."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, term: Tensor) -> Tensor:
        return x.clone()  # a view could not be detached in place, which torch's stages do to what they have sent

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.like = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        raise NotImplementedError(
            "Forward mode does not see a term of the loss that a stage carries; use reverse mode."
        )
