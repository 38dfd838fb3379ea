"""Multi-token prediction (MTP) heads (DeepSeek-V3, arXiv 2412.19437, section 2.2).

MTP head k (from 1) combines, at position i, the hidden state of the previous depth with the embedding of token i + k,
and runs one block over the sequence; the model's output head then predicts token i + k + 1 from the result. The block
is a layer like the model's last one, or the layers of the family's `mtp_kinds`. Token i + k is an input, like
positions: rolling the sequence inside the model would be wrong for permuted, split or packed rows. The code that builds
the batch computes it with `ahead`, while rows are in order.

The parameters are params["mtp"] of a config with `num_nextn_predict_layers`; `fnmodels.forward` does not use them.

In families whose residual stream has several rows (DeepSeek V4, Qwen 3.8 Flash Next) heads read the rows [B, S, n, D]
before the last layer folds them: each row and the embedding have a projection of their own, whose sum is the row that
the block begins with; the block folds its rows by weights of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common import mtp
from fnmodels.models.common.family import RMSNormConfig, function_of, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm

from .apply import CacheStep, run_layers
from .options import ForwardKwargs
from .run_params import with_run
from .tree import Tree


def ahead(values: Tensor, segment_ids: Tensor, depth: int, *, fill: int) -> Tensor:
    """[B, S, depth]: entry [b, i, k] is `values[b, i + k + 1]` if that token is in the same document, else `fill`.

    values, segment_ids: [B, S], rows in order. Tokens with fill=-1 give the `next_tokens` of `hidden`; labels with
    fill=-100 give the targets of the MTP heads. A document that continues in another row ends at the row's end.
    Raises ValueError for depth < 1.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; a look ahead is of one token at least.")
    inside, found = segment_ids > 0, []
    for k in range(1, depth + 1):
        moved, ids = (F.pad(t[:, k:], (0, min(k, t.shape[1])), value=v) for t, v in ((values, fill), (segment_ids, 0)))
        inside = inside & (ids == segment_ids)  # for every token in between: padding may be inside a document
        found.append(torch.where(inside, moved, fill))
    return torch.stack(found, dim=-1)


def source_taps(config: Any) -> tuple[str, ...]:
    """The taps of `fnmodels.hidden` that MTP heads read in place of its result; () in most families."""
    streams = traits_of(family_of(config)).mtp_reads == "streams"
    return (f"layers.{config.num_hidden_layers - 1}.streams",) if streams else ()


