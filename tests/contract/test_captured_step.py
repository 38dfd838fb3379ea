"""Steps of decoding as a CUDA graph equal those of `decode_`; without a device a recorder is the graph."""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.cache import captured
from fnmodels.cache.captured import _key
from fnmodels.inputs.values import Constants, constants, without_host
from fnmodels.ops import rotary
from fnmodels.ops.slots import QUANTIZABLE
from tests.contract.test_cache import FAMILIES, SLIDING
from tests.fnmodels.test_encode import CONFIGS, begun, weights
from tests.support.cases import Case, batch_of, cases, causal, generic_params, off, representatives, segments, short
from tests.support.recorded import graphs_on_the_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
PARTS = tuple(case for case in representatives() if causal(case))
every_part = pytest.mark.parametrize("case", PARTS, ids=str)
ROWS = segments((14,), (8, -6))
SCALED = tuple(
    case
    for case in cases()
    if causal(case) and getattr(case.config, "rope", None) and case.config.rope.kind == "longrope"
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs, or on a CPU what stands in for them."""
    if DEVICE == "cpu":
        graphs_on_the_cpu(monkeypatch)
        monkeypatch.setattr(captured, "_check_tokens", lambda _: None)


def moved(values: Any) -> Any:
    return tree.map(lambda t: t.to(DEVICE) if isinstance(t, Tensor) else t, values)


def decoded(case: Case, params: Any, tokens: Tensor, cache: Any, **now: Any) -> Any:
    prepared = fnmodels.prepare_step(case.config, tokens, cache, **now)
    return fnmodels.decode_(params, *prepared, cache, config=case.config)


def prompted(case: Case, params: Any, batch: Any, dtype: torch.dtype, device: str = DEVICE, **form: Any) -> Any:
    """A cache with the first six tokens of the batch's rows."""
    cache = fnmodels.init_cache(
        case.config, len(batch.tokens), batch.tokens.shape[1], dtype=dtype, length=batch.length, device=device, **form
    )
    tokens, ids = batch.tokens[:, :6].to(device), batch.segment_ids[:, :6].to(device)
    return decoded(case, params, tokens, cache, segment_ids=ids)[1]


class FromHost(TorchFunctionMode):
    """Raises where Python reads a tensor on the device, and where values of the host are copied there."""

    READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique", "cpu", "numpy")
    MAKES = ("tensor", "as_tensor", "new_tensor")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        index = args[1] if name == "__getitem__" else ()
        listed = any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))
        found = func(*args, **given)
        there = isinstance(found, Tensor) and found.is_meta
        sources = [part for part in (*args, *given.values()) if isinstance(part, Tensor)]
        moved = name in ("to", "copy_") and any(source.is_cpu for source in sources)
        if name in self.READS or (there and (name in self.MAKES or moved)) or listed:
            raise AssertionError(f"{name} of {args[:1]} waits for the device")
        return found


def on_meta(values: Any) -> Any:
    return tree.map(lambda t: torch.empty_like(t, device="meta") if isinstance(t, Tensor) else t, values)


def quantizable(case: Case) -> bool:
    layers = fnmodels.init_cache(case.config, 1, 8).layers
    return any(name in entry for entry in layers for name in QUANTIZABLE)


@pytest.mark.parametrize("case", [*PARTS, *map(short, SCALED)], ids=str)
def test_a_step_reads_and_copies_nothing_on_the_host(case: Case) -> None:
    """On the meta device, in the second run: the first makes the constants."""
    config, made = case.config, Constants()
    params, tokens = P.init(config, 0, device="meta"), torch.zeros(2, 1, dtype=torch.int64, device="meta")
    forms = [None, None, torch.int8] if quantizable(case) else [None, None]
    for form, within in zip(forms, (contextlib.nullcontext, FromHost, FromHost), strict=False):
        cache = fnmodels.init_cache(config, 2, 8, dtype=torch.float32, device="meta", kv_dtype=form)
        with without_host(made), within():
            decoded(case, params, tokens, cache)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_nor_does_a_step_of_a_decoder_beside_an_encoder(name: str) -> None:
    config, made = CONFIGS[name], Constants()
    params = weights(config)
    cache, own = on_meta(begun(config, params)), on_meta(fnmodels.stack_params(params, "decoder"))
    tokens = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    for within in (contextlib.nullcontext, FromHost):
        with without_host(made), within():
            prepared = fnmodels.prepare_step(config.decoder, tokens, cache)
            fnmodels.decode(own, *prepared, cache, config=config.decoder)


