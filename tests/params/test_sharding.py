"""Sharding plans: each rank's shard, compared with DTensor's and by reassembling the leaf."""

import importlib
import itertools
import re
from typing import Any

import pytest
import torch

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common.spec import attention_leaves, weight
from params import Rules, describe, plan
from params.sharding import Sharding
from tests.support.cases import richest

# `params.init` is the function
init = importlib.import_module("params.initialize")
TENSOR = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
SPEC = {
    "w": weight((8, 6), ("heads", "embed")),
    "layers": [{"o": weight((6, 8), ("embed", "heads"))} for _ in range(2)],
}


def _dims(placements: Any) -> dict[str, tuple[int | None, ...]]:
    return {path: sharding.dims for path, sharding in tree.flatten(placements).items()}


def test_axes_go_where_the_rules_say_and_the_rest_is_spread() -> None:
    made = plan(SPEC, Rules({"heads": "tp"}, spread="fsdp"), {"fsdp": 2, "tp": 4})
    assert _dims(made) == {"w": (1, 0), "layers.0.o": (0, 1), "layers.1.o": (0, 1)}
    assert _dims(plan(SPEC, Rules(spread="fsdp"), {"fsdp": 2})) == {"w": (0,), "layers.0.o": (0,), "layers.1.o": (0,)}
    assert _dims(plan(SPEC, Rules(), {"dp": 3}))["w"] == (None,)


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}])
@pytest.mark.parametrize("case", richest(), ids=str)
def test_the_parts_of_all_ranks_are_the_whole(case: Any, sizes: dict[str, int]) -> None:
    spec = fnmodels.family_of(case.config).spec(case.config)
    axes = {axis for leaf in tree.leaves(spec) for axis in leaf.axes} & {"mlp", "expert_mlp"}
    rules = Rules(dict.fromkeys(axes, "tp") if "tp" in sizes else {}, spread="fsdp")
    for path, sharding in tree.flatten(plan(spec, rules, sizes)).items():
        seen = torch.zeros(sharding.shape, dtype=torch.int)
        for coordinate in itertools.product(*map(range, sizes.values())):
            seen[sharding.box_at(coordinate)] += 1
        copies = [size for dim, (_, size) in zip(sharding.dims, sharding.sizes, strict=True) if dim is None]
        assert (seen == torch.tensor(copies).prod()).all(), path


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 9)])
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 0), (None, 1)])
def test_the_division_is_that_of_dtensor(shape: tuple[int, int], dims: tuple[int | None, ...]) -> None:
    sizes = {"a": 2, "b": 3}
    sharding = Sharding(dims, tuple(sizes.items()), shape, 4)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    for coordinate in itertools.product(range(2), range(3)):
        local = whole
        for placement, size, index in zip(sharding.placements, (2, 3), coordinate, strict=True):
            if placement.is_shard():
                pieces, _ = placement._split_tensor(local, size, with_padding=False)
                local = pieces[index]
        ours = whole[sharding.box_at(coordinate)]
        assert ours.numel() == local.numel() and torch.equal(ours.flatten(), local.flatten())


