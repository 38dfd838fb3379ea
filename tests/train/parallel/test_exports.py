"""Weights as an engine hands them to a rollout: merged, adapters under PEFT's names, shards, copies, differences."""

import warnings
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import params as P
from fnmodels import tree
from fnmodels.errors import MismatchError, UnsupportedError
from params import lora
from tests.support.cases import cases, generic, generic_params
from tests.support.ranks_pool import Ranks
from tests.train.parallel.test_engine import placed_params
from tests.train.parallel.test_stages import even
from train import adamw, apply_deltas, deltas
from train.engine import Engine
from train.handover.bucket import buckets, received
from train.optim.base import with_paths
from train.parallel import Mesh

CONFIGS = {case.name: case.config for case in cases()}
MANY = {"llama_tied": ("q_proj", "down_proj"), "deepseek_v3": ("layers.*.experts.*_proj", "o_proj")}


def adapted_params(config: Any, params: Any, targets: tuple[str, ...]) -> Any:
    """`params` with adapters that are neither at their zero beginning."""
    made = lora.add(config, params, rank=3, alpha=6.0, targets=targets)
    return with_paths(lambda path, leaf: noisy(path, leaf) if path.endswith((".a", ".b")) else leaf, made)


def noisy(path: str, leaf: Any) -> Any:
    if not hasattr(leaf, "to_local"):
        return 0.3 * generic(path, leaf)
    how = P.sharding.sharding_of(leaf)
    assert how is not None
    return how.distribute(0.3 * generic(path, torch.empty(how.shape))[how.local_box()].clone())


@pytest.mark.parametrize("name", MANY)
def test_adapters_are_merged_or_alone_as_in_a_saved_file(name: str, tmp_path: Any) -> None:
    config = even(name)
    params = adapted_params(config, generic_params(config), MANY[name])
    engine = Engine(config, params, None)
    expected = dict(P.export(config, lora.merge(params)))
    found = dict(engine.export())
    assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())
    lora.save_adapters(tmp_path, config, params)
    saved, alone = safetensors.torch.load_file(tmp_path / lora.WEIGHTS), dict(engine.export(adapters=True))
    assert alone.keys() == saved.keys() and all(torch.equal(alone[n], t) for n, t in saved.items())
    assert lora.peft_config(config, params)["lora_alpha"] == 6
    with pytest.raises(ValueError, match="hold no adapters to export"):
        Engine(config, generic_params(config), None).export(adapters=True)


def test_copies_stay_what_they_were() -> None:
    config = CONFIGS["llama"]
    engine = Engine(config, generic_params(config), adamw(0.1))
    live, copies = dict(engine.export()), dict(engine.export(copy=True))
    leaf = engine.params["embed_tokens"]
    leaf.mul_(2.0)
    name = "model.embed_tokens.weight"
    assert torch.equal(live[name], leaf) and torch.equal(copies[name], leaf / 2.0)


def test_deltas_bring_a_receiver_to_the_weights_of_now() -> None:
    config = CONFIGS["llama"]
    engine = Engine(config, tree.map(torch.clone, generic_params(config)), None)
    held = {name: tensor.bfloat16() for name, tensor in engine.export()}
    receiver = {name: tensor.clone() for name, tensor in held.items()}
    assert not list(deltas(engine.export(), held))
    leaves = tree.flatten(engine.params)
    leaves["embed_tokens"].mul_(1 + 2.0**-12)  # which bf16 rounds away for most elements, not all
    leaves["norm"][1] = float("nan")
    found = list(deltas(engine.export(), held))
    assert [name for name, _ in found] == ["model.embed_tokens.weight", "model.norm.weight"]
    rows = dict(found)["model.embed_tokens.weight"]
    assert 0 < len(rows.indices) < 0.3 * leaves["embed_tokens"].numel() and rows.values.dtype == torch.bfloat16
    apply_deltas(found, receiver)
    for name, tensor in engine.export():
        now = tensor.bfloat16().view(torch.int16)
        assert torch.equal(now, receiver[name].view(torch.int16)) and torch.equal(now, held[name].view(torch.int16))
    assert not list(deltas(engine.export(), held))  # NaN too
    with pytest.raises(ValueError, match="is the live parameter"):
        list(deltas(engine.export(), dict(engine.export())))
    with pytest.raises(MismatchError, match="the receiver has none"):
        list(deltas(engine.export(), {}))


def test_shards_of_fused_tensors_are_refused() -> None:
    config = CONFIGS["phi3"]
    with pytest.raises(UnsupportedError, match=r"is a slice of .*qkv_proj.* on disk"):
        Engine(config, generic_params(config), None).export_shards()


def over_mesh(name: str, text: str) -> tuple[bool, bool, dict[str, list[Any]]]:
    """(full tensors, and adapters alone, equal one process's; {name: [box, elements of this rank's shard, shape]})."""
    config, mesh = even(name), Mesh.parse(text)
    whole = generic_params(config)
    params = adapted_params(config, placed_params(config, mesh, whole), MANY[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine(config, params, None, mesh=mesh)
    one = Engine(config, adapted_params(config, whole, MANY[name]), None)

    def same(**how: Any) -> bool:
        ours, theirs = dict(engine.export(**how)), dict(one.export(**how))
        assert ours.keys() == theirs.keys()
        return all(bool((ours[n] - t).abs().max() < 1e-6) for n, t in theirs.items())

    shards = {
        n: [[[along.start, along.stop] for along in shard.box], shard.tensor.tolist(), shard.shape]
        for n, shard in engine.export_shards()
    }
    return same(), same(adapters=True), shards


@pytest.mark.parametrize(("name", "mesh"), [("llama_tied", "pp=2"), ("llama_tied", "tp=2"), ("deepseek_v3", "ep=2")])
def test_over_a_mesh_exports_are_those_of_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    found = ranks(2)(over_mesh, name, mesh)
    config = even(name)
    expected = dict(P.export(config, lora.merge(adapted_params(config, generic_params(config), MANY[name]))))
    joined: dict[str, Tensor] = {}
    for full, alone, shards in found:
        assert full and alone
        for tensor, (box, elements, shape) in shards.items():
            assert tuple(shape) == tuple(expected[tensor].shape)
            where = tuple(slice(*along) for along in box)
            joined.setdefault(tensor, torch.full(shape, torch.nan))[where] = torch.tensor(elements)
    assert joined.keys() == expected.keys()
    assert all(bool((joined[n] - t).abs().max() < 1e-6) for n, t in expected.items())
    held = sum(torch.tensor(elements).numel() for _, _, shards in found for _, elements, _ in shards.values())
    assert held < 1.7 * sum(map(Tensor.numel, expected.values()))


def in_buckets(name: str, text: str) -> list[tuple[str, list[float]]]:
    config, mesh = even(name), Mesh.parse(text)
    engine = Engine(config, placed_params(config, mesh, generic_params(config)), None, mesh=mesh)
    return [(name, tensor.tolist()) for name, tensor in received(buckets(engine.export(), 4096))]


@pytest.mark.parametrize(("name", "mesh"), [("llama_tied", "fsdp=2"), ("deepseek_v3", "ep=2")])
def test_over_a_mesh_every_rank_has_the_same_buckets(ranks: Ranks, name: str, mesh: str) -> None:
    config = even(name)
    expected = [[name, tensor.tolist()] for name, tensor in P.export(config, generic_params(config))]
    assert ranks(2)(in_buckets, name, mesh) == [expected, expected]
