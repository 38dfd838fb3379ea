"""Direct logit attribution: which layers, heads and neurons write a logit (arXiv 2211.00593, section 3).

The residual stream is a sum, and with the scale of the final norm held at its value the logits are an affine function
of it. So a logit is a sum of what each part contributes, plus what the head adds where the stream is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fnmodels.apply import forward, unembedded
from fnmodels.models.common.registry import DecoderConfig
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
    """{tap: what it adds to the logit of targets[b, s] at (b, s)}; with `against` to the difference of two logits.

    targets, against: token ids, int64 [B, S]. "embed", "layers.N.attention", "layers.N.mlp" and other summands of the
    residual stream: [B, S]. "layers.N.attention.z" [B, S, N] by head and "layers.N.mlp.neurons" [B, S, F] by neuron:
    their parts of these, without biases; the scale of a norm that follows the sublayer is held. The summands add up to
    the logit in families whose layers return what enters plus what they add, and whose head has no bias and no
    soft-cap. Runs kernel="math".
    """
    held = map_tree(Tensor.detach, params)
    summands, parts = ["embed", *names_of(config, *ADDED)], names_of(config, *_PARTS)
    scales = [name for name in tap_names(config) if name.endswith(".scale")]
    with torch.no_grad():
        _, tapped = forward(held, *prepared, config=config, kernel="math", taps=("hidden", *scales))
    weight = _logit_gradient(held, tapped, targets, against, config)
    frozen: dict[str, Edit] = {name: tapped[name] for name in scales if name != _SCALE}
    # Cut between sublayers, so that a head reaches the output of its own sublayer alone.
    cuts: dict[str, Edit] = dict.fromkeys(("embed", *names_of(config, "input", "middle")), _cut)
    leaves: dict[str, Edit] = dict.fromkeys(parts, _leaf)
    _, found = forward(
        held, *prepared, config=config, kernel="math", taps=(*summands, *parts), edits=frozen | cuts | leaves
    )
    added = {name: (found[name].detach() * weight).sum(-1) for name in summands}
    if parts:
        # What a layer adds after its MLP reads it; no part of it is a head's or a neuron's own.
        own = [name for name in summands if found[name].requires_grad and not name.endswith(".per_layer")]
        total = sum(((found[name] * weight).sum() for name in own), weight.new_zeros(()))
        inner = torch.autograd.grad(total, [found[name] for name in parts])
        for name, gradient in zip(parts, inner, strict=True):
            share = found[name].detach() * gradient
            added[name] = share.sum(-1) if name.endswith(".z") else share
    return added


def _logit_gradient(
    params: Tree, tapped: dict[str, Tensor], targets: Tensor, against: Tensor | None, config: DecoderConfig
) -> Tensor:
    """[B, S, D]: by how much the logits of the targets grow with the residual stream, the final norm's scale held."""
    x = tapped["hidden"].detach().requires_grad_()
    logits, _ = unembedded(params, x, config, (), {_SCALE: tapped[_SCALE]})
    wanted = logits.gather(-1, targets[..., None]).sum()
    if against is not None:
        wanted = wanted - logits.gather(-1, against[..., None]).sum()
    return torch.autograd.grad(wanted, x)[0]


def _cut(value: Tensor, name: str) -> Tensor:
    return value.detach()


def _leaf(value: Tensor, name: str) -> Tensor:
    return value.detach().requires_grad_()
