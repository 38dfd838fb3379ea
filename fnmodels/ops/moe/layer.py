"""Mixture-of-experts layer (arXiv 1701.06538): a router, k of E experts per token, and optionally a shared expert.

Padding is excluded: `valid` is required, and no value of x at padding (NaN included) reaches an expert, a count or a
gradient. Attention would spread NaN before this layer, so `forward` zeroes padding at the start.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fnmodels.inputs.values import readable
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear, linears
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.torch_internals import is_plain_eager
from fnmodels.options import Experts, Tap, untapped
from fnmodels.tree import Tree

from .choice import choose_experts
from .experts_loop import Act, inputs_of
from .router import RouterDtypes

# Entries that a sparse block always returns, and its further taps.
KEPT = ("counts", "router_logits")
MOE_TAPS = (*KEPT, "expert_indices", "expert_weights", "experts", "shared_expert")

Route = Callable[..., tuple[Tensor, Tensor]]

LATENT_EPS = 1e-5  # of the norm of what experts of a narrower width return
_UNCAST = RouterDtypes(param="model", projection="model", score="wide", output="wide")


def moe(
    layer: Tree,
    x: Tensor | tuple[Tensor, Tensor],
    route: Route,
    *,
    valid: Tensor | None,
    routing: Tensor | None = None,
    experts: str | Experts = "auto",
    act: Act | tuple[Act, Act],
    dtypes: RouterDtypes = _UNCAST,
    latent_eps: float = LATENT_EPS,
    tap: Tap = untapped,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [B, S, D], {counts [E] int64, router_logits [B, S, E], expert_indices and expert_weights [B, S, k]}).

    layer: the leaves of `fnmodels.models.common.spec.moe_leaves`; with latent_in_proj and latent_out_proj the experts,
    and neither the router nor the shared expert, work between these projections, the second of which may read a norm of
    eps `latent_eps` and weight latent_norm. x [B, S, D], or a pair: what the router reads, and x. route: a function of
    `ops.moe.router` with its keywords bound. valid: [B, S] bool, False at padding. routing: [B, S, k] int64, a replay
    of experts chosen earlier, distinct per token; their weights come from the live logits. On the CPU, ValueError for
    an expert that does not exist or is named twice (`forward` checks k, since it knows the config). experts: see
    `ops.moe.choice.choose_experts`. act: (gate, up) -> inner, or a pair, that of the experts and that of the shared
    one. dtypes: those of the logits and of the weights of the chosen experts.
    counts: number of tokens routed to each expert.
    tap: called with the name and the value of the logits, indices and weights of the router, and with "experts" and
    "shared_expert", the outputs of both [B, S, D]; returns the values to use.
    """
    read, x = x if isinstance(x, tuple) else (x, x)
    act, shared_act = act if isinstance(act, tuple) else (act, act)
    if valid is None:
        raise ValueError(
            "A layer with experts needs to know which tokens are padding: pass `valid` [B, S], which is in the inputs "
            "that fnmodels.prepare returns."
        )
    if valid.shape != x.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(
            f"valid must be bool {list(x.shape[:2])} like the tokens, not {valid.dtype} {list(valid.shape)}."
        )
    if routing is not None:
        if routing.ndim != 3 or routing.shape[:2] != x.shape[:2] or routing.dtype != torch.int64:
            raise ValueError(
                f"routing must be int64 [B, S, k] = {list(x.shape[:2])} and k, not {routing.dtype} "
                f"{list(routing.shape)}."
            )
        check_range(routing, valid, layer["router"].shape[0])
    cleared = _zero_padding(x, valid)
    read, x = cleared if read is x else _zero_padding(read, valid), cleared
    projection = [read, layer["router"]] + ([layer["router_bias"]] if "router_bias" in layer else [])
    logits = tap("router_logits", linear(*(map(upcast, projection) if dtypes.projection == "wide" else projection)))
    weights, indices = route(logits, None if routing is None else routing.where(valid[..., None], 0))
    indices = tap("expert_indices", indices)
    weights = tap("expert_weights", weights.to(dtypes.output_dtype(x.dtype)))
    inner = linear(x, layer["latent_in_proj"]) if "latent_in_proj" in layer else x
    flat = (inner.flatten(0, 1), weights.flatten(0, 1), indices.flatten(0, 1), valid.flatten())
    y = choose_experts(experts, x, *layer["experts"].values())(layer["experts"], *flat, act=act).reshape(inner.shape)
    if "latent_norm" in layer:
        y = rms_norm(y, layer["latent_norm"], eps=latent_eps)
    if "latent_out_proj" in layer:
        y = linear(y, layer["latent_out_proj"])
    y = tap("experts", y)
    if "shared_expert" in layer:
        y = y + tap("shared_expert", _shared(layer, x, shared_act))
    aux = {"counts": count_tokens(indices, valid, logits.shape[-1]), "router_logits": logits}
    return y, aux | {"expert_indices": indices, "expert_weights": weights}


def _zero_padding(x: Tensor, valid: Tensor) -> Tensor:
    """x with zeros at padding; without copies (of x and its gradient) if values can be read and there is no padding."""
    return x if is_plain_eager(x, valid) and bool(valid.all()) else x.where(valid[..., None], 0)


def check_range(routing: Tensor, valid: Tensor, experts: int) -> None:
    """ValueError for invalid experts if the values can be read without a sync; otherwise the result is undefined.

    routing: [B, S, k]; valid: bool [B, S]. A token that is no padding has k different experts, of 0 to experts - 1.
    """
    if torch.compiler.is_compiling() or not all(readable(t) and t.device.type == "cpu" for t in (routing, valid)):
        return
    wrong = routing[valid[..., None] & ((routing < 0) | (routing >= experts))]
    if len(wrong):
        raise ValueError(
            f"routing holds {int(wrong[0])} at a token that is no padding; the experts are 0 to {experts - 1}."
        )
    ordered = routing.sort(-1).values
    twice = ordered[..., 1:][valid[..., None] & (ordered[..., 1:] == ordered[..., :-1])]
    if len(twice):
        raise ValueError(
            f"routing names expert {int(twice[0])} twice at a token that is no padding; a token's must all differ."
        )


def count_tokens(indices: Tensor, valid: Tensor, experts: int) -> Tensor:
    """[E] int64: number of tokens routed to each expert; indices [B, S, k], valid [B, S]."""
    key = indices.where(valid[..., None], experts).flatten()
    return key.new_zeros(experts + 1).scatter_add(0, key, torch.ones_like(key))[:experts]


def _shared(layer: Tree, x: Tensor, act: Act) -> Tensor:
    """The output of the shared expert, which every token passes through; in Qwen 2 it is scaled by a sigmoid gate."""
    shared = layer["shared_expert"]
    inner = act(*linears(x, shared, inputs_of(shared)))
    y = linear(inner, shared["down_proj"])
    gate = layer.get("shared_expert_gate")
    if gate is None:
        return y
    gate = gate.merged() if hasattr(gate, "merged") else gate  # with an adapter
    # Written out: in a matrix product with one row, the last bits would depend on the memory alignment of that row.
    score = (upcast(x) * upcast(gate)).sum(-1, keepdim=True)
    return elementwise(torch.sigmoid, score.to(x.dtype)) * y
