"""Qwen3-ASR equals transformers with every parameter perturbed; packed documents with sounds equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.inputs.audio import chunk_rows, chunk_tokens, groups
from fnmodels.models.audio_language import qwen3_asr
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

SOUND = 60  # the id of audio tokens
_AUDIO: dict[str, Any] = {"model_type": "qwen3_asr_encoder", "d_model": 16, "encoder_layers": 2, "num_mel_bins": 9}
_AUDIO |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 24, "n_window_infer": 200, "output_dim": 24}
_AUDIO |= {"downsample_hidden_size": 5}
_TEXT: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 61, "rms_norm_eps": 7e-3}
VALUES: dict[str, Any] = {"model_type": "qwen3_asr", "audio_token_id": SOUND, "audio_config": _AUDIO}
VALUES |= {"text_config": _TEXT, "architectures": ["Qwen3ASRForConditionalGeneration"], "pad_token_id": 0}
VALUES |= {"timestamp_token_id": 59}
CONFIG = qwen3_asr.Config.from_hf(VALUES)
# Per document: numbers of text tokens, and between them the frames of clips, as strings; a window is 200 frames.
DOCUMENTS: tuple[tuple[Any, ...], ...] = ((2, "230", 3), (1, "40", 2), (3,), (1, "100", 2))


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    return wrappers.perturbed(transformers.Qwen3ASRForConditionalGeneration(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


@functools.cache
def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its clips [9, frames])."""
    generator, texts, clips = torch.Generator().manual_seed(0), [], []
    for parts in DOCUMENTS:
        own = [torch.randn(9, int(one), generator=generator) for one in parts if isinstance(one, str)]
        counts = iter([chunk_tokens(clip, 0, 9) for clip in own])
        runs = [
            torch.randint(1, 57, (one,), generator=generator)
            if isinstance(one, int)
            else torch.full((next(counts),), SOUND)
            for one in parts
        ]
        texts.append(torch.cat(runs))
        clips.append(own)
    return texts, clips


def _ours(params: Any, *, shift: int = 0) -> tuple[Tensor, Tensor]:
    """(logits [2, 50, V], segment ids); shift: a planted bug, tokens that stand elsewhere in their second."""
    texts, clips = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 50)
    frames, at, ids = chunk_rows([clip for own in clips for clip in own], CONFIG.audio, length=60)
    batch = fnmodels.prepare(CONFIG.audio, frames, positions=at + shift, segment_ids=ids)
    x = fnmodels.hidden(params["audio"], *batch, config=CONFIG.audio, kernel="math")
    features = qwen3_asr.project(params, x, groups(at, ids, 1), config=CONFIG)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG.text, tokens, positions=own, segment_ids=segment_ids)
    places = qwen3_asr.image_places(tokens, SOUND, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = qwen3_asr.with_images(params, inputs, features, places, config=CONFIG)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=CONFIG.text, kernel="math")
    return logits, segment_ids


def _sound(clips: list[Tensor]) -> dict[str, Tensor]:
    """What transformers' model takes beside the ids: clips padded to whole seconds."""
    if not clips:
        return {}
    padded = [torch.nn.functional.pad(clip, (0, -clip.shape[1] % 100)) for clip in clips]
    masks = [(torch.arange(one.shape[1]) < clip.shape[1]).long() for one, clip in zip(padded, clips, strict=True)]
    return {"input_features": torch.stack(padded), "input_features_mask": torch.stack(masks)}


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
        assert (_ours(_params(), shift=1)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_the_encoder_alone_in_any_order() -> None:
    """Frames of clips in a row, permuted, mapped over rows, with NaN at padding."""
    frames, at, ids = chunk_rows([clip for own in _documents()[1] for clip in own], CONFIG.audio, length=60)
    frames[ids == 0] = torch.nan
    prepared = fnmodels.prepare(CONFIG.audio, frames, positions=at, segment_ids=ids)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))

    def run(batch: Any) -> Tensor:
        out: Tensor = fnmodels.forward(_params()["audio"], *batch, config=CONFIG.audio, kernel="math")
        return out

    with torch.no_grad():
        out, valid = run(prepared), ids > 0
        assert_close(run(fnmodels.permute(prepared, order))[valid[:, order]], out[:, order][valid[:, order]])
        assert_close(torch.vmap(run)(fnmodels.rows(prepared))[:, 0][valid], out[valid])
    assert fnmodels.tap_names(CONFIG.audio)["layers.0.attention"] == "[B, S, 16]"


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    logits, segment_ids = _ours(params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference()
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path, parts=("text",))
    audio, loaded = P.load_pretrained(tmp_path / "theirs", part="audio")
    assert audio == CONFIG.audio
    flat = tree.flatten(_params())
    assert all(torch.equal(leaf, flat[f"audio.{path}"]) for path, leaf in tree.flatten(loaded).items())


def test_greedy_tokens_equal_transformers() -> None:
    """Through the cache, all at once and in chunks of a few tokens."""
    model, (texts, clips) = _reference(), _documents()
    model.generation_config.eos_token_id = None
    wanted = []
    for text, own in zip(texts, clips, strict=True):
        how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [SOUND]}
        with torch.no_grad():
            out = model.generate(input_ids=text[None], **how, **_sound(own))
        wanted.append(out[0, len(text) :].tolist())

    def no_sound(logits: Tensor, tokens: list[list[int]]) -> Tensor:
        return logits.index_fill(1, torch.tensor([SOUND]), -torch.inf)

    for chunk in (512, 4):
        found = train.generate(
            _params(),
            CONFIG,
            [text.tolist() for text in texts],
            max_new=5,
            sampling=train.Sampling(temperature=0.0),
            images=clips,
            logits_fn=no_sound,
            chunk=chunk,
        )
        assert found.tokens == wanted


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"must be a log-mel spectrogram \[9, frames\], not \[5, 16\]"):
        qwen3_asr.input_grid(torch.zeros(5, 16), CONFIG)
    for name, value in (("n_window", 40), ("n_window_infer", 150)):
        with pytest.raises(ValueError, match=f"'{name}' is {value}"):
            qwen3_asr.Config.from_hf(VALUES | {"audio_config": _AUDIO | {name: value}})
    with pytest.raises(ValueError, match="output_dim of the encoder is 20"):
        qwen3_asr.Config.from_hf(VALUES | {"audio_config": _AUDIO | {"output_dim": 20}})
