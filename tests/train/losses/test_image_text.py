"""The losses of CLIP and SigLIP: those of transformers on padded batches, whatever the packing; gradients too."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

import fnmodels
import train
from fnmodels import tree
from tests.support import wrappers
from tests.support.oracle import on_disk
from tests.variants.vision import pairs as models

NAMES = ("clip", "siglip")


@functools.cache
def _reference(name: str) -> Any:
    return wrappers.perturbed(AutoModel.from_config(AutoConfig.for_model(**models()[name])))


def _config(name: str) -> Any:
    return fnmodels.family_for(name).Config.from_hf(models()[name])


def _pairs(config: Any) -> tuple[Tensor, list[Tensor]]:
    """(captions of one length, as transformers' SigLIP pads them; images of the tower's size)."""
    generator = torch.Generator().manual_seed(0)
    captions = torch.randint(5, 50, (5, 6), generator=generator)
    captions[:, -1] = config.text.eos_token_id
    side = config.vision.image_size
    return captions, list(torch.randn(5, 3, side, side, generator=generator))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_loss_and_gradients_equal_transformers(name: str, pairs: int) -> None:
    config, model = _config(name), _reference(name)
    captions, images = _pairs(config)
    params = tree.map(lambda leaf: leaf.requires_grad_(), wrappers.ours_of(on_disk(model), config))
    batch = train.losses.image_text_batch(list(captions), images, config, pairs=pairs)
    assert batch["labels"].shape == (-(-5 // pairs), pairs)
    total, count = train.image_text_loss(params, batch, config=config, kernel="math")
    assert int(count) == 5
    model.zero_grad()
    theirs = model(input_ids=captions, pixel_values=torch.stack(images), return_loss=True).loss
    torch.testing.assert_close(total / count, theirs, rtol=1e-5, atol=1e-6)
    (total / count).backward()
    theirs.backward()
    wrappers.assert_gradients(model, config, params)


def test_order_in_the_batch_does_not_matter_but_pairs_do() -> None:
    config = _config("clip")
    captions, images = _pairs(config)
    params = wrappers.ours_of(on_disk(_reference("clip")), config)

    def loss(texts: list[Tensor], pictures: list[Tensor]) -> Tensor:
        return train.image_text_loss(
            params, train.losses.image_text_batch(texts, pictures, config, pairs=3), config=config
        )[0]

    one, order = loss(list(captions), images), [3, 0, 4, 1, 2]
    torch.testing.assert_close(
        loss([captions[i] for i in order], [images[i] for i in order]), one, rtol=1e-5, atol=1e-5
    )
    assert (loss(list(captions), [images[i] for i in order]) - one).abs() > 1e-2


def test_batches_that_do_not_fit() -> None:
    config = _config("clip")
    captions, images = _pairs(config)
    with pytest.raises(ValueError, match="5 captions, 4 images and 1 pairs"):
        train.losses.image_text_batch(list(captions), images[:4], config)
    with pytest.raises(ValueError, match="more than slots 20"):
        train.losses.image_text_batch(list(captions), images, config, pairs=5, slots=20)
    batch = train.losses.image_text_batch(list(captions), images, config, pairs=5)
    params = wrappers.ours_of(on_disk(_reference("clip")), config)
    batch["image_ids"] = batch["image_ids"].masked_fill(batch["image_ids"] == 5, 0)
    with pytest.raises(ValueError, match="5 captions, 4 images and 5 labels; the k-th of each is a pair"):
        train.image_text_loss(params, batch, config=config)
