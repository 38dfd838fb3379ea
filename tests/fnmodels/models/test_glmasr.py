"""GLM-ASR equals transformers with every parameter perturbed; packed documents with sounds equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import train
from fnmodels import tree
from fnmodels.inputs.audio import frame_rows
from fnmodels.models.audio_language import glmasr
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

SOUND = 60  # the id of audio tokens
_AUDIO: dict[str, Any] = {"model_type": "glmasr_encoder", "hidden_size": 16, "intermediate_size": 64}
_AUDIO |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 5, "max_position_embeddings": 64}
_AUDIO |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}}
_TEXT: dict[str, Any] = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "rms_norm_eps": 7e-3}
_TEXT |= {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
VALUES: dict[str, Any] = {"model_type": "glmasr", "audio_token_id": SOUND, "audio_config": _AUDIO}
VALUES |= {"text_config": _TEXT, "architectures": ["GlmAsrForConditionalGeneration"]}
CONFIG = glmasr.Config.from_hf(VALUES)
# Per document: numbers of text tokens, and between them the frames of clips, as strings; 8 are a feature.
DOCUMENTS: tuple[tuple[Any, ...], ...] = ((2, "24", 3), (1, "8", 2, "8", 1), (3,), (1, "16", 2))


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    return wrappers.perturbed(transformers.GlmAsrForConditionalGeneration(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


@functools.cache
def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its clips [5, frames])."""
    generator, texts, clips = torch.Generator().manual_seed(0), [], []
    for parts in DOCUMENTS:
        own = [torch.randn(5, int(one), generator=generator) for one in parts if isinstance(one, str)]
        counts = iter([glmasr.input_grid(clip, CONFIG)[2] for clip in own])
        runs = [
            torch.randint(1, 57, (one,), generator=generator)
            if isinstance(one, int)
            else torch.full((next(counts),), SOUND)
            for one in parts
        ]
        texts.append(torch.cat(runs))
        clips.append(own)
    return texts, clips


def _ours(params: Any, *, late: bool = False) -> tuple[Tensor, Tensor]:
    """(logits [2, 15, V], segment ids); late: a planted bug, groups that begin one token later."""
    texts, clips = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 15)
    frames, at, ids = frame_rows([clip for own in clips for clip in own], CONFIG.audio, length=30)
    batch = fnmodels.prepare(CONFIG.audio, frames, positions=at, segment_ids=ids)
    x = fnmodels.hidden(params["audio"], *batch, config=CONFIG.audio, kernel="math")
    features = glmasr.project(params, x.roll(-1, 1) if late else x, glmasr.groups(at, ids, CONFIG.group), config=CONFIG)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG.text, tokens, positions=own, segment_ids=segment_ids)
    places = glmasr.image_places(tokens, SOUND, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = glmasr.with_images(params, inputs, features, places, config=CONFIG)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=CONFIG.text, kernel="math")
    return logits, segment_ids


def _sound(clips: list[Tensor]) -> dict[str, Tensor]:
    """What transformers' model takes beside the ids."""
    if not clips:
        return {}
    masks = torch.ones(len(clips), clips[0].shape[1], dtype=torch.long)
    return {"input_features": torch.stack(clips), "input_features_mask": masks}


def _theirs() -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = [
        _reference()(input_ids=text[None], use_cache=False, **_sound(clips)).logits[0]
        for text, clips in zip(*_documents(), strict=True)
    ]
    return torch.cat(out)


def test_packed_documents_with_sounds_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs()
        logits, segment_ids = _ours(_params())
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(_params(), late=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    logits, segment_ids = _ours(params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference()
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path, parts=("text", "audio"))


def test_greedy_tokens_equal_transformers() -> None:
    """Through the cache, in chunks of a few tokens."""
    model, (texts, clips) = _reference(), _documents()
    model.generation_config.eos_token_id = None
    wanted = []
    for text, own in zip(texts, clips, strict=True):
        how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [SOUND]}
        with torch.no_grad():
            out = model.generate(input_ids=text[None], **how, **_sound(own))
        wanted.append(out[0, len(text) :].tolist())

    def no_sound(logits: Tensor, tokens: list[list[int]]) -> Tensor:
        return logits.index_fill(1, torch.tensor([SOUND]), -torch.inf)

    prompts, greedy = [text.tolist() for text in texts], train.Sampling(temperature=0.0)
    how = {"max_new": 4, "sampling": greedy, "images": clips, "logits_fn": no_sound, "chunk": 4}
    assert train.generate(_params(), CONFIG, prompts, **how).tokens == wanted


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"must be a spectrum \[5, frames\], not \[6, 16\]"):
        glmasr.input_grid(torch.zeros(6, 16), CONFIG)
    with pytest.raises(ValueError, match="Request 0: A clip has 6 frames, and a feature is made of 8"):
        train.generate(_params(), CONFIG, [[1, 2]], max_new=1, images=[[torch.zeros(5, 6)]])
    with pytest.raises(ValueError, match="'num_key_value_heads' is 1"):
        glmasr.Config.from_hf(VALUES | {"audio_config": _AUDIO | {"num_key_value_heads": 1}})
    with pytest.raises(ValueError, match=r"intermediate_size of the encoder is 72; .* a multiple of hidden_size, 16"):
        glmasr.Config.from_hf(VALUES | {"audio_config": _AUDIO | {"intermediate_size": 72}})
    assert fnmodels.tap_names(CONFIG.audio)["layers.0.attention"] == "[B, S, 16]"
