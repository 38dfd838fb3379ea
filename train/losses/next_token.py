"""The next token's loss of a model: (sum, count), so that whoever splits a batch divides once by the global count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import fnmodels
from fnmodels.inputs.layout import Layout
from fnmodels.models.common.registry import may_have
from fnmodels.options import Experts, Kernel
from fnmodels.tree import Tree

from .cross_entropy import check_labels, counted
from .lm_head import CHUNK, head_loss
from .moe_balance import Balance, balance_terms


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
    x, added, sums = states_and_routers(params, batch, balance=balance, aux=aux, **how)
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
    total = total if added is None else total + added
    return (total, count, sums) if aux else (total, count)


def states_and_routers(
    params: Tree, batch: Mapping[str, Tensor], *, balance: Balance | None, aux: bool, config: Any, **how: Any
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(`hidden_states`, what `balance` adds to a loss's sum, sums of what the routers did).

    None and {} where neither `balance` nor `aux` asks for them. ValueError for a model without experts.
    """
    if not aux and balance is None:
        return hidden_states(params, batch, config=config, **how), None, {}
    if not may_have(fnmodels.family_of(config), "ROUTED"):
        raise ValueError(f"balance and aux are for models with experts, and {config.model_type} has none.")
    taps = ("layers.*.router_logits", "layers.*.expert_indices", "layers.*.counts")
    x, tapped = hidden_states(params, batch, config=config, **how, taps=taps)
    labelled = counted(batch["labels"], batch.get("weights")).sum(1)
    return x, *balance_terms(tapped, batch["segment_ids"] > 0, labelled, balance or Balance())


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
    check_batch(batch)
    inputs, masks, freqs_cis = fnmodels.prepare(
        config,
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        length=length,
    )
    how: dict[str, Any] = {"kernel": kernel, "layout": layout, "layer_fn": layer_fn, "experts": experts, "taps": taps}
    return fnmodels.hidden(params, replayed(inputs, batch), masks, freqs_cis, config=config, **how)


def check_batch(batch: Mapping[str, Tensor]) -> None:
    """ValueError for a batch without what a loss reads, or with labels that are not of its tokens."""
    missing = [name for name in ("tokens", "positions", "segment_ids", "labels") if name not in batch]
    if missing:
        raise ValueError(f"The batch has no {' and no '.join(missing)}; its keys are {sorted(batch)}.")
    check_labels(batch["labels"], batch["tokens"].shape[:2], "tokens")


def replayed(inputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What `prepare` made of the batch, with the choice of experts that the batch may hold."""
    return {**inputs, "routing": batch["routing"]} if "routing" in batch else inputs
