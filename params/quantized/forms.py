"""The storage forms, each made by a function of its settings. `methods` says which ones a config.json declares.

    form             codes of X.weight [out, in]                  scales                     zeros
    fp8_*            X.weight e4m3                                one for all, each row, or each block
    mxfp8            X.weight e4m3                                [out, in / 32] powers of two
    mxfp4            X.weight e2m1 [out, in / 2]                  [out, in / 32] powers of two
    mxfp4_blocks     X_blocks e2m1 [out, in / 32, 16], X [in, out] X_scales [out, in / 32] powers of two
    nvfp4            X.weight e2m1 [out, in / 2]                  [out, in / 16] e4m3, times or over one for all
    gptq             X.qweight [in / p, out]                      X.scales [G, out]          X.qzeros [G, out / p]
    awq_gemm         X.qweight [in, out / p]                      X.scales [G, out]          X.qzeros [G, out / p]
    awq_gemv         X.qweight [out, in / p]                      X.scales [out, G, padded]  X.qzeros [out, G / p]
    packed_integers  X.weight_packed [out, in / p]                X.weight_scale [out, G]    .._zero_point [out / p, G]
    integers         X.weight int8                                X.weight_scale [out, G]    .._zero_point [out, G]
    affine           X.weight [out, in / p]                       X.scales [out, G]          X.biases [out, G] are added
    codebook4        X.weight [out in / 2], a table of 16         X.weight.absmax, by blocks of all elements in a row
    row_int8         X.weight int8                                X.SCB [out] / 127
    hqq              X.W_q, slabs of all elements in rows         X.scale                    X.zero
    ternary          X.weight [out / 4, in], slabs of 2 bits      X.weight_scale

p integers are packed into a word. Sources: fp8 in blocks of 128 x 128, DeepSeek V3 (arXiv 2412.19437); mxfp4 and mxfp8,
OCP Microscaling Formats 1.0; nf4, QLoRA (arXiv 2305.14314); gptq, AutoGPTQ's packer, whose first version stores zeros
less 1 modulo 2^bits; awq, AutoAWQ; the rest, the packages that write them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .decode import PackedIntegers, Slabs, e2m1, floats_or_powers, powers, same
from .form import ALL, EACH, INDICES, SCALES, Axis, Form, Part

FP8 = (torch.float8_e4m3fn,)
SHARD = r"\.shard_\d+\.(?=weight$)"  # in the names of a table's shards, which have one scale
ENGRAM = r"\.engram\.embed\.(?=weight$)"  # in the names of tables of n-grams, whose rows have scales of their own
BYTES = (torch.uint8,)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of 8 neighbours, the one in each 4 bits of a word, lowest first
_SIGNED4 = PackedIntegers(4, 1, signed=True)
_POWERS = (torch.uint8, torch.float8_e8m0fnu)


def fp8(name: str, scale: str, rows: Axis, columns: Axis) -> Form:
    """e4m3 with a scale for each block of rows and columns; scale: the ending of its name."""
    dtypes = (*SCALES, torch.float8_e8m0fnu)
    scales = Part(scale, dtypes, rows, columns, check="positive")
    return Form(name, Part("", FP8), scales, dtype=torch.bfloat16)


def fp8_tensor(scale: str) -> Form:
    """One scale for all of a tensor."""
    return fp8("fp8 by tensor", scale, ALL, ALL)


def fp8_channel(scale: str) -> Form:
    """One scale for each row."""
    return fp8("fp8 by channel", scale, EACH, ALL)


def fp8_column(scale: str) -> Form:
    """One scale for each column: of experts' weights [in, out]."""
    return fp8("fp8 by column", scale, ALL, EACH)


def fp8_blocks(scale: str, block: tuple[int, int]) -> Form:
    """One scale for each block, the last of which may be smaller."""
    return fp8("fp8 in blocks", scale, Axis(block[0]), Axis(block[1]))