def read(x: Tensor, tapped: Mapping[str, Tensor], config: Any) -> Tensor:
    """What MTP heads read of the model: the one of `source_taps`, or the result x of `fnmodels.hidden`."""
    names = source_taps(config)
    return tapped[names[0]] if names else x


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
    cache: CacheStep | None = None,
    **options: Unpack[ForwardKwargs],
) -> Any:
    """A tuple of the states [B, S, D] of the MTP heads; with taps (states, {"mtp.K.NAME": tensor}).

    With cache, for params with one head, (state, [new entry of each layer of the head's block]), with taps before them.

    x: [B, S, D], the output of `fnmodels.hidden`, or the tap [B, S, n, D] of `source_taps`.
    next_tokens: [B, S, number of MTP heads] from `ahead`, negative past the end of a document: such a position is
        treated as padding (not attended to, not routed to experts).
    taps: names of taps of a layer, recorded for every MTP head.
    apart: (shard, gather) of the sequence dimension of [B, S, ...], if the outputs of layers, and x where it is that of
        the last one, hold only some of the positions of next_tokens. Taps hold all of them.
    cache: the entries of the head's layers, under their indices in `common.mtp.blocks`, see `fnmodels.apply.CacheStep`.

    Logits of head k: `family.unembed(view(params, k), state, config=config)`. Raises ValueError if next_tokens does not
    fit x and params. The paper leaves open which states the next head reads; by the trait `mtp_reads`, as in the
    implementations that the published weights were made with, they are normalized by the model's final norm or by the
    previous head's own ("chained"), or not ("raw"), or every head reads the model's ("shared"); "streams" are "raw"
    states of several rows.
    """
    if options.get("edits"):
        raise ValueError("Edits name the model's own layers; the blocks of MTP heads have none: leave edits out.")
    heads = params.get("mtp", ())
    cut, join = apart or (_same, _same)
    family, eps = family_of(config), norm_eps(config)
    norm, reads = function_of(family, "stream_norm") or rms_norm, traits_of(family).mtp_reads
    rows, columns = x.shape[0], x.shape[1] if apart is None else next_tokens.shape[1]
    if not heads or next_tokens.shape != (rows, columns, len(heads)):
        raise ValueError(
            f"next_tokens must be {[rows, columns, len(heads)]}, a token for each of the {len(heads)} heads in params "
            f"(fnmodels.mtp.ahead makes them), not {list(next_tokens.shape)}."
        )
    if x.ndim != (4 if reads == "streams" else 3):
        raise ValueError(f"x is {list(x.shape)}, and the heads of this model read {_SHAPES[reads == 'streams']}.")
    model: Any = config
    (own, first), kinds = mtp.blocks(model), mtp.kinds_of(model)
    masks, freqs_cis = _of_kinds(masks, kinds), _of_kinds(freqs_cis, kinds)
    shared: Tree | None = None if function_of(family, "shared") is None else {}  # of the model's layers alone
    before = x if reads == "raw" else cut(x) if reads == "streams" else norm(x, params["norm"], eps=eps)
    of_layers = tuple(f"layers.*.{name}" for name in dict.fromkeys((*taps, *["streams"] * (reads == "streams"))))
    states: list[Tensor] = []
    tapped: dict[str, Tensor] = {}
    for k, head in enumerate(heads):
        known = next_tokens[..., k] >= 0
        token = cut(family.embed(params, next_tokens[..., k].clamp(min=0), config=config).where(known[..., None], 0))
        layers = head["block"] if isinstance(head["block"], list) else [head["block"]]
        out = run_layers(
            with_run(params, {"layers": dict(enumerate(layers, first))}),
            join(_begun(head, token, before, norm, eps)),
            masks,
            freqs_cis,
            first,
            first + len(layers),
            config=own,
            valid=known,
            shared=shared,
            taps=of_layers,
            cache=cache,
            **options,
        )
        state, *more = out if isinstance(out, tuple) else (out,)
        states.append(state)
        of_last = more[0].items() if of_layers else ()
        found = {path.split(".", 2)[2]: value for path, value in of_last}  # of several layers, what the last one has
        tapped |= {f"mtp.{k}.{name}": found[name] for name in found if name in taps}
        if cache is not None:
            return state, *([tapped] if taps else []), [more[-1][index] for index in sorted(more[-1])]
        if reads == "streams":
            before = cut(found["streams"])
        elif reads != "shared":
            before = state if reads == "raw" else norm(state, head["norm"], eps=eps)
    return (tuple(states), tapped) if taps else tuple(states)


_SHAPES = "states [B, S, D], what fnmodels.hidden returns", "streams [B, S, n, D], its tap of mtp.source_taps"


def _begun(head: Tree, token: Tensor, before: Tensor, norm: Callable[..., Tensor], eps: float) -> Tensor:
    """What the block of a head begins with, of the embedding [B, S, D] of the token ahead and the states before."""
    token = norm(token, head["enorm"], eps=eps)
    if "eh_proj" in head:
        return linear(torch.cat((token, norm(before, head["hnorm"], eps=eps)), dim=-1), head["eh_proj"])
    if head["hnorm"].shape[0] == before.shape[-1]:
        states = norm(before, head["hnorm"], eps=eps)  # of each row
    else:
        states = norm(before.flatten(-2), head["hnorm"], eps=eps).unflatten(-1, before.shape[-2:])
    return linear(token, head["e_proj"]).unsqueeze(-2) + linear(states, head["h_proj"])


def norm_eps(config: Any) -> float:
    """The eps of the norms of the residual stream."""
    eps: float = config.layer_norm_epsilon if hasattr(config, "layer_norm_epsilon") else config.rms_norm_eps
    return eps


def _of_kinds(by_kind: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Masks or tables with those that layers of `kinds` read under their names."""
    found = {kind: mtp.like(kind, by_kind) for kind in kinds}
    return {**by_kind, **{kind: by_kind[known] for kind, known in found.items() if known is not None}}


def _same(x: Tensor) -> Tensor:
    return x


def view(params: Tree, head: int) -> Tree:
    """params for `unembed` of MTP head `head`, without "layers" and "mtp".

    The final norm and the output head are the MTP head's own where it has them.
    """
    rest = {name: value for name, value in params.items() if name not in ("layers", "mtp")}
    own = params["mtp"][head]
    return rest | {name: own[name] for name in ("norm", "lm_head") if name in own}
