"""make_step(dtype=): the model computes in one dtype, parameters and updates keep theirs."""

import functools

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import llama, tree
from fnmodels.tree import Tree
from train.state import init_state
from train.step import make_step

CONFIG = llama.Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
BATCH = fnmodels.pack([torch.arange(3, 20), torch.arange(40, 60), torch.arange(5)], 16).batch()


def loss(params, batch):
    return train.next_token_loss(params, batch, config=CONFIG)


def run(loss_fn, optimizer, params, **options):
    step, state, losses = make_step(loss_fn, optimizer, **options), init_state(params, optimizer), []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(metrics["loss"])
    return state, losses


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"remat": "full"}], ids=str)
def test_a_step_in_bf16_equals_a_loss_that_casts(options):
    def casting(params, batch):
        return loss(tree.map(torch.Tensor.bfloat16, params), batch)

    params, optimizer = P.init(CONFIG, 0), train.adamw(0.01)
    state, losses = run(loss, optimizer, params, dtype=torch.bfloat16, **options)
    by_hand, others = run(casting, optimizer, params, **options)
    assert losses == others
    assert all(map(torch.equal, tree.leaves(state), tree.leaves(by_hand)))
    assert {leaf.dtype for leaf in tree.leaves(state) if leaf.ndim} == {torch.float32}
    assert losses != run(loss, optimizer, params, **options)[1]


def test_a_loss_receives_trained_leaves_in_the_dtype_and_frozen_ones_in_theirs():
    seen = {}

    def watching(params: Tree, batch: Tree) -> tuple:
        seen.update({path: leaf.dtype for path, leaf in tree.flatten(params).items()})
        return loss(tree.map(torch.Tensor.float, params), batch)

    optimizer = train.partition({"norm": None, "*": train.sgd(0.1)})
    run(watching, optimizer, P.init(CONFIG, 0), dtype=torch.bfloat16)
    assert seen.pop("norm") == torch.float32
    assert set(seen.values()) == {torch.bfloat16}


def test_another_dtype_is_named():
    with pytest.raises(ValueError, match=r"dtype is torch\.int64; it must be a floating-point"):
        make_step(loss, train.sgd(0.1), dtype=torch.int64)
    strategy = train.parallel.Strategy(gather_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"gather_dtype torch\.float16: give one of them"):
        make_step(loss, train.sgd(0.1), dtype=torch.bfloat16, mesh=train.parallel.Mesh(fsdp=2), strategy=strategy)


def test_the_model_of_a_partial_computes_in_the_dtype():
    partial = functools.partial(train.next_token_loss, config=CONFIG)
    optimizer, params = train.adamw(0.01), P.init(CONFIG, 0)
    assert (
        run(partial, optimizer, params, dtype=torch.bfloat16)[1]
        == run(loss, optimizer, params, dtype=torch.bfloat16)[1]
    )
