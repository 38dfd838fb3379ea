"""Granite Speech equals transformers with every parameter perturbed; packed documents with sounds equal each alone."""

import functools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.inputs.audio import spectrum_rows
from fnmodels.models.audio_language import granite_speech
from fnmodels.ops.recurrent.neighbours import depthwise
from params import lora
from tests.support import wrappers
from tests.support.cases import generic
from tests.support.oracle import assert_close, on_disk

SOUND = 60  # the id of audio tokens
_AUDIO: dict[str, Any] = {"model_type": "granite_speech_encoder", "hidden_dim": 16, "num_layers": 3, "input_dim": 10}
_AUDIO |= {"num_heads": 2, "dim_head": 6, "feedforward_mult": 2, "output_dim": 7, "context_size": 8, "max_pos_emb": 11}
_AUDIO |= {"conv_kernel_size": 5, "conv_expansion_factor": 2, "dropout": 0.0}
_PROJECTOR: dict[str, Any] = {"model_type": "blip_2_qformer", "hidden_size": 12, "num_hidden_layers": 2}
_PROJECTOR |= {"num_attention_heads": 2, "intermediate_size": 20, "encoder_hidden_size": 16, "layer_norm_eps": 1e-2}
_TEXT: dict[str, Any] = {"model_type": "granite", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "rms_norm_eps": 7e-3}
_TEXT |= {"embedding_multiplier": 1.5, "attention_multiplier": 0.3, "residual_multiplier": 0.8, "logits_scaling": 1.0}
_ONE: dict[str, Any] = {"model_type": "granite_speech", "audio_token_index": SOUND, "encoder_config": _AUDIO}
_ONE |= {"projector_config": _PROJECTOR, "text_config": _TEXT, "window_size": 6, "downsample_rate": 3}
_ONE |= {"architectures": ["GraniteSpeechForConditionalGeneration"], "has_lora_adapter": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "granite_speech": _ONE,
    "granite_speech_plus": _ONE
    | {"model_type": "granite_speech_plus", "architectures": ["GraniteSpeechPlusForConditionalGeneration"]}
    | {"projector_config": _PROJECTOR | {"encoder_hidden_size": 48, "cross_attention_frequency": 1}}
    | {
        "encoder_config": _AUDIO
        | {"model_type": "granite_speech_plus_encoder", "cat_hidden_layers": [0, 1], "num_layers": 2}
    },
}
every_variant = pytest.mark.parametrize("name", VARIANTS)
# Per document: numbers of text tokens, and between them the frames of clips, as strings; a block is 8, a window 6.
DOCUMENTS: tuple[tuple[Any, ...], ...] = ((2, "19", 3), (1, "5", 2), (3,), (1, "8", 2))


@functools.cache
def _config(name: str) -> granite_speech.Config:
    return granite_speech.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    model = wrappers.perturbed(getattr(transformers, VARIANTS[name]["architectures"][0])(config))
    with torch.no_grad():  # the moments of batch norms, of which variances are above 0
        for path, tensor in model.named_buffers():
            if path.endswith(("running_mean", "running_var")):
                tensor.copy_(generic(path, tensor).abs() + 0.1)
    return model


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


