"""Weights in buckets: bits and dtypes as they were, only what has changed, and errors for what is damaged or lost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError
from tests.support.cases import cases, generic_params
from train.engine import Engine
from train.handover.bucket import Bucket, as_stored, buckets, changed, received

CONFIGS = {case.name: case.config for case in cases()}


def engine_of(name: str) -> Engine:
    config = CONFIGS[name]
    return Engine(config, tree.map(torch.clone, generic_params(config)), None)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def test_tensors_of_all_dtypes_and_sizes_are_received_bit_for_bit() -> None:
    odd = {
        "a.half.x": torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16),
        "a.empty.x": torch.zeros(0, 3),
        "a.ids.x": torch.arange(5).reshape(5, 1),
        "b.number.x": torch.tensor(2.5, dtype=torch.float64),
        "b.rows.x": torch.arange(12.0).reshape(3, 4).T,
        "c.flags.x": torch.tensor([True, False, True]),
        "c.float8.x": torch.tensor([1.5, 2.0, 3.0]).to(torch.float8_e4m3fn),
    }
    made = list(buckets(odd.items(), 130))
    assert [[entry.name for entry in bucket.entries] for bucket in made] == [
        ["a.half.x", "a.empty.x", "a.ids.x"],
        ["b.number.x", "b.rows.x"],
        ["c.flags.x", "c.float8.x"],
    ]
    assert [(bucket.number, bucket.last) for bucket in made] == [(0, False), (1, False), (2, True)]
    found = dict(received(made))
    assert list(found) == list(odd)
    for name, tensor in odd.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


@pytest.mark.parametrize("size", [1, 3000, 10**9])
def test_buckets_hold_at_most_their_size_or_one_module(size: int) -> None:
    engine = engine_of("deepseek_v3")
    made = list(buckets(engine.export(), size))
    modules = [{entry.name.rsplit(".", 2)[0] for entry in bucket.entries} for bucket in made]
    assert all(len(one) == 1 or bucket.data.numel() <= size for one, bucket in zip(modules, made, strict=True))
    attention = [number for number, one in enumerate(modules) if "model.layers.1.self_attn" in one]
    assert len(attention) == 1
    assert [bucket.last for bucket in made] == [False] * (len(made) - 1) + [True]
    assert len(made) in {1: range(40, 90), 3000: range(10, 80), 10**9: range(1, 2)}[size]
    expected = dict(engine.export())
    found = dict(received(made))
    assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="size of a bucket is 0"):
        list(buckets([], 0))


def test_a_bucket_keeps_its_values_when_the_weights_change() -> None:
    engine = engine_of("llama")
    (bucket,) = buckets(engine.export(), 10**9)
    before = engine.params["norm"].clone()
    engine.params["norm"].zero_()
    assert torch.equal(dict(bucket.tensors())["model.norm.weight"], before)


def names_of(made: list[Bucket]) -> list[list[str]]:
    return [[entry.name for entry in bucket.entries] for bucket in made]


@pytest.mark.parametrize("size", [1, 100, 300, 10**6])
def test_a_source_may_use_its_memory_again(size: int) -> None:
    def source() -> Any:
        memory = torch.empty(20)
        for number in range(9):
            yield f"{number // 3}.x.{number}.weight", memory.fill_(number)

    made = list(buckets(source(), size))
    assert len(made) == {1: 3, 100: 3, 300: 3, 10**6: 1}[size]
    assert [tensor.unique().tolist() for _, tensor in received(made)] == [[float(number)] for number in range(9)]
    assert [tensor.unique().tolist() for _, tensor in changed(source(), {})] == [[float(n)] for n in range(9)]


def test_a_small_bucket_holds_little_memory() -> None:
    (bucket,) = buckets([("a.b.weight", torch.ones(3))], 10**6)
    assert bucket.data.untyped_storage().nbytes() == 64


@pytest.mark.parametrize(
    "leaves",
    [
        ["q_proj.weight", "A_log", "dt_bias", "o_proj.weight"],
        ["sinks", "q_proj.weight", "k_proj.weight"],
        ["q_proj.weight", "o_proj.weight", "sinks"],
    ],
)
def test_parameters_of_a_module_itself_travel_with_its_projections(leaves: list[str]) -> None:
    attention = [f"layers.1.attn.{leaf}" for leaf in leaves]
    tensors = {name: torch.ones(3) for name in ("layers.0.mlp.up.weight", *attention, "layers.1.mlp.up.weight")}
    made = list(buckets(tensors.items(), 1))
    assert names_of(made) == [["layers.0.mlp.up.weight"], attention, ["layers.1.mlp.up.weight"]]
    has: dict[str, bytes] = {}
    list(changed(tensors.items(), has))
    tensors[attention[0]].zero_()
    assert [name for name, _ in changed(tensors.items(), has)] == attention


@pytest.mark.parametrize(("name", "module"), [("kimi_linear", "self_attn"), ("deepseek_v4", "attn")])
def test_attention_with_parameters_of_its_own_is_in_one_bucket(name: str, module: str) -> None:
    made = list(buckets(engine_of(name).export(), 1))
    places: dict[str, set[int]] = {}
    for bucket in made:
        for entry in bucket.entries:
            owner, _, leaf = entry.name.partition(f".{module}.")
            if leaf and leaf.count(".") == leaf.endswith(".weight"):  # wq_a.weight and attn_sink, not compressor.ape
                places.setdefault(owner, set()).add(bucket.number)
    assert places and all(len(numbers) == 1 for numbers in places.values()), places


def test_only_modules_with_a_changed_bit_are_sent_again() -> None:
    engine, has = engine_of("qwen3_moe"), dict[str, bytes]()
    receiver = dict(received(buckets(as_stored(changed(engine.export(), has), torch.float32), 4096)))
    assert receiver.keys() == dict(engine.export()).keys()
    (nothing,) = buckets(changed(engine.export(), has), 4096)
    assert nothing.last and not nothing.entries and nothing.tensors() == []
    leaves = tree.flatten(engine.params)
    leaves["norm"][0] = -0.0
    stack = next(path for path in leaves if path.endswith("experts.up_proj"))
    leaves[stack][2, 1, 1] += 1e-3
    sent = dict(received(buckets(changed(engine.export(), has), 4096)))
    assert list(sent) == ["model.layers.0.mlp.experts.2.up_proj.weight", "model.norm.weight"]
    receiver |= sent
    assert all(bits(receiver[name]) == bits(tensor) for name, tensor in engine.export())
    leaves["norm"][0] = 0.0
    assert [name for name, _ in changed(engine.export(), has)] == ["model.norm.weight"]  # -0.0 and 0.0 are other bits
    leaves["layers.1.attention.k_proj"][0, 0] += 1.0
    assert {name.rsplit(".", 2)[0] for name, _ in changed(engine.export(), has)} == {"model.layers.1.self_attn"}
    assert not list(changed(engine.export(), has))


def test_an_update_too_small_for_the_receivers_dtype_sends_nothing() -> None:
    engine, has = engine_of("llama"), dict[str, bytes]()
    list(changed(as_stored(engine.export(), torch.bfloat16), has))
    engine.params["norm"].copy_(engine.params["norm"].bfloat16() * (1 + 2.0**-12))
    list(changed(as_stored(engine.export(), torch.bfloat16), has))
    engine.params["norm"].mul_(1 + 2.0**-14)
    assert not list(changed(as_stored(engine.export(), torch.bfloat16), has))
    assert list(changed(engine.export(), dict(has)))


def test_dtypes_are_those_of_the_checkpoint_by_name() -> None:
    engine = engine_of("deepseek_v3")
    dtypes = {name: torch.bfloat16 for name, _ in engine.export()}
    bias = next(name for name in dtypes if name.endswith("e_score_correction_bias"))
    dtypes[bias] = torch.float32
    found = dict(as_stored(engine.export(), dtypes))
    assert {name: tensor.dtype for name, tensor in found.items()} == dtypes
    del dtypes[bias]
    with pytest.raises(MismatchError, match=r"e_score_correction_bias is among the weights, and not among"):
        list(as_stored(engine.export(), dtypes))


def flipped(bucket: Bucket) -> Bucket:
    data = bucket.data.clone()
    data[5] ^= 1
    return replace(bucket, data=data)


def renamed(bucket: Bucket) -> Bucket:
    first, *rest = bucket.entries
    return replace(bucket, entries=(replace(first, name="other"), *rest))


@pytest.mark.parametrize("damage", [flipped, renamed, lambda bucket: replace(bucket, data=bucket.data[:-1])])
def test_a_damaged_bucket_is_an_error_before_any_of_its_tensors(damage: Any) -> None:
    made = list(buckets(engine_of("llama").export(), 4096))
    made[2] = damage(made[2])
    arrived: list[str] = []
    with pytest.raises(MismatchError, match="Bucket 2 of the weights is not what was sent"):
        arrived.extend(name for name, _ in received(made))
    assert arrived == [entry.name for bucket in made[:2] for entry in bucket.entries]


def test_lost_repeated_and_unfinished_buckets_are_errors() -> None:
    made = list(buckets(engine_of("llama").export(), 4096))
    with pytest.raises(MismatchError, match="Bucket 2 of the weights has come where number 1 was due"):
        list(received([made[0], *made[2:]]))
    with pytest.raises(MismatchError, match="Bucket 0 of the weights has come where number 1 was due"):
        list(received([made[0], *made]))
    with pytest.raises(MismatchError, match=r"has come where number \d+ was due"):
        list(received([*made, made[-1]]))
    with pytest.raises(MismatchError, match=f"end with bucket {len(made) - 2}, which is not the last one"):
        list(received(made[:-1]))
    with pytest.raises(MismatchError, match="No bucket of the weights has come"):
        list(received([]))