def test_what_a_graph_is_made_for() -> None:
    """Parameters in other memory and other static fields need a new graph, values written in place do not."""
    case = FAMILIES[0]
    cache, tokens = fnmodels.init_cache(case.config, 1, 4), torch.zeros(1, 1, dtype=torch.int64)
    params = P.lora.add(case.config, tree.map(torch.clone, generic_params(case.config)), rank=2, seed=0)
    inputs = {"tokens": tokens, "segment_ids": None, "length": None}
    first = _key(params, inputs, cache)
    with torch.no_grad():
        tree.map(lambda leaf: leaf.mul_(2), params)
    assert _key(params, inputs, cache) == first
    louder = tree.map(lambda leaf: leaf, params)
    louder["layers"][0] = _with_scale(params["layers"][0], 3.0)
    other = tree.map(Tensor.clone, params)
    length, longer = {**inputs, "length": 5}, fnmodels.init_cache(case.config, 1, 5)
    for parameters, given, held in ((louder, inputs, cache), (other, inputs, cache), (params, length, cache)):
        assert _key(parameters, given, held) != first
    assert _key(params, inputs, longer) != first


def _with_scale(node: Any, scale: float) -> Any:
    if isinstance(node, dict):
        return {name: _with_scale(value, scale) for name, value in node.items()}
    return replace(node, scale=scale) if isinstance(node, P.lora.Lora) else node


def test_an_option_that_has_no_graph() -> None:
    with pytest.raises(ValueError, match="reads no values"):
        fnmodels.cache.captured_step(FAMILIES[0].config, kernel="invariant")


