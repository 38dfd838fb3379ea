"""Initialization: a leaf depends on (seed, path) only; abstract trees and counts follow from the same spec."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import params as P
from fnmodels import family_of, llama
from fnmodels.models.common.registry import family_for
from fnmodels.models.common.spec import InTurn, Parts
from params.initialize import draw
from tests.support.cases import Case, structures

every_structure = pytest.mark.parametrize("case", structures(), ids=str)


@dataclass(frozen=True)
class Config:
    """The config of a user's own family outside fnmodels: this file."""

    width: int = 8


def spec(config: Config) -> Any:
    frozen = P.Leaf((config.width,), torch.float32, ("embed",), P.Constant(0.5), trainable=False, keep_dtype=True)
    return {"table": P.Leaf((config.width, 3), torch.float32, ("embed", "mlp"), P.Normal(0.5)), "bias": frozen}


def block() -> None:
    """Stands for the functions that `family_of` requires and initialization does not call."""


kinds = attention_masks = freqs_cis = embed = unembed = block


def _small(layers: int = 2, **changes: Any) -> llama.Config:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return llama.Config(**(sizes | {"num_hidden_layers": layers, "num_key_value_heads": 1} | changes))


@every_structure
def test_same_seed_same_leaves(case: Case) -> None:
    one, two, other = (P.flatten(P.init(case.config, seed)) for seed in (3, 3, 4))
    spec = P.flatten(family_of(case.config).spec(case.config))
    drawn = {path for path, leaf in spec.items() if not isinstance(leaf.init, P.Constant | InTurn | Parts)}
    for path, leaf in one.items():
        assert torch.equal(leaf, two[path])
        assert torch.equal(leaf, other[path]) != (path in drawn)
    drawn_leaves = [one[path] for path in drawn]
    firsts = {tuple(leaf.flatten()[:4].tolist()) for leaf in drawn_leaves}
    assert len(firsts) == len(drawn_leaves), "two leaves begin alike"


def test_a_leaf_does_not_depend_on_the_others() -> None:
    small, large = P.flatten(P.init(_small(2), 0)), P.flatten(P.init(_small(5), 0))
    assert all(torch.equal(leaf, large[path]) for path, leaf in small.items())
    tied = P.flatten(P.init(_small(tie_word_embeddings=True), 0))
    assert "lm_head" not in tied and all(torch.equal(leaf, small[path]) for path, leaf in tied.items())
    leaves = P.flatten(llama.spec(_small()))
    backwards = {path: draw(leaves[path], 0, path) for path in reversed(leaves)}
    assert all(torch.equal(leaf, backwards[path]) for path, leaf in small.items())


@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "modernbert"])
def test_a_new_head_is_drawn_where_there_was_one(family: str) -> None:
    """Of other labels, and of as many; parts before the outputs stay in a head of the same kind alone."""
    config: Any = next(case.config for case in structures() if case.family == family and hasattr(case.config, "head"))
    first, before = P.new_head(config, P.init(config, 0), head="classification", num_labels=3)
    outputs = {path for path in P.flatten(before) if path.rpartition(".")[2].startswith("score")}
    for labels in (3, 2):
        made, after = P.new_head(first, before, head="classification", num_labels=labels, seed=1)
        flat, spec = P.flatten(after), P.flatten(family_of(made).spec(made))
        assert {path: leaf.shape for path, leaf in flat.items()} == {path: leaf.shape for path, leaf in spec.items()}
        assert {path for path, leaf in flat.items() if leaf is not P.flatten(before)[path]} == outputs != set()
    other = P.flatten(P.new_head(first, before, head="tokens", num_labels=3, seed=1)[1])
    kept = {path for path, leaf in other.items() if leaf is P.flatten(before).get(path)}
    assert not any(path.startswith(("head.", "score")) for path in kept) and len(kept) > 5


