"""Parameters that are parts of one tensor on disk: taken apart, joined again."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnmodels.models.common.moe import expert_names
from fnmodels.models.common.storage import (
    Stack,
    TensorSlice,
    covers,
    disk_names,
    disk_region,
    disk_shape,
    extract,
    extract_into,
    extract_parameter,
    fuse,
    join,
)

FUSED = [TensorSlice("qkv", 0, 4, 8), TensorSlice("qkv", 4, 6, 8), TensorSlice("qkv", 6, 8, 8)]
GROUPED = [TensorSlice("qkv", i, i + 1, 6, groups=2) for i in range(3)]
TRANSPOSED = [TensorSlice("qkv", 0, 3, 6, transposed=True), TensorSlice("qkv", 3, 6, 6, transposed=True)]
HALVES = [TensorSlice("experts", i, i + 4, 8, transposed=True, batched=True) for i in (0, 4)]  # Llama 4's
COLUMNS = [TensorSlice("out", 0, 4, 10, columns=True), TensorSlice("out", 4, 10, 10, columns=True)]  # Flux's
BELOW = [TensorSlice("w2", i, j, 3, columns=True, transposed=True) for i, j in ((0, 1), (1, 3))]  # DBRX's
TURNS = [TensorSlice("experts", i, i + 1, 8, groups=4, transposed=True, batched=True) for i in (0, 1)]  # gpt-oss's


def test_take_selects_rows():
    whole = torch.arange(6.0)
    assert [extract(part, whole).tolist() for part in GROUPED] == [[0, 3], [1, 4], [2, 5]]
    assert extract(FUSED[1], torch.arange(8)).tolist() == [4, 5]
    assert extract(COLUMNS[1], torch.arange(20).view(2, 10)).tolist() == [[*range(4, 10)], [*range(14, 20)]]
    assert extract(BELOW[1], torch.arange(6).view(3, 2)).tolist() == [[2, 4], [3, 5]]
    assert extract(TRANSPOSED[1], torch.arange(12).view(2, 6)).tolist() == [[3, 9], [4, 10], [5, 11]]


@pytest.mark.parametrize(
    "parts", [FUSED, GROUPED, TRANSPOSED, ["weight"]], ids=["fused", "grouped", "transposed", "one"]
)
@pytest.mark.parametrize("inner", [(), (5,)], ids=["bias", "weight"])
def test_join_undoes_take(parts, inner):
    rows = 8 if isinstance(parts[0], str) else parts[0].rows
    whole = torch.randn(disk_shape(parts[0], (rows, *inner)))
    leaves = [extract(part, whole) for part in parts]
    assert torch.equal(join(zip(parts, leaves, strict=True)), whole)
    assert all(disk_shape(part, leaf.shape) == whole.shape for part, leaf in zip(parts, leaves, strict=True))


def test_contiguous_parts_are_views():
    whole = torch.randn(8, 5)
    assert extract(FUSED[1], whole).data_ptr() == whole[4:].data_ptr()
    assert extract(TensorSlice("w", 0, 5, 5, transposed=True), whole).data_ptr() == whole.data_ptr()


def test_fused_parts_follow_each_other():
    assert fuse("qkv", {"q": 4, "k": 2, "v": 2}) == dict(zip("qkv", FUSED, strict=True))


def test_covers_finds_holes_and_overlaps():
    assert covers(FUSED) and covers(GROUPED) and covers(["weight"])
    assert not covers(FUSED[:2]) and not covers([*FUSED, FUSED[0]]) and not covers(["weight", "weight"])


def test_a_part_outside_of_its_tensor_is_refused():
    with pytest.raises(ValueError, match="does not lie in its tensor"):
        TensorSlice("qkv", 4, 9, 8)


def test_experts_of_one_tensor():
    """Gate and up of all experts lie in [E, in, 2 F], by halves or column by column in turn; so do biases [E, 2 F]."""
    weight, bias = torch.randn(3, 5, 8), torch.randn(3, 8)
    for e in range(3):
        assert torch.equal(extract(HALVES[0], weight)[e], weight[e, :, :4].T)
        assert torch.equal(extract(HALVES[1], weight)[e], weight[e, :, 4:].T)
        assert torch.equal(extract(HALVES[1], bias)[e], bias[e, 4:])
        assert torch.equal(extract(TURNS[0], weight)[e], weight[e, :, 0::2].T)
        assert torch.equal(extract(TURNS[1], weight)[e], weight[e, :, 1::2].T)
        assert torch.equal(extract(TURNS[1], bias)[e], bias[e, 1::2])
    assert extract(HALVES[1], weight).data_ptr() == weight[0, 0, 4:].data_ptr(), "a view"
    assert extract(TURNS[1], weight).is_contiguous(), "a copy: as a view none of its numbers would have a neighbor"


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[TensorSlice], tuple[int, ...]]:
    """Parts that fill one tensor, and that tensor's shape but for its rows."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    groups, transposed, batched = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans())
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if draw(st.booleans()):
        ends = zip(starts, sizes, strict=True)
        how = {"columns": True, "transposed": transposed}
        parts = [TensorSlice("w", start, start + size, sum(sizes), **how) for start, size in ends]
        return draw(st.permutations(parts)), (draw(st.integers(1, 3)), sum(sizes))
    rows = groups * sum(sizes)
    parts = [
        TensorSlice("w", start, start + size, rows, groups=groups, transposed=transposed, batched=batched)
        for start, size in zip(starts, sizes, strict=True)
    ]
    experts = (draw(st.integers(1, 3)),) if batched else ()
    return draw(st.permutations(parts)), (*experts, rows, *draw(st.sampled_from([(), (1,), (3,)])))


