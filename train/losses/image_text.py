"""The losses of CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): which caption belongs to which image."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels.inputs.packing import IGNORE, Document
from fnmodels.ops.dtypes import upcast
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.batch import check_entries
from train.loss import run_options

from .batch_checks import PAIRS, check_batch, checked_by
from .cross_entropy import check_targets

_TEXT = ("tokens", "positions", "segment_ids")
_IMAGE = ("patches", "patch_positions", "image_ids")


def image_text_batch(
    captions: Sequence[Document],
    images: Sequence[Tensor],
    config: Any,
    *,
    pairs: int = 1,
    length: int | None = None,
    slots: int | None = None,
) -> dict[str, Tensor]:
    """A batch of captions and their images for `image_text_loss`, with several pairs packed in each row.

    Args:
        captions: Token ids of each caption.
        images: Floats [C, H, W] of each image, in the captions' order.
        config: The config of a model of a text and a vision tower.
        pairs: Pairs in a row.
        length: Tokens of captions in a row; None: those of the fullest row.
        slots: Tokens of images in a row; None: those of the fullest row.

    Returns:
        The batch; its labels [B, pairs] are the number of each pair, -100 where a last row has fewer.

    Raises:
        ValueError: There are more or fewer captions than images, `pairs` is below 1, or a row does not fit.
    """
    if len(captions) != len(images) or not images or pairs < 1:
        raise ValueError(
            f"There are {len(captions)} captions, {len(images)} images and {pairs} pairs in a row: each image has one "
            "caption, and a row at least one pair."
        )
    starts = range(0, len(images), pairs)
    rows = [[torch.as_tensor(one) for one in captions[start : start + pairs]] for start in starts]
    sizes = [[len(one) for one in row] for row in rows]
    most = max(map(sum, sizes))
    segment_ids = fnmodels.segments_from_lengths(sizes, most if length is None else length)
    tokens = torch.zeros_like(segment_ids)
    tokens[segment_ids > 0] = torch.cat([one for row in rows for one in row])
    made = [fnmodels.inputs.patch_rows(images[start : start + pairs], config.vision) for start in starts]
    counts = [[int((ids > 0).sum()) for ids in image_ids] for _, _, image_ids in made]
    width = max(map(sum, counts)) if slots is None else slots
    if max(map(sum, counts)) > width:
        raise ValueError(f"The images of a row have up to {max(map(sum, counts))} tokens, more than slots {width}.")
    packed = [
        fnmodels.inputs.patch_rows(images[start : start + pairs], config.vision, length=width) for start in starts
    ]
    patches, places, image_ids = (torch.cat(part) for part in zip(*packed, strict=True))
    labels = torch.arange(len(starts) * pairs).view(-1, pairs)
    batch = {"tokens": tokens, "positions": fnmodels.positions_from_segments(segment_ids), "segment_ids": segment_ids}
    batch |= {"patches": patches, "patch_positions": places, "image_ids": image_ids}
    return batch | {"labels": labels.where(labels < len(images), IGNORE)}


def _check_pairs(batch: Mapping[str, Tensor], config: Any, _: Mapping[str, Any]) -> None:
    """The k-th caption, image and label of these rows are a pair; `check_batch` of the rest."""
    check_batch(batch, config, PAIRS)
    check_entries(batch, *_TEXT, *_IMAGE, "labels")
    texts, images = (len(fnmodels.documents(batch[name])) for name in ("segment_ids", "image_ids"))
    _check_counts(texts, images, int((batch["labels"] != IGNORE).sum()))


def _check_counts(texts: int, images: int, labels: int) -> None:
    if not texts == images == labels:
        raise ValueError(
            f"The batch has {texts} captions, {images} images and {labels} labels; the k-th of each is a pair."
        )


@checked_by(_check_pairs)
def image_text_loss(
    params: Tree, batch: Mapping[str, Tensor], *, config: Any, **options: Unpack[ForwardKwargs]
) -> tuple[Tensor, Tensor]:
    """The contrastive loss of a model of a text and a vision tower, CLIP (arXiv 2103.00020) or SigLIP (arXiv
    2303.15343).

    CLIP: the mean of two cross entropies, of a caption over all images and of an image over all captions. SigLIP, whose
    model has a bias: the sum over all images of the binary cross entropies of a caption. Other pairs of the microbatch
    are negatives, over a mesh those of all ranks.

    Args:
        params: The parameters of both towers.
        batch: The result of `image_text_batch`; the k-th caption of the batch belongs to its k-th image.
        config: The model's config.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The sum over pairs in nats, and the number of pairs.

    Raises:
        ValueError: An entry is missing, or there are more or fewer captions than images.
    """
    check_entries(batch, *_TEXT, *_IMAGE, "labels")
    check_targets(batch["labels"], None)
    text, image = _features(params, batch, config, options)
    numbers = batch["labels"].flatten()
    numbers = numbers[numbers != IGNORE]
    _check_counts(len(text), len(image), len(numbers))
    gather = run_options(params).ranks.all_documents
    texts, images, every = (one if gather is None else gather(one) for one in (text, image, numbers))
    real = every != IGNORE  # ranks with fewer pairs are padded
    texts, images, every = texts[real], images[real], every[real]
    similarity = fnmodels.family_of(config).similarity  # type: ignore[attr-defined]
    count = torch.tensor(len(numbers), device=numbers.device)
    of_text = upcast(similarity(params, text, images))
    same = numbers[:, None] == every
    if "logit_bias" in params:
        signs = torch.where(same, 1.0, -1.0)
        return -F.logsigmoid(signs * of_text).sum(), count
    of_image, target = upcast(similarity(params, texts, image)).T, same.int().argmax(1)
    both = torch.stack([F.cross_entropy(logits, target, reduction="sum") for logits in (of_text, of_image)])
    return both.mean(), count


def _features(params: Tree, batch: Mapping[str, Tensor], config: Any, options: ForwardKwargs) -> tuple[Tensor, Tensor]:
    """([captions, width], [images, width]): the features of both towers."""
    found = []
    for name, entries in (("text", _TEXT), ("vision", _IMAGE)):
        tower: Any = getattr(config, name)
        values, positions, segment_ids = (batch[entry] for entry in entries)
        own = params[name]
        prepared = fnmodels.prepare(tower, values, positions=positions, segment_ids=segment_ids)
        hidden = fnmodels.forward(own, *prepared, config=tower, **options)
        documents = fnmodels.documents(segment_ids, positions) if name == "text" else fnmodels.documents(segment_ids)
        tokens = (values,) if name == "text" else ()
        features: Any = fnmodels.family_of(tower).features  # type: ignore[attr-defined]
        found.append(features(own, hidden, *tokens, documents, config=tower))
    return found[0], found[1]
