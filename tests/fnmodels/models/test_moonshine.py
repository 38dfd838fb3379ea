"""Moonshine: packed clips equal each alone in transformers, gradients and files too; moments of clips; sizes."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.inputs.waves import sample_rows
from fnmodels.models.encoder_decoder import moonshine
from fnmodels.ops.dropout import Dropout
from tests.support import wrappers
from tests.support.cases import positions_of, segments
from tests.support.dropouts import apart, check_places, fixed_dropout
from tests.support.oracle import assert_close, on_disk
from tests.variants.moonshine import TINY, TOTALS, variants

# Samples of the clips, of which a token reads 895 and the next begins 384 later: 4, 1, 2, 10 and 5 tokens, with 0, 5,
# 1, 3 and 4 outputs of the first convolution that no token reads.
SIZES = (895 + 3 * 384, 895 + 5 * 64 + 63, 895 + 384 + 64, 895 + 9 * 384 + 3 * 64, 895 + 4 * 384 + 4 * 64 + 1)
ROWS = 3000
TARGETS = segments((5, 3, 7), (1, 13, -1))
every_variant = pytest.mark.parametrize("name", variants())


@functools.cache
def config_of(name: str = "moonshine") -> moonshine.Config:
    return moonshine.Config.from_hf(variants()[name])


@functools.cache
def reference(name: str = "moonshine") -> Any:
    """transformers' model, every parameter generic; its padding token is a token like others."""
    config = transformers.MoonshineConfig(**variants()[name])
    cls = transformers.MoonshineForConditionalGeneration
    return wrappers.perturbed(cls._from_config(config, attn_implementation="eager"))


@functools.cache
def weights(name: str = "moonshine") -> Any:
    return wrappers.ours_of(on_disk(reference(name)), config_of(name))


def clips() -> list[Tensor]:
    """Of different loudness, and not around 0, so that moments of another clip would be others."""
    generator = torch.Generator().manual_seed(0)
    return [0.1 * (i + 1) * (torch.randn(size, generator=generator) + 0.5) for i, size in enumerate(SIZES)]


def prepared_pair(name: str = "moonshine", length: int | None = 16) -> tuple[Any, list[Tensor]]:
    """(packed inputs with NaN at padding, the tokens of each document in order)."""
    waves, positions, sources = sample_rows(clips(), config_of(name), length=length)
    assert [int((row > 0).sum()) for row in sources] == ([7, 15] if length else [4, 1, 2, 10, 5])
    waves[sources == 0] = torch.nan
    tokens = torch.randint(61, TARGETS.shape, generator=torch.Generator().manual_seed(1))
    given = {"positions": positions, "segment_ids": sources}
    given |= {"decoder_positions": positions_of(TARGETS), "decoder_segment_ids": TARGETS}
    documents = [tokens[row, TARGETS[row] == s] for row in range(2) for s in (1, 2, 3) if (TARGETS[row] == s).any()]
    return fnmodels.prepare_pair(config_of(name), waves, tokens, **given), documents


def theirs_of(name: str, clip: Tensor, tokens: Tensor) -> Tensor:
    logits: Tensor = reference(name)(clip[None], decoder_input_ids=tokens[None], use_cache=False).logits[0]
    return logits


@every_variant
@pytest.mark.parametrize("kernel", ["math", "auto"])
def test_packed_clips_are_as_each_alone_in_transformers(name: str, kernel: str) -> None:
    prepared, documents = prepared_pair(name)
    with torch.no_grad():
        got = fnmodels.forward(weights(name), *prepared, config=config_of(name), kernel=kernel)
        at = fnmodels.documents(TARGETS)
        for i, (clip, tokens) in enumerate(zip(clips(), documents, strict=True)):
            assert_close(got[at.number == i], theirs_of(name, clip, tokens))


