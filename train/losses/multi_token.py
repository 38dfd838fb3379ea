"""The loss of heads that predict further tokens (`fnmodels.mtp`), beside that of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import mtp
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import MaskLike
from fnmodels.inputs.packing import IGNORE
from fnmodels.options import Experts, Kernel
from fnmodels.tree import Tree

from .cross_entropy import counted
from .lm_head import CHUNK, head_loss
from .moe_balance import Balance, balance_terms
from .next_token import check_batch, replayed
from .vocab_parallel import Vocab


def look_ahead(batch: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The batch with next_tokens, next_labels and, where it has weights, next_weights [B, S, heads], for `mtp_loss`.

    batch: tokens, segment_ids and labels [B, S], with the rows still in order: permute, split and shard what comes out.
    """
    ids = batch["segment_ids"]
    further = {
        "next_tokens": mtp.ahead(batch["tokens"], ids, heads, fill=-1),
        "next_labels": mtp.ahead(batch["labels"], ids, heads, fill=IGNORE),
    }
    if "weights" in batch:
        further["next_weights"] = mtp.ahead(batch["weights"], ids, heads, fill=0)
    return {**batch, **further}


def mtp_loss(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    weight: float = 0.3,
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
    """(sum, count[, aux]) as `next_token_loss`, plus `weight` times the mean over heads of their sums.

    The count is that of the next tokens' labels: a head that sees less far from the end of a document is not divided by
    less (arXiv 2412.19437, equations 24 and 25; there the weight is 0.3, and 0.1 for the last part of training).
    batch: what `look_ahead` returns; its `routing`, if any, is that of the model's own layers, and heads choose for
    themselves. experts: see `fnmodels.forward`. label_smoothing, z_loss: of all heads, the next token's too, see
    `cross_entropy`. balance: for the routers of the model's own layers. aux: with counts of
    the heads behind those of the layers, so that `make_step(balance_rate=...)` moves their biases too.
    """
    check_ahead(batch, config)
    check_batch(batch)
    inputs, masks, freqs_cis = fnmodels.prepare(
        config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"], length=length
    )
    how: dict[str, Any] = {"config": config, "kernel": kernel, "layout": layout, "layer_fn": layer_fn}
    how["experts"] = experts
    names = ("router_logits", "expert_indices", "counts") if aux or balance is not None else ()
    # Some tap is always asked for, so that it returns a pair.
    taps = ("hidden", *(f"layers.*.{name}" for name in names))
    x, tapped = fnmodels.hidden(params, replayed(inputs, batch), masks, freqs_cis, **how, taps=taps)
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    total, count, *of_heads = heads_loss(
        params, x, batch, masks, freqs_cis, **how, **terms, weight=weight, chunk=chunk, counts=bool(names)
    )
    if not names:
        return total, count
    labelled = counted(batch["labels"], batch.get("weights")).sum(1)
    added, sums = balance_terms(tapped, inputs["valid"], labelled, balance or Balance())
    sums["counts"] = torch.cat((sums["counts"], *of_heads))
    return (total + added, count, sums) if aux else (total + added, count)


def heads_loss(
    params: Tree,
    x: Tensor,
    batch: Mapping[str, Tensor],
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    *,
    config: Any,
    weight: float = 0.3,
    chunk: int | None = CHUNK,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    counts: bool = False,
    **how: Any,
) -> tuple[Tensor, ...]:
    """(sum, count) of `mtp_loss` from the model's states x, `fnmodels.hidden`; with counts also those [heads, E] of the
    heads' experts. how: kernel, layout, layer_fn and experts, of `fnmodels.mtp.hidden`."""
    table = params["embed_tokens"]
    columns = isinstance(table, Vocab) and table.region.sequence
    how["apart"] = (table.region.cut, table.region.join) if columns else None
    how["taps"] = ("output", "counts") if counts else ("output",)  # some tap, so that it returns a pair
    states, tapped = mtp.hidden(params, x, batch["next_tokens"], masks, freqs_cis, config=config, **how)
    given: dict[str, Any] = {"config": config, "chunk": chunk, "label_smoothing": label_smoothing, "z_loss": z_loss}
    total, count = head_loss(params, x, batch["labels"], **given, weights=batch.get("weights"))
    further = []
    for k, state in enumerate(states):
        weights = batch["next_weights"][..., k] if "weights" in batch else None
        labels = batch["next_labels"][..., k]
        further.append(head_loss(mtp.view(params, k), state, labels, **given, weights=weights)[0])
    total = total + weight / len(further) * torch.stack(further).sum()
    if not counts:
        return total, count
    return total, count, torch.stack([tapped[f"mtp.{k}.counts"] for k in range(len(states))])


def check_ahead(batch: Mapping[str, Tensor], config: Any) -> None:
    """ValueError for a batch without what `look_ahead` adds, of as many heads as the config has."""
    needed = ("next_tokens", "next_labels", *(("next_weights",) if "weights" in batch else ()))
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(f"The batch has no {' and no '.join(missing)}: train.look_ahead(batch, heads) adds them.")
    for name in needed:
        shape = [*batch["tokens"].shape, config.num_nextn_predict_layers]
        if list(batch[name].shape) != shape:
            raise ValueError(f"{name} is {list(batch[name].shape)}, and of the model's heads it is to be {shape}.")