def test_neither_reads_nor_moves_global_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = P.init(_small(), 0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(one["embed_tokens"], P.init(_small(), 0)["embed_tokens"])


def test_dtype_is_a_cast_of_the_same_draw() -> None:
    full, half = P.flatten(P.init(_small(), 7)), P.flatten(P.init(_small(), 7, dtype=torch.bfloat16))
    assert all(torch.equal(half[path], leaf.bfloat16()) for path, leaf in full.items())


def test_distribution() -> None:
    drawn = P.init(_small(vocab_size=4000, initializer_range=0.03), 0)["embed_tokens"]
    assert float(drawn.std()) == pytest.approx(0.03, rel=0.02) and abs(float(drawn.mean())) < 1e-3


@pytest.mark.parametrize(
    "seed", [1.0, "1", None, True, torch.tensor(1.0), torch.tensor([1]), torch.tensor(True)], ids=repr
)
def test_a_seed_that_is_no_int_is_named(seed: Any) -> None:
    # It is hashed as text, so that 1 and 1.0 would be two seeds.
    with pytest.raises(TypeError, match="seed must be an int or a 0-d integer tensor, "):
        P.init(_small(), seed)


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_init_under_vmap_stacks_the_parameters_of_each_seed(shape: tuple[int, ...]) -> None:
    seeds = torch.tensor([5, 0, 2**40, 7])[: math.prod(shape)].view(shape)
    made = lambda seed: P.init(_small(), seed, dtype=torch.bfloat16)  # noqa: E731
    for _ in shape:
        made = torch.func.vmap(made)
    stacked = P.flatten(made(seeds))
    for index in itertools.product(*map(range, shape)):
        alone = P.flatten(P.init(_small(), int(seeds[index]), dtype=torch.bfloat16))
        assert stacked.keys() == alone.keys()
        assert all(torch.equal(stacked[path][index], leaf) for path, leaf in alone.items())


def test_init_of_a_seed_in_a_tensor_is_that_of_the_int() -> None:
    one, two = (P.flatten(P.init(_small(), seed)) for seed in (3, torch.tensor(3)))
    assert all(torch.equal(one[path], two[path]) for path in one)


def test_equal_ints_are_one_seed() -> None:
    one, two = (P.init(_small(), seed)["embed_tokens"] for seed in (3, np.int64(3)))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float32", float], ids=repr)
def test_a_dtype_that_is_not_floating_is_named(dtype: Any) -> None:
    for make in (lambda: P.init(_small(), 0, dtype=dtype), lambda: P.abstract(_small(), dtype=dtype)):
        with pytest.raises(TypeError, match=r"dtype must be None or a floating torch\.dtype, not"):
            make()


@every_structure
def test_abstract_equals_init(case: Case) -> None:
    for dtype in (None, torch.bfloat16):
        real = P.flatten(P.init(case.config, 0, dtype=dtype))
        meta = P.flatten(P.abstract(case.config, dtype=dtype))
        assert real.keys() == meta.keys()
        for path, leaf in real.items():
            assert meta[path].is_meta and (meta[path].shape, meta[path].dtype) == (leaf.shape, leaf.dtype)
            assert torch.isfinite(leaf).all()
    assert P.count(case.config) == sum(leaf.numel() for leaf in real.values())


def test_family_of_a_user_and_keep_dtype() -> None:
    for tree in (P.init(Config(), 0, dtype=torch.bfloat16), P.abstract(Config(), dtype=torch.bfloat16)):
        assert tree["table"].dtype == torch.bfloat16 and tree["bias"].dtype == torch.float32
    assert P.init(Config(), 0)["bias"].tolist() == [0.5] * 8
    assert P.count(Config()) == 8 * 3 + 8


def _published(model_type: str, vocab: int, width: int, mlp: int, layers: int, heads: int, kv: int, **rest: Any) -> Any:
    values = {"model_type": model_type, "vocab_size": vocab, "hidden_size": width, "intermediate_size": mlp}
    values |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv}
    return family_for(model_type).Config.from_hf(values | rest)


@pytest.mark.parametrize(
    ("config", "number"),
    [
        (_published("llama", 128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
        (_published("llama", 128256, 8192, 28672, 80, 64, 8), 70_553_706_496),
        (_published("llama", 128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True), 1_235_814_400),
        (_published("mistral", 32000, 4096, 14336, 32, 32, 8), 7_241_732_096),
        (_published("qwen2", 152064, 3584, 18944, 28, 28, 4), 7_615_616_512),
        (_published("qwen3", 151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True), 596_049_920),
        (_published("smollm3", 128256, 2048, 11008, 36, 16, 4, tie_word_embeddings=True), 3_075_098_624),
    ],
    ids=["llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-0.6b", "smollm3-3b"],
)
def test_published_counts(config: Any, number: int) -> None:
    assert P.count(config) == number
    assert sum(leaf.numel() for leaf in P.flatten(P.abstract(config)).values()) == number
