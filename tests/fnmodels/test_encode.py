"""Caches of decoders with cross attention, of every pair: equal to full rows; greedy tokens as transformers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.encoder_decoder import bart, moonshine, t5, t5gemma, whisper
from tests.support.cases import generic_params, positions_of, segments
from tests.support.oracle import assert_close
from tests.variants import bart as barts
from tests.variants import t5gemma as t5gemmas
from tests.variants.moonshine import TINY as MOONSHINE
from tests.variants.t5 import variants
from tests.variants.whisper import TINY

CONFIGS: dict[str, Any] = {name: t5.Config.from_hf(variants()[name]) for name in ("t5", "t5_v1_1")}
CONFIGS["umt5"] = t5.Config.from_hf(variants()["umt5"])
CONFIGS |= {name: bart.Config.from_hf(barts.variants()[name]) for name in ("bart", "mbart", "m2m_100")}
CONFIGS |= {
    name: t5gemma.Config.from_hf(values) for name, values in t5gemmas.variants().items() if "encoder" not in name
}
CONFIGS["whisper"] = whisper.Config.from_hf(TINY)
CONFIGS["moonshine"] = moonshine.Config.from_hf(MOONSHINE)
SOUNDS = ("whisper", "moonshine")  # whose encoders read vectors
every_model = pytest.mark.parametrize("name", CONFIGS)
SOURCES = segments((9, -1), (4, 6))  # one document and padding; two documents
TARGETS = segments((7, -5), (5, 7))
SAMPLES = 895 - 384  # of a clip of Moonshine without tokens; each has 384


def weights(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    return tree.map(lambda leaf: leaf.to(dtype), generic_params(config))


def source(config: Any) -> Tensor:
    """What the encoder reads in two rows of ten tokens, NaN at padding where it reads vectors."""
    generator = torch.Generator().manual_seed(0)
    if config.model_type not in SOUNDS:
        return torch.randint(61, SOURCES.shape, generator=generator)
    frames = sounds(config, (9, 4, 6), generator, length=10)
    frames[SOURCES == 0] = torch.nan
    return frames


def sounds(config: Any, sizes: tuple[int, ...], generator: torch.Generator, length: int | None = None) -> Tensor:
    """Rows of clips of so many tokens, fp64."""
    if config.model_type == "whisper":
        mels = [torch.randn(6, 2 * size, generator=generator, dtype=torch.float64) for size in sizes]
        return fnmodels.inputs.frame_rows(mels, config, length=length)[0]
    waves = [torch.randn(SAMPLES + 384 * size, generator=generator, dtype=torch.float64) for size in sizes]
    return fnmodels.inputs.sample_rows(waves, config, length=length)[0]


def begun(config: Any, params: Any, **how: Any) -> Any:
    """A cache after the encoder."""
    given = {"segment_ids": SOURCES, "positions": positions_of(SOURCES)}
    prepared = fnmodels.prepare(config.encoder, source(config), **given)
    return fnmodels.cache.encode(
        params, *prepared, config=config, **{"capacity": 12, "rings": False, "kernel": "math"} | how
    )


def full_rows(config: Any, params: Any, tokens: Tensor) -> Tensor:
    given = {"segment_ids": SOURCES, "positions": positions_of(SOURCES)}
    given |= {"decoder_segment_ids": TARGETS, "decoder_positions": positions_of(TARGETS)}
    prepared = fnmodels.prepare_pair(config, source(config), tokens, **given)
    return fnmodels.forward(params, *prepared, config=config, kernel="math")


def in_pieces(config: Any, params: Any, tokens: Tensor, cache: Any, sizes: tuple[int, ...], run: Any) -> Tensor:
    own, found, begin = fnmodels.stack_params(params, "decoder"), [], 0
    for size in sizes:
        part = slice(begin, begin + size)
        step = fnmodels.prepare_step(config.decoder, tokens[:, part], cache, segment_ids=TARGETS[:, part])
        logits, cache = run(own, *step, cache, config=config.decoder, at="all", kernel="math")
        found.append(logits)
        begin += size
    return torch.cat(found, dim=1)


@every_model
@pytest.mark.parametrize("run", [fnmodels.prefill, fnmodels.decode_])
@pytest.mark.parametrize("sizes", [(12,), (3, 1, 5, 3), (1,) * 12])
def test_cached_equals_full_rows(name: str, sizes: tuple[int, ...], run: Any) -> None:
    """Ragged, packed and padded rows, with NaN in empty slots and in what the encoder has at padding."""
    config = CONFIGS[name]
    params, tokens = weights(config), torch.randint(61, TARGETS.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = full_rows(config, params, tokens)
        cache = begun(config, params)
        layers = tuple(
            {n: t if n.startswith("memory") else torch.full_like(t, torch.nan) for n, t in entry.items()}
            for entry in cache.layers
        )
        found = in_pieces(config, params, tokens, replace(cache, layers=layers), sizes, run)
    assert (found - wanted)[TARGETS > 0].abs().max() < 1e-12 * wanted[TARGETS > 0].abs().max()


@every_model
def test_a_cache_with_rings_equals_full_rows(name: str) -> None:
    """The default: windows keep their last tokens alone, and each row has one document."""
    config = CONFIGS[name]
    params, tokens = weights(config), torch.randint(61, TARGETS.shape, generator=torch.Generator().manual_seed(1))
    encoded = source(config).nan_to_num() if config.model_type in SOUNDS else source(config)
    own, found = fnmodels.stack_params(params, "decoder"), []
    with torch.no_grad():
        prepared = fnmodels.prepare_pair(config, encoded, tokens)
        wanted = fnmodels.forward(params, *prepared, config=config, kernel="math")
        given = fnmodels.prepare(config.encoder, encoded)
        cache = fnmodels.cache.encode(params, *given, config=config, capacity=tokens.shape[1], kernel="math")
        for token in tokens.split(1, 1):
            step = fnmodels.prepare_step(config.decoder, token, cache)
            logits, cache = fnmodels.decode_(own, *step, cache, config=config.decoder, at="all", kernel="math")
            found.append(logits)
    assert (torch.cat(found, 1) - wanted).abs().max() < 1e-12 * wanted.abs().max()


@every_model
def test_mistakes_would_be_seen(name: str) -> None:
    """Another document's memory, and positions of keys that are one off where each distance has a bias or a window."""
    config = CONFIGS[name]
    params, tokens = weights(config), torch.randint(61, TARGETS.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, cache = full_rows(config, params, tokens), begun(config, params)
        memory = replace(cache.memory, segments=cache.memory.segments.clamp(max=1))
        mixed = in_pieces(config, params, tokens, replace(cache, memory=memory), (12,), fnmodels.prefill)
        assert (mixed - wanted)[1].abs().max() > 1e-3
        step = fnmodels.prepare_step(config.decoder, tokens[:, :5], cache, segment_ids=TARGETS[:, :5])
        own = fnmodels.stack_params(params, "decoder")
        _, cache = fnmodels.prefill(own, *step, cache, config=config.decoder, kernel="math")
        slots = {kind: replace(held, positions=held.positions - 1) for kind, held in cache.slots.items()}
        inputs, *rest = fnmodels.prepare_step(config.decoder, tokens[:, 5:6], cache, segment_ids=TARGETS[:, 5:6])
        right, _ = fnmodels.decode(own, inputs, *rest, cache, config=config.decoder, kernel="math")
        moved = replace(cache, slots=slots)
        off, _ = fnmodels.decode(own, inputs, *rest, moved, config=config.decoder, kernel="math")
        assert_close(right[:, 0], wanted[:, 5])
        assert bool((off - right).abs().max() > 1e-3) == (config.model_type in (*t5.MODEL_TYPES, "t5gemma"))


def prefilled(config: Any, params: Any, cache: Any, tokens: Tensor, kernel: str = "math") -> tuple[Tensor, Any]:
    """Logits of tokens of one document per row, and the cache after them."""
    with torch.no_grad():
        step = fnmodels.prepare_step(config.decoder, tokens, cache, segment_ids=torch.ones_like(tokens))
        own = fnmodels.stack_params(params, "decoder")
        return fnmodels.prefill(own, *step, cache, config=config.decoder, kernel=kernel)


def test_rows_keep_their_bits_wherever_they_stand() -> None:
    """With kernel="invariant", which T5's biases do not have."""
    config = CONFIGS["whisper"]
    params, tokens = weights(config), torch.randint(61, (2, 6), generator=torch.Generator().manual_seed(1))
    after = partial(prefilled, config, params, kernel="invariant")
    _, cache = after(begun(config, params, kernel="invariant"), tokens[:, :3])
    swapped = after(fnmodels.take(cache, [1, 0]), tokens[[1, 0], 3:4])[0]
    assert torch.equal(swapped, after(cache, tokens[:, 3:4])[0][[1, 0]])


@every_model
def test_rows_of_caches(name: str) -> None:
    """Taken, inserted and truncated rows go on as those that were never moved.

    fp64: a row has other last bits at another place of a product, where its terms may be summed in another order. The
    three layers have some 36 products of at most 44 terms, whose roundings add up like a random walk of 36 * 44 steps
    of half an eps: 20 eps of the largest logit.
    """
    config = CONFIGS[name]
    params, tokens = weights(config), torch.randint(61, (2, 6), generator=torch.Generator().manual_seed(1))
    after = partial(prefilled, config, params)
    _, cache = after(begun(config, params), tokens[:, :3])
    wanted, longer = after(cache, tokens[:, 3:4])
    swapped = fnmodels.take(cache, [1, 0])
    assert all(torch.equal(a, b[[1, 0]]) for a, b in zip(tree.leaves(swapped), tree.leaves(cache), strict=True))
    bound = 20 * torch.finfo(torch.float64).eps * float(wanted.abs().max())
    torch.testing.assert_close(after(swapped, tokens[[1, 0], 3:4])[0], wanted[[1, 0]], rtol=0, atol=bound)
    back = fnmodels.insert(swapped, [0, 1], cache)
    assert torch.equal(after(back, tokens[:, 3:4])[0], wanted)
    assert torch.equal(after(fnmodels.truncate(longer, 3), tokens[:, 3:4])[0], wanted)
    assert_close(after(fnmodels.resize(cache, 20), tokens[:, 3:4])[0], wanted)
    memory = replace(cache.memory, **{n: getattr(cache.memory, n)[:, :9] for n in ("positions", "segments")})
    with pytest.raises(ValueError, match="memories of 10 and 9 tokens"):
        fnmodels.insert(cache, [0, 1], replace(cache, memory=memory))


def lively(config: Any) -> Any:
    """fp32 params with which a model does not write one token again and again."""
    flat = tree.flatten(weights(config, torch.float32))
    if type(config) is bart.Config:  # whose head is tied
        flat = {path: 6 * t if path.endswith("_proj") else t for path, t in flat.items()}
        flat |= {path: t - 1 for path, t in flat.items() if path.endswith("norm_bias")}
    if type(config) is moonshine.Config:  # likewise
        flat = {path: 2 * t if path.endswith("_proj") and "conv" not in path else t for path, t in flat.items()}
        flat["decoder.norm"] = flat["decoder.norm"] - 1
    return tree.unflatten(flat)


@every_model
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Twelve tokens after the start, of two rows whose encoder reads equally many tokens."""
    config = CONFIGS[name]
    params = lively(config)
    P.save_pretrained(tmp_path, config, params)
    architecture = transformers.AutoConfig.from_pretrained(tmp_path).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(tmp_path, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    if config.model_type not in SOUNDS:
        tokens = torch.randint(2, 61, (2, 10), generator=generator)
        given: Any = {"input_ids": tokens}
    elif config.model_type == "moonshine":
        waves = torch.randn(2, SAMPLES + 384 * 10, generator=generator)
        tokens, given = fnmodels.inputs.sample_rows(list(waves), config)[0], {"input_values": waves}
    else:
        mel = torch.randn(2, 6, 20, generator=generator)
        tokens, given = fnmodels.inputs.frame_rows(list(mel), config)[0], {"input_features": mel}
    ids = torch.full((2, 1), config.decoder_start_token_id)
    wanted = transformers.GenerationMixin.generate(
        model, **given, decoder_input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=False
    )
    decoder, own = config.decoder, fnmodels.stack_params(params, "decoder")
    with torch.no_grad():
        cache = fnmodels.cache.encode(params, *fnmodels.prepare(config.encoder, tokens), config=config, capacity=13)
        found = [ids]
        for _ in range(12):
            step = fnmodels.prepare_step(decoder, found[-1], cache)
            logits, cache = fnmodels.decode_(own, *step, cache, config=decoder)
            found.append(logits[:, -1].argmax(-1, keepdim=True))
    assert torch.cat(found, dim=1).tolist() == wanted.tolist()
    assert len(set(wanted.flatten().tolist())) > 2  # not one token again and again


def test_bad_use_is_a_sentence() -> None:
    config = CONFIGS["t5"]
    params = weights(config)
    with pytest.raises(ValueError, match="has its cache from"):
        fnmodels.init_cache(config, 1, 4)
    own, decoder = fnmodels.stack_params(params, "decoder"), config.decoder
    cache = fnmodels.init_cache(decoder, 1, 4)
    step = fnmodels.prepare_step(decoder, torch.ones(1, 1, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="A cache has them from"):
        fnmodels.decode(own, *step, cache, config=decoder)
    prepared = fnmodels.prepare(config.encoder, torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="has one stack"):
        fnmodels.cache.encode(params, *prepared, config=decoder, capacity=4)
    with pytest.raises(ValueError, match="one stack"):
        fnmodels.cache.encode(params, *prepared, config=config.encoder, capacity=4)


@every_model
def test_a_resized_cache_has_a_memory_of_its_own(name: str) -> None:
    config = CONFIGS[name]
    params = weights(config)
    cache, other = begun(config, params), fnmodels.take(begun(config, params), [0])
    before = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, cache)
    fnmodels.cache.insert_(fnmodels.resize(cache, 12), [1], other)
    for one, kept in zip(tree.leaves(cache), tree.leaves(before), strict=True):
        assert torch.equal(one, kept) if isinstance(one, Tensor) else one == kept
