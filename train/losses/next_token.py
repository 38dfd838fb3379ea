"""The next-token loss, (sum, count[, aux]), and the model states that losses share."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels.apply import hidden_states
from fnmodels.image_text import ImageFeatures, Prepared, own_places, with_features
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.family import DecoderConfig, field_of, parsed, traits_of
from fnmodels.models.common.registry import text_config
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.options import USUAL, ForwardKwargs, ForwardOptions
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree
from train.batch import check_entries
from train.loss import run_options
from train.losses.moe_balance import balance_terms, counts_by_layer
from train.run_options import PLAIN, Balance, RouterTerms

from .cross_entropy import check_labels, check_targets, counted
from .lm_head import loss_of_targets

ROUTER_TAPS = ("layers.*.router_logits", "layers.*.expert_indices", "layers.*.counts")


def next_token_loss(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    chunk: int | str | None = "auto",
    length: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    balance: Balance | None = None,
    aux: bool = False,
    **options: Unpack[ForwardKwargs],
) -> tuple[Any, ...]:
    """The loss of language models: the sum of the tokens' cross entropies, and the number of labels that count.

    Args:
        params: The parameters of the model.
        batch: tokens, positions, segment_ids and labels, each [B, S]; labels[b, t] is the target predicted at t
            (already shifted), int64, -100 ignored. Optional: weights [B, S], which multiply each token's loss (a label
            of weight 0 does not count). Also routing and choices, int64 [B, S, layers, k], the experts and the keys to
            use; rng, int64 [B, S], keys of dropout from `fnmodels.inputs.noise_keys`; token_types [B, S];
            image_features [B, S, F, D] with is_image. See `train.Batch`.
        config: The model's config; that of the whole model for a batch with images, whose text `params` are of.
        chunk: Tokens whose logits exist at a time; "auto" as for `head_loss`; None: all, in plain operations.
        length: The length that length-dependent rotary scalings read, see `fnmodels.prepare`.
        label_smoothing: The share of the target that is spread uniformly over the vocabulary (arXiv 1512.00567).
        z_loss: The coefficient of log(sum(exp(logits)))^2 (arXiv 2204.02311).
        balance: Terms added for the routers of a model with experts; None: none.
        aux: Whether router sums are returned too: {"counts": [sparse layers, E] tokens per expert} and, for nonzero
            coefficients of `balance`, "sequence_balance", "batch_balance" and "router_z".
        **options: Keywords of `fnmodels.forward`; without a layout one is computed where the host can read the batch.

    Returns:
        (sum in nats, 0-d in fp32 at least; count, 0-d int64[, aux]).

    Raises:
        ValueError: The batch lacks a required entry, an id is outside of the model's, or balance or aux are set for a
            model without experts.
    """
    given = ForwardOptions(**options) if options else USUAL
    call = model_call(params, batch, config=config, length=length, balance=balance, aux=aux, options=given)
    found = call.states(*hidden_states(*call.arguments)[:2])
    with invariant_rows(given.invariant):
        total, count = loss_of_targets(
            params,
            found.x,
            batch["labels"],
            config=call.arguments[4],
            chunk=chunk,
            weights=batch.get("weights"),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
    return found.added_to(total, count)


class ModelStates(NamedTuple):
    """The model's results for a batch, from which a loss is computed.

    x [B, S, D]: from `fnmodels.hidden`. masks, freqs_cis: from `fnmodels.prepare`. params: with the options of their
    run. added: the balance terms for the loss's sum, 0-d; None without balance. sums: router statistics; None unless
    requested. tapped: the taps that the loss asked for.
    """

    x: Tensor
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    params: RunParams
    added: Tensor | None = None
    sums: dict[str, Tensor] | None = None
    tapped: Mapping[str, Tensor] = {}

    def added_to(self, total: Tensor, count: Tensor) -> tuple[Any, ...]:
        """(sum, count[, aux]) of the loss, from the head's sum and count."""
        total = total if self.added is None else total + self.added
        return (total, count) if self.sums is None else (total, count, self.sums)


class ModelCall(NamedTuple):
    """A call of the model for a loss: the first seven arguments of `fnmodels.apply.hidden_states`, and its terms.

    run_params: the params with the options of their run, for further calls. terms: None without balance and aux.
    balanced: whether their sum is added to the loss.
    """

    arguments: tuple[Any, ...]
    run_params: RunParams
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    valid: Tensor
    terms: RouterTerms | None = None
    balanced: bool = False

    def states(self, x: Tensor, tapped: dict[str, Tensor]) -> ModelStates:
        """The states of a batch, from what the model returned."""
        if self.terms is None:
            return ModelStates(x, self.masks, self.freqs_cis, self.run_params, tapped=tapped)
        of_run = run_options(self.run_params).ranks.balance
        local = self.terms.balance if of_run is None else of_run(self.terms.balance)
        added, sums = balance_terms(tapped, self.valid, self.terms.labelled, local)
        if "counts" in sums:
            sums["counts"] = counts_by_layer(sums["counts"], self.arguments[4])
        results = added if self.balanced else None, sums if self.terms.aux else None
        return ModelStates(x, self.masks, self.freqs_cis, self.run_params, *results, tapped)


