"""The loss of multi-token prediction (MTP) heads (`fnmodels.mtp`), added to the next-token loss."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels import mtp
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import parsed
from fnmodels.models.common.mtp import kinds_of
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree
from train.run_options import Balance

from .cross_entropy import check_targets
from .lm_head import head_loss
from .next_token import model_states
from .vocab_parallel import Vocab


def look_ahead(batch: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Adds the targets of multi-token prediction to a batch, for `mtp_loss`.

    Args:
        batch: tokens, segment_ids and labels, each [B, S], in their original order: permute, split and shard
            afterwards.
        heads: The number of MTP heads, config.num_nextn_predict_layers.

    Returns:
        The batch plus next_tokens, next_labels and, if it has weights, next_weights, each [B, S, heads].
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
    chunk: int | str | None = "auto",
    length: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    balance: Balance | None = None,
    aux: bool = False,
    **options: Unpack[ForwardKwargs],
) -> tuple[Any, ...]:
    """`next_token_loss` plus the mean over the MTP heads of their sums (arXiv 2412.19437, equations 24 and 25).

    Args:
        params: The parameters of the model and its heads.
        batch: The result of `look_ahead`. Its `routing` and `choices`, if any, are of the model's layers without the
            heads, as edits are.
        config: The model's config.
        weight: The coefficient of the heads' mean; the paper has 0.3, and 0.1 for the last part of training.
        chunk: Tokens whose logits exist at a time; "auto" as for `head_loss`; None: all, in plain operations.
        length: The length that length-dependent rotary scalings read, see `fnmodels.prepare`.
        label_smoothing: The share of the target that is spread uniformly over the vocabulary, for all heads.
        z_loss: The coefficient of log(sum(exp(logits)))^2, for all heads.
        balance: Balance terms for the routers of the model's layers without the heads; None: none.
        aux: Whether router sums are returned. Counts then include those of the MTP heads, if these have experts, after
            the layers', so that `make_step(balance_rate=...)` updates their biases too.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        (sum in nats, count[, aux]). The count is that of the next-token labels, for every head.

    Raises:
        ValueError: The model has no MTP heads, or the batch lacks the entries that `look_ahead` adds.
    """
    check_ahead(batch, config)
    given = ForwardOptions(**options)
    how: dict[str, Any] = {"options": given, "balance": balance, "aux": aux, "taps": mtp.source_taps(config)}
    found = model_states(params, batch, config=config, length=length, **how)
    table = params["embed_tokens"]
    split = (table.region.cut, table.region.join) if isinstance(table, Vocab) and table.region.sequence else None
    routed = found.sums is not None and any(kind.routed for kind in parsed(kinds_of(config)))
    states, tapped = mtp.hidden(
        found.params,
        mtp.read(found.x, found.tapped, config),
        batch["next_tokens"],
        found.masks,
        found.freqs_cis,
        config=config,
        apart=split,
        taps=("output", "counts") if routed else ("output",),  # one at least, so that it returns a pair
        **dataclasses.replace(given, edits=None).keywords,
    )
    loss = functools.partial(head_loss, config=config, chunk=chunk, label_smoothing=label_smoothing, z_loss=z_loss)
    total, count = loss(params, found.x, batch["labels"], weights=batch.get("weights"))
    further = []
    for k, state in enumerate(states):
        weights = batch["next_weights"][..., k] if "weights" in batch else None
        further.append(loss(mtp.view(params, k), state, batch["next_labels"][..., k], weights=weights)[0])
    total = total + weight / len(further) * torch.stack(further).sum()
    if routed and found.sums is not None:
        of_heads = torch.stack([tapped[f"mtp.{k}.counts"] for k in range(len(states))])
        of_layers = [found.sums["counts"]] if "counts" in found.sums else []
        found.sums["counts"] = torch.cat((*of_layers, of_heads))
    return found.added_to(total, count)


def check_ahead(batch: Mapping[str, Tensor], config: Any) -> None:
    """ValueError for a model without MTP heads, or a batch without the entries that `look_ahead` adds for them."""
    if not getattr(config, "num_nextn_predict_layers", 0):
        raise ValueError(
            f"mtp_loss is for models with heads that predict further tokens; {config.model_type} has none."
        )
    needed = ("next_tokens", "next_labels", *(("next_weights",) if "weights" in batch else ()))
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(
            f"The batch has no {' and no '.join(missing)}: train.losses.look_ahead(batch, heads) adds them."
        )
    for name in needed:
        shape = [*batch["tokens"].shape, config.num_nextn_predict_layers]
        if list(batch[name].shape) != shape:
            raise ValueError(f"{name} is {list(batch[name].shape)}, and of the model's heads it is to be {shape}.")
    check_targets(batch["next_labels"], config.vocab_size, "next_labels")
