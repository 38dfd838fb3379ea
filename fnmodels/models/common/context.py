"""`Context`, the extension point of a block: attention, mixture of experts and taps as methods.

    @with_context
    def block(layer, x, mask, freqs, /, *, config, kind, ctx):
        ...
        attended = ctx.tap("attention", project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)))

A family calls `ctx` and does not handle kernels, layouts, expert implementations or padding itself. A new capability
is a method here or in a subclass passed as `context`; families do not change. Edits of activations (`fnmodels.edits`)
are applied by `tap`: their functions are bound to the block, their tensors are the keyword `edit_tensors` of the call.

With a cache (`fnmodels.cache`) a layer's entry, a dict of tensors, is the keyword `cache` of the call, and the slots of
the new tokens are the keyword `slots`. `attend` reads and extends it, `state` and `keep` do so for recurrent layers,
and the new entry leaves as aux["cache"]. As arguments of the call they cause no recompilation over layers and steps.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.edits import BoundEdits
from fnmodels.inputs.mask import MaskLike
from fnmodels.ops.attention.alibi import places_of, with_alibi
from fnmodels.ops.attention.relative_bias import Bias, kept_places, with_places
from fnmodels.ops.attention.select import attention
from fnmodels.ops.dropout import Dropout, Noise, dropped, dropped_weights
from fnmodels.ops.indexer import Indexer, keys_of_ranks
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.mla import (
    Rotate,
    Widths,
    absorbed,
    expanded,
    latent_keys,
    latent_queries,
    pays_to_absorb,
    pays_to_gather,
)
from fnmodels.ops.mlp import glu
from fnmodels.ops.moe.choice import choose_experts
from fnmodels.ops.moe.experts import with_merged_adapters
from fnmodels.ops.moe.experts_loop import Act
from fnmodels.ops.moe.layer import KEPT, LATENT_EPS, Route, moe
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.ops.norm_taps import watched_norms
from fnmodels.ops.slots import Entry, SlotUse, extended
from fnmodels.options import USUAL, Block, Experts, ForwardOptions, Tap, untapped
from fnmodels.tree import Tree, flatten

from .carried import Passing
from .chosen_keys import ChoiceHooks, chosen_keys

ATTENTION_TAPS = tuple(f"attention.{name}" for name in "qkvz")  # inputs and output of `attend`, [B, S, heads, H]
STATE_TAP = "attention.state"  # of a recurrent layer, after each row's last token
# {tap: the rate of dropout of its value}
_DROPPED = {"attention": "attention", "cross_attention": "attention", "mlp": "mlp", "mlp.neurons": "neurons"}
PATTERN_TAPS = ("attention.scores", "attention.pattern")  # [B, N, Q, K], where attention is written out
_USE, _NO_DROPOUT = SlotUse(), Dropout()


class Context(ChoiceHooks, Passing):
    """The services of one call of one layer's block; created in each call, inside the remat or compiled region.

    options, taps, use: static, bound to the block. tensors: keyword tensors of this call, such as valid and routing,
    which are arguments and not bound, so that layers do not recompile. aux: {name: tensor} that the block returns
    beside x.
    """

    use = _USE
    dropout = _NO_DROPOUT  # of the config, where the call has keys of noise
    edits: Mapping[str, Any] = {}

    def __init__(self, options: ForwardOptions, taps: tuple[str, ...], tensors: Mapping[str, Any]) -> None:
        self.options, self.taps, self.tensors = options, taps, tensors
        self.aux: dict[str, Any] = {}

    def tap(self, name: str, value: Tensor) -> Tensor:
        """`value`, edited if there is an edit of `name`, and then recorded if `name` is in `taps`.

        Where the call has keys of noise, what a layer adds to the residual stream and "mlp.neurons" are dropped first.
        """
        if name in _DROPPED and (rate := getattr(self.dropout, _DROPPED[name])):
            keys, shard = self.tensors["noise"].read_by(name)
            value = dropped(value, keys, rate, name, shard=shard)
        if name in self.edits:
            value = self.edits[name](value, self.tensors["edit_tensors"].get(name, {}))
            self.aux["edited"] = (*self.aux.get("edited", ()), name)
        if name in self.taps:
            self.aux[name] = value
        return value

    @property
    def shown(self) -> Tap:
        """`tap`, or `untapped` where no tap or edit is asked for: then an operation may reuse the memory of values."""
        return self.tap if self.taps or self.edits or self.dropout.neurons else untapped

    def wants(self, name: str) -> bool:
        """Whether a tap or an edit is of this name."""
        return name in self.taps or name in self.edits

    def wants_any(self, names: tuple[str, ...]) -> bool:
        """Whether a tap or an edit is of one of these names."""
        return bool(self.taps or self.edits) and any(map(self.wants, names))

    def norms(self, layer: Tree) -> AbstractContextManager[None]:
        """A scope in which the layer's norms show their outputs and scales, for taps such as "input_layernorm.scale".

        Nothing where no name of a norm is wanted.
        """
        if not (self.taps or self.edits):
            return nullcontext()
        wanted = {name.removesuffix(".scale") for name in (*self.taps, *self.edits) if "norm" in name}
        found = {name: leaf for name, leaf in flatten(layer).items() if name in wanted} if wanted else {}
        return watched_norms(found, self.tap) if found else nullcontext()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskLike,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Bias | None = None,
        alibi: Mapping[str, Tensor] | None = None,
        lend: bool = False,
    ) -> Tensor:
        """Attention of q [B, Q, N, H], k [B, K, G, H], v [B, K, G, Hv]: [B, Q, N, Hv]. See `ops.attention.select`.

        With a cache, k and v are those of the new tokens, and the queries see the cached ones too.
        lend: later layers may read these keys and values, see `attend_borrowed`.
        bias: with a cache of the keys that are read, but a `DistanceBias` of new ones. sinks: [N]; [B, Q, N] with one.
        alibi: {"slopes": fp32 [B, S, heads], "positions": fp32 [B, S]} of these tokens, see `ops.attention.alibi`; a
        cache keeps the places of the keys.
        """
        if watched := type(self) is not _Unwatched:
            q, k, v = self._tapped(q, k, v)
        if alibi is not None or "cache" in self.tensors:
            read = {"k": k, "v": v}
            if bias is not None:
                read |= kept_places(bias)
            if alibi is not None:
                read["places"] = places_of(alibi["positions"], k.dtype)
            if "cache" in self.tensors:
                read = self.extend(read)
                k, v = read["k"], read["v"]
                bias = None if bias is None else with_places(bias, read)
            if alibi is not None:
                q, k = with_alibi(q, k, alibi["slopes"], read["places"], scale=scale)
        if lend:
            self.aux["kv"] = {"k": k, "v": v}
        z = self._attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, bias=bias)
        return self.tap("attention.z", z) if watched else z

    def shared(self, name: str) -> Any:
        """The entry of this name that the family's `shared` made for the layers of this call; None: there is none."""
        return self.tensors.get("shared", {}).get(name)

    def _tapped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.tap("attention.q", q), self.tap("attention.k", k), self.tap("attention.v", v)

    def attend_borrowed(self, q: Tensor, mask: MaskLike, *, scale: float) -> Tensor:
        """Attention of q [B, Q, N, H] over keys and values of an earlier layer, cached ones included: [B, Q, N, Hv].

        That is the last layer of the kind `LayerKind.source`, whose block calls `attend` with lend=True. The
        layer that borrows has no entry in a cache.
        """
        q, lent = self.tap("attention.q", q), self.tensors["kv"]
        k, v = (self.tap(f"attention.{name}", lent[name]) for name in "kv")
        return self.tap("attention.z", self._attention(q, k, v, mask, scale=scale))

    def layer_input(self) -> Tensor:
        """This layer's part of what the family's `layer_inputs` returns: [B, S, P]."""
        value: Tensor = self.tensors["layer_input"]
        return value

    def attend_latent(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        freqs: Tensor,
        mask: MaskLike,
        *,
        widths: Widths,
        rotate: Rotate,
        scale: float,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Multi-head latent attention of x [B, S, D], with "sinks" [N] if `weights` have them: [B, S, N, Hv].

        See `fnmodels.ops.mla`. queries: [B, S, N, P + R], where they are not those of `latent_queries`. A cache holds
        the latents. Few queries that meet many of them have the projection of keys and values applied to queries and
        results instead (no taps q, k and v then).
        """
        q = latent_queries(weights, x, freqs, widths=widths, rotate=rotate) if queries is None else queries
        latent, rope = latent_keys(weights, x, freqs, widths=widths, rotate=rotate)
        cached, sinks = "cache" in self.tensors, weights.get("sinks")
        unseen = not (self.dropout.weights or self.wants_any((*ATTENTION_TAPS, *PATTERN_TAPS)))
        gathers = unseen and pays_to_gather(weights["kv_b_proj"], mask, q.shape[2], widths, self.options.kernel)
        if not (cached or gathers):
            return self.attend(q, *expanded(weights, latent, rope, widths=widths), mask, scale=scale, sinks=sinks)
        if cached:
            read = self.extend({"latent": latent} | ({"rope": rope} if widths.rope else {}))
            latent, rope = read["latent"], read.get("rope", read["latent"][..., :0])
        absorbs = gathers or pays_to_absorb(weights["kv_b_proj"], x.shape[1], latent.shape[1], widths=widths)
        if absorbs and not self.options.invariant and not self.wants_any(ATTENTION_TAPS):
            q, k, v, out = absorbed(weights, q, latent, rope, widths=widths)
            return out(self._attention(q, k, v, mask, scale=scale, sinks=sinks))
        k, v = expanded(weights, latent, rope, widths=widths)
        q, k, v = self._tapped(q, k, v)
        return self.tap("attention.z", self._attention(q, k, v, mask, scale=scale, sinks=sinks))

    def choose(self, weights: Mapping[str, Any], x: Tensor, freqs: Tensor, mask: MaskLike, *, indexer: Indexer) -> Any:
        """The mask of the few keys that each query of x [B, S, D] attends to; see `fnmodels.ops.indexer`.

        weights: those of latent attention, with an "indexer", whose keys a cache holds. Without one the layer takes the
        choice of the last layer that made one. The choice is in aux as "chosen", for later layers, and as the tap
        "choices", int64 [B, S, k]; the keyword `choices` of the block's call, a choice made before, replaces it.
        Where no query has more than `indexer.count` keys nothing is chosen: the mask is returned as it is.
        With kernel="invariant" the result is a mask made ready for it.
        """
        with torch.no_grad():  # no decorator, which dynamo cannot read on a method
            # Another tensor than x: what a wrapper of weights keeps of it here has no gradient.
            return chosen_keys(self, weights, x.detach(), freqs, mask, indexer)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskLike,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Bias | None = None,
    ) -> Tensor:
        watched = type(self) is not _Unwatched and self.wants_any(PATTERN_TAPS)
        kernel, tap = self.options.kernel, self.tap if watched else None
        if self.dropout.weights:
            k, v, mask, noise = self._keys_of_all(k, v, mask)
            kernel, tap = "math", functools.partial(self._dropping, noise)
        return attention(
            q,
            k,
            v,
            mask,
            kernel=kernel,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            layout=self.options.layout,
            bias=bias,
            tap=tap,
        )

    def _keys_of_all(self, k: Tensor, v: Tensor, mask: MaskLike) -> tuple[Tensor, Tensor, MaskLike, Noise]:
        """(k, v, mask, noise) for kernel="math", with the keys of all ranks where others have some.

        ValueError for another kernel, which computes no single weights.
        """
        noise: Noise = self.tensors["noise"]
        ranks, kernel = keys_of_ranks(self.options.kernel), self.options.kernel
        if ranks is not None:
            gathered = replace(noise, keys=ranks.gather(noise.keys))
            return ranks.gather(k), ranks.gather(v), ranks.mask(mask), gathered
        if kernel != "math":
            raise ValueError(
                f"Dropout of attention's weights, here at a rate of {self.dropout.weights}, needs them written out; "
                f'kernel={kernel!r} has none: take "auto" or kernel="math", leave rng out, or set the rate "weights" '
                "of config.dropout to 0."
            )
        return k, v, mask, noise

    def _dropping(self, noise: Noise, name: str, value: Tensor) -> Tensor:
        """The tap of the scores and weights of attention, of which the weights are dropped."""
        if name == PATTERN_TAPS[1]:
            value = dropped_weights(value, noise, self.dropout.weights, name)
        return self.tap(name, value)

    def state(self) -> Entry | None:
        """The cached entry that a recurrent layer continues from; None: every row starts here, from zeros."""
        return self.tensors.get("cache")

    def keep(self, **entry: Tensor) -> None:
        """The entry from which the next tokens of the rows continue; dropped where the call has no cache.

        Its state is the tap "attention.state", which is edited only where a cache keeps it.
        """
        cached = "cache" in self.tensors
        if "state" in entry and (cached or (self.wants(STATE_TAP) and STATE_TAP not in self.edits)):
            entry["state"] = self.tap(STATE_TAP, entry["state"])
        if cached:
            self._put(entry)

    def extend(self, new: Entry) -> Entry:
        """Writes what the new tokens add to the entry, [B, S, ...]; returns what the queries read, [B, K, ...]."""
        tensors = self.tensors
        read, written = extended(tensors["cache"], new, tensors["slots"], self.use, tensors.get("occupied"))
        self._put(written)
        return read

    def _put(self, entry: Entry) -> None:
        self.aux["cache"] = self.aux["cache"] | entry if "cache" in self.aux else entry

    def moe(
        self,
        layer: Tree,
        x: Tensor | tuple[Tensor, Tensor],
        route: Route,
        *,
        act: str | Act | tuple[Act, Act],
        dtypes: RouterDtypes,
        input_weighted: bool = False,
        around: Callable[[Experts], Experts] | None = None,
        latent_eps: float = LATENT_EPS,
    ) -> Tensor:
        """The mixture of experts on x [B, S, D]: [B, S, D]; arguments as for `fnmodels.ops.moe.layer.moe`.

        x: may be a pair, what the router reads and what the experts do. act: a function (gate, up) -> inner, the name
        of an activation for `glu`, or a pair of functions, that of the experts and that of the shared one.
        input_weighted: scale the experts' inputs, not their outputs. around: wraps the function of the experts, such as
        `with_identities` and `with_each_output`. Token counts and router logits are always in aux; the chosen experts
        and their weights if they are in `taps`.
        """
        act = functools.partial(glu, activation=act) if isinstance(act, str) else act
        inner = x[1] if isinstance(x, tuple) else x
        layer = layer | {"experts": with_merged_adapters(layer["experts"])}
        run = choose_experts(self.options.expert_path, inner, *layer["experts"].values())
        run = around(run) if around else run
        how: dict[str, Any] = {name: self.tensors.get(name) for name in ("valid", "routing")}
        how |= {"experts": functools.partial(run, input_weighted=input_weighted), "latent_eps": latent_eps}
        y, routed = moe(layer, x, route, act=act, dtypes=dtypes, tap=self.tap, **how)
        self.aux |= {name: routed[name] for name in KEPT}
        return y


class _Unwatched(Context):
    """The Context of a call without taps, edits and dropout, in which values pass as they are."""

    def tap(self, name: str, value: Tensor) -> Tensor:
        """`value`."""
        return value


def with_context(block: Callable[..., Tensor]) -> Block:
    """Wraps a family's block(layer, x, mask, freqs, /, *, config, kind, ctx) -> x as a pure function -> (x, aux).

    Called as block(layer, x, mask, freqs, config=, kind=, options=ForwardOptions(), taps=(), edits=(), use=None,
    **tensors). Statics (config, kind, options, taps, edits, use) are hashable; `fnmodels.apply` binds them, once per
    kind, and per layer where functions edit it. aux["edited"]: the taps that were edited.
    """

    @functools.wraps(block)
    def context(
        layer: Tree,
        x: Tensor,
        mask: Any,
        freqs: Any,
        /,
        *,
        config: Any,
        kind: str,
        options: ForwardOptions = USUAL,
        taps: tuple[str, ...] = (),
        edits: BoundEdits = (),
        use: SlotUse | None = None,
        **tensors: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        watched = taps or edits or options.context is not None or "noise" in tensors
        ctx = (options.context or Context)(options, taps, tensors) if watched else _Unwatched(options, taps, tensors)
        if use is not None:
            ctx.use = use
        if not (watched or options.invariant):  # no scope is needed
            return block(layer, x, mask, freqs, config=config, kind=kind, ctx=ctx), ctx.aux
        if edits:
            ctx.edits = {edit.tap: edit for edit in edits}
        if "noise" in tensors:
            ctx.dropout = config.dropout
        with invariant_rows(options.invariant), ctx.norms(layer):
            x = block(layer, x, mask, freqs, config=config, kind=kind, ctx=ctx)
        return x, ctx.aux

    return context
