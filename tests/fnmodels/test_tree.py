"""The tree module: dicts matched by key, nodes of frozen dataclasses, paths and back."""

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from fnmodels import tree

Pair = collections.namedtuple("Pair", "left right")


@tree.pytree
@dataclass(frozen=True)
class Node:
    value: Any
    other: Any
    rule: str = tree.static(default="causal")


TREE = {"b": [1, {"x": 2}], "a": (3, None), "n": Node(4, None, "window"), "p": Pair(5, 6)}


def test_map_keeps_structure() -> None:
    assert tree.map(lambda v: 10 * v, TREE) == {
        "b": [10, {"x": 20}],
        "a": (30, None),
        "n": Node(40, None, "window"),
        "p": Pair(50, 60),
    }
    assert tree.map(lambda v: v, None) is None and tree.map(lambda v: v + 1, 1) == 2


def test_map_matches_dicts_by_key() -> None:
    assert tree.map(lambda x, y: x - y, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": -9, "b": -18}
    assert tree.map(lambda x, y, z: x + y + z, [1], [2], [3]) == [6]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 1}}, "'a'"),
        ({"a": [1, 2]}, {"a": [1]}, "a list of 2 against a list of 1"),
        ([1], (1,), "the root"),
        ({"a": None}, {"a": 1}, "None against"),
        (Node(1, 2, "causal"), Node(1, 2, "window"), "the root"),
        ({"a": [Node(1, 2)]}, {"a": [3]}, "'a.0'"),
    ],
)
def test_differing_trees_are_an_error_which_names_the_place(one: Any, other: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        tree.map(lambda x, y: x, one, other)
    assert words in str(caught.value)


def test_flatten_and_back() -> None:
    flat = tree.flatten(TREE)
    assert flat == {"b.0": 1, "b.1.x": 2, "a.0": 3, "n.value": 4, "p.0": 5, "p.1": 6}
    assert tree.leaves(TREE) == list(flat.values())
    nested = {"layers": [{"w": 1}, {"w": 2}], "norm": 3}
    assert tree.unflatten(tree.flatten(nested)) == nested
    assert tree.unflatten({"a.0": 1, "a.2": 2}) == {"a": {"0": 1, "2": 2}}
    many = {"layers": list(range(12))}
    assert tree.unflatten(dict(reversed(tree.flatten(many).items()))) == many
    assert tree.flatten(7) == {"": 7} and tree.unflatten({"": 7}) == 7
    assert tree.flatten({"empty": {}, "none": None}) == {}


def test_paths_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="without a dot"):
        tree.flatten({"a.b": 1})
    for flat in ({"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}):
        with pytest.raises(ValueError, match="'a"):
            tree.unflatten(flat)


def test_nodes_are_pytrees_of_torch_too() -> None:
    node = Node(torch.ones(2, 3), None, "window")
    values, spec = _pytree.tree_flatten(node)
    assert len(values) == 1 and _pytree.tree_unflatten(values, spec) is not node
    assert _pytree.tree_unflatten(values, spec).rule == "window"
    out = torch.func.vmap(lambda n: n.value.sum())(node)
    assert torch.equal(out, torch.full((2,), 3.0))


def test_unflatten_gives_the_order_that_jvp_asks_for() -> None:
    """Trees of the same keys in another order are refused by torch.func.jvp; `like` settles the order."""
    params = {"w": [torch.ones(2), torch.ones(2)], "b": torch.ones(2)}
    flat = tree.flatten(params)
    reordered = {path: flat[path] for path in sorted(flat, reverse=True)} | {"b": flat["b"]}
    reordered = {"b": reordered.pop("b"), **reordered}

    def total(values: tree.Tree) -> torch.Tensor:
        return values["w"][0].sum() * 3 + values["b"].sum()

    with pytest.raises(RuntimeError, match="same python structure"):
        torch.func.jvp(total, (params,), (tree.unflatten(reordered),))
    found = tree.unflatten(reordered, like=params)
    _, tangent = torch.func.jvp(total, (params,), (found,))
    assert float(tangent) == 8
    with pytest.raises(ValueError, match="'b' is only in `like`"):
        tree.unflatten({"w.0": 1, "w.1": 1}, like=params)
    with pytest.raises(ValueError, match="'c' is only in `flat`"):
        tree.unflatten(flat | {"c": 1}, like=params)


def test_inner_products_sums_and_vectors_of_trees() -> None:
    one = {"b": torch.tensor([[1.0, 2.0]]), "a": [torch.tensor(3.0), None]}
    other = {"a": [torch.tensor(5.0), None], "b": torch.tensor([[7.0, 11.0]])}  # built in another order
    assert tree.vdot(one, other) == 7 + 22 + 15
    assert torch.equal(tree.axpy(2.0, one, other)["b"], torch.tensor([[9.0, 15.0]]))
    vector, inverse = tree.ravel(one)
    assert vector.tolist() == [1, 2, 3]
    again = inverse(10 * vector)
    assert again["a"] == [30, None] and again["b"].tolist() == [[10, 20]]
    with pytest.raises(ValueError, match=r"must be \[3\]"):
        inverse(vector[:2])
    with pytest.raises(ValueError, match="one dtype"):
        tree.ravel({"a": vector, "b": vector.double()})
    with pytest.raises(ValueError, match="shapes"):
        tree.vdot({"a": torch.ones(2, 1)}, {"a": torch.ones(1, 2)})


def test_stacked_trees_and_back() -> None:
    trees = [{"a": torch.full((2,), float(i)), "b": [torch.tensor(i)]} for i in range(3)]
    stacked = tree.stack(trees)
    assert stacked["a"].shape == (3, 2) and stacked["b"][0].tolist() == [0, 1, 2]
    assert [one["b"][0].item() for one in tree.unstack(stacked)] == [0, 1, 2]
    with pytest.raises(ValueError, match="dimension 0"):
        tree.unstack({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="at least one"):
        tree.stack([])


def test_map_with_path_names_each_leaf_as_flatten_does() -> None:
    named = tree.map_with_path(lambda path, leaf, other: (path, leaf - other), TREE, TREE)
    assert named["b"][1]["x"] == ("b.1.x", 0) and named["n"].value == ("n.value", 0) and named["p"].right == ("p.1", 0)


WATCHED = {
    "an entry": lambda t: t.update(a=torch.zeros(1)),
    "an entry below": lambda t: t["b"][1].update(c=torch.zeros(1)),
    "an entry of a tuple's dict": lambda t: t["d"][0].update(e=torch.zeros(1)),
    "a list's entry": lambda t: t["b"].__setitem__(0, torch.zeros(1)),
    "a new key": lambda t: t["b"][1].update(new=torch.zeros(1)),
    "a key less": lambda t: t["b"][1].pop("c"),
    "another name": lambda t: t["b"][1].update(other=t["b"][1].pop("c")),
    "a longer list": lambda t: t["b"].append(torch.zeros(1)),
    "equal containers": lambda t: t.update(b=list(t["b"])),
}


@pytest.mark.parametrize("change", WATCHED)
def test_a_watched_tree_that_changed_is_noticed(change):
    watched = {"a": torch.zeros(1), "b": [torch.zeros(1), {"c": torch.zeros(1)}], "d": ({"e": torch.zeros(1)},)}
    unchanged = tree.watch(watched)
    watched["a"].add_(1)  # values may change
    assert unchanged()
    WATCHED[change](watched)
    assert not unchanged()