def test_constants_of_the_host_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: factors of a rotary scaling that each step copies to the device."""
    for planted in (
        lambda values, dtype, device: torch.tensor(values, device=device),
        lambda values, dtype, device: torch.tensor(values).to(device),
        lambda values, dtype, device: torch.empty(len(values), device=device).copy_(torch.tensor(values)),
        lambda values, dtype, device: torch.tensor(values[0], device=device).expand(len(values)),
    ):
        monkeypatch.setattr(rotary, "constants", planted)
        with pytest.raises(AssertionError, match="waits for the device"):
            test_a_step_reads_and_copies_nothing_on_the_host(SCALED[0])


@pytest.mark.parametrize("case", PARTS[::2], ids=str)
def test_without_the_host_the_result_is_the_same(case: Case) -> None:
    batch, params = batch_of(case.config, ROWS), generic_params(case.config)
    one, other = (prompted(case, params, batch, torch.float32, "cpu") for _ in range(2))
    for t in range(6, 9):
        now = {"segment_ids": batch.segment_ids[:, t : t + 1]}
        wanted, one = decoded(case, params, batch.tokens[:, t : t + 1], one, **now)
        with without_host({}):
            got, other = decoded(case, params, batch.tokens[:, t : t + 1], other, **now)
        valid = now["segment_ids"][:, 0] > 0
        assert off(got[valid], wanted[valid]) < 2e-5


def test_constants_are_made_once() -> None:
    device = torch.device("cpu")
    plain = [constants((1.0, 2.0), torch.float64, device) for _ in range(2)]
    assert plain[0] is not plain[1]
    with without_host({}):
        made = [constants(values, torch.float64, device) for values in ((1.0, 2.0), (1.0, 2.0), (1.0, 3.0))]
    assert made[0] is made[1] and torch.equal(made[0], plain[0]) and made[2].tolist() == [1.0, 3.0]


def check(got: Tensor, wanted: Tensor) -> None:
    """The same bits on a device; on a CPU `decode_` reads values, and so leaves out masks and experts."""
    assert torch.equal(got, wanted) if DEVICE == "cuda" else off(got, wanted) < 2e-5


def compare(case: Case, dtype: torch.dtype, experts: str, **form: Any) -> None:
    batch = batch_of(case.config, ROWS)
    params = moved(tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, generic_params(case.config)))
    step = fnmodels.cache.captured_step(case.config, experts=experts)
    one, other = (prompted(case, params, batch, dtype, **form) for _ in range(2))
    for t in range(6, 14):
        tokens, ids = batch.tokens[:, t : t + 1].to(DEVICE), batch.segment_ids[:, t : t + 1].to(DEVICE)
        made = fnmodels.prepare_step(case.config, tokens, other, segment_ids=ids)
        wanted, other = fnmodels.decode_(params, *made, other, config=case.config, experts=experts)
        given = one
        got, one = step(params, tokens, given, segment_ids=ids)
        valid = ids[:, 0] > 0
        check(got[valid], wanted[valid])
        with pytest.raises(RuntimeError, match="used up"):
            given.layers
    assert off(one.slots, other.slots) == 0 if one.slots else True


@every_part
def test_every_part(case: Case, graphs: None) -> None:
    """Rows that end, slots that fill up, rings that turn over and states."""
    compare(case, torch.float32, "dense")


@on_cuda
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_family_in_bf16(case: Case) -> None:
    compare(case, torch.bfloat16, "dense")


@pytest.mark.parametrize("case", [case for case in PARTS if quantizable(case)][::3], ids=str)
def test_int8_caches(case: Case, graphs: None) -> None:
    compare(case, torch.float32, "dense", kv_dtype=torch.int8)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_decoders_beside_an_encoder(name: str, graphs: None) -> None:
    config = CONFIGS[name]
    params = weights(config, torch.float32)
    own, step = moved(fnmodels.stack_params(params, "decoder")), fnmodels.cache.captured_step(config.decoder)
    one, other = (moved(begun(config, params)) for _ in range(2))
    for token in range(5):
        tokens = torch.full((2, 1), token, device=DEVICE)
        wanted, other = fnmodels.decode_(
            own, *fnmodels.prepare_step(config.decoder, tokens, other), other, config=config.decoder
        )
        got, one = step(own, tokens, one)
        check(got, wanted)


def test_caches_in_turn_and_steps_of_other_functions(graphs: None) -> None:
    """No cache is written by a step of another; a cache may leave the graph and come back."""
    case = SLIDING
    config, batch, params = case.config, batch_of(case.config, ROWS), moved(generic_params(case.config))
    step = fnmodels.cache.captured_step(config)
    tokens = batch.tokens.to(DEVICE)

    def both(caches: list[Any], run: Any) -> list[Tensor]:
        found = []
        for t in range(6, 12):
            for i, cache in enumerate(caches):
                logits, caches[i] = run(tokens[:, t - i : t - i + 1], cache)
                found.append(logits)
        return found

    def plain(now: Tensor, cache: Any) -> Any:
        return fnmodels.decode_(params, *fnmodels.prepare_step(config, now, cache), cache, config=config)

    calls = itertools.count(1)

    def mixed(now: Tensor, cache: Any) -> Any:
        return plain(now, cache) if next(calls) % 3 == 0 else step(params, now, cache)

    wanted, by_graphs, either = (
        both([prompted(case, params, batch, torch.float32) for _ in range(2)], run)
        for run in (plain, lambda now, cache: step(params, now, cache), mixed)
    )
    for got in (by_graphs, either):
        for one, other in zip(got, wanted, strict=True):
            check(one, other)


def test_parameters_written_in_place_and_others(graphs: None) -> None:
    case = FAMILIES[0]
    config, batch = case.config, batch_of(case.config, ROWS)
    params = tree.map(torch.clone, moved(generic_params(config)))  # for other tests share those of the CPU
    step, tokens = fnmodels.cache.captured_step(config), batch.tokens[:, 6:7].to(DEVICE)
    cache = prompted(case, params, batch, torch.float32)
    _, cache = step(params, tokens, cache)
    tree.map(lambda leaf: leaf.mul_(1.5), params)
    for now in (params, tree.map(lambda leaf: leaf + 0.1, params)):
        other = tree.map(lambda t: t.clone() if isinstance(t, Tensor) else t, cache)
        wanted, _ = fnmodels.decode_(now, *fnmodels.prepare_step(config, tokens, other), other, config=config)
        got, cache = step(now, tokens, cache)
        check(got, wanted)


def test_generation_by_graphs_is_generation(graphs: None) -> None:
    """Requests that come and go. Steps without graphs leave out idle slots, so that products are rounded otherwise."""
    case = SLIDING
    params = moved(generic_params(case.config))
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3], [2, 9, 4, 7]]
    wanted, got = (
        train.generate(params, case.config, prompts, max_new=[9, 12, 3, 7, 5], slots=3, seeds=1, compile=how)
        for how in ("none", "graph")
    )
    assert got.tokens == wanted.tokens
    assert off(got.logp, wanted.logp) < 1e-4


def test_planted_bugs_are_found(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that the runs before the capture advance, and the memory of one cache for another."""
    recurrent = next(case for case in FAMILIES if case.family == "qwen3_next")
    with monkeypatch.context() as patch:
        patch.setattr(captured, "_states", lambda cache: [])
        with pytest.raises(AssertionError):
            compare(recurrent, torch.float32, "dense")
    monkeypatch.setattr(captured._Capture, "holds", lambda self, cache: True)
    with pytest.raises(AssertionError):
        test_caches_in_turn_and_steps_of_other_functions(None)


@on_cuda
def test_several_tokens_per_row_are_refused() -> None:
    config, tokens = FAMILIES[0].config, torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"\[1, 2\]: a captured step takes one per row"):
        fnmodels.cache.captured_step(config)(moved(generic_params(config)), tokens, fnmodels.init_cache(config, 1, 4))


def test_tensors_on_a_cpu_are_refused() -> None:
    config = FAMILIES[0].config
    cache = fnmodels.init_cache(config, 1, 4)
    with pytest.raises(ValueError, match=r"CUDA graph, and the tokens are on cpu"):
        fnmodels.cache.captured_step(config)(generic_params(config), torch.zeros(1, 1, dtype=torch.int64), cache)
