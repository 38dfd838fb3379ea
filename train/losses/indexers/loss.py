"""The loss that trains indexers, which choose the keys of attention: dense warm-up and sparse stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.apply import hidden_states
from fnmodels.models.common.carried import own_choices
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree
from train.loss import run_options
from train.losses.cross_entropy import counted
from train.losses.lm_head import loss_of_targets
from train.losses.next_token import model_call
from train.run_options import Balance

from .teaching import TAP, TeachIndexers

Stage = Literal["dense", "sparse"]


def indexer_loss(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    stage: Stage,
    weight: float = 1.0,
    chunk: int | str | None = "auto",
    length: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    balance: Balance | None = None,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The divergence between what attention looks at and the indexers' scores, summed over layers and labelled tokens.

    The target of a layer is its attention's weights, summed over heads and normalized, without a gradient. The inputs
    of an indexer have none either: the divergence trains indexers alone, and the next-token loss everything else.
    Where each head of keys chooses blocks by scores of keys, the divergence is over keys, and the mean over these
    heads. Where scores are of pools of keys, it is over complete blocks, whose weight is the largest of their keys.
    An indexer that chooses keys of windows learns the weights of these keys, without those of tokens beside them.
    Layers that take the choice of an earlier one have no indexer, and no term. Which parameters train says the
    optimizer's spec: `with_indexers(spec, stage)`.

    Args:
        params: The parameters.
        batch: As for `next_token_loss`.
        config: The config of a model whose attention chooses its keys.
        stage: "dense", the warm-up: attention sees all keys, and the loss is the divergence alone. "sparse": attention
            sees the chosen keys, over which the divergence is taken, and the next-token loss is added.
        weight: Of the divergence.
        chunk: See `head_loss`.
        length: See `fnmodels.prepare`.
        label_smoothing: Of the next-token loss, see there; so are z_loss and balance, whose sums of routers are
            returned too.
        z_loss: Likewise.
        balance: Likewise.
        **options: Keywords of `fnmodels.forward`, except context.

    Returns:
        The sum; the number of labels that count; {"indexer_kl": the sum of the divergences without their weight}, and
        {"counts": [sparse layers, E] tokens per expert} in a step that balances experts by biases.

    Raises:
        ValueError: For another stage, a model without an indexer, a context of the caller's own, and a pipeline. In the
            dense stage for a batch with `choices` and for a term of the next-token loss. For tensor parallelism that
            does not divide heads of keys with a choice of blocks each.
    """
    given = ForwardOptions(**options)
    _check(params, batch, config, stage, given)
    if stage == "dense" and (label_smoothing or z_loss or balance is not None):
        raise ValueError(
            "In the dense stage the loss is the divergence of indexers alone, and nothing else trains: leave "
            "label_smoothing, z_loss and balance out."
        )
    given = dataclasses.replace(given, context=TeachIndexers(stage == "dense"))
    how: Any = {"options": given, "balance": balance, "aux": balance is not None, "taps": (f"layers.*.{TAP}",)}
    call = model_call(params, batch, config=config, length=length, **how)
    x, tapped, _ = hidden_states(*call.arguments)
    found = call.states(x, tapped)
    labelled = counted(batch["labels"], batch.get("weights"))
    of_layers = [tap for name, tap in tapped.items() if name.endswith(f".{TAP}")]  # a run that reports routers has more
    divergence = torch.stack(of_layers).sum(0).where(labelled, 0).sum()
    sums = {TAP: divergence.detach(), **(found.sums or {})}
    if stage == "dense":
        return weight * divergence, labelled.sum(), sums
    total, count = loss_of_targets(
        params,
        found.x,
        batch["labels"],
        config=config,
        chunk=chunk,
        weights=batch.get("weights"),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return total + weight * divergence + (0 if found.added is None else found.added), count, sums


def _check(
    params: Tree, batch: Mapping[str, Tensor], config: DecoderConfig, stage: str, options: ForwardOptions
) -> None:
    if stage not in ("dense", "sparse"):
        raise ValueError(f"stage is {stage!r}; it is 'dense', the warm-up, or 'sparse'.")
    family = fnmodels.family_of(config)
    if not own_choices(family.kinds(config)):
        raise ValueError(f"indexer_loss is for models whose attention chooses its keys; {config.model_type} does not.")
    if options.context is not None:
        raise ValueError("indexer_loss has a context of its own, in which layers compare scores: leave context out.")
    if stage == "dense" and "choices" in batch:
        raise ValueError("In the dense stage attention sees all keys: leave choices out of the batch.")
    if run_options(params).stage is not None:
        raise ValueError("indexer_loss reads all layers in one process: take a mesh without pp.")


def with_indexers(spec: Tree, stage: Stage) -> Tree:
    """The spec with the indexers of layers as trainable parameters, and in the dense stage nothing else.

    Args:
        spec: `family.spec(config)`.
        stage: As for `indexer_loss`.

    Returns:
        The tree of leaves, for the `spec` of an optimizer.

    Raises:
        ValueError: For a spec without an indexer.
    """
    flat = tree.flatten(spec)
    indexers = {path for path in flat if path.startswith("layers.") and ".indexer." in path}
    if not indexers:
        raise ValueError("The spec has no indexer: no leaf's path is layers.N.attention.indexer.NAME.")
    return tree.unflatten(
        {
            path: dataclasses.replace(leaf, trainable=path in indexers or (stage == "sparse" and leaf.trainable))
            for path, leaf in flat.items()
        }
    )
