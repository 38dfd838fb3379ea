"""Steps of decoding as one compiled graph equal steps without a compiler."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fnmodels
import params as P
import train
from fnmodels.ops.linear import linear
from tests.contract.test_cache import FAMILIES, empty
from tests.params.test_weight_forms import WIDE as SMALL
from tests.support.cases import Case, batch_of, generic_params, off, segments

ONE_LAYER = replace(SMALL, num_hidden_layers=1, layer_kinds=("full",))
# Slots that are rings, latent attention with experts, recurrent layers.
STRUCTURES = pytest.mark.parametrize(
    "case", [case for case in FAMILIES if case.family in ("gemma", "deepseek", "lfm2")], ids=str
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """torch.compile without code generation; counts graphs."""
    torch.compiler.reset()
    counter, compile = CompileCounterWithBackend("eager"), torch.compile

    @functools.wraps(compile)  # its keywords are looked up
    def counted(function: Any, *, options: Any = None, **others: Any) -> Any:
        of_dynamo = {name: value for name, value in (options or {}).items() if name == "guard_filter_fn"}
        return compile(function, backend=counter, options=of_dynamo or None, **others)  # the rest is Inductor's

    monkeypatch.setattr(torch, "compile", counted)
    yield counter
    torch.compiler.reset()


@pytest.mark.slow
@STRUCTURES
def test_every_structure_in_one_graph(case: Case, graphs: CompileCounterWithBackend) -> None:
    """Rows that end, slots that fill up and rings that turn over: one graph, in the memory of the given cache."""
    config, batch = case.config, batch_of(case.config, segments((14,), (8, -6)))
    params = generic_params(config)
    cache = empty(batch, dtype=torch.float32)
    prompt = fnmodels.prepare_step(config, batch.tokens[:, :6], cache, segment_ids=batch.segment_ids[:, :6])
    _, cache = fnmodels.decode_(params, *prompt, cache, config=config)
    wanted, step = batch.forward(params), fnmodels.compiled_step(config)
    for t in range(6, 14):
        given, at = cache, slice(t, t + 1)
        logits, cache = step(params, batch.tokens[:, at], given, segment_ids=batch.segment_ids[:, at])
        valid = batch.segment_ids[:, t] > 0
        assert off(logits[valid, 0], wanted[valid, t]) < 2e-5
        with pytest.raises(RuntimeError, match="used up"):
            given.layers
    assert graphs.frame_count == 1


def both(params: Any, config: Any, rows: int, **form: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits of the compiled step, of `decode_`) for four tokens of each row. form: keywords of `init_cache`."""
    step, tokens = fnmodels.compiled_step(config), torch.arange(4 * rows).reshape(4, rows, 1)
    one, other = (fnmodels.init_cache(config, rows, 8, **form) for _ in range(2))
    for now in tokens:
        logits, one = step(params, now, one)
        prepared = fnmodels.prepare_step(config, now, other)
        wanted, other = fnmodels.decode_(params, *prepared, other, config=config)
        yield logits, wanted


