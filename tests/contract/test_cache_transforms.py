"""Steps on a cache under vmap, compiled block by block, and exported."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fnmodels
import params as P
from fnmodels import tree
from tests.contract.test_cache import FAMILIES, SLIDING, empty, stepped
from tests.support.cases import Case, batch_of, generic_params, off, segments, shortest, trainable

THREE = pytest.mark.parametrize("case", [c for c in FAMILIES if c.family in ("gemma", "deepseek", "mixtral")], ids=str)
RAGGED = segments((10,), (7, -3))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@THREE
def test_a_model_per_row(case: Case) -> None:
    """vmap over stacked adapters, each with a row of the cache, equals a loop."""
    config, batch = case.config, batch_of(case.config, RAGGED)
    plain = generic_params(config)
    names = ("kv_b_proj" if case.family == "deepseek" else "q_proj", "o_proj")
    models = [P.lora.add(config, plain, rank=2, targets=names, seed=seed) for seed in (0, 1)]
    models = [tree.map(lambda t, by=by: t + 0.05 * by, model) for by, model in enumerate(models, 1)]
    _, cache = stepped(plain, batch, empty(batch, dtype=torch.float32, room=14), (10,))
    tokens, ids = batch.tokens[:, :2], torch.tensor([[1, 1], [1, 0]])
    prepared = fnmodels.prepare_step(config, tokens, cache, segment_ids=ids)

    def one(model: Any, *step: Any) -> Any:
        return fnmodels.decode(model, *step, config=config, kernel="math")

    stacked = tree.map(lambda *leaves: torch.stack(leaves), *models)
    logits, after = torch.func.vmap(one)(stacked, *fnmodels.rows((*prepared, cache)))
    for row, model in enumerate(models):
        here = fnmodels.take(cache, [row])
        step = fnmodels.prepare_step(config, tokens[[row]], here, segment_ids=ids[[row]])
        wanted, grown = one(model, *step, here)
        assert off(logits[row][ids[[row]] > 0], wanted[ids[[row]] > 0]) < 1e-5
        assert off(tree.map(lambda t, row=row: t[row], after), grown) < 1e-5


@pytest.mark.slow
@THREE
def test_compiled_blocks_do_not_recompile(case: Case, fresh_compiler: None) -> None:
    """One graph per kind for all layers and steps, over rows that end and slots that fill up."""
    config = shortest(case.config, 2)
    batch, params = batch_of(config, segments((14,), (8, -6))), generic_params(config)
    # Writes to the cache are functionalized in one model; captures do not depend on it, and take half the time without.
    counter = CompileCounterWithBackend("aot_eager" if case.family == "mixtral" else "eager")
    blocks: dict[Any, Any] = {}

    def once(block: Any) -> Any:
        key = tuple(sorted(block.keywords.items(), key=lambda item: item[0]))
        return blocks.setdefault(key, torch.compile(block, backend=counter, fullgraph=True))

    def run(*given: Any, **options: Any) -> Any:
        wrapped = {"layer_fn": once} if given[1]["tokens"].shape[1] == 1 else {}
        return fnmodels.decode_(*given, **options, **wrapped)

    wanted = batch.forward(params)
    got, _ = stepped(
        params,
        batch,
        empty(batch, dtype=torch.float32),
        (6, *[1] * 8),
        run=run,
        kernel="sdpa" if case.family != "gemma" else "math",
    )
    assert off(got[batch.valid], wanted[batch.valid]) < 2e-5
    assert counter.frame_count == len(set(fnmodels.family_of(config).kinds(config)))


class Step(torch.nn.Module):
    """The shell torch.export asks for: a step and its preparation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, params: Any, tokens: Tensor, cache: Any) -> Any:
        prepared = fnmodels.prepare_step(self.config, tokens, cache)
        return fnmodels.decode(params, *prepared, cache, config=self.config)


@pytest.mark.slow
def test_an_exported_step(fresh_compiler: None) -> None:
    """One program for all steps, whose cache is an argument and a result."""
    config, batch = SLIDING.config, batch_of(SLIDING.config, segments((14,), (14,)))
    params = generic_params(config)
    wanted = batch.forward(params)
    _, cache = stepped(params, batch.take(slice(None), slice(0, 4)), empty(batch, dtype=torch.float32), (4,))
    program = torch.export.export(Step(config), (params, batch.tokens[:, 4:5], cache)).module()
    for t in range(4, 14):
        logits, cache = program(params, batch.tokens[:, t : t + 1], cache)
        assert off(logits[:, 0], wanted[:, t]) < 1e-5


def test_gradients_through_a_cache() -> None:
    """The loss of a chunk reaches the chunks before it through functional steps."""
    config, batch = SLIDING.config, batch_of(SLIDING.config, RAGGED)
    params = trainable(generic_params(config, torch.float64))
    leaves = tree.leaves(params)
    wanted = torch.autograd.grad(batch.forward(params)[batch.valid].square().mean(), leaves)
    got, _ = stepped(params, batch, empty(batch), (6, 1, 3))
    found = torch.autograd.grad(got[batch.valid].square().mean(), leaves)
    assert all(off(a, b) < 1e-10 for a, b in zip(found, wanted, strict=True))
