"""Expert load balancing: auxiliary losses on router logits, and updates of the selection bias.

    loss_fn = functools.partial(next_token_loss, config=config, balance=Balance(sequence=1e-3, z=1e-3))
    step = make_step(loss_fn, optimizer, balance_rate=1e-3)      # moves the selection biases, once per step

Each loss is for one layer and takes logits, not probabilities: its softmax is in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig, is_routed, stored_layers
from fnmodels.models.common.registry import family_of
from fnmodels.ops.dtypes import upcast, widest
from fnmodels.tree import Tree
from train.run_options import Adding, Balance


def balance_loss(
    logits: Tensor, indices: Tensor, valid: Tensor, *, scores: str = "softmax", over: Adding | None = None
) -> Tensor:
    """The balance loss E sum_e f_e p_e of each row, for one layer with experts (arXiv 2101.03961, 2412.19437).

    f_e is the fraction of the row's choices that fell on expert e, p_e the mean of its scores; only p has a gradient.
    The loss is 1 for uniform use, and E / k where k experts get all tokens. For a loss over the batch pass
    logits.flatten(0, 1)[None]. transformers' coefficients must be multiplied by k.

    Args:
        logits: The router's [B, S, E].
        indices: The chosen experts, int64 [B, S, k].
        valid: bool [B, S], False on padding.
        scores: "softmax", or "sigmoid" divided by the sum over experts.
        over: Sums integer tensors over the ranks that hold other tokens of the same rows, see `Balance`; p is then a
            sum over the rank's tokens, and the counts in f have no gradient. None: this process has all tokens.

    Returns:
        [B], without a unit; 0 for a row of padding.
    """
    wide = _cleared(logits, valid)
    p = wide.softmax(-1) if scores == "softmax" else wide.sigmoid() / wide.sigmoid().sum(-1, keepdim=True)
    experts = logits.shape[-1]
    chosen = indices.where(valid[..., None], experts).flatten(1)
    counts = chosen.new_zeros(len(chosen), experts + 1).scatter_add(1, chosen, torch.ones_like(chosen))[:, :experts]
    tokens = valid.sum(-1, keepdim=True)
    if over is not None:
        counts, tokens = over(torch.cat((counts, tokens), -1)).split((experts, 1), -1)
    tokens = tokens.clamp(min=1)
    p = p.where(valid[..., None], 0).sum(1) / tokens
    f = counts.to(p.dtype) / (tokens * indices.shape[-1])
    return experts * (f * p).sum(-1)


def router_z_loss(logits: Tensor, valid: Tensor, *, over: Adding | None = None) -> Tensor:
    """The router's z-loss (arXiv 2202.08906): the mean over each row's tokens of log(sum(exp(logits)))^2.

    Args:
        logits: The router's [B, S, E].
        valid: bool [B, S], False on padding.
        over: Sums integer tensors over the ranks that hold other tokens of the same rows, see `Balance`; None: this
            process has all tokens.

    Returns:
        [B], nats squared; 0 for a row of padding.
    """
    wide = _cleared(logits, valid)
    squares = wide.logsumexp(-1).square().where(valid, 0)
    tokens = valid.sum(-1) if over is None else over(valid.sum(-1))
    return squares.sum(-1) / tokens.clamp(min=1)


def _cleared(logits: Tensor, valid: Tensor) -> Tensor:
    """fp32 at least, 0 at padding before any operation: masking afterwards would give a gradient of 0 x NaN = NaN."""
    return upcast(logits).where(valid[..., None], 0)


def update_bias(bias: Tensor, counts: Tensor, rate: float | Tensor) -> Tensor:
    """The selection bias after one step: plus `rate` below the mean count, minus above it (arXiv 2408.15664).

    Args:
        bias: The bias [E] before, in fp32 at least.
        counts: Tokens per expert in the global batch, [E]; equal counts leave the bias unchanged.
        rate: The change of each element, in units of the router's scores.

    Returns:
        The new bias [E].

    Raises:
        ValueError: The bias is in half precision, which would round most updates away.
    """
    if bias.dtype.itemsize < 4:
        raise ValueError(
            f"The selection bias is {bias.dtype}, in which moves of {rate} are lost to rounding: it must be fp32 at "
            "least, as params.load_pretrained returns it whatever the other leaves are."
        )
    wide = counts.to(widest(counts.device))  # fp32 does not tell counts above 2^24 apart
    return (bias + rate * torch.sign(wide.mean() - wide).to(bias.dtype)).to(bias.dtype)


def moved_biases(params: Tree, counts: Tensor, rate: float, skip: Tensor) -> dict[str, Tensor]:
    """{path: a layer's selection bias after one step}, unchanged where `skip` (0-d bool) is True.

    counts [layers, E]: of the layers with experts in order, followed by the MTP heads where the loss counts them too.
    ValueError for counts of another number of layers.
    """
    flat = tree.flatten(params)
    biases = [path for path in flat if path.endswith(".selection_bias")]
    paths = [path for path in biases if path.startswith("layers.")]
    heads = [path for path in biases if path.startswith("mtp.")]
    paths += heads if len(counts) == len(paths) + len(heads) else []
    if 0 < len(paths) < len(counts):  # some layers choose experts otherwise, by token ids, and have no bias
        of_experts = (path for path in flat if path.startswith("layers.") and ".experts." in path)
        layers = dict.fromkeys(path.partition(".mlp.")[0] for path in of_experts)
        rows = [row for row, layer in enumerate(layers) if f"{layer}.mlp.selection_bias" in flat]
        counts = counts[rows] if len(layers) == len(counts) and len(rows) == len(paths) else counts
    if len(paths) != len(counts):
        raise ValueError(
            f"balance_rate moves a selection_bias of each layer with experts: there are {len(paths)} of them, and "
            f"the loss returns counts of {len(counts)} such layers: its aux must hold counts [layers with experts, E]."
        )
    return {
        path: torch.where(skip, flat[path], update_bias(flat[path], of_layer, rate))
        for path, of_layer in zip(paths, counts, strict=True)
    }


def counts_by_layer(counts: Tensor, config: DecoderConfig) -> Tensor:
    """[layers with experts, E] of counts [layers that run with experts, E]: passes of one stored layer are summed."""
    family = family_of(config)
    kinds = family.kinds(config)
    run = zip(stored_layers(config, kinds), kinds, strict=True)
    rows = [stored for stored, kind in run if is_routed(family, kind)]
    first = list(dict.fromkeys(rows))
    if len(first) == len(rows):
        return counts
    at = torch.tensor([first.index(stored) for stored in rows], device=counts.device)
    return counts.new_zeros(len(first), counts.shape[1]).index_add(0, at, counts)


def balance_terms(
    tapped: Mapping[str, Tensor], valid: Tensor, labelled: Tensor, balance: Balance
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the term to add to the loss's sum; {counts [layers, E], sums of the terms without their coefficients}).

    tapped: router_logits, expert_indices and counts of the layers with experts, named as in `forward`, in order. valid
    [B, S]. labelled [B]: labels that count in each row, by which the row's term is weighted: divided by the global
    count the sum is a mean over tokens, however the batch is split. With balance.over, the sum over ranks is.
    """
    over, across, mine = balance.over, balance.across, labelled.sum()
    if over is not None and (balance.sequence or balance.z):
        labelled = over(labelled)

    def of(name: str) -> list[Tensor]:
        return [value for tap, value in tapped.items() if tap.endswith(f".{name}")]

    logits, indices = of("router_logits"), of("expert_indices")
    before = torch.zeros((), device=valid.device) if balance.before is None else balance.before
    if not logits:  # a pipeline stage without experts, which may not send the tensor that it received
        return before.clone(), {}
    aux: dict[str, Tensor] = {"counts": torch.stack(of("counts"))}
    total = torch.zeros((), dtype=torch.promote_types(logits[0].dtype, torch.float32), device=valid.device)
    if balance.sequence:
        losses = [
            balance_loss(x, i, valid, scores=balance.scores, over=over) for x, i in zip(logits, indices, strict=True)
        ]
        aux["sequence_balance"] = (torch.stack(losses).mean(0) * labelled).sum()
        total = total + balance.sequence * aux["sequence_balance"]
    if balance.batch:
        flat = [[t.flatten(0, 1)[None] for t in (x, i, valid)] for x, i in zip(logits, indices, strict=True)]
        losses = [balance_loss(*row, scores=balance.scores, over=across) for row in flat]
        aux["batch_balance"] = torch.stack(losses).mean() * (mine if across is None else across(mine))
        total = total + balance.batch * aux["batch_balance"]
    if balance.z:
        losses = [router_z_loss(x, valid, over=over) for x in logits]
        aux["router_z"] = (torch.stack(losses).mean(0) * labelled).sum()
        total = total + balance.z * aux["router_z"]
    if balance.share is None:
        return total, aux
    return before + total * balance.share, {n: v if n == "counts" else v * balance.share for n, v in aux.items()}