def filled(step: Any, params: Any, config: Any, capacity: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits of the compiled step, of `decode_`) of two rows from `start` tokens until their cache is full."""
    tokens = torch.arange(2 * capacity).view(2, capacity) % config.vocab_size
    prompt = fnmodels.prepare_step(config, tokens[:, :start], fnmodels.init_cache(config, 2, capacity))
    one, other = (
        fnmodels.decode_(params, *prompt, fnmodels.init_cache(config, 2, capacity), config=config)[1] for _ in range(2)
    )
    for t in range(start, capacity):
        logits, one = step(params, tokens[:, t, None], one)
        prepared = fnmodels.prepare_step(config, tokens[:, t, None], other)
        wanted, other = fnmodels.decode_(params, *prepared, other, config=config)
        yield logits, wanted


@pytest.mark.slow
def test_few_graphs_serve_all_lengths_and_capacities(graphs: CompileCounterWithBackend) -> None:
    """Steps that read blocks of slots and those that read all are two graphs of one capacity, and two of all others."""
    config = ONE_LAYER
    params, step = generic_params(config), fnmodels.compiled_step(config)
    for capacity, start, count in ((300, 5, 2), (300, 250, 2), (500, 440, 4), (512, 440, 4), (100, 90, 4), (64, 60, 4)):
        for logits, wanted in filled(step, params, config, capacity, start):
            assert off(logits, wanted) < 2e-6
        assert graphs.frame_count == count


@pytest.mark.parametrize("rows", [1, 3])  # one row's int8 products are loops of the graph
@pytest.mark.parametrize("form", ["packed", "int8", "int4"])
def test_each_form_of_weights(form: str, rows: int, graphs: CompileCounterWithBackend) -> None:
    params = generic_params(ONE_LAYER)
    made = P.packed(params) if form == "packed" else P.quantize(params, ONE_LAYER, kind=form)
    dtype, bound = (torch.float32, 2e-6) if form == "packed" else (torch.bfloat16, 3e-2)
    for logits, wanted in both(made, ONE_LAYER, rows, dtype=dtype):
        assert off(logits, wanted) < bound
    assert graphs.frame_count == 1


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_int8_caches(family: str, graphs: CompileCounterWithBackend) -> None:
    """Heads and latents in int8: the numbers of `decode_` with the same cache, in one graph for all steps."""
    config = ONE_LAYER if family == "llama" else next(case.config for case in FAMILIES if case.family == family)
    for logits, wanted in both(generic_params(config), config, 2, kv_dtype=torch.int8):
        assert off(logits, wanted) < 2e-6
    assert graphs.frame_count == 1


@pytest.mark.slow
def test_generated_code() -> None:
    """Inductor's code for one row, whose products are loops."""
    torch.compiler.reset()
    config = ONE_LAYER
    for logits, wanted in both(generic_params(config), config, 1):
        assert off(logits, wanted) < 2e-6
    torch.compiler.reset()


@pytest.mark.slow
def test_generated_code_reads_blocks_of_slots() -> None:
    torch.compiler.reset()
    config = ONE_LAYER
    for logits, wanted in filled(fnmodels.compiled_step(config), generic_params(config), config, 200, 120):
        assert off(logits, wanted) < 2e-6
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_of_one_row(dtype: torch.dtype, bias: bool, graphs: CompileCounterWithBackend) -> None:
    x, weight, add = (torch.randn(shape).to(dtype) for shape in ((1, 1, 48), (32, 48), (32,)))
    more: tuple[Tensor, ...] = (add,) if bias else ()

    @torch.no_grad()
    def run(*given: Tensor) -> Tensor:
        return linear(*given)

    found = torch.compile(run, fullgraph=True)(x, weight, *more)
    assert found.dtype is dtype
    wanted = F.linear(x.double(), weight.double(), add.double() if bias else None)
    assert off(found.double(), wanted) < {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.slow
def test_generate_compiles_its_steps(graphs: CompileCounterWithBackend) -> None:
    """The same draws as without, over more requests than slots. Packed weights, which no file of code can hold."""
    params, prompts = P.packed(generic_params(ONE_LAYER)), [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    settings: dict[str, Any] = {"slots": 2, "seeds": [3, 4, 5, 6], "sampling": train.Sampling(temperature=0.7)}
    for new in (5, 9):
        wanted = train.generate(params, ONE_LAYER, prompts, max_new=new, **settings)
        found = train.generate(params, ONE_LAYER, prompts, max_new=new, compile="step", **settings)
        assert found.tokens == wanted.tokens
    assert graphs.frame_count == 2
    step = fnmodels.compiled_step(ONE_LAYER)
    for _ in range(2):  # a step keeps its graph
        found = train.generate(params, ONE_LAYER, prompts, max_new=9, compile=step, **settings)
        assert found.tokens == wanted.tokens
    assert graphs.frame_count == 3


def test_what_no_graph_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="layer_fn"):
        fnmodels.compiled_step(SMALL, layer_fn=lambda block: block)
    with pytest.raises(ValueError, match="invariant"):
        fnmodels.compiled_step(SMALL, kernel="invariant")
    with pytest.raises(ValueError, match=r"'block'.*step"):
        train.generate(P.init(SMALL, seed=0), SMALL, [[1]], max_new=1, compile="block")
