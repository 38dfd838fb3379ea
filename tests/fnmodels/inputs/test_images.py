"""Images become the pixels that transformers' processors make, and patches hold every pixel once."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fnmodels.inputs.image_sizes import fit_area, fit_edge, fit_patches, pan_and_scan, tiles
from fnmodels.inputs.images import center_crop, normalized, patch_rows, patches_of, resize, shortest_edge
from tests.support.wrappers import merged_patches

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


def _image(size: tuple[int, int]) -> Tensor:
    return torch.randint(256, (3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize("size", [(37, 53), (80, 31), (20, 90), (9, 9), (8, 100), (128, 24)])
def test_patches_equal_those_of_qwen(size: tuple[int, int]) -> None:
    """Images too large, too small and between; the sums are made in another order."""
    pytest.importorskip("torchvision")
    import transformers

    image, area = _image(size), {"shortest_edge": 500, "longest_edge": 2400}
    process: Any = transformers.Qwen2VLImageProcessor(size=area, patch_size=4)
    theirs = process(image, return_tensors="pt")
    ours = normalized(resize(image, fit_area(image, 8, 500, 2400)), MEAN, STD)
    assert (ours.shape[1] // 4, ours.shape[2] // 4) == tuple(theirs.image_grid_thw[0, 1:].tolist())
    assert float((merged_patches(ours, 4) - theirs.pixel_values).abs().max()) <= 1e-5


@pytest.mark.parametrize("size", [(37, 53), (80, 31), (20, 90), (9, 9)])
def test_pixels_equal_those_of_pixtral(size: tuple[int, int]) -> None:
    pytest.importorskip("torchvision")
    import transformers

    image = _image(size)
    process: Any = transformers.PixtralImageProcessor(size={"longest_edge": 50}, patch_size={"height": 8, "width": 8})
    theirs: Tensor = process(image, return_tensors="pt").pixel_values[0]
    ours = normalized(resize(image, fit_edge(image, 8, 50)), MEAN, STD)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-5


@pytest.mark.parametrize("size", [(40, 40), (30, 75), (90, 24), (20, 100), (30, 44)])
def test_crops_equal_those_of_gemma3(size: tuple[int, int]) -> None:
    """The whole image, then its crops, each resized to a square."""
    pytest.importorskip("torchvision")
    import transformers

    image, how = _image(size), {"least": 12, "most": 3, "ratio": 1.3}
    process: Any = transformers.Gemma3ImageProcessor(
        size={"height": 28, "width": 28},
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=12,
        pan_and_scan_max_num_crops=3,
        pan_and_scan_min_ratio_to_activate=1.3,
    )
    theirs = process(image, return_tensors="pt")
    crops = pan_and_scan(image, **how)
    assert [len(crops)] == list(theirs.num_crops)
    half = (0.5, 0.5, 0.5)
    ours = torch.stack([normalized(resize(one, (28, 28), how="bilinear"), half, half) for one in (image, *crops)])
    assert ours.shape == theirs.pixel_values.shape
    assert float((ours - theirs.pixel_values).abs().max()) <= 1e-5


@pytest.mark.parametrize("size", [(40, 40), (30, 75), (200, 24), (20, 100), (9, 9), (61, 44), (130, 130)])
def test_tiles_equal_those_of_llama4(size: tuple[int, int]) -> None:
    """Which are normalized in bfloat16."""
    pytest.importorskip("torchvision")
    import transformers

    image = _image(size)
    process: Any = transformers.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=6)
    theirs: Tensor = process(image, return_tensors="pt").pixel_values
    ours = torch.stack([normalized(one, (0.5,) * 3, (0.5,) * 3) for one in tiles(image, 28, 6)])
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-2


def test_sizes_and_crops_equal_transformers() -> None:
    """For many shapes, without torchvision."""
    pytest.importorskip("PIL")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    crops_of: Any = functools.partial(Gemma3ImageProcessorPil.pan_and_scan, None)
    for height, width in torch.randint(4, 130, (200, 2), generator=torch.Generator().manual_seed(0)).tolist() + [
        [4, 127],
        [129, 3],
    ]:
        image = torch.arange(3 * height * width).reshape(3, height, width)
        assert fit_area(image, 8, 500, 2400) == smart_resize(height, width, 8, 500, 2400)
        assert fit_edge(image, 6, 50) == get_resize_output_image_size(image.numpy(), 50, 6, "channels_first")
        assert fit_patches(image, 12, 20) == get_aspect_ratio_preserving_size(height, width, 4, 180, 3)
        theirs = crops_of(image.numpy(), 12, 3, 1.3)
        ours = pan_and_scan(image, least=12, most=3, ratio=1.3)
        assert len(ours) == len(theirs)
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(ours, theirs, strict=True))


def test_sizes_of_no_image_are_refused() -> None:
    with pytest.raises(ValueError, match="An image of 1 x 300 pixels is more than 200 times as long as wide"):
        fit_area(torch.zeros(3, 1, 300), 8, 500, 2400)
    with pytest.raises(ValueError, match="An image of 40 x 40 pixels has no cell of 8 pixels within 0"):
        fit_patches(torch.zeros(3, 40, 40), 8, 0)
    with pytest.raises(ValueError, match=r"An image is \[C, H, W\], not \[4, 4\]"):
        fit_edge(torch.zeros(4, 4), 8, 50)


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


@dataclass(frozen=True)
class Patches:
    special_tokens: int
    patch_size: int = 4
    num_channels: int = 3
    channels_last: bool = False


@pytest.mark.parametrize("special", [0, 2])
def test_rows_hold_each_image_once(special: int) -> None:
    """A stacked tensor is a list of images; special tokens and padding have zeros for pixels, and gradients arrive."""
    config, images = Patches(special), torch.randn(3, 3, 8, 12).requires_grad_()
    tokens = special + 6
    rows = patch_rows(images, config, length=2 * tokens + 1)
    patches, positions, ids = rows
    assert all(
        torch.equal(a, b) for a, b in zip(rows, patch_rows(list(images), config, length=2 * tokens + 1), strict=True)
    )
    assert patches.shape == (2, 2 * tokens + 1, 48) and ids.tolist()[1] == [1] * tokens + [0] * (tokens + 1)
    for image, (row, start) in zip(images, ((0, 0), (0, tokens), (1, 0)), strict=True):
        own = patches[row, start : start + tokens]
        assert torch.equal(own[special:], patches_of(image, 4).flatten(0, 1)) and not own[:special].any()
        grid = [[row, column, 2, 3] for row in range(2) for column in range(3)]
        before = [[k - special, k - special, 2, 3] for k in range(special)]
        assert positions[row, start : start + tokens].tolist() == before + grid
    assert not patches[ids == 0].any() and not positions[ids == 0].any()
    (gradient,) = torch.autograd.grad(patches.sum(), images)
    assert torch.equal(gradient, torch.ones_like(images))
    for none in ([], images[:0]):
        with pytest.raises(ValueError, match="at least one image"):
            patch_rows(none, config)


def test_pixels_are_normalized_per_channel() -> None:
    image = torch.full((3, 1, 1), 255, dtype=torch.uint8)
    assert torch.allclose(
        normalized(image, (0.5, 0.0, 1.0), (0.5, 1.0, 2.0)).flatten(), torch.tensor([1.0, 1.0, 0.0]), atol=1e-6
    )
    with pytest.raises(ValueError, match="must have 3 values, one per channel"):
        normalized(image, (0.5,), (0.5,))
