"""Tests of FLOPs per token: the documented formula against counts made by hand."""

import pytest

import fnmodels
import params as P
from fnmodels import llama, qwen_moe, tree
from tests.support.cases import attending, attending_layers, cases, generic_params, layers_run
from train.job.flops import flops_per_token, peak_memory

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ATTENTION, MLP, HEAD = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48, 128 * 32
SCORES = 2 * 10 * 32 // 2 * 2  # of a token in a row of 10: q k and p v, each seeing half of it


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_by_hand(tied):
    config = llama.Config(**SIZES, tie_word_embeddings=tied)
    forward = 3 * (2 * (ATTENTION + MLP) + SCORES) + 2 * HEAD
    assert flops_per_token(config, llama.spec(config), 10) == 3 * forward


def test_of_the_experts_those_that_are_chosen_count():
    config = qwen_moe.Config(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    router, experts = 8 * 32, 2 * 3 * 32 * 16
    forward = 3 * (2 * (ATTENTION + router + experts) + SCORES) + 2 * HEAD
    assert flops_per_token(config, qwen_moe.spec(config), 10) == 3 * forward


def test_frozen_weights_have_no_gradient_to_be_made():
    config = llama.Config(**SIZES)
    adapted = P.lora.add(config, P.init(config, 0), rank=4, targets=("o_proj",))
    weights, adapters = 3 * (ATTENTION + MLP) + HEAD, 3 * 4 * (32 + 32)
    assert flops_per_token(config, P.lora.spec(config, adapted), 10) == 4 * weights + 6 * adapters + 9 * SCORES


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_family_has_attention_and_no_more_flops_than_all_its_weights_would_need(case):
    spec = fnmodels.family_of(case.config).spec(case.config)
    none, some = (flops_per_token(case.config, spec, length) for length in (0, 7))
    params = generic_params(case.config)
    ran = params | {"layers": layers_run(case.config, params["layers"])}
    everything = sum(leaf.numel() for leaf in tree.leaves(ran))
    assert 0 < none < 6 * everything
    layers = enumerate(layers_run(case.config, spec["layers"]))
    attention = attending_layers(case.config)
    heads = [layer["attention"] for index, layer in layers if index in attention]
    widths = [one["o_proj"].shape[1] if "o_proj" in one else one["q_b_proj"].shape[0] for one in heads]
    assert some - none == 6 * 7 * sum(widths)
    assert bool(widths) == bool(attending((case,)))


def test_memory_is_in_bytes():
    assert 5e7 < peak_memory() < 1e12
