"""Each tap is what its definition says (E2), by a written-out reference, in every family; planted errors are found."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.convert import to_dense
from fnmodels.models.common import context
from fnmodels.models.common.decoder import head
from fnmodels.models.common.family import LayerKind, field_of
from fnmodels.models.decoder import muse_spark
from fnmodels.ops import norm
from fnmodels.ops.attention.select import attention
from fnmodels.ops.mlp import ACTIVATIONS, clamped_glu, clamped_swiglu, limited_glu, softcapped_swiglu
from fnmodels.ops.moe.each_output import with_each_output
from fnmodels.ops.moe.layer import MOE_TAPS
from fnmodels.ops.recurrent.token_shift import token_shift
from tests.support.cases import (
    Case,
    batch_of,
    block_structures,
    cases,
    generic_params,
    is_inner,
    layers_run,
    off,
    segments,
    short,
    sparse_layers,
    tap_names,
)

ROWS = segments((5, 3), (-1, 6, 1))
# A norm follows each sum.
NO_SUMS = ("albert", "bert", "deberta_v2", "distilbert", "electra", "gte", "mpnet", "roberta", "roformer", "nomic_bert")
NO_SUMS += ("muse_spark",)  # a gate weighs the stream and what joins it
NO_SUMS += ("longformer",)
NO_SUMS += ("minimax",)  # sublayers add to their normed input
READ_MORE = ("zamba2", "inkling2", "kimi_k3")  # norms read the embedding, what a block has left, or states of blocks
# Sublayers read states of blocks: tests/fnmodels/models/test_inkling2.py, where a convolution follows each, and
# test_kimi_k3.py.
DEEP = ("inkling2", "kimi_k3")
GATED = (
    "qwen3_next",
    "lfm3",
    "laguna",
    "afmoe",
    "axk2",
    "hy_v4",
    "bailing_hybrid",
    "qwen4_exp",
    "hrm_text",
    "step3p5",
    "inkling2",
    "muse_glimmer",
    "muse_spark",
    "kimi_k3",
    "bitnet",
)  # the output of attention is multiplied by a gate, or normalized, before it is projected

every_block = pytest.mark.parametrize("case", block_structures(), ids=str)


@functools.cache
def run_with_all_taps(case: Case) -> dict[str, Tensor]:
    """Every tap of a forward pass."""
    names = tap_names(case.config)
    logits, tapped = batch_of(case.config, ROWS).forward(generic_params(case.config), kernel="math", taps=tuple(names))
    plain = batch_of(case.config, ROWS).forward(generic_params(case.config), kernel="math")
    assert off(logits, plain) < 1e-5 and tapped.keys() == names.keys()
    return {name: tapped[name] for name in names}


def check_shapes(case: Case, tapped: dict[str, Tensor]) -> None:
    """`tap_names` says the shapes."""
    for name, shape in tap_names(case.config).items():
        sizes = {"B": 2, "S": 8}
        parts = [part for part in shape[1:-1].split(", ") if part]
        own = [size if part == "K" else part for part, size in zip(parts, tapped[name].shape, strict=True)]
        assert list(tapped[name].shape) == [sizes[part] if part in sizes else int(part) for part in own], name


def check_attention(case: Case, tapped: dict[str, Tensor]) -> None:
    """q, k and v are what the kernel gets; scores, pattern and z follow from them."""
    kinds = fnmodels.family_of(case.config).kinds(case.config)
    if any(LayerKind.parse(kind).compresses for kind in kinds) or hasattr(case.config, "candidate_size"):
        return  # where keys of windows stand beside those of tokens, and both are values too
    calls: list[Any] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Tensor:
        calls.append((q, k, v, mask, how))
        return attention(q, k, v, mask, kernel="math", **how | {"layout": None})

    batch_of(case.config, ROWS).forward(generic_params(case.config), kernel=kernel)
    layers = [name.removesuffix(".q") for name in tapped if name.endswith(".attention.q")]
    assert len(calls) == len(layers)
    for layer, (q, k, v, mask, how) in zip(layers, calls, strict=True):
        for name, value in (("q", q), ("k", k), ("v", v)):
            tap = tapped[f"{layer}.{name}"]  # of linear biases, queries and keys get two dimensions more
            assert off(tap, value[..., : tap.shape[-1]]) < 1e-5, name
        repeats = q.shape[2] // k.shape[2]
        keys, values = (t.repeat_interleave(repeats, 2) for t in (k, v))
        scores = torch.einsum("bqnh,bknh->bnqk", q, keys) * how["scale"]
        if how["softcap"] is not None:
            scores = how["softcap"] * torch.tanh(scores / how["softcap"])
        scores = scores + how["bias"].dense() if "bias" in how else scores
        assert off(tapped[f"{layer}.scores"], scores) < 1e-5
        weights = scores.masked_fill(~to_dense(mask), -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        sinks = None if how["sinks"] is None else how["sinks"].exp()  # [N], or of each token [B, Q, N]
        total = total if sinks is None else total + (sinks.mT[..., None] if sinks.ndim == 3 else sinks[:, None, None])
        pattern = weights / total.where(total > 0, 1)
        assert off(tapped[f"{layer}.pattern"], pattern) < 1e-5
        assert off(tapped[f"{layer}.z"], torch.einsum("bnqk,bknh->bqnh", pattern, values)) < 1e-5


# Norms without a weight, by the family: they have no tap.
WITHOUT_WEIGHT = {
    "hrm_text": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-2),
    "nanochat": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-2),
    "olmo1": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-5),
}


def check_outputs(case: Case, tapped: dict[str, Tensor]) -> None:
    """attention is the projection of z, and mlp that of the neurons, which are an activation of pre."""
    names, config = list(tapped), case.config
    share = getattr(config, "residual_multiplier", 1.0)
    for index, layer in enumerate(layers_run(config, generic_params(config)["layers"])):
        tap = {name: tapped[f"layers.{index}.{name}"] for name in _within(names, index)}
        order = list(tap)
        if "attention.z" in tap and case.family not in GATED and "o_proj" in layer["attention"]:
            own = layer["attention"]
            out = F.linear(tap["attention.z"].flatten(2), own["o_proj"], own.get("o_bias"))
            after = order[order.index("attention.z") + 1]  # a norm, before it is added, or attention itself
            out = (
                out * share * getattr(config, "attention_out_multiplier", getattr(config, "full_attn_beta_factor", 1.0))
            )
            if after in ("attention", "mamba"):
                assert off(tap["attention"], out) < 1e-5, index
            elif is_inner(layer):
                rate = torch.rsqrt(out.square().mean(-1, keepdim=True) + config.rms_norm_eps)
                assert off(tap["post_attention_layernorm.scale"], rate) < 1e-5, index
            else:
                assert off(tap["attention"], tap[after.removesuffix(".scale")]) == 0, index
        if "mlp.pre" not in tap:
            continue
        own, before = layer["mlp"], order[order.index("mlp.pre") - 1]
        if is_inner(layer):  # its adapters merged, by the number of the use
            use = layer["adapters"][int(fnmodels.family_of(config).kinds(config)[index].rpartition("_")[2])]
            own = own | {f"{n}_proj": own[f"{n}_proj"] + use[f"{n}_b_proj"] @ use["mlp_a_proj"] for n in ("gate", "up")}
        x = tap["input_layernorm" if before == "attention" else before]
        x = WITHOUT_WEIGHT[case.family](x) if before == "middle" and case.family in WITHOUT_WEIGHT else x
        if "k_mix" in own:  # what each token reads of the one before it
            x = x + (token_shift(x, ROWS)[0] - x) * own["k_mix"]
        first = "gate" if "gate_proj" in own else "up"
        pre = F.linear(x, own[f"{first}_proj"], own.get(f"{first}_bias")) * getattr(config, "mlp_gate_multiplier", 1.0)
        assert off(tap["mlp.pre"], pre) < 1e-5, index
        few = "_sparse" in fnmodels.family_of(config).kinds(config)[index]  # the smallest gates are cut off
        if not getattr(config, "xielu", False) and not few:
            act = getattr(config, "hidden_act", None) or getattr(config, "mlp_hidden_act", "silu")
            neurons = ACTIVATIONS[act](pre)
            neurons = neurons * F.linear(x, own["up_proj"], own.get("up_bias")) if first == "gate" else neurons
            if hasattr(config, "swiglu_alpha"):
                how = {"alpha": config.swiglu_alpha, "limit": config.swiglu_limit}
                neurons = clamped_swiglu(pre, F.linear(x, own["up_proj"]), **how)
            if case.family == "glm5_next":
                neurons = clamped_glu(pre, F.linear(x, own["up_proj"]), activation=act, limit=config.swiglu_limit)
            if case.family == "kimi_k3":
                caps = {"gate_cap": config.gate_softcap, "up_cap": config.up_softcap}
                neurons = softcapped_swiglu(pre, F.linear(x, own["up_proj"]), **caps)
            number = fnmodels.family_of(config).kinds(config)[index].rpartition("_")[2]
            if (limits := getattr(config, "limits", ())) and number.isdigit() and (limit := limits[int(number)][1]):
                neurons = limited_glu(pre, F.linear(x, own["up_proj"]), activation=act, limit=limit)
            if "ffn_sub_norm" in own:
                neurons = F.rms_norm(neurons, neurons.shape[-1:], own["ffn_sub_norm"], config.rms_norm_eps)
            assert off(tap["mlp.neurons"], neurons) < 1e-5, index
        out = F.linear(tap["mlp.neurons"], own["down_proj"], own.get("down_bias"))
        out = out * share * getattr(config, "mlp_down_multiplier", 1.0)
        after = order[order.index("mlp.neurons") + 1]
        if after == "mlp":
            assert off(tap["mlp"], out) < 1e-5, index


def mixtures_of(case: Case) -> list[tuple[dict[str, Any], Tensor, Tensor, Any, bool, Any]]:
    """(weights, input of the router, that of the experts, activation, whether weights scale it, what each output
    passes) of each mixture."""
    found: list[Any] = []
    finishes: dict[str, Any] = {}
    inner = context.moe

    def record(layer: Any, x: Any, route: Any, **how: Any) -> Any:
        read, own = x if isinstance(x, tuple) else (x, x)
        act = how["act"][0] if isinstance(how["act"], tuple) else how["act"]  # beside that of the shared expert
        found.append((layer, read, own, act, how["experts"].keywords["input_weighted"], finishes.pop("", None)))
        return inner(layer, x, route, **how)

    def note(experts: Any, finish: Any) -> Any:
        finishes[""] = finish
        return with_each_output(experts, finish)

    with mock.patch.object(context, "moe", record), mock.patch.object(muse_spark, "with_each_output", note):
        batch_of(case.config, ROWS).forward(generic_params(case.config), kernel="math")
    return found


def check_experts(case: Case, tapped: dict[str, Tensor]) -> None:
    """The router's logits, and the sum of the chosen experts by their weights, in a loop over the tokens."""
    config, valid = case.config, batch_of(case.config, ROWS).valid
    for index, (layer, read, x, act, scales_inputs, finish) in zip(
        sparse_layers(config), mixtures_of(case), strict=True
    ):
        tap = {name: tapped[f"layers.{index}.{name}"] for name in _within(list(tapped), index)}
        chosen, weights, logits = tap["expert_indices"][valid], tap["expert_weights"][valid], tap["router_logits"]
        assert chosen.shape[-1] == weights.shape[-1] == config.num_experts_per_tok
        assert off(logits[valid], F.linear(read[valid], layer["router"], layer.get("router_bias"))) < 1e-5, index
        assert torch.equal(tap["counts"], torch.bincount(chosen.flatten(), minlength=logits.shape[-1]))
        own = F.linear(x[valid], layer["latent_in_proj"]) if "latent_in_proj" in layer else x[valid]
        rows = []
        for token, experts, shares in zip(own, chosen, weights, strict=True):
            total = torch.zeros_like(token)
            for expert, share in zip(experts, shares, strict=True):
                if expert >= len(layer["experts"]["down_proj"]):  # returns its input
                    total = total + token * share
                    continue
                one = {name: leaf[expert] for name, leaf in layer["experts"].items()}
                inputs = [name for name in ("gate", "up") if f"{name}_proj" in one]
                scaled = token * share if scales_inputs else token
                pre = [F.linear(scaled, one[f"{name}_proj"], one.get(f"{name}_bias")) for name in inputs]
                y = F.linear(act(*pre), one["down_proj"], one.get("down_bias"))
                y = y if finish is None else finish(y[None])[0]
                total = total + (y if scales_inputs else y * share)
            rows.append(total)
        wanted = torch.stack(rows)
        if "latent_norm" in layer:
            wanted = F.rms_norm(wanted, wanted.shape[-1:], layer["latent_norm"], config.rms_norm_eps)
        wanted = F.linear(wanted, layer["latent_out_proj"]) if "latent_out_proj" in layer else wanted
        assert off(tap["experts"][valid], wanted) < 1e-5, index
        added = tap["experts"] + tap.get("shared_expert", 0)
        order = list(tap)
        if order[order.index("mlp") - 1] in ("experts", "shared_expert") and case.family not in DEEP:
            share = getattr(config, "residual_multiplier", 1.0) / (1 + getattr(config, "average_experts", False))
            share *= getattr(config, "mlp_beta_factor", 1.0)
            assert off(tap["mlp"][valid], (added * share)[valid]) < 1e-5


