"""kernel="invariant" in models of published widths: matrix libraries choose other kernels for these than for tiny ones.

One model per structure. Each is compared in several batches, and with two threads.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import invariance, tree
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Causal
from fnmodels.ops.attention.select import attention
from fnmodels.ops.invariant import attention as tiles
from fnmodels.ops.invariant import rows as invariant
from fnmodels.ops.moe import router
from tests.contract.test_invariant import (
    DTYPES,
    EACH,
    LENGTHS,
    ROWS,
    alone,
    assert_bits,
    logprobs,
    logprobs_and_gradients,
    sampled,
)
from tests.support.cases import generic_params, variants_of
from tests.support.processor import needs_matrix_tiles
from tests.variants.qwen3_next import FIVE

FOUR_ROWS = tuple(((n, length), (None, max(LENGTHS) - length)) for n, length in enumerate(LENGTHS))
CHUNKS = (37, 17, 5, 3, 2, 1, 1, 37, 36)
OVER_THE_END_OF_A_TILE = (100, 27, 1, 1, 1, 9)
FEW = (127, 1, 1, 10), (37, 5, 3, 1, 93)  # of all structures but the first: as far, with fewer numbers of rows

WIDE: dict[str, Any] = {"vocab_size": 600, "hidden_size": 640, "intermediate_size": 1184}
LATENT = {"kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # structure: family, variant, what is wide
    "dense": ("llama", "qwen3", {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "ungrouped": ("llama", "llama_attention_bias", {"head_dim": 160, "num_hidden_layers": 1} | FOUR),
    "latent": ("deepseek", "deepseek_v3_no_latent", LATENT | {"num_hidden_layers": 2, "moe_intermediate_size": 512}),
    "softmax router": (
        "qwen_moe",
        "qwen2_moe",
        {"num_hidden_layers": 1, "mlp_only_layers": [], "moe_intermediate_size": 512, "num_experts": 20}
        | {"shared_expert_intermediate_size": 1024},
    ),
    "sigmoid router": ("glm4_moe", "glm4_moe", {"num_hidden_layers": 2, "moe_intermediate_size": 640, "head_dim": 128}),
    "sinks": (
        "gpt_oss",
        "gpt_oss",
        {"head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 2, "sliding_window": 40}
        | {"intermediate_size": 640},
    ),
    "softcap and windows": ("gemma", "gemma2", {"head_dim": 256, "sliding_window": 40} | GROUPED),
    "gated delta": (
        "qwen3_next",
        "qwen3_5",
        {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "linear_value_head_dim": 128}
        | {"rope_parameters": FIVE["rope_parameters"] | {"mrope_section": [22, 21, 21]}}  # of the 64 pairs that rotate
        | DELTA,
    ),
    "channel delta": (
        "kimi_linear",
        "kimi_linear",
        LATENT
        | {"linear_num_heads": 2, "linear_head_dim": 128, "num_hidden_layers": 2, "moe_intermediate_size": 512}
        | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    ),
    "state space": ("mamba2", "mamba2", {"num_heads": 20, "head_dim": 64, "state_size": 128, "num_hidden_layers": 1}),
    "state space and attention": (
        "falcon_h1",
        "falcon_h1",
        {"head_dim": 96, "mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_head": 64, "mamba_d_state": 128}
        | {"num_hidden_layers": 1},
    ),
    "short convolution": (
        "lfm2",
        "lfm2",
        {"num_attention_heads": 10, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    "indexer": (
        "deepseek_v32",
        "deepseek_v32",
        LATENT
        | FOUR
        | {"q_lora_rank": 192, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 24}
        | {"moe_intermediate_size": 512, "num_hidden_layers": 1, "first_k_dense_replace": 1},
    ),
    "shared keys": (
        "gemma4",
        "gemma4_text_e",
        {"head_dim": 128, "global_head_dim": 256, "sliding_window": 40, "hidden_size_per_layer_input": 64}
        | {"num_hidden_layers": 3, "num_kv_shared_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"vocab_size_per_layer_input": 600},
    ),
}


@functools.cache
def config_of(structure: str, **changes: Any) -> Any:
    family, variant, wide = MODELS[structure]
    values = variants_of(family).variants()[variant]
    fits = {name: value for name, value in WIDE.items() if name in values}
    return getattr(fnmodels, family).Config.from_hf(values | fits | wide | changes)


def params_of(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    return generic_params.__wrapped__(config, dtype)  # not kept: all of them are more than a gigabyte


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(config: Any, params: Any, repeats: int = 1, chunks: tuple[tuple[int, ...], ...] = FEW) -> None:
    """Rows in another order, and steps of a sampler, with two threads have the bits of each document with one.

    So have the gradients of a document's embedded tokens.
    """
    with threads(1):
        wanted, grads = dict[int, Tensor](), dict[int, Tensor]()
        for rows in EACH:
            logp, grad = logprobs_and_gradients(config, params, rows)
            wanted, grads = wanted | logp, grads | grad
        found = logprobs(config, params, FOUR_ROWS * repeats)
        assert_bits(found, {n: logp.repeat(repeats) for n, logp in wanted.items()}, f"{4 * repeats} rows")
        assert_bits(sampled(config, params, chunks[0], rings=True, rows=1), wanted, "one row, sampled")
    with threads(2):
        logp, grad = logprobs_and_gradients(config, params, ROWS["other order"])
        assert_bits(logp, wanted, "two threads")
        assert_bits(grad, grads, "gradients, two threads")
        assert_bits(sampled(config, params, chunks[1], rings=False, rows=2), wanted, "two threads, two rows, sampled")


def _pairs() -> Iterator[Any]:
    """The first structure in both dtypes, the others in one in turn. All but one take seconds."""
    for index, structure in enumerate(MODELS):
        marks = [] if structure == "ungrouped" else [pytest.mark.slow]
        for number, dtype in enumerate(DTYPES):
            if index == 0 or index % len(DTYPES) == number:
                yield pytest.param(structure, dtype, marks=marks)


@pytest.mark.parametrize(("structure", "dtype"), list(_pairs()))
def test_a_document_has_its_bits(structure: str, dtype: str) -> None:
    """Its log-probabilities in other batches and in the sampler, and the gradients of its embedded tokens."""
    config = config_of(structure)
    params = params_of(config, DTYPES[dtype])
    if structure == next(iter(MODELS)):
        check(config, params, 2, (OVER_THE_END_OF_A_TILE, CHUNKS))
    else:
        check(config, params)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dora"), [("fp32", True), ("bf16", False)])
def test_adapters_have_their_bits(dtype: str, dora: bool) -> None:
    config = config_of("ungrouped")
    targets = ("q_proj", "o_proj", "gate_proj", "down_proj")
    added = P.lora.add(config, params_of(config, DTYPES[dtype]), rank=8, targets=targets, seed=0, dora=dora)
    params = tree.map(lambda leaf: leaf + 0.01, added)
    check(config, params)


def test_packed_weights_have_the_bits_of_plain_ones() -> None:
    config = config_of("dense", num_hidden_layers=1)
    params = params_of(config)
    assert_bits(sampled(config, P.packed(params), CHUNKS, rings=True, rows=1), alone(config, params), "packed")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_vocabulary_has_its_bits_in_any_chunk(dtype: str) -> None:
    config = config_of("dense", num_hidden_layers=1, vocab_size=2000)
    params = params_of(config, DTYPES[dtype])
    with threads(1):
        wanted = alone(config, params)
        assert_bits(sampled(config, params, OVER_THE_END_OF_A_TILE, rings=True, rows=1), wanted, "sampled")
        for chunk in (1, 7, None):
            assert_bits(logprobs(config, params, ROWS["packed"], chunk=chunk), wanted, f"chunk {chunk}")


Run = Callable[[], list[Tensor]]


def activations() -> list[Tensor]:
    """Of so many elements that a gelu takes all threads, and other activations one."""
    x = torch.randn(27 * 1184, generator=torch.Generator().manual_seed(0))
    with invariant.invariant_rows(True):
        return [invariant.elementwise(f, x) for f in (F.gelu, functools.partial(F.gelu, approximate="tanh"), F.silu)]


def gradients_of_a_router() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits, up = torch.randn(200, 60, generator=draw).requires_grad_(), torch.randn(200, 4, generator=draw)
    with invariant.invariant_rows(True):
        weights, _ = router.softmax_top_k(logits, k=4, renormalize=True)
        return list(torch.autograd.grad(weights, logits, up))


def gradients_of_attention() -> list[Tensor]:
    """Of keys that many queries share."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, up = (torch.randn(1, 140, heads, 64, generator=draw) for heads in (16, 2, 2, 16))
    positions, ids = torch.arange(140)[None], torch.ones(1, 140, dtype=torch.long)
    given = [t.requires_grad_() for t in (q, k, v)]
    mask = Mask(positions, ids, positions, ids, None, None, Causal())
    return list(torch.autograd.grad(attention(*given, mask, kernel="invariant", scale=0.1), given, up))