def in_module(form: Form, scale: str) -> Form:
    """The same with scales X.scale, in place of X.weight_scale; scale: their name within the module."""
    assert isinstance(form.scales, Part)
    codes, scales = replace(form.codes, ending="weight"), replace(form.scales, ending=scale)
    return replace(form, codes=codes, scales=scales, weight="weight")


def ue8m0(form: Form) -> Form:
    """The same with scales that may be the bytes of powers of two, in a dtype of bytes."""
    assert isinstance(form.scales, Part)
    dtypes = tuple(dict.fromkeys((*form.scales.dtypes, *BYTES)))
    return replace(form, scales=replace(form.scales, dtypes=dtypes, decode=floats_or_powers))


def mxfp8(scale: str) -> Form:
    """e4m3 and a power of two for each 32 columns."""
    scales = Part(scale, _POWERS, EACH, Axis(32), powers, check="positive")
    return Form("mxfp8", Part("", FP8), scales, dtype=torch.bfloat16)


def mxfp4(codes: str, scale: str) -> Form:
    """e2m1 and a power of two for each 32 columns."""
    values = Part(codes, (torch.uint8, torch.int8), EACH, Axis(2, packed=True), e2m1)
    scales = Part(scale, _POWERS, EACH, Axis(32), powers, check="positive")
    return Form("mxfp4", values, scales, dtype=torch.bfloat16)


def mxfp4_blocks() -> Form:
    """mxfp4 as gpt-oss has it: codes in pieces of 16 bytes, of a weight [.., in, out]."""
    form = mxfp4("_blocks", "_scales")
    assert isinstance(form.scales, Part)
    codes = replace(form.codes, dtypes=BYTES, pieces=16)
    return replace(form, codes=codes, scales=replace(form.scales, dtypes=BYTES), turned=True)


def nvfp4(codes: str, second: str, *, divides: bool, needed: bool = True) -> Form:
    """e2m1 and an e4m3 scale for each 16 columns, which one fp32 number for all multiplies or divides."""
    values = Part(codes, BYTES, EACH, Axis(2, packed=True), e2m1)
    check = "positive" if divides else "not negative"
    over = Part(second, SCALES, ALL, ALL, needed=needed, check=check)  # type: ignore[arg-type]
    first = Part("_scale", FP8, check="not negative")
    scales = Form("scales", first, over, columns=Axis(16), divides=divides)
    return Form("nvfp4", values, scales, dtype=torch.bfloat16)


def gptq(bits: int, group: int, *, zero_offset: int, indexed: bool = False) -> Form:
    """Integers packed along the inputs; with g_idx, the group of each input. group 0: all inputs."""
    words, columns = _words(bits), Axis(group)
    codes = Part("qweight", (torch.int32,), EACH, _packed(words), PackedIntegers(bits, 1), inputs_first=True)
    scales = Part("scales", SCALES, EACH, columns, inputs_first=True, check="finite")
    unpack = PackedIntegers(bits, 0, offset=zero_offset)
    zeros = Part("qzeros", (torch.int32,), _packed(words), columns, unpack, inputs_first=True)
    index = Part("g_idx", INDICES, ALL, EACH, needed=indexed)
    return Form(f"gptq of {bits} bits", codes, scales, zeros, index=index, weight="weight")


def awq_gemm(group: int) -> Form:
    """4-bit integers packed along the outputs, in AWQ_ORDER."""
    out, columns, unpack = Axis(8, packed=True), Axis(group), PackedIntegers(4, 0, AWQ_ORDER)
    codes = Part("qweight", (torch.int32,), out, EACH, unpack, inputs_first=True)
    scales = Part("scales", SCALES, EACH, columns, inputs_first=True, check="finite")
    zeros = Part("qzeros", (torch.int32,), out, columns, unpack, inputs_first=True)
    return Form("awq gemm", codes, scales, zeros, weight="weight")