def norms_of(case: Case) -> dict[str, tuple[Tensor, Tensor, float]]:
    """{tap: (x, weight, eps)} of every norm that has a tap, as it is called; the x of a LayerNorm is centered."""
    names = [name for name in tap_names(case.config) if f"{name}.scale" in tap_names(case.config)]
    calls: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = {}
    watched = norm.watched

    def record(x: Tensor, weight: Any, eps: float) -> Any:
        seen = watched(x, weight, eps)
        if seen is not None:
            again = len(calls) if field_of(case.config, "passes") else 0
            calls.setdefault((id(weight), again), (x, weight, eps))  # an indexer computes one again
        return seen

    with mock.patch.object(norm, "watched", record):
        batch_of(case.config, ROWS).forward(generic_params(case.config), kernel="math", taps=tuple(names))
    return dict(zip(names, calls.values(), strict=True))


def check_norms(case: Case, tapped: dict[str, Tensor]) -> None:
    """Scales and outputs of all norms, from what they read: the residual stream, where that is known."""
    if field_of(case.config, "residual_streams"):
        return  # norms read mixtures of streams
    biases = {path for path in tree.flatten(generic_params(case.config)) if path.endswith("norm_bias")}
    for name, (x, weight, eps) in norms_of(case).items():
        assert off(tapped[f"{name}.scale"], torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)) < 1e-5, name
        normed = x * tapped[f"{name}.scale"]
        # some multiply by 1 + weight before the scale is taken, so what the norm is given is multiplied already
        before = case.family == "muse_spark" and name.endswith("post_feedforward_layernorm")
        rest = [tapped[name] - normed * by for by in ((weight, 1 + weight) if not before else (1,))]
        if f"{name.replace('final.norm', 'norm')}_bias" in biases:
            rest = [one - one[(0,) * (one.ndim - 1)] for one in rest]  # the same for all tokens
        assert min(float(one.abs().max()) for one in rest) < 1e-5 * max(1.0, float(tapped[name].abs().max())), name
        source = "hidden" if name == "final.norm" else name.replace(".input_layernorm", ".input")
        if source != name and source in tapped and case.family not in READ_MORE:
            stream = tapped[source]
            assert min(off(x, stream), off(x, stream - stream.mean(-1, keepdim=True))) < 1e-5, name


