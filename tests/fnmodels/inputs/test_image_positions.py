"""Positions of text with images equal transformers' `get_rope_index` for each document alone."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from fnmodels.inputs.image_positions import image_positions
from fnmodels.inputs.segments import positions_from_segments, segments_from_lengths, text_order

# Rows of documents: numbers of text tokens, and grids (frames, rows, columns) between them.
Document = list[int | tuple[int, int, int]]
ROWS: list[list[Document]] = [
    [[2, (1, 2, 3), 4, (1, 1, 5), 1], [3], [(1, 3, 1), 1, (1, 2, 2)]],
    [[1], [5, (1, 4, 2), 2]],
]
VIDEOS: list[list[Document]] = [[[2, (3, 2, 1), 4, (2, 1, 2), 1], [1, (2, 2, 2), 3]]]


def _kinds(document: Document) -> Tensor:
    """1 at the tokens of images."""
    runs = [torch.zeros(one) if isinstance(one, int) else torch.ones(one[0] * one[1] * one[2]) for one in document]
    return torch.cat(runs).long()


def _batch(rows: list[list[Document]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(is_image, segment ids, grids)."""
    segment_ids = segments_from_lengths([[len(_kinds(one)) for one in row] for row in rows], length)
    is_image = torch.zeros_like(segment_ids)
    is_image[segment_ids > 0] = torch.cat([_kinds(one) for row in rows for one in row])
    grids = [grid for row in rows for one in row for grid in one if not isinstance(grid, int)]
    return is_image == 1, segment_ids, torch.tensor(grids)


def _theirs(model: Any, document: Document, kind: int, seconds: list[float]) -> Tensor:
    """[tokens, 3] of one document; kind: 1 for images, 2 for videos."""
    sizes = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    owner = SimpleNamespace(config=SimpleNamespace(vision_config=sizes))
    owner.get_vision_position_ids = functools.partial(model.get_vision_position_ids, owner)
    kinds = _kinds(document)[None] * kind
    grids = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in (one for one in document if not isinstance(one, int))])
    name = "image_grid_thw" if kind == 1 else "video_grid_thw"
    given = {name: grids.reshape(-1, 3), "second_per_grid_ts": torch.tensor(seconds)}
    positions: Tensor = model.get_rope_index(owner, torch.zeros_like(kinds), kinds, **given)[0][:, 0].T
    return positions


@pytest.mark.parametrize("model", [Qwen2_5_VLModel, Qwen3VLModel])
def test_positions_equal_transformers(model: Any) -> None:
    is_image, segment_ids, grids = _batch(ROWS, 29)
    found = image_positions(is_image, segment_ids, grids)
    wanted = torch.cat([_theirs(model, one, 1, []) for row in ROWS for one in row])
    assert torch.equal(found[segment_ids > 0], wanted)
    assert not found[segment_ids == 0].any()
    assert torch.equal(text_order(found, segment_ids), positions_from_segments(segment_ids))


def test_videos_equal_transformers() -> None:
    seconds = [[0.3, 1.4], [0.25]]
    is_image, segment_ids, grids = _batch(VIDEOS, 30)
    found = image_positions(is_image, segment_ids, grids, 4 * torch.tensor([0.3, 1.4, 0.25]))
    wanted = [_theirs(Qwen2_5_VLModel, one, 2, own) for one, own in zip(VIDEOS[0], seconds, strict=True)]
    assert torch.equal(found[segment_ids > 0], torch.cat(wanted))


def test_grids_that_do_not_fit_are_refused() -> None:
    is_image, segment_ids, grids = _batch([[[1, (1, 2, 2), 1]]], 6)
    with pytest.raises(ValueError, match=r"6 tokens by their grids \[\[1, 2, 3\]\], but the text has 4"):
        image_positions(is_image, segment_ids, torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match=r"integers \[images, 3\], not torch.int64 \[1, 2\]"):
        image_positions(is_image, segment_ids, grids[:, 1:])
    apart = torch.tensor([[True, True, False, True, True, False]])
    with pytest.raises(ValueError, match=r"Image 0 has 4 tokens by its grid .* but not in one run"):
        image_positions(apart, segment_ids, grids)
    with pytest.raises(ValueError, match="not in one run"):
        image_positions(is_image, torch.tensor([[1, 1, 1, 2, 2, 2]]), grids)