def awq_gemv(group: int) -> Form:
    """4-bit integers packed along the inputs, zeros along the groups; scales and zeros are padded."""
    codes = Part("qweight", (torch.int32,), EACH, Axis(8, packed=True), PackedIntegers(4, 1))
    scales = Part("scales", SCALES, EACH, Axis(group), padded=True, check="finite")
    stored = Part("qzeros", (torch.int32,), EACH, Axis(8, packed=True), PackedIntegers(4, 1), padded=True)
    return Form("awq gemv", codes, scales, _of_groups(stored, group), weight="weight")


def packed_integers(bits: int, group: int, *, symmetric: bool, indexed: bool = False, unpacked: bool = False) -> Form:
    """Signed integers plus 2^(bits - 1), packed along the inputs. unpacked: zeros are int8, as early versions wrote."""
    words, columns = _words(bits), Axis(group)
    codes = Part("_packed", (torch.int32,), EACH, _packed(words), PackedIntegers(bits, 1))
    scales = Part("_scale", SCALES, EACH, columns, check="finite")
    middle = 1 << bits - 1
    zeros: Part | Form = Part(
        "_zero_point", (torch.int32,), _packed(words), columns, PackedIntegers(bits, 0), needed=not symmetric
    )
    if unpacked:
        zeros = _of_groups(Part("_zero_point", (torch.int8,), needed=not symmetric), group, offset=middle)
    index = Part("_g_idx", INDICES, ALL, EACH, needed=indexed)
    return Form(f"packed integers of {bits} bits", codes, scales, zeros, index=index, middle=middle, state="_shape")


def integers(group: int, *, symmetric: bool, indexed: bool = False, rows: Axis = EACH) -> Form:
    """Signed integers, one in a byte. rows: ALL for one scale for all of a tensor, with group 0."""
    scales = Part("_scale", SCALES, rows, Axis(group), check="finite")
    zeros = Part("_zero_point", (torch.int8,), rows, Axis(group), needed=not symmetric)
    index = Part("_g_idx", INDICES, ALL, EACH, needed=indexed)
    return Form("integers in bytes", Part("", (torch.int8,)), scales, zeros, index=index)


def affine(bits: int, group: int, biases: str) -> Form:
    """Integers packed along the inputs; each group has a scale and a bias that is added."""
    codes = Part("weight", (torch.uint32, torch.int32), EACH, _packed(_words(bits)), PackedIntegers(bits, 1))
    scales = Part("scales", SCALES, EACH, Axis(group), check="finite")
    bias = Part(biases, SCALES, EACH, Axis(group), check="finite")
    return Form(f"affine integers of {bits} bits", codes, scales, bias=bias, weight="weight")


STATES = ".quant_state.bitsandbytes__"
NESTED_OFFSET = ".nested_offset"  # a number in the state


def codebook4(kind: str, block: int, nested: int) -> Form:
    """bitsandbytes' nf4 and fp4, with a scale for each block of elements.

    nested: the block of those, which are codes of a table of their own, times a scale, plus a number; 0 for none.
    """
    codes = Part("", BYTES, EACH, Axis(2, packed=True), same)
    table = Part(".quant_map", (torch.float32,), ALL, Axis(0, 16), check="finite")
    scales: Part | Form = Part(".absmax", (torch.float32,), EACH, Axis(block), check="not negative")
    if nested:
        lookup = Part(".nested_quant_map", (torch.float32,), ALL, Axis(0, 256), check="finite")
        over = Part(".nested_absmax", (torch.float32,), EACH, Axis(nested), check="not negative")
        packed, added = Part(".absmax", BYTES, decode=same), Part(NESTED_OFFSET, (torch.float32,), ALL, ALL)
        scales = Form("scales", packed, over, table=lookup, columns=Axis(block), bias=added)
    return Form(kind, codes, scales, table=table, width=-1, dtype=torch.bfloat16, state=STATES + kind)


