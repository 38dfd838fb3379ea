"""Whisper: parity with transformers of every parameter, several clips in a row, files, sizes, gradients, decoding."""

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.inputs.audio import log_mel, mel_filters
from fnmodels.models.encoder_decoder import whisper
from fnmodels.ops.dropout import Dropout
from tests.support.cases import generic, positions_of, segments
from tests.support.dropouts import apart, check_places, fixed_dropout
from tests.support.oracle import assert_close
from tests.variants.whisper import TINY, TOTALS

CONFIG, ROWS = whisper.Config.from_hf(TINY), 3000
SIZES = (10, 7, 1, 10, 4)  # tokens of the clips; rows of 24 hold three and two of them
TARGETS = segments((5, 3, 7), (1, 13, -1))


@functools.cache
def reference(places: int = 10, **rates: float) -> Any:
    """transformers' model, every parameter generic, for clips of this many tokens, which it cannot take shorter."""
    values = transformers.WhisperConfig(**TINY | {"max_source_positions": places} | rates)
    model = transformers.WhisperForConditionalGeneration._from_config(values, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, leaf in model.named_parameters():
            full = torch.empty(10, 24) if path.endswith("encoder.embed_positions.weight") else leaf
            leaf.copy_(generic(path, full)[: len(leaf)])
    return model


@functools.cache
def weights() -> Any:
    """The reference's parameters, by name and by nothing else."""
    state, stored = dict(reference().named_parameters()), whisper.hf_names(CONFIG)
    assert set(stored.values()) == state.keys()
    return tree.unflatten({path: state[name].detach().clone() for path, name in stored.items()})


def clips() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 2 * size, generator=generator) for size in SIZES]


def prepared_pair() -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """(packed inputs, (clip, tokens) of each document in order)."""
    frames, positions, sources = fnmodels.inputs.frame_rows(clips(), CONFIG, length=24)
    tokens = torch.randint(61, TARGETS.shape, generator=torch.Generator().manual_seed(1))
    given = {"positions": positions, "segment_ids": sources}
    given |= {"decoder_positions": positions_of(TARGETS), "decoder_segment_ids": TARGETS}
    prepared = fnmodels.prepare_pair(CONFIG, frames, tokens, **given)
    documents = [tokens[row, TARGETS[row] == s] for row in range(2) for s in (1, 2, 3) if (TARGETS[row] == s).any()]
    return prepared, list(zip(clips(), documents, strict=True))