def gradients_of_weights() -> list[Tensor]:
    """Sums over more rows than one thread takes, by MKL in fp32."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fnmodels.ops.cpu.product_table.ONEDNN", frozenset())
        for dtype, rows, width in ((torch.float32, 4096, 128), (torch.float32, 8192, 64), (torch.bfloat16, 4096, 128)):
            x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)
            weight = x[:width].clone().requires_grad_()
            found += torch.autograd.grad(invariant.invariant_linear(x, weight, None), weight, x)
    return found


def scores_of_a_row() -> list[Tensor]:
    """With the entropy, which are sums over the vocabulary."""
    logits = torch.randn(1, 1, 40000, generator=torch.Generator().manual_seed(0))
    return list(train.logprobs(logits, torch.tensor([[3]])))


SHARED: tuple[Run, ...] = (
    activations,
    gradients_of_a_router,
    gradients_of_attention,
    gradients_of_weights,
    scores_of_a_row,
)


def differ_by_threads(run: Run) -> bool:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(run())
    return any(not torch.equal(one, first) for other in found for one, first in zip(other, found[0], strict=True))


@pytest.mark.parametrize("run", SHARED)
def test_threads_change_nothing(run: Run) -> None:
    assert not differ_by_threads(run)


def sampled_differs() -> bool:
    """Products of one query of one head of 160."""
    config = config_of("ungrouped", num_hidden_layers=1)
    params = params_of(config)
    got = sampled(config, params, OVER_THE_END_OF_A_TILE, rings=True, rows=1)
    return not torch.equal(got[0], alone(config, params)[0])


def wide_rows_differ() -> bool:
    config = config_of("ungrouped", num_hidden_layers=1)
    params = params_of(config, torch.bfloat16)
    got, wanted = logprobs(config, params, ROWS["packed"]), alone(config, params)
    return any(not torch.equal(got[n], wanted[n]) for n in got)


def _torchs(x: Tensor) -> Tensor:
    return x.softmax(-1)


BUGS: dict[str, tuple[Any, str, Any, Callable[[], bool]]] = {
    "attention products of 4 rows": (tiles, "least_rows", lambda width: 4, sampled_differs),
    "bf16 products in tiles": (invariant, "MATRIX_TILES", False, wide_rows_differ),
    "sums over all rows": (tiles, "SUMMED", 1 << 20, functools.partial(differ_by_threads, gradients_of_attention)),
    "gradients of weights over all rows": (
        invariant,
        "SUMMED",
        1 << 20,
        functools.partial(differ_by_threads, gradients_of_weights),
    ),
    "a softmax of any width": (router, "softmax", _torchs, functools.partial(differ_by_threads, gradients_of_a_router)),
    "a gelu shared as others": (invariant, "GELU_GRAIN", 1 << 30, functools.partial(differ_by_threads, activations)),
}


@needs_matrix_tiles
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong, found = BUGS[bug]
    monkeypatch.setattr(module, name, wrong)
    assert found()


@needs_matrix_tiles
def test_explain_invariance_finds_planted_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in ("attention products of 4 rows", "bf16 products in tiles", "sums over all rows"):
        monkeypatch.setattr(*BUGS[bug][:3])
    found = fnmodels.explain_invariance()
    assert not found["form of the keys of fp32 attention"]
    assert not found["rows of bf16 products"]
    assert not found["number of threads"]


@needs_matrix_tiles
@pytest.mark.parametrize(
    ("module", "name", "wrong"), [(invariant, "GELU_GRAIN", 1 << 30), (invariance, "softmax", _torchs)]
)
def test_explain_invariance_asks_about_threads(
    module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with torch.no_grad(), invariant.invariant_rows(True):
        assert not invariance._threads_alike(torch.Generator().manual_seed(0))