def row_int8() -> Form:
    """bitsandbytes' LLM.int8 (arXiv 2208.07339): the largest magnitude of each row is 127."""
    scales = Part("SCB", (torch.float32,), EACH, ALL, check="not negative")
    codes = Part("weight", (torch.int8,))
    layout = (("weight_format", (0,)),)  # 1 to 3 are those of kernels: col32, col_turing, col_ampere
    return Form("int8 by row", codes, scales, weight="weight", factor=1 / 127, dtype=torch.bfloat16, repeated=layout)


_HQQ_BESIDE = (
    *("unpack_view_dtype", "view_as_float", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)


def hqq(bits: int, width: int, *, by_row: bool) -> Form:
    """HQQ: of all elements as rows of `width`; a scale and a zero for each row, or each column.

    3 bits are in words of 32, others in bytes.
    """
    word, count = (torch.int32, 10) if bits == 3 else (torch.uint8, 8 // bits)
    codes = Part("W_q", (word,), Axis(count, packed=True), EACH, Slabs(bits, count))
    over = (EACH, ALL) if by_row else (ALL, EACH)
    scales = Part("scale", SCALES, *over, check="finite")
    zeros = Part("zero", SCALES, *over, check="finite")
    packing = f"{bits}bit_{'32' if bits == 3 else 'u8'}"
    settings = {"nbits": (bits,), "axis": (int(by_row),), "quant_scale": (0,), "quant_zero": (0,)}
    settings |= {"group_size": (width,)} if width else {}
    return Form(
        f"hqq of {bits} bits",
        codes,
        scales,
        zeros,
        weight="weight",
        width=width,
        whole=True,
        state="shape",
        beside=_HQQ_BESIDE,
        repeated=(*settings.items(), ("packing", tuple(packing.encode()))),
    )


def ternary(*, divides: bool) -> Form:
    """BitNet's -1, 0 and 1 as 0, 1 and 2: four slabs of rows in the bytes of [out / 4, in], the first lowest."""
    codes = Part("", BYTES, Axis(4, packed=True), EACH, Slabs(2, 4, lowest_first=True))
    scales = Part("_scale", SCALES, ALL, ALL, check="positive")
    return Form("ternary", codes, scales, middle=1, divides=divides, whole=True, dtype=torch.bfloat16)


def _of_groups(stored: Part, group: int, offset: float = 0) -> Form:
    """Numbers of each group of columns, whose part has its own packing."""
    return Form("zeros", stored, None, columns=Axis(group), offset=offset)


def _words(bits: int) -> Axis:
    """The layout of integers in words of 32 bits."""
    return Axis(32 // bits) if 32 % bits == 0 else Axis(32, bits)


def _packed(words: Axis) -> Axis:
    return replace(words, packed=True)


def torchao_fp8(rows: Axis, columns: Axis) -> Form:
    """torchao's Float8Tensor as it saves one: X._weight_qdata and X._weight_scale."""
    form = fp8("torchao's fp8", "_weight_scale", rows, columns)
    return replace(form, codes=replace(form.codes, ending="_weight_qdata"), weight="weight")


def torchao_integers(group: int) -> Form:
    """torchao's Int8Tensor and IntxUnpackedToInt8Tensor: integers of any width, one in a byte."""
    codes = Part("_weight_qdata", (torch.int8,))
    scales = Part("_weight_scale", SCALES, EACH, Axis(group), check="finite")
    zeros = Part("_weight_zero_point", (torch.int8, *INDICES), EACH, Axis(group), needed=False)
    return Form("torchao's integers", codes, scales, zeros, weight="weight")


def torchao_int4(group: int) -> Form:
    """torchao's Int4Tensor: two signed integers in a byte, and [G, out] scales and numbers that are added."""
    codes = Part("_weight_qdata", (torch.int8, torch.uint8), EACH, Axis(2, packed=True), _SIGNED4)
    scales = Part("_weight_scale", SCALES, EACH, Axis(group), inputs_first=True, check="finite")
    bias = Part("_weight_zero_point", SCALES, EACH, Axis(group), inputs_first=True, check="finite")
    return Form("torchao's int4", codes, scales, bias=bias, weight="weight")
