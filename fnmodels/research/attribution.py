"""Direct logit attribution: which layers, heads and neurons write a logit (arXiv 2211.00593, section 3).

The residual stream is a sum, and with the scale of the final norm held at its value the logits are an affine function
of it. So a logit is a sum of what each part contributes, plus what the head adds where the residual stream is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fnmodels.apply import forward
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import Edit
from fnmodels.taps import tap_names
from fnmodels.tree import Tree
from fnmodels.tree import map as map_tree

from .common import ADDED, Prepared, names_of

_PARTS = ("attention.z", "mlp.neurons")  # heads and neurons
_SCALE = "final.norm.scale"


def direct_logit_attribution(
    params: Tree, prepared: Prepared, targets: Tensor, *, config: DecoderConfig, against: Tensor | None = None
) -> dict[str, Tensor]:
    """Direct logit attribution: the summand of each part of the residual stream in a logit, or in a difference of two.

    The summands add up to the logit in families whose layers return what enters plus what they add, or a multiple of
    it, and whose head has no bias and no soft-cap. Runs kernel="math".

    Args:
        params: The parameters of the model.
        prepared: (inputs, masks, freqs_cis) of `fnmodels.prepare`.
        targets: The token whose logit is explained at each position, int64 [B, S].
        config: The model's config.
        against: The token whose logit is subtracted, int64 [B, S]; None: no difference.

    Returns:
        {tap: what it adds}. "embed", "layers.N.attention", "layers.N.mlp" and other summands: [B, S].
        "layers.N.attention.z" [B, S, N] by head and "layers.N.mlp.neurons" [B, S, F] by neuron: their parts of these,
        without biases; the scale of a norm that follows the sublayer is held.
    """
    constant_params = map_tree(Tensor.detach, params)
    summands, parts = ["embed", *names_of(config, *ADDED)], names_of(config, *_PARTS)
    scales = [name for name in tap_names(config) if name.endswith(".scale")]
    run = functools.partial(forward, constant_params, *prepared, config=config, kernel="math")
    with torch.no_grad():
        _, tapped = run(taps=(*summands, *scales))
    # With constants replacing the sublayers' outputs, the residual stream is the sum of these as the model takes it.
    constants = {name: tapped[name].requires_grad_() for name in summands}
    logits = run(edits={**constants, _SCALE: tapped[_SCALE]})
    score = logits.gather(-1, targets[..., None]).sum()
    if against is not None:
        score = score - logits.gather(-1, against[..., None]).sum()
    grads = torch.autograd.grad(score, list(constants.values()))
    weights = dict(zip(summands, grads, strict=True))
    added = {name: (tapped[name].detach() * weights[name]).sum(-1) for name in summands}
    return added | (_parts_of(run, tapped, scales, weights, parts, config) if parts else {})


def _parts_of(
    run: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    tapped: dict[str, Tensor],
    scales: list[str],
    weights: dict[str, Tensor],
    parts: list[str],
    config: DecoderConfig,
) -> dict[str, Tensor]:
    """Contributions of heads and neurons. weights: how much logits grow with each summand of the residual stream."""
    frozen: dict[str, Edit] = {name: tapped[name] for name in scales if name != _SCALE}
    # Cut between sublayers, so that a head reaches the output of its own sublayer alone.
    cuts: dict[str, Edit] = dict.fromkeys(("embed", *names_of(config, "input", "middle")), _cut)
    leaves: dict[str, Edit] = dict.fromkeys(parts, _leaf)
    _, values = run(taps=(*weights, *parts), edits=frozen | cuts | leaves)
    # Added after the MLP, from its input; no head or neuron contributes it.
    summed = [name for name in weights if values[name].requires_grad and not name.endswith(".per_layer")]
    total = torch.stack([(values[name] * weights[name]).sum() for name in summed]).sum()
    shares = torch.autograd.grad(total, [values[name] for name in parts])
    each = {name: values[name].detach() * share for name, share in zip(parts, shares, strict=True)}
    return {name: share.sum(-1) if name.endswith(".z") else share for name, share in each.items()}


def _cut(value: Tensor, name: str) -> Tensor:
    return value.detach()


def _leaf(value: Tensor, name: str) -> Tensor:
    return value.detach().requires_grad_()
