"""torch.compile captures the model as one graph, and compiles a block once for all layers of its kind.

The backend is "eager", which captures the Python code only; tests/fnmodels/test_export.py and tests/train/test_step.py
run graphs of derivatives and generated code. Models have as few layers as have all of their kinds.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import fnmodels
from fnmodels import tree
from tests.support.cases import (
    Batch,
    Case,
    batch_of,
    block_structures,
    cases,
    covering_blocks,
    forward,
    generic_params,
    gradients,
    off,
    richest,
    segments,
    shortest,
    summed_loss,
    tokens_of,
    trainable,
)

BRANCHING = tuple(case for case in cases() if case.name == "llama_longrope_long")  # its table has two branches
# Those with masks, tables or tensors between layers of their own; the test of the block captures each block.
WHOLE = {"camembert", "deepseek_v4", "falcon_h1", "gemma3n_text", "gemma4_text_e", "glm_moe_dsa", "gpt_neo", "gpt_oss"}
WHOLE |= {"deepseek_v41", "hrm_text_deep", "llama4_text", "mistral_large4", "hy_v4"}
GRAPHS = tuple(case for case in cases() if case.name in WHOLE)
assert {case.name for case in GRAPHS} == WHOLE
pytestmark = pytest.mark.slow
MIXED, OTHER = segments((-3, 5, 4), (12,), (7, 1, -4)), segments((12,), (2, 9, -1), (-11, 1))


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@contextmanager
def one_graph() -> Iterator[None]:
    """Reports a failed capture as a failure of the property instead of an error of the test."""
    try:
        yield
    except Unsupported as error:
        raise AssertionError(f"torch.compile cannot capture the model in one graph: {error}") from error


def with_one_of_each(config: Any) -> Any:
    """GLM without the layers whose mixer and MLP two others have: one chooses keys, one takes the choice."""
    kinds = ("indexed", "indexed_shared_moe")
    if getattr(config, "layer_kinds", ())[:2] != ("indexed", "indexed_shared"):
        return config
    return dataclasses.replace(config, num_hidden_layers=len(kinds), layer_kinds=kinds)


@pytest.mark.parametrize("case", GRAPHS + BRANCHING, ids=str)
def test_prepare_and_forward_are_one_graph(case: Case) -> None:
    """F10: equal to eager, backward included; no recompile for an equal config, other values or other masks."""
    counter = CompileCounterWithBackend("eager")

    def loss(weights: Any, batch: Any, labels: Tensor, config: Any) -> Tensor:
        prepared = Batch(config, *batch, length=24).prepared()
        return summed_loss(fnmodels.forward(weights, *prepared, config=config), labels)

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    model = with_one_of_each(shortest(case.config))
    weights = trainable(generic_params(model))
    first, second = batch_of(model, MIXED), batch_of(model, OTHER, seed=1)
    equal = dataclasses.replace(model)
    assert equal is not model and equal == model
    for batch, config in ((first, model), (second, equal)):
        given = (batch.tokens, batch.positions, batch.segment_ids)
        with one_graph():
            got = compiled(weights, given, batch.labels, config)
        wanted = loss(weights, given, batch.labels, config)
        assert off(got, wanted) < 1e-5
        assert off(gradients(got, weights), gradients(wanted, weights)) < 1e-4
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", [case for case in richest() if case.family in ("gemma", "mixtral")], ids=str)
def test_a_plain_layout_is_one_graph(case: Case) -> None:
    """The layout that the compiled train step passes for rows of one document each."""
    counter = CompileCounterWithBackend("eager")
    model = shortest(case.config)
    compiled = torch.compile(partial(fnmodels.forward, config=model), backend=counter, fullgraph=True)
    weights = generic_params(model)
    for seed in range(2):
        prepared = fnmodels.prepare(model, tokens_of(model, 2, 10, seed=seed), length=24)
        layout = fnmodels.layout(prepared[1])
        assert layout is not None and layout.plain
        wanted = forward(weights, prepared, config=model, kernel="math")
        assert off(compiled(weights, *prepared, layout=layout), wanted) < 1e-5
    assert counter.frame_count == 1


# Layers of these read a state more after every block or pass, so that a kind has a graph for each such number.
DEEP = ("inkling2", "kimi_k3", "ouro")


@pytest.mark.parametrize("case", [case for case in block_structures() if case.family not in DEEP], ids=str)
def test_layers_of_a_kind_are_called_alike(case: Case) -> None:
    """F10: what a compiled block guards is the same for all layers of a kind: trees, shapes, dtypes, other values."""
    config, seen = shortest(case.config, 2), dict[str, dict[str, Any]]()

    def watched(block: Any) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            leaves = tree.flatten({"given": list(given), "options": options})
            guarded = {path: guard(leaf) for path, leaf in leaves.items()}
            assert seen.setdefault(block.keywords["kind"], guarded) == guarded
            return block(*given, **options)

        return run

    batch_of(config, MIXED).forward(generic_params(config), layer_fn=watched)
    assert seen.keys() == set(fnmodels.family_of(config).kinds(config))


def guard(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


# Blocks of `WHOLE` are captured above, and what they guard is the same in all layers of a kind; one is here too.
_CAPTURED = WHOLE - {"gpt_oss"}
BLOCKS = [case for case in covering_blocks() if case.family not in DEEP and case.name not in _CAPTURED]


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_one_compilation_of_the_block_for_all_layers_of_a_kind(case: Case) -> None:
    """F10: each kind once, forward and backward, because a block receives its own layer's subtree and no index.

    Each kind has two layers at least: what makes a third one compile anew does so for the second. Kinds that another
    case compiles run without a compiler.
    """
    config = shortest(case.config, 2)
    counter = CompileCounterWithBackend("eager")
    weights, batch = trainable(generic_params(config)), batch_of(config, MIXED)
    # All kinds of a case that planted bugs name.
    compiled = set(covering_blocks().get(case, fnmodels.family_of(config).kinds(config)))
    blocks: dict[str, Any] = {}

    def once(block: Any) -> Any:
        if block.keywords["kind"] not in compiled:
            return block
        return blocks.setdefault(block.keywords["kind"], torch.compile(block, backend=counter, fullgraph=True))

    wanted = summed_loss(batch.forward(weights), batch.labels)
    with one_graph():
        got = summed_loss(fnmodels.forward(weights, *batch.prepared(), config=config, layer_fn=once), batch.labels)
    assert off(got, wanted) < 1e-5
    assert off(gradients(got, weights), gradients(wanted, weights)) < 1e-4
    assert 1 <= counter.frame_count <= len(compiled)
