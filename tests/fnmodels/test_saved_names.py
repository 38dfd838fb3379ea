"""Names and fields that programs saved by torch.export hold: the module of a class, its name and its fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import BidirectionalWindow, Causal, Chunk, Everything, SameSpan, Window
from fnmodels.ops.attention.block_sparse import Plan, Step
from fnmodels.ops.attention.sdpa import ByIndex
from fnmodels.ops.moe.dispatch import Dispatched
from params.lora import Lora
from train.state import State

LEAF = {"type": None, "context": None, "children_spec": []}
T = torch.ones(1, 2)
RULE = (Causal() & (Window(3) | SameSpan())) & ((Chunk(4) | BidirectionalWindow(2)) | Everything())


def rule(name: str, **fields: Any) -> dict[str, Any]:
    return {"module": "fnmodels.inputs.rules", "class": name, "fields": fields}


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


SAVED_RULE = rule(
    "And",
    left=rule("And", left=rule("Causal"), right=rule("Or", left=rule("Window", size=3), right=rule("SameSpan"))),
    right=rule(
        "Or",
        left=rule("Or", left=rule("Chunk", size=4), right=rule("BidirectionalWindow", size=2)),
        right=rule("Everything"),
    ),
)
SAVED_STEP = {
    "module": "fnmodels.ops.attention.block_sparse",
    "class": "Step",
    "fields": {"start": 0, "stop": 2, "causal": True, "mask": 0, "count": 1},
}
TUPLE = {"type": "builtins.tuple", "context": "null", "children_spec": [LEAF]}
STATICS = [["steps", [SAVED_STEP, None]], ["sizes", [2]], ["shape", [1, 2]], ["merged", False]]

# (a node, its name in the file, the names of its children and its static fields, its children)
SAVED: list[tuple[Any, str, list[Any], list[Any]]] = [
    (
        Mask(T, T, T, T, None, None, RULE),
        name_of(Mask),
        [["q_positions", "q_segments", "kv_positions", "kv_segments"], [["rule", SAVED_RULE]]],
        [LEAF] * 4,
    ),
    (ByIndex(Causal()), name_of(ByIndex), [[], [["rule", rule("Causal")]]], []),
    (
        Plan((T,), (Step(0, 2, True, 0), None), (2,), (1, 2), False),
        name_of(Plan),
        [["masks"], STATICS],
        [TUPLE],
    ),
    (Dispatched(T, T, T), name_of(Dispatched), [["order", "counts", "valid"], []], [LEAF] * 3),
    (Lora(T, T, T, 0.5), name_of(Lora), [["weight", "a", "b"], [["scale", 0.5]]], [LEAF] * 3),
    (State(T, T, T), name_of(State), [["step", "params", "opt_state"], []], [LEAF] * 3),
]


@pytest.mark.parametrize(("node", "name", "context", "children"), SAVED, ids=[name for _, name, _, _ in SAVED])
def test_a_saved_node_names_its_class_and_fields_and_is_read_back(
    node: Any, name: str, context: list[Any], children: list[Any]
) -> None:
    saved = [1, {"type": name, "context": context, "children_spec": children}]
    assert json.loads(_pytree.treespec_dumps(_pytree.tree_structure(node))) == saved
    spec = _pytree.treespec_loads(json.dumps(saved))
    assert spec == _pytree.tree_structure(node)
    read = _pytree.tree_unflatten(_pytree.tree_leaves(node), spec)
    assert type(read) is type(node)
    assert all(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(read))


def test_a_plan_that_was_saved_before_steps_had_counts_is_read() -> None:
    [(node, name, context, children)] = [saved for saved in SAVED if isinstance(saved[0], Plan)]
    text = json.dumps([1, {"type": name, "context": context, "children_spec": children}])
    assert ', "count": 1' in text
    assert _pytree.treespec_loads(text.replace(', "count": 1', "")) == _pytree.tree_structure(node)
