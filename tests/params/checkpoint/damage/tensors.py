"""Tensors that do not fit the config, tied heads that differ, and values that are not finite."""

from collections.abc import Iterator

import torch
from torch import Tensor

import params as P
from tests.params.checkpoint.damage.ways import (
    EMBED,
    FILE,
    HEAD,
    NAME,
    NORM,
    Damage,
    configured,
    each_tensor,
    in_turn,
    joined,
    nothing,
    raw,
    with_head,
    with_names,
    with_tensors,
)


def cases() -> Iterator[Damage]:
    """Every case of this group."""
    for what, (do, *words) in _REFUSED.items():
        yield Damage(what, do, P.MismatchError, tuple(words))
    for prefix in ("module.", "_orig_mod.", "model."):
        words = (f"{NORM}: missing", f"'{prefix}{HEAD}' in {FILE}: unexpected")
        yield Damage(f"all under {prefix}", with_names(lambda n, p=prefix: p + n), P.MismatchError, words)
    for name in _STRANGERS:
        words = (f"'{name}' in {FILE}: unexpected",)
        yield Damage(f"near a leftover: {name}", with_tensors({name: torch.ones(4)}), P.MismatchError, words)
    for dtype in _CLASSES:
        words = (f"{NAME} in {FILE}: expected a floating dtype, found {str(dtype).removeprefix('torch.')}",)
        yield Damage(f"of {dtype}", with_tensors({NAME: lambda t, d=dtype: t.to(d)}), P.MismatchError, words)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield Damage(f"good: all of {dtype}", each_tensor(lambda t, d=dtype: t.to(d)))
        yield Damage(f"good: one of {dtype}", with_tensors({NORM: lambda t, d=dtype: t.to(d)}))
    yield from _gpt2()
    yield from _fp8()
    yield from _ties()
    yield from _values()