@pytest.mark.parametrize(
    ("rules", "sizes", "words"),
    [
        (Rules({"heads": "tp"}), {"tp": 3}, r"w: heads is 8, not a multiple of 3 (tp)."),
        (Rules({"heads": "tp", "embed": "tp"}), {"tp": 2}, "w: both 'heads' and 'embed' go to 'tp'; only one can."),
        (Rules({"heads": "tp"}), {"fsdp": 2}, "the mesh dimension 'tp'; the mesh has fsdp."),
        (Rules({"hedas": "tp"}), {"tp": 2}, "the axis 'hedas', which no leaf has; there are embed, heads."),
        (Rules({"heads": ("a", "b")}), {"a": 2, "b": 8}, "w: heads is 8, not a multiple of 16 (a, b)."),
    ],
)
def test_rules_that_do_not_fit_raise(rules: Rules, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        plan(SPEC, rules, sizes)


def test_heads_stay_whole() -> None:
    """Divisible rows are not sharded if that would split a head; fewer KV heads than shards are replicated."""
    leaves = attention_leaves(32, 6, 2, 8, std=0.02, qkv_bias=True)
    rules = Rules({"heads": "tp", "kv_heads": "tp"})
    with pytest.raises(ValueError, match=re.escape("q_proj: heads is 6 heads of 8, not a multiple of 4 (tp).")):
        plan(leaves, rules, {"tp": 4})
    with pytest.raises(ValueError, match=re.escape("k_proj: kv_heads is 2 heads of 8, not a multiple of 3 (tp).")):
        plan(leaves, rules, {"tp": 3})
    whole = {"k_proj": (None,), "v_proj": (None,), "k_bias": (None,), "v_bias": (None,)}
    assert _dims(plan(leaves, rules, {"tp": 6})) == {"q_proj": (0,), "o_proj": (1,), "q_bias": (0,), **whole}
    divided = _dims(plan(leaves, rules, {"tp": 2}))
    assert all(divided[name] == (0,) for name in whole)


@pytest.mark.parametrize("case", richest(), ids=str)
def test_every_leaf_with_heads_says_how_large_they_are(case: Any) -> None:
    config = case.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    counts = {
        "heads": {heads, getattr(config, "sliding_attention_heads", heads)},
        "kv_heads": {kv_heads, getattr(config, "sliding_key_value_heads", kv_heads)},
    }
    counts["kv_heads"] |= {count for _, count, _ in getattr(config, "sublayers", ())}  # each layer's own
    for path, leaf in tree.flatten(fnmodels.family_of(config).spec(config)).items():
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            assert axis not in counts or size in {count * leaf.unit for count in counts[axis]}, path


def test_a_mesh_dimension_has_one_use() -> None:
    with pytest.raises(ValueError, match="'tp' is in `spread`"):
        Rules({"heads": "tp"}, spread=("fsdp", "tp"))


def test_equal_rules_are_equal_and_hashable() -> None:
    assert Rules({"a": "x", "b": ("y",)}) == Rules({"b": "y", "a": ("x",)})
    assert len({Rules(spread="x"), Rules(spread=("x",))}) == 1


def test_the_table_adds_up() -> None:
    config = fnmodels.preset("llama-3.1-8b")
    sizes = {"fsdp": 2, "tp": 2}
    text = describe(plan(fnmodels.family_of(config).spec(config), Rules(TENSOR, spread="fsdp"), sizes))
    lines = text.splitlines()
    assert f"layers.*.mlp.gate_proj (x{config.num_hidden_layers})" in text
    per_rank = int(lines[-1].split()[-1].replace(",", ""))
    assert sum(int(re.findall(r"\] +([\d,]+)", line)[-1].replace(",", "")) for line in lines[1:-1]) == per_rank
    # everything is sharded four ways except the norms, which tp replicates
    assert P.count(config) <= per_rank < 1.001 * P.count(config)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 0), (None, 1)])
@pytest.mark.parametrize("block", [1, 12, 30, 1 << 20])
def test_each_rank_draws_its_part_of_the_one_leaf(
    dims: tuple[int | None, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "BLOCK", block)
    leaf = weight((7, 5), ("mlp", "embed"))
    whole = init.draw(leaf, 3, "w")
    sharding = Sharding(dims, (("a", 2), ("b", 3)), leaf.shape, 4)
    for coordinate in itertools.product(range(2), range(3)):
        part = sharding.box_at(coordinate)
        assert torch.equal(init.draw(leaf, 3, "w", part), whole[part])


def test_no_rank_draws_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    normal = torch.Tensor.normal_
    monkeypatch.setattr(init, "BLOCK", 64)
    monkeypatch.setattr(torch.Tensor, "normal_", lambda t, *a, **k: (drawn.append(t.numel()), normal(t, *a, **k))[1])
    init.draw(weight((400, 8), ("mlp", "embed")), 0, "w", (slice(100, 200), slice(0, 8)))
    assert 800 <= sum(drawn) <= 800 + 2 * 64


def test_init_by_a_plan_needs_its_mesh_and_its_model() -> None:
    config = next(case.config for case in richest() if case.family == "llama")
    spec = fnmodels.family_of(config).spec(config)
    with pytest.raises(ValueError, match="made from sizes alone"):
        P.init(config, 0, plan=plan(spec, Rules(), {"dp": 1}))
    with pytest.raises(ValueError, match="another model"):
        P.init(config, 0, plan=plan(SPEC, Rules(), {"dp": 1}))


def test_no_process_is_left_without_rows_of_an_uneven_axis() -> None:
    spec = {"table": weight((5, 3), ("ngram", "ngram_latent"))}
    with pytest.raises(
        ValueError, match=r"table: ngram is 5, of which 4 processes \(tp\) have 2 each and the last ones"
    ):
        plan(spec, Rules({"ngram": "tp"}), {"tp": 4})
    assert plan(spec, Rules({}, spread=("fsdp",)), {"fsdp": 4})["table"].dims == (None,)
    assert plan(spec, Rules({"ngram": "tp"}), {"tp": 3})["table"].dims == (0,)