def model_states(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    length: int | Tensor | None,
    options: ForwardOptions,
    balance: Balance | None = None,
    aux: bool = False,
    taps: tuple[str, ...] = (),
) -> ModelStates:
    """The model's states for a batch: of the call that `model_call` makes, with its errors."""
    how: dict[str, Any] = {"options": options, "balance": balance, "aux": aux, "taps": taps}
    call = model_call(params, batch, config=config, length=length, **how)
    return call.states(*hidden_states(*call.arguments)[:2])


def model_call(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    length: int | Tensor | None,
    options: ForwardOptions,
    balance: Balance | None = None,
    aux: bool = False,
    taps: tuple[str, ...] = (),
) -> ModelCall:
    """The call of the model for a batch as in `next_token_loss`, after checking its keys and labels.

    balance, aux: as there. taps: that the loss reads; over a pipeline of the last layer. ValueError for an invalid
    batch, and for balance or aux with a model without experts.
    """
    check_entries(batch, "tokens", "positions", "segment_ids", "labels")
    whole, config = config, text_config(config)
    check_labels(batch["labels"], batch["tokens"].shape[:2], "tokens")
    if field_of(config, "head") in ("lm", "masked_lm"):  # others have labels of another meaning, which they check
        check_targets(batch["labels"], config.vocab_size)
    given = params if isinstance(params, RunParams) else RunParams(params, PLAIN)
    run = run_options(given)
    length = length if run.ranks.length is None else run.ranks.length(config, batch["positions"], length)
    known: Any = {name: batch.get(name) for name in ("positions", "segment_ids", "rng")} | {"length": length}
    if "image_features" in batch:
        (inputs, masks, freqs_cis), options = _with_images(given, batch, whole, options, known)
    else:
        inputs, masks, freqs_cis = fnmodels.prepare(config, batch["tokens"], **known)
    inputs |= {name: batch[name] for name in ("routing", "choices", "token_types", "preceding") if name in batch}
    arguments = inputs, masks, freqs_cis, config, options
    aux = aux or run.reports.counts
    if not aux and balance is None:
        return ModelCall((given, *arguments, taps), given, masks, freqs_cis, inputs["valid"])
    family = fnmodels.family_of(config)
    if not traits_of(family).routed:
        raise ValueError(f"balance and aux are for models with experts, and {config.model_type} has none.")
    terms = RouterTerms(balance or Balance(), counted(batch["labels"], batch.get("weights")).sum(1), aux)
    noted = given
    if run is given.run and run.stage is not None:
        noted = RunParams(given, dataclasses.replace(run, stage=dataclasses.replace(run.stage, routers=terms)))
    # a dense model of a family that has models with experts: its terms are 0
    taps = (*taps, *ROUTER_TAPS) if any(kind.routed for kind in parsed(family.kinds(config))) else taps
    return ModelCall((noted, *arguments, taps), given, masks, freqs_cis, inputs["valid"], terms, balance is not None)


def _with_images(
    params: RunParams, batch: Mapping[str, Tensor], config: Any, options: ForwardOptions, known: dict[str, Any]
) -> tuple[Prepared, ForwardOptions]:
    """What `prepare` makes of a batch with image_features, and the options of the call, whose edits add the features of
    layers. ValueError for the config of a text alone, a loss with edits of its own, and edits over sequence=True.

    params: of the text. config: of the whole model. known: further arguments of `prepare`.
    """
    if text_config(config) is config:
        raise ValueError(
            f"The batch has image_features, and config is that of a text alone ({config.model_type}): pass the config "
            "of the full model, of fnmodels.models.vision_language."
        )
    check_entries(batch, "is_image")
    tokens, values, places = batch["tokens"], batch["image_features"].unbind(2), own_places(batch["is_image"])
    types = {"token_types": batch["token_types"]} if "token_types" in batch else {}
    prepared = fnmodels.prepare(config, tokens, places=places, **types, **known)
    if run_options(params).stage is not None:  # the call is recorded: pipelines, which have no features, refuse these
        return prepared, options
    features = ImageFeatures(values, torch.zeros(0, 3, dtype=torch.int64))
    prepared, more = with_features(params.with_entries({"text": params}), features, places, prepared, config=config)
    if "edits" not in more:
        return prepared, options
    if run_options(params).ranks.sequence:
        raise ValueError(
            f"The images of {config.model_type} are edits of layers at all positions, of which sequence=True has some "
            "on each process: use sequence=False."
        )
    if options.edits:
        raise ValueError(f"The images of {config.model_type} are edits of layers; the loss has edits of its own.")
    return prepared, dataclasses.replace(options, edits=more["edits"])
