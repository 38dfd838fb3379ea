"""Rotary tables against plain Python floats, one position and one frequency at a time; and their application."""

import cmath
import importlib
import math

import pytest
import torch

from fnmodels.ops.rotary import (
    Rope,
    apply_rotary,
    apply_rotary_interleaved,
    attention_factor,
    laid_out,
    mrope_table,
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


def test_angles_have_gradients() -> None:
    table = rotary_table(Rope(), DIM, torch.arange(9)[None]).requires_grad_()
    x = torch.randn(2, 9, 3, DIM)
    grad = torch.autograd.grad(apply_rotary(x, table)[..., 0].sum(), table)[0]
    torch.testing.assert_close(grad[0, :, 0, 0], x[..., 0].sum((0, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_a_table_laid_out_once_rotates_with_the_same_bits(partial: float, dtype: torch.dtype) -> None:
    table = rotary_table(Rope(partial=partial), DIM, torch.arange(7)[None])
    x = torch.randn(2, 7, 3, DIM, dtype=dtype)
    for rotate in (apply_rotary, apply_rotary_interleaved):
        assert torch.equal(rotate(x, laid_out(table)), rotate(x, table))
    assert not torch.equal(apply_rotary(x, laid_out(table * -1)), apply_rotary(x, table))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'spiral' is unknown"):
        rotary_table(Rope(kind="spiral"), DIM, torch.zeros(1, 1, dtype=torch.long))


AXES = {  # sections, interleaved -> the axis of each pair
    ((2, 3, 3), False): [0, 0, 1, 1, 1, 2, 2, 2],
    ((4, 2, 2), True): [0, 1, 2, 0, 1, 2, 0, 0],
    ((3, 3, 2), True): [0, 1, 2, 0, 1, 2, 0, 1],
    ((8,), False): [0] * 8,
    ((5, 3), True): [0, 1, 0, 1, 0, 1, 0, 0],
}


@pytest.mark.parametrize(("sections", "interleaved"), AXES)
@pytest.mark.parametrize("name", ["default", "yarn"])
def test_each_pair_turns_with_its_axis(sections: tuple[int, ...], interleaved: bool, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(1_000_000, (2, 5, len(sections)), generator=generator)
    table = mrope_table(ROPES[name], DIM, positions, sections, interleaved=interleaved)
    assert table.dtype == torch.float32
    for pair, axis in enumerate(AXES[sections, interleaved]):
        assert torch.equal(table[:, :, pair], rotary_table(ROPES[name], DIM, positions[..., axis])[:, :, pair])
    text = positions[..., :1].expand_as(positions)
    same = mrope_table(ROPES[name], DIM, text, sections, interleaved=interleaved)
    assert torch.equal(same, rotary_table(ROPES[name], DIM, text[..., 0]))


@pytest.mark.parametrize(("model", "interleaved"), [("qwen2_vl", False), ("qwen3_vl", True)])
def test_tables_of_vision_language_models(model: str, interleaved: bool) -> None:
    """Against transformers', whose angles are fp32: at positions where these are good to 1e-4."""
    transformers = pytest.importorskip("transformers")
    sections = (4, 2, 2) if interleaved else (2, 3, 3)
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": list(sections),
        "mrope_interleaved": interleaved,
    }
    sizes = {"hidden_size": 2 * DIM, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": DIM}
    names = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL"}
    config = getattr(transformers, f"{names[model]}TextConfig")(rope_parameters=rope, **sizes)
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    rotary = getattr(modeling, {"qwen2_vl": "Qwen2VLRotaryEmbedding", "qwen3_vl": "Qwen3VLTextRotaryEmbedding"}[model])
    positions = torch.randint(500, (2, 7, 3), generator=torch.Generator().manual_seed(0))
    cos, sin = rotary(config)(torch.zeros(1), positions.permute(2, 0, 1))
    table = mrope_table(Rope(1e4), DIM, positions, sections, interleaved=interleaved)
    torch.testing.assert_close(torch.stack((cos, sin), -1)[:, :, : DIM // 2], table, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "sections", "interleaved", "words"),
    [
        ((2, 5), (2, 3, 3), False, r"must be \[B, S, 3\] for the sections \(2, 3, 3\), not \[2, 5\]"),
        ((2, 5, 2), (2, 3, 3), False, r"not \[2, 5, 2\]"),
        ((2, 5, 3), (2, 3, 4), False, "do not divide the 8 pairs"),
        ((2, 5, 3), (1, 3, 4), True, r"\(1, 3, 4\), interleaved, do not divide"),
    ],
)
def test_sections_that_do_not_fit(
    shape: tuple[int, ...], sections: tuple[int, ...], interleaved: bool, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        mrope_table(Rope(), DIM, torch.zeros(shape, dtype=torch.long), sections, interleaved=interleaved)


def test_one_axis_refuses_three() -> None:
    with pytest.raises(ValueError, match=r"not \[2, 5, 3\]: this model's rope has one axis"):
        rotary_table(Rope(), DIM, torch.zeros(2, 5, 3, dtype=torch.long))