def test_the_encoder_alone_in_any_order() -> None:
    """Clips in a row, permuted, mapped over rows, one by one, with NaN at padding and any numbers of segments."""
    waves, positions, sources = sample_rows(clips(), config_of(), length=16)
    waves[sources == 0] = torch.nan
    config, own = config_of().encoder, fnmodels.stack_params(weights(), "encoder")
    valid, numbers = sources > 0, torch.tensor([0, 70, 3, 9])[sources]
    prepared = fnmodels.prepare(config, waves, positions=positions, segment_ids=numbers)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))

    def run(batch: Any, kernel: str = "math") -> Tensor:
        out: Tensor = fnmodels.forward(own, *batch, config=config, kernel=kernel)
        return out

    with torch.no_grad():
        out, found = run(prepared), fnmodels.documents(sources)
        for i, clip in enumerate(clips()):
            assert_close(out[found.number == i], reference().model.encoder(clip[None]).last_hidden_state[0])
        assert_close(run(fnmodels.permute(prepared, order))[valid[:, order]], out[:, order][valid[:, order]])
        assert_close(torch.vmap(run)(fnmodels.rows(prepared))[:, 0][valid], out[valid])
        alone, places, ids = sample_rows(clips(), config)
        batch = fnmodels.prepare(config, alone, positions=places, segment_ids=ids)
        assert torch.equal(run(batch, "invariant")[ids > 0], run(prepared, "invariant")[valid])


def test_every_parameter_is_read() -> None:
    prepared, _ = prepared_pair("moonshine_biased")
    run = functools.partial(fnmodels.forward, config=config_of("moonshine_biased"), kernel="math")
    flat, valid = tree.flatten(weights("moonshine_biased")), TARGETS > 0
    with torch.no_grad():
        wanted = run(tree.unflatten(flat), *prepared)
        for path in flat:
            if path.endswith("cross_attention.k_bias"):  # keys without rotation: the softmax cancels it
                continue
            changed = run(tree.unflatten(flat | {path: flat[path] * 1.02}), *prepared)
            assert (changed - wanted)[valid].abs().max() > 1e-5, path


def test_mistakes_would_be_seen() -> None:
    """Moments of two clips, of all outputs that tokens hold, without those that none reads; other frequencies."""
    (inputs, masks, freqs), _ = prepared_pair()
    run = functools.partial(fnmodels.forward, config=config_of(), kernel="math")
    encoder = inputs["encoder"]

    def off(**changed: Any) -> float:
        given = inputs | {"encoder": encoder | changed}
        with torch.no_grad():
            return float((run(weights(), given, masks, freqs) - wanted)[TARGETS > 0].abs().max())

    wanted = run(weights(), inputs, masks, freqs)
    assert off() == 0
    assert off(clip=encoder["clip"].clamp(max=1)) > 1e-3
    for count in (18, 6):
        tokens = encoder["tokens"].clone()
        tokens[..., -1] = count
        assert off(tokens=tokens) > 1e-3
    tokens = encoder["tokens"].clone()
    tokens[..., -1].clamp_(max=13)
    assert off(tokens=tokens) > 1e-4
    others = {name: {kind: table.flip(-2) for kind, table in tables.items()} for name, tables in freqs.items()}
    with torch.no_grad():
        assert (run(weights(), inputs, masks, others) - wanted)[TARGETS > 0].abs().max() > 1e-3


@every_variant
def test_gradients_equal_transformers(name: str) -> None:
    """Of the loss on packed clips, and transformers' on the clips one by one."""
    (inputs, masks, _), documents = prepared_pair(name)
    labels = torch.randint(61, TARGETS.shape, generator=torch.Generator().manual_seed(2)).where(TARGETS > 0, -100)
    encoder, at = inputs["encoder"], fnmodels.documents(TARGETS)
    batch = {"tokens": encoder["tokens"], "positions": encoder["positions"], "labels": labels}
    batch |= {"segment_ids": masks["cross"].kv_segments, "decoder_segment_ids": TARGETS}
    batch |= {"decoder_tokens": inputs["decoder"]["tokens"], "decoder_positions": inputs["decoder"]["positions"]}
    model = reference(name)
    model.zero_grad()
    for i, (clip, tokens) in enumerate(zip(clips(), documents, strict=True)):
        logits = theirs_of(name, clip, tokens)
        torch.nn.functional.cross_entropy(logits, labels[at.number == i], reduction="sum").backward()
    for kernel in ("math", "auto"):
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), weights(name))
        total, count = train.losses.pair_loss(own, batch, config=config_of(name), kernel=kernel)
        total.backward()
        assert int(count) == int((TARGETS > 0).sum())
        wrappers.assert_gradients(model, config_of(name), own)


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(reference(name), config_of(name), tmp_path, parts=())
    values = reference(name).config.to_dict() | {"architectures": TINY["architectures"]}
    assert config_of(name) == moonshine.Config.from_hf(values)
    pads = [moonshine.Config.from_hf(v).to_hf().get("pad_head_dim_to_multiple_of") for v in (TINY, values)]
    assert pads == [5, values["pad_head_dim_to_multiple_of"]]


