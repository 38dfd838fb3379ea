"""From hidden states to logits: the final norm and the head, with the taps and edits that are of the norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fnmodels.edits import edit_end
from fnmodels.models.common import decoder
from fnmodels.models.common.family import DecoderConfig, function_of
from fnmodels.models.common.registry import family_of
from fnmodels.ops.norm_taps import watched_norms

from .options import Edit
from .taps import FINAL
from .tree import Tree


def unembedded(
    params: Tree, x: Tensor, config: DecoderConfig, taps: tuple[str, ...], edits: Mapping[str, Edit]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits [B, S, V], taps) of hidden states x [B, S, D]: the final norm and the head. taps, edits: of FINAL."""
    if not taps and not (edits and any(name in edits for name in FINAL)):
        return decoder.scores(params, x, config=config), {}
    if "norm" not in params:
        raise ValueError(f"This model has no final norm, so it has no {' and no '.join(FINAL)}.")
    tapped: dict[str, Tensor] = {}

    def tap(name: str, value: Tensor) -> Tensor:
        tapped[name] = edit_end(edits, name, value)
        return tapped[name]

    with watched_norms({FINAL[0]: params["norm"]}, tap):
        logits = decoder.scores(params, x, config=config)
    if not tapped:
        raise ValueError(f"A {config.model_type} has no {' and no '.join(FINAL)}: its last norm is of pooled features.")
    return logits, {name: tapped[name] for name in taps}


def refuse_final(config: Any, taps: tuple[str, ...], edits: Mapping[str, Edit]) -> None:
    if unread := [*taps, *(name for name in FINAL if name in edits)]:
        raise ValueError(f"A {config.model_type} has no {unread[0]!r}: what its last norm returns has no weight.")


def per_document(
    params: Tree, inputs: Tree, x: Tensor, config: Any, taps: tuple[str, ...], edits: Mapping[str, Edit]
) -> Tensor:
    """Logits [N, labels] of hidden states x [B, S, D]: one row per document. ValueError for taps and edits of FINAL."""
    if not isinstance(inputs, Mapping) or "documents" not in inputs:
        raise ValueError(
            f"The head {config.head!r} returns one row per document: pass the inputs that fnmodels.prepare returns, "
            'which hold "documents".'
        )
    if unread := [*taps, *(name for name in FINAL if name in edits)]:
        raise ValueError(f"{unread[0]!r} is of each token, but the head {config.head!r} reads one token per document.")
    classify = function_of(family_of(config), "classify") or decoder.classify
    logits: Tensor = classify(params, x, inputs["documents"], config=config)
    return logits
