"""Encoders of waves: packed clips equal each alone in transformers; files, CTC loss and decoding, transforms."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.inputs.waves import unit_variance, wave_rows
from fnmodels.models.audio import wav2vec2
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

_TINY: dict[str, Any] = {"vocab_size": 13, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "conv_dim": [10, 12, 8], "conv_stride": [3, 2, 2], "conv_kernel": [7, 3, 2]}
_TINY |= {"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 3, "layer_norm_eps": 1e-2}
_STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}
_WAVLM = _TINY | {"model_type": "wavlm", "num_buckets": 16, "max_bucket_distance": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "wav2vec2": _TINY | {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]},
    "hubert": _TINY | _STABLE | {"model_type": "hubert", "architectures": ["HubertModel"]},
    "unispeech": _TINY | {"model_type": "unispeech", "architectures": ["UniSpeechForCTC"]},
    "unispeech-sat": _TINY | _STABLE | {"model_type": "unispeech-sat", "architectures": ["UniSpeechSatModel"]},
    "wavlm": _WAVLM | {"architectures": ["WavLMForCTC"]},
    "wavlm_stable": _WAVLM | _STABLE | {"architectures": ["WavLMModel"]},
}
# Parameters of the presets, as transformers' models of these configs have them.
SIZES = (150, 37, 300, 22, 91)  # samples of clips; a token has 19 of them and the next begins 12 later
SAYS = ([3, 3, 5], [4], [7, 1, 9, 9, 2], [], [8, 6])
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _config(name: str) -> wav2vec2.Config:
    return wav2vec2.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    return wrappers.perturbed(getattr(transformers, VARIANTS[name]["architectures"][0])(config))


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _clips() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) + 0.5 for size in SIZES]


def _ours(name: str, params: Any, batch: Any, kernel: str = "math") -> Tensor:
    layout = fnmodels.layout(batch[1]) if kernel == "auto" else None
    out: Tensor = fnmodels.forward(params, *batch, config=_config(name), kernel=kernel, layout=layout)
    return out


def _batch(name: str, length: int | None) -> tuple[Any, Tensor]:
    waves, positions, segment_ids = wave_rows(_clips(), _config(name), length=length)
    waves[segment_ids == 0] = torch.nan
    return fnmodels.prepare(_config(name), waves, positions=positions, segment_ids=segment_ids), segment_ids


def _theirs(name: str, clip: Tensor) -> Tensor:
    out = _reference(name)(clip[None])
    found: Tensor = out.logits[0] if "logits" in out else out.last_hidden_state[0]
    return found


@every_variant
def test_packed_clips_equal_each_alone_in_transformers(name: str) -> None:
    with torch.no_grad():
        for length, kernel in ((None, "math"), (30, "auto")):
            batch, segment_ids = _batch(name, length)
            out, found = _ours(name, _params(name), batch, kernel), fnmodels.documents(segment_ids)
            for i, clip in enumerate(_clips()):
                assert_close(out[found.number == i], _theirs(name, clip))
        assert_close(torch.vmap(lambda rows: _ours(name, _params(name), rows))(fnmodels.rows(batch))[:, 0], out)
    with pytest.raises(ValueError, match="order"):
        fnmodels.permute(batch, torch.arange(30))


@every_variant
def test_gradients_equal_transformers(name: str) -> None:
    params, (batch, segment_ids) = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name)), _batch(name, 30)
    _ours(name, params, batch)[segment_ids > 0].square().sum().backward()
    model = _reference(name)
    model.zero_grad()
    torch.stack([_theirs(name, clip).square().sum() for clip in _clips()]).sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


def test_a_clip_that_heard_another_would_be_seen() -> None:
    """Moments of another clip, and places without zeros between clips."""
    (inputs, masks, freqs), segment_ids = _batch("wav2vec2", 30)
    wanted = _ours("wav2vec2", _params("wav2vec2"), (inputs, masks, freqs))

    def off(**changed: Tensor) -> float:
        out = _ours("wav2vec2", _params("wav2vec2"), (inputs | changed, masks, freqs))
        return float((out - wanted)[segment_ids > 0].abs().max())

    waves = inputs["tokens"].clone()
    waves[..., 19:] = waves[:, :1, 19:]
    assert off(tokens=waves) > 1e-2
    slots = torch.arange(30).expand(len(segment_ids), -1)
    assert off(line=slots, place=slots) > 1e-2
    assert off(masked=segment_ids == 2) > 1e-2


def test_a_clip_alone_has_the_bits_of_a_packed_one() -> None:
    batch, segment_ids = _batch("hubert", 30)
    single, owners = _batch("hubert", None)
    with torch.no_grad():
        packed, alone = (_ours("hubert", _params("hubert"), given, "invariant") for given in (batch, single))
    assert torch.equal(packed[segment_ids > 0], alone[owners > 0])


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    """With the published names of weight norm, and with those that transformers writes."""
    wrappers.assert_files(_reference(name), _config(name), tmp_path, parts=())
    assert any(path.endswith("conv.weight_g") for path in load_file(tmp_path / "ours" / "model.safetensors"))
    assert _config(name) == wav2vec2.Config.from_hf(AutoConfig.for_model(**VARIANTS[name]).to_dict())


def test_a_file_of_pretraining_is_read_without_its_quantizer(tmp_path: Path) -> None:
    values = VARIANTS["wav2vec2"] | {"architectures": ["Wav2Vec2ForPreTraining"]}
    model = wrappers.perturbed(transformers.Wav2Vec2ForPreTraining(AutoConfig.for_model(**values)))
    model.save_pretrained(tmp_path)
    config, params = P.load_pretrained(tmp_path)
    assert config.head == "none"
    found = tree.flatten(params)
    state = on_disk(model)
    assert torch.equal(found["layers.1.mlp.up_proj"], state[wav2vec2.hf_names(config)["layers.1.mlp.up_proj"]])
    state = {path: value for path, value in state.items() if path != "wav2vec2.masked_spec_embed"}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})  # as wav2vec2-base-960h
    assert "mask_token" not in P.load_pretrained(tmp_path)[1]


@pytest.mark.parametrize("per", ["clip", "label"])
def test_the_loss_is_that_of_transformers_clip_by_clip(per: str) -> None:
    config, model = _config("wav2vec2"), _reference("wav2vec2")
    waves, positions, segment_ids = wave_rows(_clips(), config, length=30)
    at = fnmodels.documents(segment_ids)
    labels = torch.full((len(waves), int(segment_ids.max()), 5), -100)
    for row, segment, says in zip(at.row, at.segment, SAYS, strict=True):
        labels[row, segment - 1, : len(says)] = torch.tensor(says)
    batch = {"tokens": waves, "positions": positions, "segment_ids": segment_ids, "labels": labels}
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params("wav2vec2"))
    total, count = train.losses.ctc_loss(params, batch, config=config, per=per, kernel="math")
    total.backward()
    model.zero_grad()
    model.config.ctc_loss_reduction = {"clip": "sum", "label": "mean"}[per]
    losses = [
        model(clip[None], labels=torch.tensor([says])).loss for clip, says in zip(_clips(), SAYS, strict=True) if says
    ]
    silent = torch.nn.functional.log_softmax(_theirs("wav2vec2", _clips()[3]), -1)[:, 0].sum()
    wanted = torch.stack(losses).sum() - silent
    wanted.backward()
    assert int(count) == len(SIZES)
    assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    wrappers.assert_gradients(model, config, params)
    labels[0, 0, 1] = 13
    with pytest.raises(ValueError, match=r"labels\[0, 0, 1\] is 13, but the vocabulary has 13 entries"):
        train.losses.ctc_loss(params, batch, config=config)


def test_steps_of_training_lower_the_loss() -> None:
    config = wav2vec2.Config.from_hf(VARIANTS["wav2vec2"] | {"num_hidden_layers": 1})
    waves, positions, segment_ids = wave_rows(_clips()[:1], config)
    batch = {"tokens": waves, "positions": positions, "segment_ids": segment_ids, "labels": torch.tensor([[SAYS[2]]])}
    optimizer = train.adamw(5e-3)
    step = train.make_step(functools.partial(train.losses.ctc_loss, config=config), optimizer)
    state, losses = train.init_state(P.init(config, 0), optimizer), []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]


def test_greedy_decoding_joins_runs_and_leaves_blanks_out() -> None:
    paths = torch.tensor([[3, 3, 0, 3, 5, 5, 9, 9], [4, 0, 0, 0, 4, 4, 2, 0]])
    segment_ids = torch.tensor([[1, 1, 1, 1, 1, 1, 2, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    logits = torch.nn.functional.one_hot(paths, 13).float()
    assert train.losses.ctc_greedy(logits, segment_ids) == [[3, 3, 5], [9], [4], [4, 2]]


def test_taps_and_errors_name_what_does_not_fit() -> None:
    config = _config("wav2vec2")
    assert fnmodels.tap_names(config)["layers.0.attention"] == "[B, S, 24]"
    assert_close(unit_variance(torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0]))
    with pytest.raises(ValueError, match=r"Clip 1 must be floats .* at least 19 samples"):
        wave_rows([torch.zeros(19), torch.zeros(18)], config)
    batch = fnmodels.prepare(config, torch.zeros(1, 4, 19), positions=torch.ones(1, 4, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"are waves \[B, S, 75\] .* not torch.float32 \[1, 4, 19\]"):
        fnmodels.forward(_params("wav2vec2"), *batch, config=config)
    with pytest.raises(ValueError, match=r"\(index, tokens of the clip\), \[B, S, 2\], not \[1, 4\]"):
        fnmodels.prepare(config, torch.zeros(1, 4, 75))
    with pytest.raises(ValueError, match="'add_adapter' is true; only false"):
        wav2vec2.Config.from_hf(VARIANTS["wav2vec2"] | {"add_adapter": True})
    with pytest.raises(ValueError, match="conv_dim, conv_stride, conv_kernel are"):
        wav2vec2.Config.from_hf(VARIANTS["wav2vec2"] | {"conv_dim": [10, 12]})
    with pytest.raises(ValueError, match='needs a model with the head "lm"'):
        train.losses.ctc_loss({}, {}, config=_config("hubert"))
