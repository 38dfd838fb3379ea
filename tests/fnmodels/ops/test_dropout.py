"""Masks by hashing: equal to loops of Python integers, uniform, and independent of what they should not depend on."""

import math
import zlib

import pytest
import torch

import fnmodels
from fnmodels import gpt2
from fnmodels.errors import ConfigError
from fnmodels.inputs.noise import fold, mixed, noise_keys
from fnmodels.ops.dropout import Dropout, Noise, dropped, dropped_weights, named

WORD, GOLDEN = 2**32 - 1, 0x9E3779B9


def hashed(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0x735A2D97 % 2**32
    return x ^ x >> 15


def folded(key: int, number: int) -> int:
    low, high = number & WORD, (number >> 32) & WORD
    return hashed(key ^ hashed((hashed((low + GOLDEN) & WORD) + high) & WORD))


def rows(*documents: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, segment_ids) [1, length] of documents one after another, then padding."""
    ids = torch.zeros(1, length, dtype=torch.int64)
    ids[0, : sum(documents)] = torch.repeat_interleave(torch.arange(len(documents)) + 1, torch.tensor(documents))
    return fnmodels.positions_from_segments(ids), ids


def test_keys_are_those_of_python_integers():
    numbers = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, -1, 2**62 + 5])
    assert mixed(numbers[:4]).tolist() == [hashed(int(n)) for n in numbers[:4]]
    assert fold(torch.tensor(77), numbers).tolist() == [folded(77, int(n)) for n in numbers]
    positions, ids = rows(3, 2, length=6)
    found = noise_keys(-5, torch.cat((positions, positions + 1)), torch.cat((ids, ids)))
    for row in range(2):
        for token in range(5):
            document = int(ids[0, token]) + 2 * row
            expected = folded(folded(folded(GOLDEN, -5), document), int(positions[0, token]) + row)
            assert int(found[row, token]) == expected


def test_masks_are_those_of_python_integers():
    keys = noise_keys(3, *rows(4, length=4))
    drop = round(0.3 * 2**32)
    out, base = dropped(torch.ones(1, 4, 5), keys, 0.3, "mlp"), zlib.crc32(b"mlp")
    for token in range(4):
        for i in range(5):
            kept = hashed(folded(int(keys[0, token]), base) ^ hashed((i + GOLDEN) & WORD)) >= drop
            assert out[0, token, i] == (1 / (1 - 0.3) if kept else 0)
    full = dropped_weights(torch.ones(1, 6, 4, 4), Noise(keys, keys, keys, keys, torch.tensor(0)), 0.3, "w")
    for head, query, key in ((0, 0, 0), (5, 3, 1), (2, 1, 3), (4, 2, 2)):
        of_query = folded(folded(int(keys[0, query]), zlib.crc32(b"w")), head)
        assert bool(full[0, head, query, key]) == (hashed(of_query ^ hashed(int(keys[0, key]) ^ GOLDEN)) >= drop)
    second = dropped_weights(
        torch.ones(1, 3, 2, 4), Noise(keys, keys, keys[:, 2:], keys, torch.tensor(0), head_shard=1), 0.3, "w"
    )
    assert torch.equal(second, full[:, 3:, 2:])


def thrown(count: int, *, seed: int = 0, name: str = "x", layer: int = 0, rate: float = 0.5) -> torch.Tensor:
    """bool [count, count]: which elements of as many positions are dropped."""
    keys = fold(noise_keys(seed, *rows(count, length=count)), layer)
    return dropped(torch.ones(1, count, count), keys, rate, name)[0] == 0


def test_hashes_are_uniform_in_every_byte():
    positions, ids = rows(512, length=512)
    hashes = mixed(named(noise_keys(0, positions, ids), "x")[..., None] ^ mixed(torch.arange(512) + GOLDEN & WORD))
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((hashes.flatten() >> shift) & 255, minlength=256).double()
        mean = hashes.numel() / 256
        chi = float(((counts - mean) ** 2 / mean).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255), (shift, chi)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_and_the_mean_are_kept(rate):
    mask = thrown(700, rate=rate)
    spread = math.sqrt(rate * (1 - rate))
    assert abs(float(mask.double().mean()) - rate) <= 5 * spread / 700
    for sums in (mask.double().mean(0), mask.double().mean(1)):  # of features, and of tokens
        assert abs(float(sums.std()) - spread / math.sqrt(700)) <= 0.15 * spread / math.sqrt(700) + 1e-12
    assert float(dropped(torch.ones(1, 9, 400), noise_keys(0, *rows(9, length=9)), rate, "y").mean()) == pytest.approx(
        1, abs=5 * math.sqrt(rate / (1 - rate) / 3600) + 1e-6
    )


OTHERS = {
    "seed": {"seed": 1},
    "a seed of 2^32": {"seed": 2**32},
    "layer": {"layer": 1},
    "name": {"name": "y"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_masks_of_another_key_are_independent(what):
    assert agreement(thrown(600), thrown(600, **OTHERS[what])) < 5 / 600


def agreement(one, other):
    """How far the correlation of two masks at rate 1/2 is from 0; that of chance is 1 / sqrt(elements)."""
    return abs(float((one ^ other).double().mean()) * 2 - 1)


def test_neighbours_are_independent():
    mask = thrown(600)
    for other in (mask.roll(1, 0), mask.roll(1, 1), mask.roll((1, 1), (0, 1)), mask.roll((1, -1), (0, 1)), mask.T):
        different = ~torch.eye(600, dtype=torch.bool)
        assert agreement(mask[different], other[different]) < 5 / 600
    keys = noise_keys(0, *rows(96, length=96))
    weights = (
        dropped_weights(torch.ones(1, 8, 96, 96), Noise(keys, keys, keys, keys, torch.tensor(0)), 0.5, "w")[0] == 0
    )
    for other in (weights.roll(1, 0), weights.roll(1, 1), weights.roll(1, 2), weights.mT):
        different = (weights != other) | ~torch.eye(96, dtype=torch.bool)
        assert agreement(weights[different], other[different]) < 0.03


def test_documents_are_numbered_over_rows_for_a_seed_and_in_rows_for_seeds():
    packed = noise_keys(9, *rows(3, 5, 2, length=10))
    apart = [rows(n, length=5) for n in (3, 5, 2)]
    positions, ids = (torch.cat(parts) for parts in zip(*apart, strict=True))
    separate = noise_keys(9, positions, ids)
    assert torch.equal(packed[0], separate[ids > 0])
    assert len(set(packed[0].tolist())) == 10
    seeds = torch.tensor([4, 5, 4])
    of_rows = noise_keys(seeds, positions, ids)
    assert torch.equal(of_rows[0, :2], of_rows[2, :2]) and not (of_rows[0, :3] == of_rows[1, :3]).any()
    assert torch.equal(noise_keys(seeds[1:], positions[1:], ids[1:]), of_rows[1:])
    assert torch.equal(noise_keys(packed, *rows(3, 5, 2, length=10)), packed)


def test_seeds_may_be_mapped():
    places = rows(3, 5, length=9)
    stacked = torch.func.vmap(lambda seed: noise_keys(seed, *places))(torch.arange(3))
    assert all(torch.equal(stacked[seed], noise_keys(seed, *places)) for seed in range(3))


@pytest.mark.parametrize(
    ("rng", "error", "said"),
    [
        (True, TypeError, "rng is True; it is a seed"),
        ("1", TypeError, "rng is '1'"),
        (torch.tensor(1.0), TypeError, "rng is float32; seeds and keys are integers"),
        (torch.arange(3), ValueError, r"rng is \[3\]; it is a seed \[\], a seed for each row \[1\]"),
        (torch.zeros(1, 5, dtype=torch.int64), ValueError, r"or the keys of tokens \[1, 4\]"),
    ],
)
def test_an_rng_that_is_none_is_refused(rng, error, said):
    with pytest.raises(error, match=said):
        noise_keys(rng, *rows(4, length=4))


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, "0.1", True, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ConfigError, match="The dropout rate of mlp is"):
        Dropout(mlp=rate)
    values = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": rate}
    with pytest.raises(ConfigError, match="'resid_pdrop' is"):
        gpt2.Config.from_hf(values)