_CLASSES = (
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_STRANGERS = (
    *("model.rotary_emb.inv_freq", "model.layers.0.attn.bias", "model.layers.0.self_attn.rotary_emb.inv_freqs"),
    *("transformer.h.0.attn.bias", "model.layers.0.self_attn.q_proj.bias"),
)
_SHAPE = f"{NORM} in {FILE}: expected [16], found"
_REFUSED = {
    "one missing": (with_tensors({NORM: None}), "1 differences", f"{NORM}: missing; expected [16]"),
    "all missing": (raw(joined({}, b"")), "21 differences", f"{NORM}: missing"),
    "one too many": (with_tensors({"x": torch.ones(3)}), "1 differences", f"'x' in {FILE}: unexpected, [3] of float32"),
    "a scalar too many": (with_tensors({"x": torch.tensor(3)}), f"'x' in {FILE}: unexpected, [] of int64"),
    "one without a name": (with_names(lambda name: "" if name == NORM else name), f"'' in {FILE}: unexpected"),
    "one renamed": (
        with_names(lambda n: n + "_" if n == NORM else n),
        "2 differences",
        f"{NORM}: missing",
        f"'{NORM}_'",
    ),
    "a layer too many": (with_tensors({NAME.replace("1", "2"): torch.ones(24, 16)}), "model.layers.2", "unexpected"),
    "a row too many": (with_tensors({NORM: torch.ones(17)}), f"{_SHAPE} [17]"),
    "a dimension too many": (with_tensors({NORM: torch.ones(16, 1)}), f"{_SHAPE} [16, 1]"),
    "no dimension": (with_tensors({NORM: torch.ones(())}), f"{_SHAPE} []"),
    "no element": (with_tensors({NORM: torch.ones(0)}), f"{_SHAPE} [0]"),
    "transposed": (with_tensors({NAME: lambda t: t.T}), NAME, "expected [24, 16], found [16, 24]"),
    "flat": (with_tensors({NAME: lambda t: t.flatten()}), NAME, "expected [24, 16], found [384]"),
    "packed to 4 bits": (with_tensors({NAME: torch.ones(24, 8).byte()}), NAME, "found [24, 8]", "found uint8"),
    "fp8 with scales that the config does not speak of": (
        with_tensors({NAME: lambda t: t.to(torch.float8_e4m3fn), NAME + "_scale_inv": torch.ones(1, 1)}),
        *(f"{NAME} in {FILE}: expected a floating dtype, found float8_e4m3fn", f"'{NAME}_scale_inv'"),
    ),
    "many at once": (
        with_tensors({NORM: torch.ones(3), NAME: None, EMBED: lambda t: t.int(), "x": torch.ones(1), HEAD: None}),
        *(
            "5 differences",
            f"{_SHAPE} [3]",
            f"{NAME}: missing",
            f"{EMBED} in",
            "found int32",
            "'x'",
            f"{HEAD}: missing",
        ),
    ),
    "untied, no head": (with_tensors({HEAD: None}), f"{HEAD}: missing; expected [40, 16]"),
    "untied, a head of another shape": (with_tensors({HEAD: lambda t: t[1:]}), HEAD, "found [39, 16]"),
    "config tied, files not": (configured(tie_word_embeddings=True), HEAD, "differs from", "tie_word_embeddings"),
}


def _gpt2() -> Iterator[Damage]:
    weight = "transformer.h.0.attn.c_attn.weight"
    turned = with_tensors({weight: lambda t: t.T})
    yield Damage("[out, in] in GPT-2", turned, P.MismatchError, (weight, "expected [16, 48], found [48, 16]"), "gpt2")
    buffers: dict[str, Tensor] = {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32)}
    buffers["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    yield Damage("good: known leftovers of GPT-2", with_tensors(buffers), base="gpt2")
    yield Damage("good: OpenAI's names of GPT-2", with_names(lambda n: n.removeprefix("transformer.")), base="gpt2")
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    yield Damage("good: known leftovers of Llama", with_tensors(frequencies))


def _fp8() -> Iterator[Damage]:
    """A checkpoint with one fp8 tensor, declared in config.json."""
    config = configured(quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    scale = NAME + "_scale_inv"
    for what, scales, *words in (
        ("without a scale", None, f"{NAME!r} in {FILE}", f"but missing are {scale!r}"),
        ("with too few scales", torch.ones(1, 1), scale, "expected [2, 1] of float32", "found [1, 1]"),
        ("with scales of integers", torch.ones(2, 1).int(), scale, "expected [2, 1] of float32", "of int32"),
        *(
            (f"with a scale of {bad}", torch.tensor([[1.0], [bad]]), f"{scale!r}: 1 of 2 scales, {bad} for one")
            for bad in (float("nan"), float("inf"), 0.0, -1.0)
        ),
    ):
        do = in_turn(config, with_tensors({NAME: lambda t: t.to(torch.float8_e4m3fn), scale: scales}))
        yield Damage(f"fp8 {what}", do, P.MismatchError, tuple(words))
    hostile = with_tensors({"a\x1b[2J": torch.ones(2, 2).to(torch.float8_e4m3fn)})
    words = ("'a\\x1b[2J' in",)
    yield Damage("fp8 of a name that is no text", in_turn(config, hostile), P.MismatchError, words)
    yield Damage("good: fp8 that is dequantized already", config)
    fitting = with_tensors({NAME: lambda t: t.to(torch.float8_e4m3fn), scale: torch.ones(2, 1)})
    yield Damage("good: fp8 with its scales", in_turn(config, fitting))
    large = configured(quantization_config={"quant_method": "fp8", "weight_block_size": [1 << 30, 1 << 30]})
    single = with_tensors({NAME: lambda t: t.to(torch.float8_e4m3fn), scale: torch.ones(1, 1)})
    yield Damage("good: fp8 with blocks larger than the tensor", in_turn(large, single))


def _ties() -> Iterator[Damage]:
    """Config tied? x head in the file? x equal?"""
    for what, change in {
        "that differs": lambda t: t + 1,
        "with one bit flipped": lambda t: (t.view(torch.int32) ^ torch.eye(40, 16).int()).view(torch.float32),
        "of another dtype": lambda t: t.bfloat16(),
        "of another shape": lambda t: t[1:],
        "of another rank": lambda t: t[None],
        "of integers": lambda t: t.int(),
    }.items():
        yield Damage(f"tied, a head {what}", with_head(change), P.MismatchError, (HEAD,), "tied")
    untied = configured(tie_word_embeddings=False)
    yield Damage("files tied, config not", untied, P.MismatchError, (f"{HEAD}: missing",), "tied")
    yield Damage("good: tied, no head", nothing, base="tied")
    yield Damage("good: tied, an equal head", with_head(lambda t: t), base="tied")
    yield Damage("good: untied, an equal head", with_head(lambda t: t))


def _values() -> Iterator[Damage]:
    for value in ("nan", "inf", "-inf"):
        spoiled = with_tensors({NAME: lambda t, v=value: t.index_fill(0, torch.tensor([3]), float(v))})
        words = (f"{NAME} in {FILE}: 16 of 384 values are not finite",)
        yield Damage(f"{value}, with check_finite", spoiled, P.MismatchError, words, check_finite=True)
        yield Damage(f"good: {value}, without check_finite", spoiled)
    largest = with_tensors({NAME: lambda t: t.fill_(3e38)})
    yield Damage("good: the largest values, with check_finite", largest, check_finite=True)
