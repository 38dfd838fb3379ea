"""Voxtral Realtime equals transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import train
from fnmodels import tree
from fnmodels.image_text import image_features
from fnmodels.inputs.audio import causal_rows
from fnmodels.models.audio_language import voxtral_realtime
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk
from train.data.image_prompts import placeholder_in

_AUDIO: dict[str, Any] = {"model_type": "voxtral_realtime_encoder", "hidden_size": 16, "intermediate_size": 20}
_AUDIO |= {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 6, "num_mel_bins": 5, "sliding_window": 6}
_AUDIO |= {"rms_norm_eps": 1e-2, "max_position_embeddings": 64}
_AUDIO |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_TEXT: dict[str, Any] = {"model_type": "voxtral_realtime_text", "hidden_size": 24, "intermediate_size": 40}
_TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 61}
_TEXT |= {"rms_norm_eps": 7e-3, "sliding_window": 5, "tie_word_embeddings": True}
_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 64}
VALUES: dict[str, Any] = {"model_type": "voxtral_realtime", "audio_config": _AUDIO, "text_config": _TEXT}
VALUES |= {"architectures": ["VoxtralRealtimeForConditionalGeneration"], "downsample_factor": 2}
VALUES |= {"default_num_delay_tokens": 3, "audio_length_per_tok": 4, "tie_word_embeddings": True}
CONFIG = voxtral_realtime.Config.from_hf(VALUES)
LENGTHS = (9, 3, 6)  # tokens of each document, with 4 frames of sound for each


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    return wrappers.perturbed(transformers.VoxtralRealtimeForConditionalGeneration(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


@functools.cache
def _documents() -> tuple[list[Tensor], list[Tensor]]:
    """(tokens of each document, its sound [5, frames])."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 61, (count,), generator=draw) for count in LENGTHS]
    return texts, [torch.randn(5, 4 * count, generator=draw) for count in LENGTHS]


def _features(params: Any, clips: list[Tensor], shift: int = 0) -> Tensor:
    frames, at, ids = causal_rows(clips, CONFIG.audio, length=40)
    batch = fnmodels.prepare(CONFIG.audio, frames, positions=at + shift, segment_ids=ids)
    x = fnmodels.forward(params["audio"], *batch, config=CONFIG.audio, kernel="math")
    return voxtral_realtime.project(params, x, voxtral_realtime.groups(at, ids, CONFIG.group))


def _ours(params: Any, *, shift: int = 0, delay: int = 3) -> Tensor:
    """[tokens, V]; shift: a planted bug, no frame is the first of its clip."""
    texts, clips = _documents()
    config = replace(CONFIG, text=replace(CONFIG.text, delay=delay))
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 13)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    places = voxtral_realtime.sound_places(segment_ids, LENGTHS)
    inputs = voxtral_realtime.with_sound(params, inputs, _features(params, clips, shift), places, config=config)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits[segment_ids > 0]


def _theirs(delay: int = 3) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = [
        _reference()(input_ids=text[None], input_features=clip[None], use_cache=False, num_delay_tokens=delay).logits[0]
        for text, clip in zip(*_documents(), strict=True)
    ]
    return torch.cat(out)


def test_packed_documents_with_sounds_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs()
        assert_close(_ours(_params()), wanted)
        assert_close(_ours(_params(), delay=5), _theirs(5))
        assert (_ours(_params(), delay=5) - wanted).abs().max() > 1e-2
        assert (_ours(_params(), shift=1) - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    _ours(params).square().sum().backward()
    model = _reference()
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path, parts=("text", "audio"))
    wrappers.assert_text_alone(CONFIG, tmp_path)
    assert placeholder_in(tmp_path / "theirs", Tokenizer(models.BPE())) is None  # no token stands for a sound
    assert voxtral_realtime.Config.from_hf(CONFIG.to_hf()) == CONFIG


def test_a_stream_equals_the_whole() -> None:
    """Sound in chunks and token by token, each through a cache of its own with rings, as all at once."""
    (texts, clips), params = _documents(), _params()
    with torch.no_grad():
        frames, _, _ = causal_rows(clips[:1], CONFIG.audio)
        hears = fnmodels.init_cache(CONFIG.audio, batch=1, capacity=32)
        writes = fnmodels.init_cache(CONFIG.text, batch=1, capacity=16)
        found, first = [], torch.zeros(1, 1, 2, dtype=torch.int64)
        for i, token in enumerate(texts[0]):
            heard = fnmodels.prepare_step(CONFIG.audio, frames[:, 2 * i : 2 * i + 2], hears)
            x, hears = fnmodels.prefill(params["audio"], *heard, hears, config=CONFIG.audio, at="all")
            feature = voxtral_realtime.project(params, x, torch.tensor([[[0, 0], [0, 1]]]))
            inputs, *rest = fnmodels.prepare_step(CONFIG.text, token[None, None], writes)
            inputs = voxtral_realtime.with_sound(params, inputs, feature, first, config=CONFIG)
            logits, writes = fnmodels.decode(params["text"], inputs, *rest, writes, config=CONFIG.text)
            found.append(logits.reshape(1, -1))
        assert_close(torch.cat(found), _theirs()[: len(texts[0])])


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="There are 1 documents and 2 clips"):
        voxtral_realtime.sound_places(torch.ones(1, 3, dtype=torch.int64), [1, 2])
    with pytest.raises(ValueError, match=r"frames \[B, S, 25\] as fnmodels.inputs.causal_rows makes them"):
        fnmodels.forward(_params()["audio"], *fnmodels.prepare(CONFIG.audio, torch.zeros(1, 2, 7)), config=CONFIG.audio)
    with pytest.raises(TypeError, match="Nothing takes a token's place in voxtral_realtime"):
        image_features(_params(), [torch.zeros(5, 8)], config=CONFIG)
    with pytest.raises(TypeError, match=r"voxtral_realtime.with_sound gives its text images or sounds"):
        train.generate(_params(), CONFIG, [[1]], max_new=1, images=[[torch.zeros(5, 8)]])
    full, text = ((_params(), CONFIG), (_params()["text"], CONFIG.text))  # prompts without sound are read as text alone
    both = [train.generate(*model, [[1, 2]], max_new=3).tokens for model in (full, text)]
    assert both[0] == both[1]
    with pytest.raises(ValueError, match="'projector_hidden_act' is"):
        voxtral_realtime.Config.from_hf(VALUES | {"projector_hidden_act": "relu"})
    with pytest.raises(ValueError, match="audio_config: 'model_type' is"):
        voxtral_realtime.Config.from_hf(VALUES | {"audio_config": _AUDIO | {"model_type": "voxtral_realtime_text"}})
    assert voxtral_realtime.sound_places(torch.zeros(1, 2, dtype=torch.int64), []).unique() == -1  # padding alone
    places = voxtral_realtime.sound_places(torch.tensor([[1, 1, 0], [1, 2, 2]]), [1, 1, 2])
    assert places.tolist() == [[[0, 0], [-1, -1], [-1, -1]], [[0, 1], [0, 2], [0, 3]]]
