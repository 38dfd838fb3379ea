"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): heads that look further than the next token.

Head k (from 1) takes, at position i, what the model before it made of the tokens up to i, and the token i + k, which
the model before it had to predict; one block over all positions makes of both a state from which the model's own head
predicts token i + k + 1. Token i + k is an input, like positions: a roll of the sequence in here would be wrong as soon
as the sequence is permuted, split or packed. Whoever builds the batch calls `ahead`, on rows still in order.

The heads are parameters under "mtp" of a config with `num_nextn_predict_layers`; forward passes leave them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.registry import RMSNormConfig, family_of
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm

from .apply import run_layers
from .options import ForwardKwargs
from .run_params import with_run
from .tree import Tree


def ahead(values: Tensor, segment_ids: Tensor, depth: int, *, fill: int) -> Tensor:
    """[B, S, depth]: at [b, i, k] what `values` [B, S] holds k + 1 tokens after i in the same document, else `fill`.

    Of tokens, with fill=-1, it is what `hidden` reads; of labels, with fill=-100, what its heads are to predict. The
    rows must be in order. A document that goes on in another row ends here: the last tokens of a row see less far.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; a look ahead is of one token at least.")
    inside, found = segment_ids > 0, []
    for k in range(1, depth + 1):
        moved, ids = (F.pad(t[:, k:], (0, min(k, t.shape[1])), value=v) for t, v in ((values, fill), (segment_ids, 0)))
        inside = inside & (ids == segment_ids)  # of every token on the way too: padding may stand inside a document
        found.append(torch.where(inside, moved, fill))
    return torch.stack(found, dim=-1)


def hidden(
    params: Tree,
    x: Tensor,
    next_tokens: Tensor,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    /,
    *,
    config: RMSNormConfig,
    taps: tuple[str, ...] = (),
    apart: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None,
    **options: Unpack[ForwardKwargs],
) -> Any:
    """The states [B, S, D] of each head, a tuple; with taps (states, {"mtp.K.NAME": tensor}).

    x: the model's states, `fnmodels.hidden`. next_tokens: [B, S, heads] from `ahead`, below 0 where the document has
    ended; what a head makes of such a place is seen by no other, and counts in no expert. taps: names as the family's
    TAPS, of every head. Logits of head k are `family.unembed(view(params, k), state, config=config)`. apart: (what
    takes some columns of [B, S, D], the way back), where x and what layers return are of these only.

    The state that goes from one model to the next is normed, by the first one's final norm and by each head's own, as
    in the implementations that published weights were made for; the paper leaves it open.
    """
    heads = params.get("mtp", ())
    cut, join = apart or (_same, _same)
    rows, columns = x.shape[0], x.shape[1] if apart is None else next_tokens.shape[1]
    if not heads or next_tokens.shape != (rows, columns, len(heads)):
        raise ValueError(
            f"next_tokens must be {[rows, columns, len(heads)]}, a token for each of the {len(heads)} heads in params "
            f"(fnmodels.mtp.ahead makes them), not {list(next_tokens.shape)}."
        )
    family, eps = family_of(config), config.rms_norm_eps
    last = len(family.kinds(config)) - 1
    before = rms_norm(x, params["norm"], eps=eps)
    states: list[Tensor] = []
    tapped: dict[str, Tensor] = {}
    for k, head in enumerate(heads):
        known = next_tokens[..., k] >= 0
        token = cut(family.embed(params, next_tokens[..., k].clamp(min=0), config=config).where(known[..., None], 0))
        both = (rms_norm(token, head["enorm"], eps=eps), rms_norm(before, head["hnorm"], eps=eps))
        # The block is of the last layer's kind, and runs in its place.
        out = run_layers(
            with_run(params, {"layers": {last: head["block"]}}),
            join(linear(torch.cat(both, dim=-1), head["eh_proj"])),
            masks,
            freqs_cis,
            last,
            last + 1,
            config=config,
            valid=known,
            taps=tuple(f"layers.{last}.{name}" for name in taps),
            **options,
        )
        state, found = out if taps else (out, {})
        states.append(state)
        tapped |= {f"mtp.{k}.{name}": found[f"layers.{last}.{name}"] for name in taps}
        before = rms_norm(state, head["norm"], eps=eps)
    return (tuple(states), tapped) if taps else tuple(states)


def _same(x: Tensor) -> Tensor:
    return x


def view(params: Tree, head: int) -> Tree:
    """The model's parameters with that head's norm in the place of the last one: what `unembed` makes its logits of."""
    rest = {name: value for name, value in params.items() if name not in ("layers", "mtp")}
    return rest | {"norm": params["mtp"][head]["norm"]}