def check_stream(case: Case, tapped: dict[str, Tensor]) -> None:
    """Each layer begins with the output of the one before, and adds what its sublayers say, where it is a sum."""
    count = sum(name.endswith(".input") for name in tapped)
    states = ["embed", *(f"layers.{index}.output" for index in range(count))]
    begins = [*(f"layers.{index}.input" for index in range(count)), "hidden"]
    for before, after in zip(states, begins, strict=True):
        assert off(tapped[before], tapped[after]) == 0, after
    sums = case.family not in (*NO_SUMS, *DEEP) and not field_of(case.config, "residual_streams")
    for index in range(count if sums else 0):
        tap = {name: tapped[f"layers.{index}.{name}"] for name in _within(list(tapped), index)}
        middle = tap["input"] + tap.get("attention", 0) + tap.get("mamba", 0)
        if "middle" in tap:
            assert off(tap["middle"], middle) < 1e-5, index
        total = middle + tap.get("mlp", 0) + tap.get("per_layer", 0) + tap.get("shortcut", 0)
        layer = layers_run(case.config, generic_params(case.config)["layers"])[index]
        total = total * layer.get("layer_scalar", 1)
        if "final_norm" in layer:  # after each pass of Ouro's stack, of which the head may read several
            total = F.rms_norm(total, total.shape[-1:], layer["final_norm"], eps=case.config.rms_norm_eps)
        if "exits" not in tap:
            assert off(tap["output"], total) < 1e-5, index