@functools.cache
def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its clips [10, frames])."""
    generator, texts, clips = torch.Generator().manual_seed(0), [], []
    for parts in DOCUMENTS:
        own = [torch.randn(10, int(one), generator=generator) for one in parts if isinstance(one, str)]
        counts = iter([granite_speech.input_grid(clip, _config("granite_speech"))[2] for clip in own])
        runs = [
            torch.randint(1, 57, (one,), generator=generator)
            if isinstance(one, int)
            else torch.full((next(counts),), SOUND)
            for one in parts
        ]
        texts.append(torch.cat(runs))
        clips.append(own)
    return texts, clips


def _ours(name: str, params: Any, *, shift: int = 0) -> tuple[Tensor, Tensor]:
    """(logits [2, 24, V], segment ids); shift: a planted bug, frames that stand elsewhere in their block."""
    config = _config(name)
    texts, clips = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 24)
    frames, at, ids = spectrum_rows([clip for own in clips for clip in own], config.audio, length=36)
    batch = fnmodels.prepare(config.audio, frames, positions=at + shift, segment_ids=ids)
    x, tapped = fnmodels.hidden(
        params["audio"], *batch, config=config.audio, kernel="math", taps=("embed", *granite_speech.taps(config))
    )
    features = granite_speech.project(params, x, granite_speech.groups(at, ids, config.group), tapped, config=config)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    places = granite_speech.image_places(tokens, SOUND, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = granite_speech.with_images(params, inputs, features, places, config=config)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits, segment_ids


def _sound(clips: list[Tensor]) -> dict[str, Tensor]:
    return {"input_features": torch.stack([clip.mT for clip in clips])} if clips else {}


def _theirs(name: str) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = [
        _reference(name)(input_ids=text[None], use_cache=False, **_sound(clips)).logits[0]
        for text, clips in zip(*_documents(), strict=True)
    ]
    return torch.cat(out)


@every_variant
def test_packed_documents_with_sounds_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(name)
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(name, _params(name), shift=1)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    name = "granite_speech"
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name))
    logits, segment_ids = _ours(name, params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference(name)
    model.zero_grad()
    _theirs(name).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path, parts=("text", "audio"))


def test_the_encoder_alone() -> None:
    """Frames of clips in a row and alone, mapped over rows, with NaN at padding."""
    config, params = _config("granite_speech").audio, _params("granite_speech")["audio"]
    clips = [clip for own in _documents()[1] for clip in own]
    frames, at, ids = spectrum_rows(clips, config, length=36)
    frames[ids == 0] = torch.nan
    prepared = fnmodels.prepare(config, frames, positions=at, segment_ids=ids)

    def run(batch: Any, **options: Any) -> Tensor:
        out: Tensor = fnmodels.forward(params, *batch, config=config, **{"kernel": "math"} | options)
        return out

    with torch.no_grad():
        out, valid = run(prepared), ids > 0
        alone = [run(fnmodels.prepare(config, clip.mT[None]))[0] for clip in clips]
        assert_close(out[valid], torch.cat(alone))
        assert_close(run(prepared, kernel="blocks", layout=fnmodels.layout(prepared[1]))[valid], out[valid])
        assert_close(torch.vmap(run)(fnmodels.rows(prepared))[:, 0][valid], out[valid])
    assert fnmodels.tap_names(config)["layers.0.conv"] == "[B, S, 16]"
    with pytest.raises(ValueError, match="order"):
        fnmodels.permute(prepared, torch.randperm(36))


def test_the_convolution_equals_torchs() -> None:
    draw = torch.Generator().manual_seed(0)
    x, segment_ids = torch.randn(1, 9, 3, generator=draw), torch.tensor([[1, 1, 1, 1, 0, 2, 2, 2, 2]])
    for taps in (1, 4, 5):
        weight = torch.randn(3, taps, generator=draw)
        found = depthwise(x, weight, segment_ids)
        for piece in (slice(0, 4), slice(5, 9)):
            padded = torch.nn.functional.pad(x[:, piece].mT, (taps // 2, (taps - 1) // 2))
            assert_close(found[:, piece].mT, torch.nn.functional.conv1d(padded, weight[:, None], groups=3))
        assert not found[:, 4].any()


def test_adapters_are_of_prompts_with_sound(tmp_path: Path) -> None:
    """params with PEFT's adapters equal transformers' model with them; those without are another function."""
    model, config = _reference("granite_speech"), _config("granite_speech")
    wrappers.save(model, tmp_path)
    # the encoder's names are other ones
    adapted = peft.get_peft_model(
        type(model).from_pretrained(tmp_path), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    ).eval()
    with torch.no_grad():
        for path, tensor in adapted.named_parameters():
            if "lora_" in path:
                tensor.copy_(generic(path, tensor))
        adapted.save_pretrained(tmp_path)
        config, params = P.load_pretrained(tmp_path)
        heard = lora.load_adapters(tmp_path, config, params)
        text, clips = (both[0] for both in _documents())
        wanted = adapted(input_ids=text[None], use_cache=False, **_sound(clips)).logits[0]
        assert_close(_ours("granite_speech", heard)[0][0, : len(text)], wanted)
        assert (_ours("granite_speech", params)[0][0, : len(text)] - wanted).abs().max() > 1e-2


def test_greedy_tokens_equal_transformers() -> None:
    """Through the cache, all at once and in chunks of a few tokens."""
    for name in VARIANTS:
        model, (texts, clips) = _reference(name), _documents()
        model.generation_config.eos_token_id = None
        wanted = []
        for text, own in zip(texts, clips, strict=True):
            how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            with torch.no_grad():
                out = model.generate(input_ids=text[None], suppress_tokens=[SOUND], **how, **_sound(own))
            wanted.append(out[0, len(text) :].tolist())

        def no_sound(logits: Tensor, tokens: list[list[int]]) -> Tensor:
            return logits.index_fill(1, torch.tensor([SOUND]), -torch.inf)

        found = train.generate(
            _params(name),
            _config(name),
            [text.tolist() for text in texts],
            max_new=4,
            sampling=train.Sampling(temperature=0.0),
            images=clips,
            logits_fn=no_sound,
            chunk=4,
        )
        assert found.tokens == wanted


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"must be a spectrum \[10, frames\], not \[5, 16\]"):
        granite_speech.input_grid(torch.zeros(5, 16), _config("granite_speech"))
    for part, changes, error in (
        ("encoder_config", {"context_size": 12}, "context_size 12 is above max_pos_emb 11"),
        ("encoder_config", {"num_layers": 1}, "num_layers is 1"),
        ("projector_config", {"encoder_hidden_size": 20}, "encoder_hidden_size of the projector is 20"),
        ("projector_config", {"use_qformer_text_input": True}, "'use_qformer_text_input' is true"),
    ):
        with pytest.raises(ValueError, match=error):
            granite_speech.Config.from_hf(_ONE | {part: _ONE[part] | changes})
    drops = granite_speech.Config.from_hf(_ONE | {"encoder_config": _AUDIO | {"dropout": 0.1}}).audio
    assert drops.to_hf()["dropout"] == 0.1
    with pytest.raises(ValueError, match=r"config states 'dropout' = 0.1, which a granite_speech_encoder here does"):
        fnmodels.prepare(drops, torch.zeros(1, 2, 10), rng=1)
    with pytest.raises(ValueError, match="'window_size' 6 is not a multiple of 'downsample_rate' 4"):
        granite_speech.Config.from_hf(_ONE | {"downsample_rate": 4})
