"""Rotary tables against plain Python floats, one position and one frequency at a time; and their application."""

import cmath
import math

import pytest
import torch

from fnmodels.ops.rotary import (
    Rope,
    apply_rotary,
    apply_rotary_interleaved,
    attention_factor,
    no_rotation,
    rotary_table,
)

DIM, LENGTH = 16, 24
SHORT, LONG = tuple(1 + i / 10 for i in range(8)), tuple(2 + i / 3 for i in range(8))
OLD = 16
YARN = {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5, "original_max_position_embeddings": 64}
ROPES = {
    "default": Rope(1e4),
    "linear": Rope(1e4, "linear", factor=3.0),
    "dynamic": Rope(1e4, "dynamic", factor=3.0, original_max_position_embeddings=OLD),
    "llama3": Rope(100.0, "llama3", factor=8.0, original_max_position_embeddings=OLD),
    "yarn": Rope(100.0, "yarn", **YARN),
    "yarn_smooth": Rope(100.0, "yarn", truncate=False, **YARN),
    "longrope": Rope(1e4, "longrope", original_max_position_embeddings=OLD, short_factor=SHORT, long_factor=LONG),
}


def frequency(rope: Rope, i: int, length: int) -> float:
    """Radians per position of pair i, written from the papers."""
    theta, old = rope.theta, rope.original_max_position_embeddings
    base = theta ** (-2 * i / DIM)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "dynamic":
        stretch = rope.factor * max(length, old) / old - (rope.factor - 1)
        return (theta * stretch ** (DIM / (DIM - 2))) ** (-2 * i / DIM)
    if rope.kind == "llama3":
        turns = old * base / (2 * math.pi)
        if turns < rope.low_freq_factor:
            return base / rope.factor
        if turns > rope.high_freq_factor:
            return base
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return (1 - kept) * base / rope.factor + kept * base
    if rope.kind == "yarn":
        low, high = (DIM * math.log(old / (b * 2 * math.pi)) / (2 * math.log(theta)) for b in (2.0, 0.5))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        return base / rope.factor * ramp + base * (1 - ramp)
    if rope.kind == "longrope":
        return base / (LONG if length > old else SHORT)[i]
    return base


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [9, 24])
def test_tables(name: str, length: int) -> None:
    rope, positions = ROPES[name], torch.tensor([[0, 1, 7, 1_000_000], [3, 3, 2, 999_999]])
    table = rotary_table(rope, DIM, positions, length)
    assert table.dtype == torch.float32 and table.shape == (2, 4, DIM // 2, 2)
    scale = attention_factor(rope)
    for (b, t), position in zip(
        [(b, t) for b in range(2) for t in range(4)], positions.flatten().tolist(), strict=True
    ):
        for i in range(DIM // 2):
            want = cmath.rect(scale, math.fmod(position * frequency(rope, i, length), 2 * math.pi))
            got = complex(*table[b, t, i].tolist())
            assert abs(got - want) < 1e-7 * scale + 2e-10 * position  # fp32 rounding, and that of the fp64 angle


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_is_said_or_the_longest_position(name: str) -> None:
    rope, positions = ROPES[name], torch.tensor([[0, 1, 2], [3, 4, 23]])
    assert torch.equal(rotary_table(rope, DIM, positions), rotary_table(rope, DIM, positions, 24))
    assert not torch.equal(rotary_table(rope, DIM, positions), rotary_table(rope, DIM, positions, 9))
    rows = rotary_table(rope, DIM, positions, torch.tensor([9, 24]))  # one length per row
    assert torch.equal(rows[0], rotary_table(rope, DIM, positions, 9)[0])
    assert torch.equal(rows[1], rotary_table(rope, DIM, positions, 24)[1])


@pytest.mark.parametrize(
    ("rope", "want"),
    [
        (Rope(), 1.0),
        (Rope(kind="linear", factor=4.0), 1.0),
        (Rope(kind="yarn", factor=4.0), 0.1 * math.log(4) + 1),
        (Rope(kind="yarn", factor=0.5), 1.0),
        (Rope(kind="yarn", factor=4.0, attention_factor=1.7), 1.7),
        (
            Rope(kind="yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.0),
            (0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
        ),
        (Rope(kind="yarn", factor=4.0, mscale=0.7), 0.1 * math.log(4) + 1),
        (Rope(kind="longrope", factor=8.0, original_max_position_embeddings=64), math.sqrt(1.5)),
        (Rope(kind="longrope", factor=1.0, original_max_position_embeddings=64), 1.0),
    ],
)
def test_attention_factor(rope: Rope, want: float) -> None:
    assert attention_factor(rope) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 22])
def test_rotation(interleaved: bool, width: int) -> None:
    """Pairs are rotated as complex numbers; what lies past the rotating dimensions passes through."""
    torch.manual_seed(0)
    x, positions = torch.randn(2, 5, 3, width), torch.randint(100, (2, 5))
    table = rotary_table(Rope(100.0), DIM, positions)
    got = (apply_rotary_interleaved if interleaved else apply_rotary)(x, table)
    want = x.clone()
    for i in range(DIM // 2):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + DIM // 2)
        turned = torch.complex(x[..., one], x[..., other]) * torch.view_as_complex(table[:, :, i])[:, :, None]
        want[..., one], want[..., other] = turned.real, turned.imag
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    again = (apply_rotary_interleaved if interleaved else apply_rotary)(x[:, :, :1], table)
    assert torch.equal(again, got[:, :, :1])


def test_one_table_serves_all_rows() -> None:
    x, positions = torch.randn(3, 5, 2, DIM), torch.arange(5)[None]
    one, each = rotary_table(Rope(), DIM, positions), rotary_table(Rope(), DIM, positions.expand(3, 5))
    assert torch.equal(apply_rotary(x, one), apply_rotary(x, each))


def test_scores_see_distances_only() -> None:
    q, k = torch.randn(1, 1, 1, DIM, dtype=torch.float64), torch.randn(1, 1, 1, DIM, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        return (apply_rotary(q, _at(at)) * apply_rotary(k, _at(other))).sum()

    def _at(position: int) -> torch.Tensor:
        return rotary_table(Rope(), DIM, torch.tensor([[position]]))

    assert torch.allclose(score(12, 5), score(1007, 1000), rtol=1e-5)


def test_no_rotation_and_dtypes() -> None:
    x, positions = torch.randn(2, 3, 1, DIM), torch.arange(3).expand(2, 3)
    assert no_rotation(positions).shape == (2, 3, 0, 2)
    assert apply_rotary(x, no_rotation(positions)) is x
    table = rotary_table(Rope(), DIM, positions)
    assert apply_rotary(x.bfloat16(), table).dtype == torch.bfloat16
    assert torch.equal(apply_rotary(x.bfloat16(), table), apply_rotary(x.bfloat16().float(), table).bfloat16())
    assert apply_rotary(x.double(), table).dtype == torch.float64


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'spiral' is unknown"):
        rotary_table(Rope(kind="spiral"), DIM, torch.zeros(1, 1, dtype=torch.long))