def check_state(case: Case, tapped: dict[str, Tensor]) -> None:
    """The state of a recurrent layer is what a cache holds after the row's last document, run alone."""
    names = [name for name in tapped if name.endswith(".attention.state")]
    tokens = batch_of(case.config, ROWS).tokens
    for row, own in enumerate((tokens[:1, 5:], tokens[1:, 7:])) if names else ():
        cache = fnmodels.init_cache(case.config, batch=1, capacity=own.shape[1], dtype=torch.float32)
        given = fnmodels.prepare_step(case.config, own, cache)
        params = generic_params(case.config)
        _, cache = fnmodels.prefill(params, *given, cache, config=case.config, kernel="math")
        for name in names:
            assert off(tapped[name][row], cache.layers[int(name.split(".")[1])]["state"][0]) < 1e-5, name


def check_choices(case: Case, tapped: dict[str, Tensor]) -> None:
    """Queries attend to no key but those that the indexer chose."""
    if hasattr(case.config, "indexed_ratio") or hasattr(case.config, "candidate_size"):
        return  # of windows: tests/fnmodels/models/test_deepseek_v4.py and test_deepseek_v41.py
    positions = batch_of(case.config, ROWS).positions
    groups, size = field_of(case.config, "choice_heads") or 1, getattr(case.config, "index_block_size", 1)
    for name in (name for name in tapped if name.endswith(".choices")):
        pattern = tapped[name.replace("choices", "attention.pattern")].unflatten(1, (groups, -1)).amax(2)
        keys = pattern.shape[-1]
        names = tapped[name].unflatten(-1, (groups, -1)).transpose(1, 2).unsqueeze(-1)  # of blocks of keys, or of keys
        places = (names * size + torch.arange(size)).where(names >= 0, -1).flatten(-2)
        places = places.where((places >= 0) & (places < keys), keys)  # positions in the document; -1: none
        chosen = pattern.new_zeros(*pattern.shape[:-1], keys + 1).scatter(-1, places, 1)
        chosen = chosen.gather(-1, positions[:, None, None].expand_as(pattern))
        assert not (pattern * (1 - chosen)).any(), name


