"""Each tap is what its definition says (E2), by a written-out reference, in every family; planted errors are found."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels.inputs.convert import to_dense
from fnmodels.models.common.decoder import head
from fnmodels.ops.attention.select import attention
from fnmodels.ops.mlp import ACTIVATIONS
from tests.support.cases import (
    Case,
    batch_of,
    cases,
    generic_params,
    layer_structures,
    off,
    segments,
    sparse_layers,
    tap_names,
)

ROWS = segments((5, 3), (-1, 6, 1))
EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
GATED = ("qwen3_next",)  # the output of attention is multiplied by a gate before it is projected

every_structure = pytest.mark.parametrize("case", layer_structures(), ids=str)


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
        said = [sizes[part] if part in sizes else int(part) for part in shape[1:-1].split(", ") if part]
        assert list(tapped[name].shape) == said, name


def check_attention(case: Case, tapped: dict[str, Tensor]) -> None:
    """q, k and v are what the kernel gets; scores, pattern and z follow from them."""
    calls: list[Any] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Tensor:
        calls.append((q, k, v, mask, how))
        return attention(q, k, v, mask, kernel="math", **how | {"layout": None})

    batch_of(case.config, ROWS).forward(generic_params(case.config), kernel=kernel)
    layers = [name.removesuffix(".q") for name in tapped if name.endswith(".attention.q")]
    assert len(calls) == len(layers)
    for layer, (q, k, v, mask, how) in zip(layers, calls, strict=True):
        for name, value in (("q", q), ("k", k), ("v", v)):
            assert off(tapped[f"{layer}.{name}"], value) < 1e-5, name
        repeats = q.shape[2] // k.shape[2]
        keys, values = (t.repeat_interleave(repeats, 2) for t in (k, v))
        scores = torch.einsum("bqnh,bknh->bnqk", q, keys) * how["scale"]
        if how["softcap"] is not None:
            scores = how["softcap"] * torch.tanh(scores / how["softcap"])
        assert off(tapped[f"{layer}.scores"], scores) < 1e-5
        weights = scores.masked_fill(~to_dense(mask), -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        total = total if how["sinks"] is None else total + how["sinks"].exp()[:, None, None]
        pattern = weights / total.where(total > 0, 1)
        assert off(tapped[f"{layer}.pattern"], pattern) < 1e-5
        assert off(tapped[f"{layer}.z"], torch.einsum("bnqk,bknh->bqnh", pattern, values)) < 1e-5


def check_outputs(case: Case, tapped: dict[str, Tensor]) -> None:
    """attention is the projection of z, and mlp that of the neurons, which are an activation of pre."""
    names, config = list(tapped), case.config
    share = getattr(config, "residual_multiplier", 1.0)
    for index, layer in enumerate(generic_params(config)["layers"]):
        tap = {name: tapped[f"layers.{index}.{name}"] for name in _within(names, index)}
        order = list(tap)
        if "attention.z" in tap and case.family not in GATED:
            own = layer["attention"]
            out = F.linear(tap["attention.z"].flatten(2), own["o_proj"], own.get("o_bias"))
            after = order[order.index("attention.z") + 1]  # a norm, before it is added, or attention itself
            out = out * share * getattr(config, "attention_out_multiplier", 1.0)
            if after in ("attention", "mamba"):
                assert off(tap["attention"], out) < 1e-5, index
            else:
                assert off(tap["attention"], tap[after.removesuffix(".scale")]) == 0, index
        if "mlp.pre" not in tap:
            continue
        own, before = layer["mlp"], order[order.index("mlp.pre") - 1]
        x = tap["input_layernorm" if before == "attention" else before]
        first = "gate" if "gate_proj" in own else "up"
        pre = F.linear(x, own[f"{first}_proj"], own.get(f"{first}_bias")) * getattr(config, "mlp_gate_multiplier", 1.0)
        assert off(tap["mlp.pre"], pre) < 1e-5, index
        if not getattr(config, "xielu", False):
            act = getattr(config, "hidden_act", None) or config.mlp_hidden_act
            neurons = ACTIVATIONS[act](pre)
            neurons = neurons * F.linear(x, own["up_proj"], own.get("up_bias")) if first == "gate" else neurons
            assert off(tap["mlp.neurons"], neurons) < 1e-5, index
        out = F.linear(tap["mlp.neurons"], own["down_proj"], own.get("down_bias"))
        out = out * share * getattr(config, "mlp_down_multiplier", 1.0)
        after = order[order.index("mlp.neurons") + 1]
        if after == "mlp":
            assert off(tap["mlp"], out) < 1e-5, index


def check_experts(case: Case, tapped: dict[str, Tensor]) -> None:
    """The mixture is the sum of the routed and the shared experts; weights and indices are of the router's choice."""
    config, valid = case.config, batch_of(case.config, ROWS).valid
    for index in sparse_layers(config):
        tap = {name: tapped[f"layers.{index}.{name}"] for name in _within(list(tapped), index)}
        chosen, logits = tap["expert_indices"], tap["router_logits"]
        assert chosen.shape[-1] == tap["expert_weights"].shape[-1] == config.num_experts_per_tok
        counts = torch.bincount(chosen[valid].flatten(), minlength=logits.shape[-1])
        assert torch.equal(tap["counts"], counts)
        added = tap["experts"] + tap.get("shared_expert", 0)
        order = list(tap)
        if order[order.index("mlp") - 1] in ("experts", "shared_expert"):
            assert off(tap["mlp"][valid], (added * getattr(config, "residual_multiplier", 1.0))[valid]) < 1e-5