def test_sizes() -> None:
    """transformers counts the same on meta; tests/fnmodels/models/test_presets.py holds the presets to TOTALS."""
    for name, total in TOTALS.items():
        with torch.device("meta"):
            values = transformers.MoonshineConfig(**moonshine.PRESETS[name])
            assert transformers.MoonshineForConditionalGeneration(values).num_parameters() == total
        assert moonshine.Config.from_hf(moonshine.PRESETS[name]) == moonshine.Config.from_hf(
            values.to_dict() | {"architectures": TINY["architectures"]}
        )


@pytest.mark.parametrize("samples", [895, 895 + 383, 895 + 384, 16_000, 160_001])
def test_a_clip_has_as_many_tokens_as_in_transformers(samples: int) -> None:
    clip = torch.rand(samples, generator=torch.Generator().manual_seed(0))
    rows, positions, _ = sample_rows([clip], config_of())
    with torch.no_grad():
        assert reference().model.encoder(clip[None]).last_hidden_state.shape[1] == rows.shape[1] == positions.max() + 1
    assert rows[0, :, -1].sum() == (samples - 127) // 64 + 1  # each output counts once


def test_bad_use_is_a_sentence() -> None:
    config, own = config_of().encoder, fnmodels.stack_params(weights(), "encoder")
    with pytest.raises(ValueError, match=r"Clip 1 must be floats .* at least 895 samples"):
        sample_rows([torch.zeros(895), torch.zeros(894)], config)
    with pytest.raises(ValueError, match="sample_rows needs at least one clip"):
        sample_rows([], config)
    with pytest.raises(ValueError, match="Clip 3 has 10 tokens"):
        sample_rows(clips(), config, length=3)
    prepared = fnmodels.prepare(config, torch.zeros(1, 3, 1215))
    with pytest.raises(ValueError, match=r"samples \[B, S, 1216\] .* not torch.float32 \[1, 3, 1215\]"):
        fnmodels.forward(own, *prepared, config=config)
    with pytest.raises(ValueError, match="says where clips are"):
        fnmodels.forward(own, torch.zeros(1, 3, 1216), *prepared[1:], config=config)
    for field, value in (("encoder_num_key_value_heads", 1), ("decoder_num_attention_heads", 4)):
        with pytest.raises(P.UnsupportedError, match=f"'{field}' is {value}; only 3"):
            moonshine.Config.from_hf(TINY | {field: value})
    with pytest.raises(P.UnsupportedError, match="the rope is 'linear'"):
        moonshine.Config.from_hf(TINY | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    with pytest.raises(P.ConfigError, match="decoder_act 'nothing' is unknown"):
        moonshine.Config(**{**vars(config_of()), "decoder_act": "nothing"})


def test_training_with_dropout_is_distributed_as_in_transformers() -> None:
    """Weights of attention, those to the encoder's tokens too."""
    values = TINY | {"attention_dropout": 0.4}
    config, clip, tokens = moonshine.Config.from_hf(values), clips()[0][: 895 + 384], torch.tensor([[1, 7, 30, 12]])
    assert config.to_hf()["attention_dropout"] == 0.4
    model = transformers.MoonshineForConditionalGeneration._from_config(
        transformers.MoonshineConfig(**values), attn_implementation="eager"
    )
    model = wrappers.perturbed(model).train()

    @torch.no_grad()
    def theirs_of(rows: int) -> Tensor:
        torch.manual_seed(0)
        given = {"decoder_input_ids": tokens.expand(rows, -1), "use_cache": False}
        logits: Tensor = model(clip.expand(rows, -1), **given).logits
        return logits

    @torch.no_grad()
    def ours(dropout: Dropout, rows: int = ROWS) -> Tensor:
        own, made = dataclasses.replace(config, dropout=dropout), sample_rows([clip], config)
        waves, positions, sources = (t.expand(rows, *t.shape[1:]) for t in made)
        given = {"positions": positions, "segment_ids": sources, "rng": 1}
        prepared = fnmodels.prepare_pair(own, waves, tokens.expand(rows, -1), **given)
        return fnmodels.forward(weights(), *prepared, config=own)

    with fixed_dropout():
        check_places(functools.partial(ours, rows=1), config.dropout, theirs_of(1))
    theirs = theirs_of(ROWS)
    means, variances = apart(ours(config.dropout), theirs)
    assert means < 1.5 and abs(variances) < 0.08, (means, variances)
    means, variances = apart(ours(Dropout()), theirs)  # planted: none
    assert means > 1.5 or abs(variances) > 0.08, (means, variances)
