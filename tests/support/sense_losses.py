"""Losses of texts that hear, and of texts whose images queries read or layers attend to; see `encoder_losses`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fnmodels
import train
from fnmodels.inputs.audio import causal_rows, frame_rows, spectrum_rows
from fnmodels.inputs.image_places import cells, image_places
from fnmodels.models.audio_language import glmasr, granite_speech, voxtral_realtime
from fnmodels.models.vision import mllama_vision
from fnmodels.models.vision_language import blip, blip_2, llava, mllama
from tests.fnmodels.models import (
    test_blip,
    test_blip_2,
    test_glmasr,
    test_granite_speech,
    test_llava,
    test_mllama,
    test_voxtral_realtime,
)

Setting = tuple[Any, Callable[..., Any], list[dict[str, Tensor]]]
WORDS = 56  # ids of words are below
# {name: (family, its config.json, what makes rows of clips, frames of both clips of a row)}
SOUNDS: dict[str, tuple[Any, dict[str, Any], Any, tuple[int, int]]] = {
    "granite_speech": (granite_speech, test_granite_speech.VARIANTS["granite_speech"], spectrum_rows, (19, 5)),
    "glmasr": (glmasr, test_glmasr.VALUES, frame_rows, (24, 16)),
    "voxtral_realtime": (voxtral_realtime, test_voxtral_realtime.VALUES, causal_rows, (20, 12)),
}
# {name: (family, its config.json, the side of an image, tokens of an image)}
IMAGES: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "blip": (blip, test_blip.VALUES, 12, 1),
    "blip_2": (blip_2, test_blip_2.VALUES, 12, test_blip_2.QUERIES),
    "mllama": (mllama, test_mllama.VALUES, 8, 1),
    "video_llava": (llava, test_llava.VARIANTS["video_llava"], 18, 10),
}


def sense_loss(params: Any, batch: dict[str, Tensor], *, config: Any, change: Callable[..., dict[str, Any]]) -> Any:
    """Next-token prediction of texts with sounds or images, which `change` adds to their inputs."""
    own = {name: batch[name] for name in ("positions", "segment_ids")}
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, batch["tokens"], **own)
    inputs = change(params, inputs, batch, config)
    logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
    return train.cross_entropy(logits, batch["labels"])


def read(weights: Any, batch: dict[str, Tensor], tower: Any, run: Any, names: tuple[str, ...] = ()) -> Any:
    """(hidden states, the taps `names`) of the tower."""
    own = {"positions": batch["places"]} | ({"segment_ids": batch["owners"]} if "owners" in batch else {})
    x = run(weights, *fnmodels.prepare(tower, batch["sensed"], **own), config=tower, taps=names)
    return x if names else (x, {})


def with_sounds(family: Any, params: Any, inputs: Any, batch: dict[str, Tensor], config: Any) -> dict[str, Any]:
    """Features in place of tokens, or beside every token."""
    at, ids = batch["places"], batch["owners"]
    beside = family is voxtral_realtime
    x, _ = read(params["audio"], batch, config.audio, fnmodels.forward if beside else fnmodels.hidden)
    groups = family.groups(at, ids, config.group)
    if beside:
        features = family.project(params, x, groups)
        _, counts = (ids + 9 * torch.arange(len(ids))[:, None])[ids > 0].unique_consecutive(return_counts=True)
        places = family.sound_places(batch["segment_ids"], (counts // config.group).tolist())
        return family.with_sound(params, inputs, features, places, config=config)
    features = family.project(params, x, groups, config=config)
    places = image_places(batch["tokens"], config.audio_token, features.new_ones(features.shape[:2]) > 0)
    return family.with_images(params, inputs, features, places, config=config)


def with_pictures(family: Any, params: Any, inputs: Any, batch: dict[str, Tensor], config: Any) -> dict[str, Any]:
    """Features in place of tokens, or memory of images or tiles."""
    at, own = batch["places"], (batch["tokens"], batch["segment_ids"])
    if family is blip:
        features, _ = read(params["vision"], batch, config.vision, fnmodels.forward)
        return inputs | blip.image_memory(*own, features, at, config=config)
    if family is mllama:
        x, tapped = read(params["vision"], batch, config.vision, fnmodels.forward, mllama.taps(config))
        features = mllama.project(params, x, tapped, config=config)
        return inputs | mllama.image_memory(*own, features, at, config=config)
    if family is llava:  # frames of videos, with their class tokens
        weights, tower = llava.video_tower(params, config)
        x, _ = read(weights, batch, tower, fnmodels.hidden)
        features, token, seen = llava.project(params, x), config.video_token, batch["owners"] > 0
    else:
        x, _ = read(params["vision"], batch, config.vision, fnmodels.forward)
        features = family.project(params, x, cells(at, batch["owners"], 1), config=config)
        token, seen = config.image_token, features.new_ones(features.shape[:2]) > 0
    places = image_places(batch["tokens"], token, seen)
    return family.with_images(params, inputs, features, places, config=config)


def texts(half: int, runs: list[list[int | tuple[int, int]]], length: int) -> dict[str, Tensor]:
    """A row of packed documents of runs: so many words, or (a token, how often)."""
    draw, rows = torch.Generator().manual_seed(half), []
    for document in runs:
        parts = [
            torch.randint(1, WORDS, (one,), generator=draw) if isinstance(one, int) else torch.full((one[1],), one[0])
            for one in document
        ]
        rows.append(torch.cat(parts))
    own = fnmodels.segments_from_lengths([[len(row) for row in rows]], length)
    tokens = torch.zeros_like(own)
    tokens[own > 0] = torch.cat(rows)
    following = tokens.roll(-1, 1)
    labels = following.where((own > 0) & (own == own.roll(-1, 1)) & (following < WORDS), -100)
    return {"tokens": tokens, "segment_ids": own, "positions": fnmodels.positions_from_segments(own), "labels": labels}


def sound_setting(name: str) -> Setting:
    """(config, loss, the rows of each rank): two documents in a row, each with a sound."""
    family, values, rows, sizes = SOUNDS[name]
    config = family.Config.from_hf(values | {"text_config": values["text_config"] | {"vocab_size": 64}})
    draw, made = torch.Generator().manual_seed(0), []
    for half in range(2):
        counts = (sizes[0], sizes[1] + 8 * half)
        clips = [torch.randn(config.audio.num_mel_bins, count, generator=draw) for count in counts]
        sensed, places, owners = rows(clips, config.audio, length=36)
        runs: list[Any] = [[5], [3 + 2 * half]]
        if family is not voxtral_realtime:
            runs = [[2, (config.audio_token, family.input_grid(clip, config)[2]), 3] for clip in clips]
        made.append(texts(half, runs, 36) | {"sensed": sensed, "places": places, "owners": owners})
    change = functools.partial(with_sounds, family)
    return config, functools.partial(sense_loss, config=config, change=change), made


def picture_setting(name: str) -> Setting:
    """(config, loss, the rows of each rank): two documents in a row, each with an image."""
    family, values, side, count = IMAGES[name]
    size = {"vocab_size": 64 if family is not mllama else WORDS}
    config = family.Config.from_hf(values | {"text_config": values["text_config"] | size})
    token = config.video_token if family is llava else config.image_token
    draw, made = torch.Generator().manual_seed(0), []
    for half in range(2):
        first = [2 + half] if family is not blip else []  # whose texts begin with the image's token
        batch = texts(half, [[*first, (token, count), 3], [(token, count), 4]], 32)
        if family is blip:
            images = [torch.randn(3, side, side, generator=draw) for _ in range(2)]
            batch["sensed"], batch["places"] = blip.tile_rows(images, config.vision)
        elif family is mllama:
            images = [torch.randn(3, *tiles, generator=draw) for tiles in ((side, 2 * side), (2 * side, side))]
            batch["sensed"], batch["places"] = mllama_vision.tile_rows(images, config.vision)
        else:
            images = [torch.randn(3, side, side, generator=draw) for _ in range(2)]
            names = ("sensed", "places", "owners")
            batch |= zip(names, fnmodels.inputs.patch_rows(images, config.vision, length=25), strict=True)
        made.append(batch)
    change = functools.partial(with_pictures, family)
    return config, functools.partial(sense_loss, config=config, change=change), made


SENSES: dict[str, Callable[[], Setting]] = {name: functools.partial(sound_setting, name) for name in SOUNDS}
SENSES |= {name: functools.partial(picture_setting, name) for name in IMAGES}
