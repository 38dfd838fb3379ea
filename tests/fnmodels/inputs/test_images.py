"""Images become the pixels that transformers' processors make, and patches hold every pixel once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.inputs.images import center_crop, normalized, patches_of, resize, shortest_edge

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


@pytest.mark.parametrize("size", [(37, 53), (80, 31), (20, 90)])
def test_pixels_equal_transformers(size: tuple[int, int]) -> None:
    """The sums are made in another order."""
    pytest.importorskip("torchvision")
    import transformers

    image = torch.randint(256, (3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    process: Any = transformers.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_mean=MEAN, image_std=STD
    )
    theirs: Tensor = process(image, return_tensors="pt").pixel_values[0]
    ours = normalized(center_crop(resize(image, shortest_edge(image, 28)), (28, 28)), MEAN, STD)
    assert float((ours - theirs).abs().max()) <= 1e-5


def test_a_crop_pads_what_is_smaller() -> None:
    image = torch.arange(1, 13.0).reshape(1, 3, 4)
    assert center_crop(image, (3, 2)).tolist() == [[[2, 3], [6, 7], [10, 11]]]
    assert center_crop(image, (6, 2))[0, :, 0].tolist() == [0, 2, 6, 10, 0, 0]


def test_patches_are_where_they_were() -> None:
    image = torch.arange(2 * 6 * 9.0).reshape(2, 6, 9)
    cells = patches_of(image, 3)
    assert cells.shape == (2, 3, 18)
    assert torch.equal(cells[1, 2].view(2, 3, 3), image[:, 3:6, 6:9])
    last = patches_of(image, 3, channels_last=True)
    assert torch.equal(last[1, 2].view(3, 3, 2).permute(2, 0, 1), image[:, 3:6, 6:9])


def test_pixels_are_normalized_per_channel() -> None:
    image = torch.full((3, 1, 1), 255, dtype=torch.uint8)
    assert torch.allclose(
        normalized(image, (0.5, 0.0, 1.0), (0.5, 1.0, 2.0)).flatten(), torch.tensor([1.0, 1.0, 0.0]), atol=1e-6
    )
    with pytest.raises(ValueError, match="must have 3 values, one per channel"):
        normalized(image, (0.5,), (0.5,))