def check_norms(case: Case, tapped: dict[str, Tensor]) -> None:
    """The first norm of a layer, where it has one, and the final norm: scales, and outputs in proportion to x."""
    eps = next(getattr(case.config, name) for name in EPS if field_or_none(case.config, name) is not None)
    pairs = [("hidden", "final.norm")] if "norm" in generic_params(case.config) else []  # encoders have none
    pairs += [(n[: -len("input_layernorm")] + "input", n) for n in tapped if n.endswith(".input_layernorm")]
    for read, name in pairs:
        x, scale, out = tapped[read], tapped[f"{name}.scale"], tapped[name]
        rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        centered = x - x.mean(-1, keepdim=True)
        std = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        assert min(off(scale, rms), off(scale, std)) < 1e-5, name
        normed = x * rms if off(scale, rms) < 1e-5 else centered * std
        rows = normed.flatten(0, 1)[2:5]  # the rows are an affine function of what is normalized, the same for each
        weight = (out.flatten(0, 1)[2:5] - out.flatten(0, 1)[3:6]) / (rows - normed.flatten(0, 1)[3:6])
        assert off(weight[0], weight[1]) < 1e-2, name


def check_stream(case: Case, tapped: dict[str, Tensor]) -> None:
    """Each layer begins with the output of the one before; in Llama's blocks all between them is written out."""
    count = sum(name.endswith(".input") for name in tapped)
    states = ["embed", *(f"layers.{index}.output" for index in range(count))]
    begins = [*(f"layers.{index}.input" for index in range(count)), "hidden"]
    for before, after in zip(states, begins, strict=True):
        assert off(tapped[before], tapped[after]) == 0, after
    for index in range(count if case.name == "llama" else 0):
        tap = {name: tapped[f"layers.{index}.{name}"] for name in _within(list(tapped), index)}
        layer = generic_params(case.config)["layers"][index]
        assert off(tap["middle"], tap["input"] + tap["attention"]) < 1e-5
        assert off(tap["output"], tap["middle"] + tap["mlp"]) < 1e-5
        for norm, x in (("input_layernorm", "input"), ("post_attention_layernorm", "middle")):
            assert off(tap[norm], tap[x] * tap[f"{norm}.scale"] * layer[norm]) < 1e-5, norm


def field_or_none(config: Any, name: str) -> Any:
    """A field, or None."""
    return getattr(config, name, None)


def _within(names: list[str], index: int) -> list[str]:
    return [name.split(".", 2)[2] for name in names if name.startswith(f"layers.{index}.")]


CHECKS: tuple[Callable[[Case, dict[str, Tensor]], None], ...] = (
    check_shapes,
    check_attention,
    check_outputs,
    check_experts,
    check_norms,
    check_stream,
)


@every_structure
def test_taps_are_what_their_definition_says(case: Case) -> None:
    tapped = run_with_all_taps(case)
    for check in CHECKS:
        check(case, tapped)


def test_the_state_of_a_recurrent_layer_is_what_a_cache_holds() -> None:
    case = next(case for case in layer_structures() if case.name == "qwen3_5")
    tokens = batch_of(case.config, segments((6,), (6,))).tokens
    cache = fnmodels.init_cache(case.config, batch=2, capacity=6, dtype=torch.float32)
    _, cache = fnmodels.prefill(
        generic_params(case.config),
        *fnmodels.prepare_step(case.config, tokens, cache),
        cache,
        config=case.config,
        kernel="math",
    )
    prepared = fnmodels.prepare(case.config, tokens)
    _, tapped = fnmodels.forward(
        generic_params(case.config), *prepared, config=case.config, kernel="math", taps=("layers.*.attention.state",)
    )
    found = {f"layers.{i}.attention.state": e["state"] for i, e in enumerate(cache.layers) if "state" in e}
    assert tapped.keys() == found.keys() != set()
    assert all(off(tapped[name], state) < 1e-5 for name, state in found.items())


WRONG = (
    *(f"attention.{name}" for name in ("q", "k", "v", "scores", "pattern", "z")),
    *("attention", "mlp.pre", "mlp.neurons", "mlp", "experts", "shared_expert", "expert_indices"),
    *("input_layernorm.scale", "final.norm.scale", "hidden", "embed", "input", "middle", "output"),
    *("input_layernorm", "post_attention_layernorm", "post_attention_layernorm.scale"),
)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tap_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tap that records another value than the one which the model goes on with fails the checks."""
    experts = name.startswith(("expert", "shared"))
    case = next(case for case in layer_structures() if case.name == ("deepseek_v3" if experts else "llama"))
    tapped = dict(run_with_all_taps(case))
    hit = [tap for tap in tapped if tap == name or tap.split(".", 2)[-1] == name]
    assert hit
    tapped |= {tap: (tapped[tap] + 1) % 2 if "indices" in tap else tapped[tap] * 1.01 for tap in hit}
    found = []
    for check in CHECKS:
        try:
            check(case, tapped)
        except AssertionError:
            found.append(check)
    assert found


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