@settings(max_examples=150, deadline=None)
@given(_layouts())
def test_any_layout_there_and_back(layout):
    parts, shape = layout
    whole = torch.arange(float(math.prod(shape))).view(disk_shape(parts[0], shape))
    leaves = [extract(part, whole) for part in parts]
    assert covers(parts) and (len(parts) == 1 or not covers(parts[1:]))
    assert torch.equal(join(zip(parts, leaves, strict=True)), whole)
    for part, leaf in zip(parts, leaves, strict=True):
        assert disk_shape(part, leaf.shape) == whole.shape
        filled = torch.full_like(leaf, math.nan, memory_format=torch.contiguous_format)
        extract_into(filled, part, whole)
        assert torch.equal(filled, leaf)


@settings(max_examples=150, deadline=None)
@given(_layouts(), st.data())
def test_any_part_is_in_its_box(layout, data):
    parts, shape = layout
    whole = torch.arange(float(math.prod(shape))).view(disk_shape(parts[0], shape))
    for part in parts:
        leaf = extract(part, whole)
        starts = [data.draw(st.integers(0, size - 1)) for size in leaf.shape]
        stops = [data.draw(st.integers(start + 1, size)) for start, size in zip(starts, leaf.shape, strict=True)]
        chosen = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
        place, wanted = disk_region(part, chosen), leaf[chosen]
        filled = torch.full(wanted.shape, math.nan)
        extract_into(filled, place.stored, whole[place.box], place.skip)
        assert torch.equal(filled, wanted)
        if part.groups == 1:
            assert whole[place.box].numel() == wanted.numel()
        assert isinstance(place.stored, str) == (
            part.groups == 1 and not (part.transposed and len(shape) > part.batched + 1)
        )


def test_a_stack_is_made_of_one_tensor_per_expert():
    stack = expert_names("model.layers.3.mlp.experts", 2, "gate_proj.weight")
    names = tuple(f"model.layers.3.mlp.experts.{e}.gate_proj.weight" for e in (0, 1))
    assert stack == Stack(names) and disk_names(stack) == names and disk_names("norm") == ("norm",)
    tensors = {name: torch.randn(4, 6) for name in names}
    assert torch.equal(extract_parameter(stack, tensors), torch.stack(list(tensors.values())))
    fused = Stack(tuple(TensorSlice(name, 1, 3, 4, transposed=True) for name in names))
    assert torch.equal(extract_parameter(fused, {n: t.T for n, t in tensors.items()})[1], tensors[names[1]][1:3])
    with pytest.raises(ValueError, match="at least one"):
        Stack(())
