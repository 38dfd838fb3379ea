"""States in 8 and 16 bits: a fraction of the memory, decay that survives rounding, and training as with fp32 states."""

import functools

import pytest
import torch

import params as P
from fnmodels import llama, tree
from train import adamw, init_state, lion, make_step, muon, next_token_loss, partition, with_ema
from train.optim import cache_chunks, with_master, with_small_state
from train.optim.small_state import from_blocks, to_blocks
from train.optim.stochastic_rounding import draw

CONFIG = llama.Config(256, 64, 128, 2, 4, 2)
BITS = pytest.mark.parametrize("bits", [8, 16])
MATRIX = {"w": torch.randn(80, 65, generator=torch.Generator().manual_seed(0)), "bias": torch.ones(65)}


def _bytes(opt_state):
    return sum(leaf.nbytes for path, leaf in tree.flatten(opt_state).items() if not path.endswith("step"))


@BITS
def test_states_take_a_fraction_of_the_memory(bits):
    params = {"w": torch.zeros(512, 512), "bias": torch.zeros(512)}
    small = with_small_state(adamw(1e-3), bits=bits).init(params)
    assert _bytes(small) == 2 * (512 * 512 * bits // 8 + (4 * 1024 if bits == 8 else 0) + 4 * 512)


def test_blocks_round_to_a_neighbor_with_an_exact_mean_at_every_scale():
    for largest in (1e-30, 3e-5, 1.0, 449.0, 1e30):
        value = torch.linspace(-1, 1, 511).mul(largest)
        many = [from_blocks(*to_blocks(value, draw(0, torch.tensor(n), "w", value))) for n in range(400)]
        off = (torch.stack(many) - value) / largest
        assert off.abs().max() <= 2**-3  # neighbors in e4m3 are 1/8 of a power of two apart
        assert off.mean().abs() < 1e-4 and off.mean(0).abs().max() < 0.02
    zeros = torch.zeros(300)
    assert torch.equal(from_blocks(*to_blocks(zeros, draw(0, torch.tensor(1), "w", zeros))), zeros)


def test_codes_have_the_values_of_torchs_conversion_and_a_block_with_a_nan_is_nan():
    codes = torch.arange(256, dtype=torch.uint8)
    wanted, found = codes.view(torch.float8_e4m3fn).float() * 2.0**-3, from_blocks(codes, torch.full((1, 1), 2.0**-3))
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])
    value = torch.ones(3 * 256)
    value[300] = torch.nan
    again = from_blocks(*to_blocks(value, draw(0, torch.tensor(1), "w", value)))
    assert again.isnan().view(3, 256).all(1).tolist() == [False, True, False] and not again[:256].isnan().any()


@BITS
def test_parts_of_a_leaf_get_the_bits_of_the_whole(bits, monkeypatch):
    optimizer, held = with_small_state(adamw(1e-2), bits=bits), []
    for size in (1 << 20, 1 << 10):
        monkeypatch.setattr(cache_chunks, "SIZE", size)
        params = tree.map(torch.clone, MATRIX)
        opt_state = optimizer.init(params)
        for _ in range(2):
            optimizer.apply_(tree.map(torch.sin, MATRIX), opt_state, params)
        held.append(tree.leaves((params, opt_state)))
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))


@BITS
def test_moments_decay_though_a_step_is_less_than_a_rounding(bits):
    optimizer = with_small_state(adamw(0.0, betas=(0.9, 0.999)), bits=bits)
    params = {"w": torch.zeros(64, 65)}
    opt_state = optimizer.init(params)
    optimizer.apply_({"w": torch.ones(64, 65)}, opt_state, params)
    first = _second(opt_state, bits).mean()
    for _ in range(400):
        optimizer.apply_({"w": torch.zeros(64, 65)}, opt_state, params)
    assert _second(opt_state, bits).mean() / first == pytest.approx(0.999**400, rel=0.1)


def _second(opt_state, bits):
    roots, scales = opt_state["inner"]["exp_avg_sq"]["w"], opt_state["scales"]["exp_avg_sq"]["w"]
    return (from_blocks(roots, scales) if bits == 8 else roots.float()).square()


@BITS
def test_in_place_equals_pure_and_a_skipped_update_keeps_every_bit(bits):
    optimizer = with_small_state(adamw(1e-2), bits=bits)
    params = tree.map(torch.clone, MATRIX)
    held, opt_state = tree.map(torch.clone, params), optimizer.init(params)
    pure_state = optimizer.init(params)
    for seed in range(3):
        grads = tree.map(lambda p, s=seed: torch.randn(p.shape, generator=torch.Generator().manual_seed(s)), params)
        updates, pure_state = optimizer.update(grads, pure_state, params)
        params = tree.map(torch.add, params, updates)
        optimizer.apply_(grads, opt_state, held)
        torch.testing.assert_close(held, params, rtol=1e-5, atol=1e-5)
    before = tree.map(torch.clone, (opt_state, held))
    optimizer.apply_(grads, opt_state, held, skip=torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves((opt_state, held)), strict=True))


def _losses(optimizer, dtype=torch.float32):
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "segment_ids": torch.ones_like(tokens)}
    batch["positions"] = torch.arange(32).expand(4, 32)
    state, found = init_state(P.init(CONFIG, 0, dtype=dtype), optimizer), []
    step = make_step(functools.partial(next_token_loss, config=CONFIG), optimizer)
    for _ in range(25):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@BITS
def test_training_goes_as_with_wide_states_and_repeats(bits):
    wide, small = _losses(adamw(3e-3)), _losses(with_small_state(adamw(3e-3), bits=bits))
    apart = max(abs(a - b) for a, b in zip(wide, small, strict=True))
    assert 0 < apart < (0.2 if bits == 8 else 0.02) and wide[-1] < 3
    assert _losses(with_small_state(adamw(3e-3), bits=bits)) == small
    assert _losses(with_small_state(adamw(3e-3), bits=bits, seed=1)) != small


def test_wrappers_and_other_optimizers():
    mixed = _losses(with_master(with_small_state(adamw(3e-3))), torch.bfloat16)
    assert mixed[-1] < 3
    assert _losses(with_small_state(lion(1e-3)))[-1] == pytest.approx(_losses(lion(1e-3))[-1], abs=0.1)
    for bad in (muon(1e-3), with_small_state(adamw(1e-3))):
        with pytest.raises(ValueError, match="treat elements independently"):
            with_small_state(bad)
    with pytest.raises(ValueError, match="bits is 4"):
        with_small_state(adamw(1e-3), bits=4)


@pytest.mark.parametrize("inner", [partition({"*": adamw(0.1)}), with_ema(adamw(0.1), 0.9)])
def test_small_states_of_a_wrapper_are_refused(inner):
    with pytest.raises(ValueError, match="put it inside of the groups of a partition"):
        with_small_state(inner).init(MATRIX)


def test_a_gradient_through_an_update_is_refused() -> None:
    params = {"w": torch.ones(80, 80)}

    def moved(scale: torch.Tensor) -> torch.Tensor:
        optimizer = with_small_state(adamw(0.1))
        return optimizer.update({"w": scale * params["w"]}, optimizer.init(params), params)[0]["w"].sum()

    moved(torch.tensor(2.0))
    with pytest.raises(ValueError, match="rounded codes, which have no derivative"):
        torch.func.grad(moved)(torch.tensor(2.0))