def _within(names: list[str], index: int) -> list[str]:
    return [name.split(".", 2)[2] for name in names if name.startswith(f"layers.{index}.")]


CHECKS: tuple[Callable[[Case, dict[str, Tensor]], None], ...] = (
    check_shapes,
    check_attention,
    check_outputs,
    check_experts,
    check_norms,
    check_stream,
    check_state,
    check_choices,
)


@every_block
def test_taps_are_what_their_definition_says(case: Case) -> None:
    tapped = run_with_all_taps(case)
    for check in CHECKS:
        check(case, tapped)
    # norms of what no tap shows: tests/fnmodels/models/test_deepseek_v4.py and test_ouro.py, ops/test_altup.py and
    # test_block_choice.py
    hidden = ("altup.router_norm", "laurel.norm", "attention.indexer.q_norm", "attention.indexer.k_norm")
    own = {"streams", "exits"} | {f"{name}{end}" for name in hidden for end in ("", ".scale")}
    assert {local(tap) for tap in tapped} - own <= {n for _, n in WRONG}, "each name has a planted error below"


_BLOCK = ("input_layernorm", "post_attention_layernorm")
_AROUND = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {  # of layers, by a variant that has them
    "llama": (*_BLOCK, "final.norm"),
    "qwen3_moe": ("attention.q_norm", "attention.k_norm"),
    "deepseek_v3": ("attention.q_a_layernorm", "attention.kv_a_layernorm"),
    "gemma2": _AROUND,
    "qwen3_next": ("attention.norm",),
    "jamba": ("attention.step_norm", "attention.b_norm", "attention.c_norm"),
    "muse_spark_text": ("mlp.pre_expert_norm",),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
    "gemma4_text_e": ("post_per_layer_input_norm",),
    "inkling2": tuple(f"{name}_input_layernorm" for name in "qkv"),
    "gemma4_text_moe": tuple(f"{name}_{number}" for name in _AROUND for number in (1, 2))[1:],
    "kimi_k3": ("mlp.latent_norm",),
    "ouro": ("input_layernorm_2", "post_attention_layernorm_2", "final_norm"),
    "bitnet": ("attention.attn_sub_norm", "mlp.ffn_sub_norm"),
}
VALUES = {
    "llama": (
        *(f"attention.{name}" for name in ("q", "k", "v", "scores", "pattern", "z")),
        *("embed", "input", "attention", "middle", "mlp.pre", "mlp.neurons", "mlp", "output", "hidden"),
    ),
    "deepseek_v3": (*MOE_TAPS,),
    "falcon_h1": ("mamba", "attention.state"),
    "gemma4_text_e": ("per_layer",),
    "longcat_flash": ("shortcut",),
    "deepseek_v32": ("choices",),
}
WRONG = [(case, name) for case, names in VALUES.items() for name in names]
WRONG += [(case, f"{name}{end}") for case, names in NORMS.items() for name in names for end in ("", ".scale")]