@pytest.mark.parametrize("kernel", ["math", "auto"])
def test_packed_clips_are_as_each_alone_in_transformers(kernel: str) -> None:
    prepared, found = prepared_pair()
    with torch.no_grad():
        got = fnmodels.forward(weights(), *prepared, config=CONFIG, kernel=kernel)
        at = fnmodels.documents(TARGETS)
        for i, (mel, tokens) in enumerate(found):
            model = reference(mel.shape[1] // 2)
            theirs = model(input_features=mel[None], decoder_input_ids=tokens[None], use_cache=False).logits[0]
            assert_close(got[at.number == i], theirs)


def test_the_encoder_alone_in_any_order() -> None:
    """Frames of clips in a row, permuted, mapped over rows, with NaN at padding."""
    frames, positions, sources = fnmodels.inputs.frame_rows(clips(), CONFIG, length=24)
    frames[sources == 0] = torch.nan
    config, own = CONFIG.encoder, fnmodels.stack_params(weights(), "encoder")
    prepared = fnmodels.prepare(config, frames, positions=positions, segment_ids=sources)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))

    def run(batch: Any) -> Tensor:
        out: Tensor = fnmodels.forward(own, *batch, config=config, kernel="math")
        return out

    with torch.no_grad():
        out, found = run(prepared), fnmodels.documents(sources)
        for i, mel in enumerate(clips()):
            theirs = reference(mel.shape[1] // 2).model.encoder(mel[None]).last_hidden_state[0]
            assert_close(out[found.number == i], theirs)
        valid = sources > 0
        assert_close(run(fnmodels.permute(prepared, order))[valid[:, order]], out[:, order][valid[:, order]])
        assert_close(torch.vmap(run)(fnmodels.rows(prepared))[:, 0][valid], out[valid])


def test_every_parameter_is_read() -> None:
    prepared, _ = prepared_pair()
    run = functools.partial(fnmodels.forward, config=CONFIG, kernel="math")
    flat, wanted = tree.flatten(weights()), run(weights(), *prepared)
    for path in flat:
        changed = run(tree.unflatten(flat | {path: flat[path] * 1.02}), *prepared)
        assert (changed - wanted).abs().max() > 1e-5, path


def test_mistakes_would_be_seen() -> None:
    """A convolution that reads past its clip, another clip's memory, wrong positions: far outside of the tolerance."""
    (inputs, masks, freqs), _ = prepared_pair()
    run = functools.partial(fnmodels.forward, config=CONFIG, kernel="math")
    wanted = run(weights(), inputs, masks, freqs)

    def off(encoder: Any = None, **changed: Any) -> float:
        given = inputs | {"encoder": inputs["encoder"] | (encoder or {})}
        return float((run(weights(), given, masks | changed, freqs) - wanted)[TARGETS > 0].abs().max())

    frames = inputs["encoder"]["tokens"].clone()
    frames[0, 9, -6:] = frames[0, 10, 12:18]  # the first clip's last token sees the next clip's first frame
    assert off({"tokens": frames}) > 1e-3
    assert off({"positions": (inputs["encoder"]["positions"] + 1) % 10}) > 1e-2
    cross = masks["cross"]
    assert off(cross=fnmodels.inputs.Mask(*[cross.q_positions, cross.q_segments.clamp(max=1)], *_rest(cross))) > 1e-2


def _rest(mask: Any) -> tuple[Any, ...]:
    return mask.kv_positions, mask.kv_segments, mask.q_spans, mask.kv_spans, mask.rule


def test_gradients_of_every_parameter() -> None:
    """Of the loss on packed clips against transformers' on the clips one by one."""
    prepared, found = prepared_pair()
    labels = torch.randint(61, TARGETS.shape, generator=torch.Generator().manual_seed(2)).where(TARGETS > 0, -100)
    (inputs, masks, _), at = prepared, fnmodels.documents(TARGETS)
    batch = {"tokens": inputs["encoder"]["tokens"], "positions": inputs["encoder"]["positions"], "labels": labels}
    batch |= {"segment_ids": masks["cross"].kv_segments, "decoder_segment_ids": TARGETS}
    batch |= {"decoder_tokens": inputs["decoder"]["tokens"], "decoder_positions": inputs["decoder"]["positions"]}
    theirs: dict[str, Tensor] = {}
    for i, (mel, tokens) in enumerate(found):
        model = copy.deepcopy(reference(mel.shape[1] // 2)).requires_grad_()
        logits = model(input_features=mel[None], decoder_input_ids=tokens[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits, labels[at.number == i], reduction="sum").backward()
        for name, leaf in model.named_parameters():
            grad = torch.zeros(10, *leaf.shape[1:]) if "encoder.embed_positions" in name else torch.zeros_like(leaf)
            grad[: len(leaf)] = leaf.grad
            theirs[name] = theirs.get(name, 0) + grad
    for kernel in ("math", "auto"):
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), weights())
        total, count = train.losses.pair_loss(own, batch, config=CONFIG, kernel=kernel)
        assert int(count) == int((TARGETS > 0).sum())
        flat = tree.flatten(own)
        for path, grad in zip(flat, torch.autograd.grad(total, list(flat.values())), strict=True):
            wanted = theirs[whisper.hf_names(CONFIG)[path]]
            assert (grad - wanted).abs().max() <= 3e-5 * max(1.0, float(wanted.abs().max())), path


def test_a_train_step_leaves_the_positions_of_the_encoder() -> None:
    prepared, _ = prepared_pair()
    (inputs, masks, _), labels = prepared, torch.where(TARGETS > 0, 3, -100)
    batch = {"tokens": inputs["encoder"]["tokens"], "positions": inputs["encoder"]["positions"], "labels": labels}
    batch |= {"segment_ids": masks["cross"].kv_segments, "decoder_segment_ids": TARGETS}
    batch |= {"decoder_tokens": inputs["decoder"]["tokens"], "decoder_positions": inputs["decoder"]["positions"]}
    optimizer = train.adamw(1e-2, spec=whisper.spec(CONFIG))
    step = train.make_step(functools.partial(train.losses.pair_loss, config=CONFIG), optimizer, remat="full")
    state, seen = train.init_state(weights(), optimizer), []
    for _ in range(3):
        state, metrics = step(state, list(fnmodels.split(batch, 2)))
        seen.append(float(metrics["loss"]))
    assert seen[-1] < seen[0] - 0.5
    assert torch.equal(state.params["encoder"]["embed_positions"], weights()["encoder"]["embed_positions"])
    assert not torch.equal(state.params["decoder"]["embed_positions"], weights()["decoder"]["embed_positions"])


def test_files(tmp_path: Path) -> None:
    """A folder of transformers is read without leftovers; ours is read by transformers, and both are bit-equal."""
    model = reference()
    model.save_pretrained(tmp_path / "theirs")
    config, params = P.load_pretrained(tmp_path / "theirs")
    assert config == CONFIG == whisper.Config.from_hf(model.config.to_dict() | {"architectures": TINY["architectures"]})
    wanted, found = tree.flatten(weights()), tree.flatten(params)
    assert found.keys() == wanted.keys() and all(torch.equal(found[path], wanted[path]) for path in wanted)
    P.save_pretrained(tmp_path / "ours", config, params)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(leaf, model.state_dict()[path]) for path, leaf in again.state_dict().items())


def test_sizes_and_init() -> None:
    """transformers counts the same on meta; tests/fnmodels/models/test_presets.py holds all presets to TOTALS."""
    for name in ("whisper-tiny", "whisper-large-v3-turbo"):
        with torch.device("meta"):
            model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**whisper.PRESETS[name]))
        assert model.num_parameters() == TOTALS[name]
    made = P.init(CONFIG, 0)["encoder"]["embed_positions"]
    theirs = transformers.models.whisper.modeling_whisper.sinusoids(*made.shape)
    torch.testing.assert_close(made, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bins", [80, 128])
def test_log_mel_equals_the_feature_extractor(bins: int) -> None:
    """To 1e-5 in fp64 (its filters and sums are fp64) and 2e-4 in fp32, whose logarithms of near silence differ."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=1)
    np.testing.assert_allclose(mel_filters(bins, dtype=torch.float64).mT, extractor.mel_filters, atol=1e-12)
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(12_345, dtype=torch.float64) / 16_000
    sound = 0.3 * torch.sin(2 * torch.pi * (300 + 900 * time) * time) + 0.01 * torch.randn(
        12_345, generator=generator, dtype=torch.float64
    )
    padded = torch.nn.functional.pad(sound, (0, 16_000 - 12_345))
    wanted = torch.from_numpy(extractor._np_extract_fbank_features(padded[None].numpy(), "cpu"))
    assert wanted.std() > 0.3
    both = torch.stack((sound, sound.flip(0)))
    torch.testing.assert_close(log_mel(both, bins=bins, length=16_000)[0], wanted[0].double(), atol=1e-5, rtol=0)
    theirs = extractor(sound.float().numpy(), sampling_rate=16_000, return_tensors="pt").input_features
    for reference_values in (theirs[0], wanted[0].float()):
        found = log_mel(sound.float(), bins=bins, length=16_000)
        torch.testing.assert_close(found, reference_values, atol=2e-4, rtol=0)


@pytest.mark.parametrize("samples", [1, 319, 320, 321, 12_345])
def test_log_mel_without_a_length_pads_the_clip_to_whole_tokens(samples: int) -> None:
    sound = torch.rand(2, samples, generator=torch.Generator().manual_seed(0)) - 0.5
    tokens = -(-samples // 320)
    assert log_mel(sound).shape == (2, 80, 2 * tokens)
    assert torch.equal(log_mel(sound), log_mel(sound, length=320 * tokens))
    assert len(fnmodels.inputs.frame_rows([log_mel(sound[0], bins=6)], CONFIG)[0][0]) == tokens


def test_bad_use_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="multiple of 320"):
        log_mel(torch.zeros(100), length=100)
    with pytest.raises(ValueError, match="There are 0 samples"):
        log_mel(torch.zeros(0))
    with pytest.raises(ValueError, match="floats from -1 to 1"):
        log_mel(torch.zeros(320, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"Clip 1 must be \[6, frames\]"):
        fnmodels.inputs.frame_rows([torch.zeros(6, 4), torch.zeros(6, 5)], CONFIG)
    with pytest.raises(ValueError, match="Clip 0 has 10 tokens"):
        fnmodels.inputs.frame_rows(clips(), CONFIG, length=8)
    prepared = fnmodels.prepare(CONFIG.encoder, torch.zeros(1, 3, 29))
    own = fnmodels.stack_params(weights(), "encoder")
    with pytest.raises(ValueError, match=r"frames \[B, S, 30\]"):
        fnmodels.forward(own, *prepared, config=CONFIG.encoder)
    with pytest.raises(ValueError, match="bare tokens"):
        fnmodels.forward(own, torch.zeros(1, 3, 30), *prepared[1:], config=CONFIG.encoder)
    long = fnmodels.prepare(CONFIG.encoder, torch.zeros(1, 11, 30))
    with pytest.raises(ValueError, match="positions go from 0 to 10"):
        fnmodels.forward(own, *long, config=CONFIG.encoder)
    with pytest.raises(P.UnsupportedError, match="scale_embedding"):
        whisper.Config.from_hf(TINY | {"scale_embedding": True})
    with pytest.raises(P.UnsupportedError, match="WhisperForAudioClassification"):
        whisper.Config.from_hf(TINY | {"architectures": ["WhisperForAudioClassification"]})
    with pytest.raises(P.ConfigError, match="multiple of decoder_attention_heads 5"):
        whisper.Config.from_hf(TINY | {"decoder_attention_heads": 5})


def test_training_with_dropout_is_distributed_as_in_transformers() -> None:
    rates = {"dropout": 0.45, "attention_dropout": 0.3, "activation_dropout": 0.6}
    config = whisper.Config.from_hf(TINY | rates)
    mel, model = clips()[0][:, :10], reference(5, **rates).train()

    def given(rows: int) -> tuple[Tensor, ...]:
        tensors = (torch.tensor([[1, 7, 30, 12]]), *fnmodels.inputs.frame_rows([mel], config), mel[None])
        return tuple(t.expand(rows, *t.shape[1:]) for t in tensors)

    @torch.no_grad()
    def theirs_of(rows: int) -> Tensor:
        tokens, *_, mels = given(rows)
        torch.manual_seed(0)
        logits: Tensor = model(mels, decoder_input_ids=tokens, use_cache=False).logits
        return logits

    @torch.no_grad()
    def ours(dropout: Dropout, rows: int = ROWS) -> Tensor:
        own, (tokens, frames, positions, sources, _) = dataclasses.replace(config, dropout=dropout), given(rows)
        places = {"positions": positions, "segment_ids": sources}
        prepared = fnmodels.prepare_pair(own, frames, tokens, **places, rng=1)
        return fnmodels.forward(weights(), *prepared, config=own)

    with fixed_dropout():
        check_places(functools.partial(ours, rows=1), config.dropout, theirs_of(1))
    theirs = theirs_of(ROWS)
    means, variances = apart(ours(config.dropout), theirs)
    assert means < 1.5 and abs(variances) < 0.08, (means, variances)
    for place in ("weights", "attention", "mlp", "embedding", "neurons"):  # planted: a place that is forgotten
        less = dataclasses.replace(config.dropout, **{place: 0.0})
        means, variances = apart(ours(less), theirs)
        assert means > 1.5 or abs(variances) > 0.08, (place, means, variances)
