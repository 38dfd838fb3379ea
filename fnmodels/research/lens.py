"""The logit lens (nostalgebraist 2020), the tuned lens (arXiv 2303.08112) and the Jacobian lens (the mean derivative of
the last state by each layer's): logits read from every layer's output.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.apply import hidden
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of
from fnmodels.ops.dtypes import upcast
from fnmodels.tree import Tree

from .common import Prepared, differentiable, layer_count, names_of, valid_of


def logit_lens(params: Tree, prepared: Prepared, *, config: DecoderConfig, kernel: str = "auto") -> Tensor:
    """The logit lens: the embedding and each layer's output, read through the final norm and the head.

    Args:
        params: The parameters of the model.
        prepared: (inputs, masks, freqs_cis) of `fnmodels.prepare`.
        config: The model's config.
        kernel: The attention kernel.

    Returns:
        Logits [L + 1, B, S, V]; the last of them are the model's.
    """
    return _logits(params, _states(params, prepared, config, kernel), config)


def init_tuned_lens(config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A tuned lens (arXiv 2303.08112) that begins as the logit lens: translators of the states before each layer.

    A state x becomes x + matrix x + bias; the last state needs none.

    Args:
        config: The model's config.
        dtype: Of the translators.

    Returns:
        matrix [L, D, D] and bias [L, D], zeros.
    """
    layers, width = layer_count(config), config.hidden_size
    return {"matrix": torch.zeros(layers, width, width, dtype=dtype), "bias": torch.zeros(layers, width, dtype=dtype)}


def tuned_lens(
    lens: dict[str, Tensor], params: Tree, prepared: Prepared, *, config: DecoderConfig, kernel: str = "auto"
) -> Tensor:
    """The logits of each layer's state, translated by a tuned lens.

    Args:
        lens: The translators, of `train_tuned_lens`.
        params: The parameters of the model.
        prepared: (inputs, masks, freqs_cis) of `fnmodels.prepare`.
        config: The model's config.
        kernel: The attention kernel.

    Returns:
        Logits [L + 1, B, S, V]; the last of them are the model's.
    """
    states = _states(params, prepared, config, kernel)
    return _logits(params, _translated(lens, states), config)


def train_tuned_lens(
    lens: dict[str, Tensor],
    params: Tree,
    batches: Iterable[Prepared],
    *,
    config: DecoderConfig,
    rate: float = 1e-3,
    kernel: str = "auto",
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains a tuned lens by Adam, one step per batch: the mean over tokens and layers of KL(model || lens).

    Args:
        lens: The translators to begin with, which are not changed.
        params: The parameters of the model, which get no gradient.
        batches: (inputs, masks, freqs_cis) of each batch.
        config: The model's config.
        rate: The learning rate.
        kernel: The attention kernel.

    Returns:
        The trained translators, and the loss of each batch in nats.
    """
    lens = {name: value.detach().clone().requires_grad_() for name, value in lens.items()}
    optimizer, losses = torch.optim.Adam(lens.values(), rate), []
    for prepared in batches:
        with torch.no_grad():
            states = _states(params, prepared, config, kernel)
            target_logp = F.log_softmax(upcast(_logits(params, states[-1:], config)[0]), -1)
        optimizer.zero_grad()
        total = 0.0
        for index, state in enumerate(states[:-1]):  # the logits of one layer at a time
            moved = state + state @ lens["matrix"][index].T + lens["bias"][index]
            lens_logp = F.log_softmax(upcast(_logits(params, moved[None], config)[0]), -1)
            divergence = (target_logp.exp() * (target_logp - lens_logp)).sum(-1)
            loss = divergence[valid_of(prepared)].mean() / (len(states) - 1)
            torch.autograd.backward(loss, inputs=list(lens.values()))
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return {name: value.detach() for name, value in lens.items()}, losses


def jacobian_lens(
    params: Tree,
    prepared: Prepared,
    *,
    config: DecoderConfig,
    directions: Tensor | None = None,
    chunk: int = 16,
) -> Tensor:
    """Derivatives of directions of the final hidden state by the embedding and by each layer's output.

    Entry l is the mean over tokens t of the derivative of directions @ (the sum over all tokens of the state before the
    final norm) by state l at t; the last is `directions` itself. Average over batches for a lens of a corpus. Runs
    kernel="math".

    Args:
        params: The parameters of the model.
        prepared: (inputs, masks, freqs_cis) of `fnmodels.prepare`.
        config: The model's config.
        directions: [n, D]; None: all dimensions, a square matrix for `jacobian_lens_logits`.
        chunk: Directions that go through one batched backward pass, which holds as many copies of the gradients of
            activations.

    Returns:
        [L + 1, n, D].
    """
    names, valid = ["embed", *names_of(config, "output")], valid_of(prepared)
    edits = {"embed": differentiable}
    last, tapped = hidden(params, *prepared, config=config, taps=tuple(names), kernel="math", edits=edits)
    vectors = torch.eye(last.shape[-1]) if directions is None else directions

    def pulled(direction: Tensor) -> Tensor:
        cotangent = direction * valid[..., None]
        gradients = torch.autograd.grad(last, [tapped[name] for name in names], cotangent, retain_graph=True)
        return torch.stack([gradient.sum((0, 1)) for gradient in gradients])

    # torch.func's vmap, for autograd.grad(is_grads_batched=True) runs products and activations one direction at a time.
    rows = [torch.func.vmap(pulled, out_dims=1)(part) for part in vectors.to(last).split(chunk)]
    return torch.cat(rows, 1) / valid.sum()


def jacobian_lens_logits(
    lens: Tensor, params: Tree, prepared: Prepared, *, config: DecoderConfig, kernel: str = "auto"
) -> Tensor:
    """The logits of each layer's state, carried to the last layer by a Jacobian lens.

    Args:
        lens: [L + 1, D, D], of `jacobian_lens` with all directions.
        params: The parameters of the model.
        prepared: (inputs, masks, freqs_cis) of `fnmodels.prepare`.
        config: The model's config.
        kernel: The attention kernel.

    Returns:
        Logits [L + 1, B, S, V]; the last of them are the model's.
    """
    states = _states(params, prepared, config, kernel)
    return _logits(params, torch.einsum("lij,lbsj->lbsi", lens, states), config)


def _states(params: Tree, prepared: Prepared, config: DecoderConfig, kernel: str) -> Tensor:
    """[L + 1, B, S, D]: the embedding and each layer's output."""
    names = ["embed", *names_of(config, "output")]
    _, tapped = hidden(params, *prepared, config=config, taps=tuple(names), kernel=kernel)
    return torch.stack([tapped[name] for name in names])


def _translated(lens: dict[str, Tensor], states: Tensor) -> Tensor:
    matrix, bias = lens["matrix"], lens["bias"][:, None, None]
    before = states[:-1] + torch.einsum("lij,lbsj->lbsi", matrix, states[:-1]) + bias
    return torch.cat((before, states[-1:]))


def _logits(params: Tree, states: Tensor, config: DecoderConfig) -> Tensor:
    family = family_of(config)
    return torch.stack([family.unembed(params, state, config=config) for state in states])