class Place:
    """The values of one tap's layer, to compute from them what another place in the code has."""

    def __init__(self, case: Case, tap: str) -> None:
        self.case, self.tap, self.tapped = case, tap, run_with_all_taps(case)
        self.prefix = tap.removesuffix(local(tap))
        params = generic_params(case.config)
        layers = layers_run(case.config, params["layers"])
        self.weights: Any = layers[int(tap.split(".")[1])] if self.prefix else params

    def __getitem__(self, name: str) -> Tensor:
        """Another tap of the layer."""
        return self.tapped[self.prefix + name]

    def projected(self, read: str, *path: str) -> Tensor:
        """The product of what `read` shows with a weight of the layer."""
        weight = functools.reduce(lambda node, name: node[name], path, self.weights)
        return F.linear(self[read], weight)

    def heads(self, name: str) -> Tensor:
        """Queries or keys as they are projected: before their positions."""
        value = self.projected("input_layernorm", "attention", f"{name}_proj")
        return value.view_as(self[f"attention.{name}"])

    def shorter(self) -> Tensor:
        """The tap of a run without the last token of each row."""
        batch = batch_of(self.case.config, ROWS).take(slice(None), slice(None, -1))
        found: Tensor = batch.forward(generic_params(self.case.config), taps=(self.tap,))[1][self.tap]
        return found

    def norm_input(self, name: str = "") -> Tensor:
        return norms_of(self.case)[self.prefix + name if name else self.tap][0]

    def in_the_row(self) -> Tensor:
        """Chosen keys counted from the row's first token, not the document's."""
        positions = batch_of(self.case.config, ROWS).positions
        return self["choices"] + (torch.arange(positions.shape[1]) - positions)[..., None]

    def scale_of_output(self) -> Tensor:
        return torch.rsqrt(self.tapped[self.tap.removesuffix(".scale")].square().mean(-1, keepdim=True))


_CHOSEN = "expert_indices"
MOVED: dict[str, Callable[[Place], Tensor]] = {  # what a tap at a wrong place would show
    "embed": lambda at: at.tapped["layers.0.input_layernorm"],
    "input": lambda at: at["input_layernorm"],
    "attention.q": lambda at: at.heads("q"),
    "attention.k": lambda at: at.heads("k"),
    "attention.v": lambda at: at["attention.k"],
    "attention.scores": lambda at: at["attention.scores"] * at["attention.q"].shape[-1] ** 0.5,  # before the scale
    "attention.pattern": lambda at: at["attention.scores"].softmax(-1),  # before the mask
    "attention.z": lambda at: at["attention"].view_as(at["attention.z"]),  # after the projection
    "attention": lambda at: at["attention.z"].flatten(2),  # before the projection
    "mamba": lambda at: at["attention"],
    "attention.state": lambda at: at.shorter(),  # before the last token
    "middle": lambda at: at["input"],
    "mlp.pre": lambda at: at.projected("post_attention_layernorm", "mlp", "up_proj"),
    "mlp.neurons": lambda at: F.silu(at["mlp.pre"]),  # before the product with the other half
    "mlp": lambda at: at["post_attention_layernorm"],
    "router_logits": lambda at: at["router_logits"].sigmoid(),
    _CHOSEN: lambda at: at["router_logits"].topk(at[_CHOSEN].shape[-1]).indices,  # before biases and groups
    "expert_weights": lambda at: at["router_logits"].sigmoid().gather(-1, at[_CHOSEN]),  # before they are normalized
    "counts": lambda at: torch.bincount(at[_CHOSEN].flatten(), minlength=len(at["counts"])),  # with padding
    "experts": lambda at: at["experts"] + at["shared_expert"],
    "shared_expert": lambda at: at["mlp"],
    "shortcut": lambda at: at["mlp"],
    "per_layer": lambda at: at.norm_input("post_per_layer_input_norm"),
    "choices": lambda at: at.in_the_row(),
    "output": lambda at: at["middle"],
    "hidden": lambda at: at["final.norm"],
}


