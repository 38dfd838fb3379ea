"""Text models that hear equal transformers with every parameter perturbed; packed documents equal each alone."""

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
from fnmodels.inputs.audio import frame_rows, groups
from fnmodels.models.audio_language import qwen2_audio
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

SOUND = 60  # the id of audio tokens
FRAMES = 16  # of a padded clip: 8 tokens of the encoder
_SHORT: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
_SHORT |= {"num_mel_bins": 6, "max_source_positions": FRAMES // 2}
_USUAL: dict[str, Any] = {"model_type": "voxtral_encoder", "hidden_size": 16, "num_hidden_layers": 2}
_USUAL |= {"num_attention_heads": 2, "intermediate_size": 64, "num_mel_bins": 6, "max_source_positions": FRAMES // 2}
_TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 7e-3}
_QWEN2 = _TEXT | {"model_type": "qwen2", "pad_token_id": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"audio_token_index": SOUND, "text_config": _QWEN2 | {"tie_word_embeddings": False}}
    | {"audio_config": _SHORT | {"model_type": "qwen2_audio_encoder"}},
    "voxtral": {"audio_token_id": SOUND, "audio_config": _USUAL}
    | {"text_config": _TEXT | {"model_type": "llama", "head_dim": 6}},
    "audioflamingo3": {"audio_token_id": SOUND, "text_config": _QWEN2}
    | {"audio_config": _USUAL | {"model_type": "audioflamingo3_encoder", "intermediate_size": 24}},
}
VARIANTS = {name: {"model_type": name} | values for name, values in VARIANTS.items()}
# Per document: numbers of text tokens, and between them the frames of clips, as strings.
DOCUMENTS: tuple[tuple[Any, ...], ...] = ((2, "16", 3), (4, "10", 1, "12", 2), (3,), ("16", 2))
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _config(name: str) -> qwen2_audio.Config:
    return qwen2_audio.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    model = getattr(transformers, qwen2_audio._TYPES[name].architecture)(config)
    return wrappers.perturbed(model)


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _documents(name: str) -> tuple[list[Tensor], list[list[Tensor]], list[list[int]]]:
    """(tokens of each document, its clips [6, 16], their frames)."""
    generator, config = torch.Generator().manual_seed(0), _config(name)
    texts, clips, lengths = [], [], []
    for parts in DOCUMENTS:
        own = [FRAMES if config.joined else int(one) for one in parts if isinstance(one, str)]
        counts = iter([frames // 2 // config.group for frames in own])
        runs = [
            torch.full((next(counts),), SOUND)
            if isinstance(one, str)
            else torch.randint(1, 57, (one,), generator=generator)
            for one in parts
        ]
        texts.append(torch.cat(runs))
        clips.append([torch.randn(6, FRAMES, generator=generator) for _ in own])
        lengths.append(own)
    return texts, clips, lengths


def _ours(name: str, params: Any, *, late: bool = False) -> tuple[Tensor, Tensor]:
    """(logits [2, 30, V], segment ids); late: a planted bug, groups that begin one token later."""
    config = _config(name)
    texts, clips, lengths = _documents(name)
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 30)
    frames, at, ids = frame_rows([clip for own in clips for clip in own], config.audio, length=20)
    ends = torch.tensor([0, *(count // 2 for own in lengths for count in own)])
    numbers = fnmodels.documents(ids).number
    ids = ids.where(at < ends[torch.where(ids > 0, numbers + 1, 0)], 0)
    batch = fnmodels.prepare(config.audio, frames, positions=at, segment_ids=ids)
    x = fnmodels.hidden(params["audio"], *batch, config=config.audio)
    features = qwen2_audio.project(params, x.roll(-1, 1) if late else x, groups(at, ids, config.group), config=config)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    places = qwen2_audio.image_places(tokens, SOUND, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = qwen2_audio.with_images(params, inputs, features, places, config=config)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits, segment_ids


def _sound(name: str, clips: list[Tensor], lengths: list[int]) -> dict[str, Tensor]:
    """What transformers' model takes beside the ids."""
    mask = (torch.arange(FRAMES) < torch.tensor(lengths)[:, None]).long()
    masks = {"qwen2_audio": {"feature_attention_mask": mask}, "audioflamingo3": {"input_features_mask": mask}}
    return {"input_features": torch.stack(clips)} | masks.get(name, {})


def _theirs(name: str) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = []
    for text, clips, lengths in zip(*_documents(name), strict=True):
        sound = _sound(name, clips, lengths) if clips else {}
        out.append(_reference(name)(input_ids=text[None], use_cache=False, **sound).logits[0])
    return torch.cat(out)


@every_variant
def test_packed_documents_with_sounds_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(name)
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(name, _params(name), late=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


@every_variant
def test_gradients_equal_transformers(name: str) -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name))
    logits, segment_ids = _ours(name, params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference(name)
    model.zero_grad()
    _theirs(name).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path, parts=("text",))
    audio, loaded = P.load_pretrained(tmp_path / "theirs", part="audio")
    assert audio == _config(name).audio
    flat = tree.flatten(_params(name))
    assert all(torch.equal(leaf, flat[f"audio.{path}"]) for path, leaf in tree.flatten(loaded).items())


@every_variant
def test_greedy_tokens_equal_transformers(name: str) -> None:
    """Through the cache, all at once and in chunks of a few tokens."""
    config, model = _config(name), _reference(name)
    texts, clips, lengths = _documents(name)
    prompts = [text.tolist() for text, own in zip(texts, lengths, strict=True) if all(n == FRAMES for n in own)]
    sounds = [own for own, count in zip(clips, lengths, strict=True) if all(n == FRAMES for n in count)]
    model.generation_config.eos_token_id = None
    wanted = []
    for prompt, own in zip(prompts, sounds, strict=True):
        known = _sound(name, own, [FRAMES] * len(own)) if own else {}
        with torch.no_grad():
            out = model.generate(
                input_ids=torch.tensor([prompt]),
                max_new_tokens=5,
                do_sample=False,
                pad_token_id=0,
                suppress_tokens=[SOUND],
                **known,
            )
        wanted.append(out[0, len(prompt) :].tolist())

    def no_sound(logits: Tensor, tokens: list[list[int]]) -> Tensor:
        return logits.index_fill(1, torch.tensor([SOUND]), -torch.inf)

    for slots, chunk in ((None, 512), (2, 4)):
        found = train.generate(
            _params(name),
            config,
            prompts,
            max_new=5,
            sampling=train.Sampling(temperature=0.0),
            images=sounds,
            logits_fn=no_sound,
            slots=slots,
            chunk=chunk,
        )
        assert found.tokens == wanted


def test_errors_name_what_does_not_fit() -> None:
    config = _config("qwen2_audio")
    with pytest.raises(ValueError, match=r"A clip is a log-mel spectrogram \[6, frames\] .* not \[5, 16\]"):
        qwen2_audio.input_grid(torch.zeros(5, 16), config)
    with pytest.raises(ValueError, match="A clip has 18 frames; it must have from 4 to 16"):
        qwen2_audio.input_grid(torch.zeros(6, 18), config)
    audio = VARIANTS["qwen2_audio"]["audio_config"] | {"scale_embedding": True}
    with pytest.raises(ValueError, match="'scale_embedding' is true; only false"):
        qwen2_audio.Config.from_hf(VARIANTS["qwen2_audio"] | {"audio_config": audio})
