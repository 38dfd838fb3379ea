"""Parameters that are parts of one tensor on disk: taken apart, joined again."""

import pytest
import torch

from fnmodels.disk import Part, covers, disk_shape, fuse, join, take

FUSED = [Part("qkv", 0, 4, 8), Part("qkv", 4, 6, 8), Part("qkv", 6, 8, 8)]
GROUPED = [Part("qkv", i, i + 1, 6, groups=2) for i in range(3)]
TRANSPOSED = [Part("qkv", 0, 3, 6, transposed=True), Part("qkv", 3, 6, 6, transposed=True)]


def test_take_selects_rows():
    whole = torch.arange(6.0)
    assert [take(part, whole).tolist() for part in GROUPED] == [[0, 3], [1, 4], [2, 5]]
    assert take(FUSED[1], torch.arange(8)).tolist() == [4, 5]
    assert take(TRANSPOSED[1], torch.arange(12).view(2, 6)).tolist() == [[3, 9], [4, 10], [5, 11]]


@pytest.mark.parametrize(
    "parts", [FUSED, GROUPED, TRANSPOSED, ["weight"]], ids=["fused", "grouped", "transposed", "one"]
)
@pytest.mark.parametrize("inner", [(), (5,)], ids=["bias", "weight"])
def test_join_undoes_take(parts, inner):
    rows = 8 if isinstance(parts[0], str) else parts[0].rows
    whole = torch.randn(disk_shape(parts[0], (rows, *inner)))
    leaves = [take(part, whole) for part in parts]
    assert torch.equal(join(zip(parts, leaves, strict=True)), whole)
    assert all(disk_shape(part, leaf.shape) == whole.shape for part, leaf in zip(parts, leaves, strict=True))


def test_contiguous_parts_are_views():
    whole = torch.randn(8, 5)
    assert take(FUSED[1], whole).data_ptr() == whole[4:].data_ptr()
    assert take(Part("w", 0, 5, 5, transposed=True), whole).data_ptr() == whole.data_ptr()


def test_fused_parts_follow_each_other():
    assert fuse("qkv", {"q": 4, "k": 2, "v": 2}) == dict(zip("qkv", FUSED, strict=True))


def test_covers_finds_holes_and_overlaps():
    assert covers(FUSED) and covers(GROUPED) and covers(["weight"])
    assert not covers(FUSED[:2]) and not covers([*FUSED, FUSED[0]]) and not covers(["weight", "weight"])


def test_a_part_outside_of_its_tensor_is_refused():
    with pytest.raises(ValueError, match="does not lie in its tensor"):
        Part("qkv", 4, 9, 8)
