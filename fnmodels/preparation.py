"""`prepare`: everything of a batch that depends on the order of tokens, made once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.documents import documents
from fnmodels.inputs.image_places import check_places
from fnmodels.inputs.mask import MaskLike
from fnmodels.inputs.noise import noise_keys
from fnmodels.inputs.segments import integers, positions_from_segments, preceding_tokens
from fnmodels.models.common.dropout import check_dropout
from fnmodels.models.common.family import DecoderConfig, field_of, function_of, traits_of
from fnmodels.models.common.heads import PER_DOCUMENT
from fnmodels.models.common.registry import check_fields, family_of, stack_configs, text_config
from fnmodels.ops.position_range import check_positions


def prepare(
    config: DecoderConfig,
    tokens: Tensor,
    *,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    length: int | Tensor | None = None,
    token_types: Tensor | None = None,
    places: Tensor | None = None,
    grids: Tensor | None = None,
    rng: int | Tensor | None = None,
) -> tuple[dict[str, Any], dict[str, MaskLike], dict[str, Tensor]]:
    """Prepares a batch for `forward`: tokens, positions, masks and rotary tables, each with batch dimension B.

    `fnmodels.errors.PositionWarning` is given where positions go past the range of the model's rotary tables, see
    `fnmodels.ops.position_range`. For a head with one result per document, inputs["documents"] are those of
    `fnmodels.documents`, which reads values.

    Args:
        config: The model's config; with `places` that of the full model with its vision tower, and the results are
            those of its text.
        tokens: Ids [B, S], or embeddings [B, S, D].
        positions: [B, S]; None: each row's document is numbered from 0, and a row with several documents raises
            ValueError. [B, S, 3], or [B, S, 4] with the order in the document first, only for a model whose rotary
            tables have several axes; [B, S, 4] of another meaning for a vision tower, see
            `fnmodels.models.common.vision`. Any integer dtype; made int64.
        segment_ids: [B, S], documents from 1, padding 0 or less; None: each row is one document without padding.
        length: The sequence length that length-dependent rotary scalings (dynamic, longrope) read, an int or [B]; None:
            the highest position + 1. See `fnmodels.ops.rotary`.
        token_types: [B, S], for an encoder that has embeddings of them; None: 0. For a model that reads images and
            whose prompt sees all of itself (PaliGemma): 0 in the prompt, images included, and 1 in the answer; needed
            there with `places`.
        places: [B, S, 2], where the features of images are, see the `image_places` of a family of
            `fnmodels.models.vision_language`: `family.with_images` puts the features into the inputs. Images that see
            all of themselves do so.
        grids: [images, 3], the frames, rows and columns of each image's features, which positions of three axes follow
            from; needed with places for a model that has these, unless positions are set.
        rng: A seed, an int or an integer tensor [] or [B], or keys [B, S] of `fnmodels.inputs.noise_keys`, which makes
            inputs["rng"] of it: with these keys `forward` drops out at the rates of `config.dropout`, without them
            never.

    Returns:
        The triple inputs, masks, freqs_cis: {name: tensor}, {kind of layer: mask} and {kind of layer: fp32 table}.

    Raises:
        ValueError: Tensors do not fit each other or the config.
        TypeError: The arguments are in another order.
    """
    if isinstance(config, Tensor) or not isinstance(tokens, Tensor):
        raise TypeError(
            f"prepare takes the config first and then tokens, a tensor [B, S]; it got a {type(config).__name__} and a "
            f"{type(tokens).__name__}."
        )
    tokens = check_tokens(tokens)
    shape = tokens.shape[:2]
    if (text := text_config(config)) is not config:
        ones = torch.ones((1, 1), dtype=torch.long, device=tokens.device)
        ids = ones.expand(shape) if segment_ids is None else per_token("segment_ids", segment_ids, shape)
        if positions is None and places is not None:
            positions = positions_of_images(config, ids, places, grids)
        made, masks, tables = prepare(
            text, tokens, positions=positions, segment_ids=segment_ids, length=length, rng=rng
        )
        types = token_types if token_types is None else per_token("token_types", token_types, shape)
        return made, with_image_masks(config, masks, made["positions"], ids, places, types), tables
    check_text_alone(config, places, grids)
    if positions is not None:
        axes = positions.shape[2:] if positions.ndim == 3 else ()
        positions = per_token("positions", positions, shape + axes)
    count = shape[1] if positions is None and segment_ids is None else None
    if segment_ids is not None:
        segment_ids = per_token("segment_ids", segment_ids, shape)
        positions = _positions(segment_ids) if positions is None else positions
    else:  # reads no tensor values: works on meta tensors and never synchronizes with the device
        segment_ids = torch.ones((1, 1), dtype=torch.long, device=tokens.device).expand(shape)
        if positions is None:
            positions = torch.arange(shape[1], device=tokens.device).expand(shape)
    of_text = prepare_text(config, tokens, positions, segment_ids, length, token_types=token_types, count=count)
    if rng is not None:
        check_dropout(config)
        of_text[0]["rng"] = noise_keys(rng, positions, segment_ids)
    return of_text


def prepare_text(
    config: DecoderConfig,
    tokens: Tensor,
    positions: Tensor,
    segment_ids: Tensor,
    length: int | Tensor | None,
    *,
    token_types: Tensor | None = None,
    count: int | None = None,
) -> tuple[dict[str, Any], dict[str, MaskLike], dict[str, Tensor]]:
    """`prepare` of int64 positions and segment_ids [B, S] of a text. count: positions are below it, where known."""
    family = family_of(config)
    if traits_of(family).inputs == "latents":
        raise ValueError("This model denoises latents, given texts: take fnmodels.diffusion.prepare_denoising.")
    check_fields(config)
    if stack_configs(config):
        raise ValueError(
            "This model has an encoder and a decoder, each with its own tokens: take fnmodels.prepare_pair."
        )
    inputs: dict[str, Any] = {"tokens": tokens, "positions": positions, "valid": segment_ids > 0}
    if token_types is not None:
        inputs["token_types"] = per_token("token_types", token_types, tokens.shape[:2])
    if field_of(config, "head") in PER_DOCUMENT:
        inputs["documents"] = documents(segment_ids, positions)
    ngrams = field_of(config, "ngram_size")
    reads_ids = ngrams or field_of(config, "hidden_size_per_layer_input") or traits_of(family).reads_ids
    if reads_ids and not tokens.is_floating_point():
        inputs["token_ids"] = tokens  # which layers embed, also where "tokens" is replaced by embeddings
    masks = family.attention_masks(config, positions, segment_ids)
    inputs |= function_of(family, "batch_inputs")(config, positions)
    inputs |= function_of(family, "token_inputs")(config, tokens, segment_ids)
    tables = family.freqs_cis(config, positions, length=length)
    check_positions(config, tables, positions, inputs["valid"], count=count)
    if ngrams and not tokens.is_floating_point():
        inputs["preceding"] = preceding_tokens(tokens, positions, segment_ids, ngrams - 1)
    return inputs, masks, tables


def positions_of_images(config: Any, segment_ids: Tensor, places: Tensor, grids: Tensor | None) -> Tensor | None:
    """Positions [B, S, 4] of text with images: the order, then three axes, both from 0 in each document; None for a
    model whose positions have one axis. ValueError without grids."""
    check_places(places, segment_ids.shape)
    family: Any = family_of(config)
    if not hasattr(family, "image_positions"):
        return None
    if grids is None:
        raise ValueError(
            "The positions of this model's images follow from their rows and columns: pass grids [images, 3], of "
            "(frames, rows, columns) of features, or positions [B, S, 3]."
        )
    axes = family.image_positions(places[..., 0] >= 0, segment_ids, grids)
    return torch.cat((positions_from_segments(segment_ids)[..., None], axes), -1)


def with_image_masks(
    config: Any,
    masks: dict[str, MaskLike],
    positions: Tensor,
    segment_ids: Tensor,
    places: Tensor | None,
    token_types: Tensor | None = None,
) -> dict[str, MaskLike]:
    """The masks of a text with images: those of the text, unless the tokens of an image, or of a prompt, see each
    other. ValueError for a prompt that token_types [B, S] do not tell from its answer."""
    family: Any = family_of(config)
    if places is not None:
        check_places(places, segment_ids.shape)
    if hasattr(family, "prompt_masks"):
        if token_types is not None:
            return masks | family.prompt_masks(config, positions, segment_ids, token_types)
        if places is not None:
            raise ValueError(
                f"The prompt of {config.model_type} sees all of itself and its answer is causal: pass token_types "
                "[B, S], 0 in the prompt, images included, and 1 in the answer."
            )
    elif token_types is not None:
        raise ValueError(f"{config.model_type} reads no token_types, and they are set.")
    if places is None or not hasattr(family, "image_masks"):
        return masks
    found: dict[str, MaskLike] = family.image_masks(config, positions, segment_ids, places)
    return masks | found


def check_text_alone(config: Any, places: Tensor | None, grids: Tensor | None) -> None:
    """ValueError for images with a model that reads none."""
    if places is not None or grids is not None:
        raise ValueError(
            f"{type(config).__module__}.{type(config).__name__} is the Config of a model of text alone, and places and "
            "grids are of images: pass the Config of the whole model, of fnmodels.models.vision_language."
        )


def check_tokens(tokens: Tensor, name: str = "tokens") -> Tensor:
    """Ids [B, S] of any integers as int64, or vectors [B, S, D]. ValueError, which calls them `name`, otherwise."""
    if tokens.ndim not in (2, 3):
        raise ValueError(f"{name} must be [B, S] (or vectors [B, S, D]), not of shape {tuple(tokens.shape)}.")
    if tokens.is_floating_point() != (tokens.ndim == 3) or tokens.dtype is torch.bool or tokens.is_complex():
        raise ValueError(
            f"{name} are {str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}: ids [B, S] are integers, and "
            "vectors [B, S, D] are floating."
        )
    return tokens if tokens.is_floating_point() else tokens.long()


def per_token(name: str, given: Tensor, shape: torch.Size) -> Tensor:
    """Broadcasts a per-token tensor of shape [B, S, ...] or [1, S, ...] to `shape`."""
    if given.shape not in (shape, (1, *shape[1:])):
        raise ValueError(f"{name} must be [B, S] = {list(shape[:2])} like the tokens, not {list(given.shape)}.")
    return integers(name, given).expand(shape)


def _positions(segment_ids: Tensor) -> Tensor:
    valid = segment_ids > 0
    highest = segment_ids.amax(dim=1, keepdim=True) if segment_ids.shape[1] else segment_ids.new_zeros(1, 1)
    several = (valid & (segment_ids != highest)).any(dim=1)
    if several.any():
        row = int(several.nonzero()[0])
        raise ValueError(
            f"Row {row} holds several documents, so their positions must be given: "
            "fnmodels.positions_from_segments(segment_ids) numbers each from 0."
        )
    # The first token of the document has position 0, whatever padding is to its left.
    before = valid.int().cumsum(dim=1).eq(0).sum(dim=1, keepdim=True)
    return (torch.arange(segment_ids.shape[1], device=segment_ids.device) - before).clamp(min=0)
