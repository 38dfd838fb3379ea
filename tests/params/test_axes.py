"""The table of logical axes: it knows every axis of a layer, and what is derived from it agrees with itself."""

import fnmodels
from fnmodels import tree
from params.axes import AXES, EMBED, HEADS, KEYS, KV_HEADS, LINEAR_HEADS, MLP, has_whole_heads, regions_of, sharded_by
from tests.support.cases import cases
from train.parallel.tensor.leaf_roles import path_in_layer


def test_every_axis_of_every_familys_layers_is_known() -> None:
    for case in cases():
        for path, leaf in tree.flatten(fnmodels.family_of(case.config).spec(case.config)).items():
            assert path_in_layer(path) is None or set(leaf.axes) <= AXES.keys(), f"{case}: {path} has {leaf.axes}"


def test_paths_in_blocks_of_mtp_heads_are_those_of_layers() -> None:
    for path in (
        "mtp.0.block.attention.q_proj",
        "text.mtp.0.block.1.attention.q_proj",
        "text.layers.3.attention.q_proj",
    ):
        assert path_in_layer(path) == "attention.q_proj"
    assert path_in_layer("text.mtp.0.eh_proj") is None


def test_a_region_is_made_by_an_axis_that_tp_shards() -> None:
    regions = {axis.region for axis in AXES.values()} - {None}
    assert regions <= set(sharded_by("tp")) and all(AXES[name].region == name for name in regions if name)


def test_key_heads_are_read_by_heads_of_the_same_region() -> None:
    assert KEYS == {KV_HEADS: HEADS, "linear_kv_heads": LINEAR_HEADS}
    for keys, heads in KEYS.items():
        assert has_whole_heads(keys) and has_whole_heads(heads) and AXES[keys].region == AXES[heads].region


def test_regions_of_a_parameter() -> None:
    assert regions_of((HEADS, EMBED)) == {HEADS} == regions_of(("latent",))
    assert regions_of(("mlp", EMBED)) == {MLP} and not regions_of((EMBED,)) and not regions_of(("expert_mlp", "mine"))
    assert not has_whole_heads("mine") and sharded_by("ep") == ("expert",)