def moved(case: Case, tap: str) -> Tensor:
    """Norms: before the norm, and the scale of their output."""
    place, name = Place(case, tap), local(tap)
    if name in MOVED:
        return MOVED[name](place)
    return place.scale_of_output() if name.endswith(".scale") else place.norm_input()


@pytest.mark.parametrize(("variant", "name"), WRONG)
def test_a_tap_at_a_wrong_place_is_found(variant: str, name: str) -> None:
    """The checks fail where a tap shows what stands before or after its place, and where it is off by a hundredth."""
    case = short(next(case for case in cases() if case.name == variant))
    plain = run_with_all_taps(case)
    hit = [tap for tap in plain if local(tap) == name]
    assert hit
    for wrong in ({tap: moved(case, tap) for tap in hit}, {tap: _scaled(plain[tap]) for tap in hit}):
        assert all(wrong[tap].shape == plain[tap].shape and wrong[tap].dtype == plain[tap].dtype for tap in hit)
        assert any(fails(check, case, plain | wrong) for check in CHECKS)


def fails(check: Callable[[Case, dict[str, Tensor]], None], case: Case, tapped: dict[str, Tensor]) -> bool:
    try:
        check(case, tapped)
    except AssertionError:
        return True
    return False


def _scaled(value: Tensor) -> Tensor:
    return value * 1.01 if value.is_floating_point() else value // 2


def local(tap: str) -> str:
    """The name within a layer, or of an end."""
    return tap.split(".", 2)[-1] if tap.startswith("layers.") else tap


def test_scores_and_patterns_need_the_written_out_kernel() -> None:
    case = next(case for case in cases() if case.name == "llama")
    batch, params = batch_of(case.config, ROWS), generic_params(case.config)
    for given in ({"taps": ("layers.0.attention.pattern",)}, {"edits": {"layers.*.attention.scores": _same}}):
        with pytest.raises(ValueError, match=r"attention\.scores and attention\.pattern exist where .*kernel=\"math\""):
            batch.forward(params, kernel="sdpa", **given)


def _same(value: Tensor, name: str) -> Tensor:
    return value


def test_edits_of_scores_norms_and_the_final_norm() -> None:
    """The mask holds for edited scores; a scale that is put there freezes a norm; the final norm is of forward."""
    case = next(case for case in cases() if case.name == "llama")
    batch, params = batch_of(case.config, ROWS), generic_params(case.config)
    run = functools.partial(batch.forward, params, kernel="math")
    pattern = run(
        taps=("layers.0.attention.pattern",), edits={"layers.0.attention.scores": lambda value, name: 0 * value}
    )[1]["layers.0.attention.pattern"]
    seen = to_dense(batch.prepared()[1]["full"])
    uniform = seen / seen.sum(-1, keepdim=True).clamp(min=1)
    assert off(pattern, uniform.float().expand_as(pattern)) < 1e-6
    names = ("layers.1.input_layernorm.scale", "final.norm.scale")
    plain, tapped = run(taps=names)
    doubled = {"layers.1.input": lambda value, name: 2 * value, "hidden": lambda value, name: 2 * value}
    hidden = fnmodels.hidden(
        params, *batch.prepared(), config=case.config, kernel="math", edits=doubled | tapped_of(names, tapped)
    )
    frozen = run(edits=doubled | dict(tapped))
    want = F.linear(hidden * tapped[names[1]] * params["norm"], head(params, case.config))
    assert off(frozen, want) < 1e-5 and off(run(edits=doubled), frozen) > 1e-2
    with pytest.raises(ValueError, match=r"'final\.norm' is of no tap"):
        fnmodels.hidden(params, *batch.prepared(), config=case.config, edits={"final.norm": _same})
    with pytest.raises(ValueError, match=r"'final\.norm' is unknown here; only forward, prefill and decode pass it"):
        fnmodels.hidden(params, *batch.prepared(), config=case.config, taps=("final.norm",))
    zero = run(edits={"final.norm": lambda value, name: 0 * value})
    assert not zero.any() and plain.any()


def tapped_of(names: tuple[str, ...], tapped: dict[str, Tensor]) -> dict[str, Any]:
    """Those of layers."""
    return {name: tapped[name] for name in names if name.startswith("layers.")}
