"""The road from a step to a block: the frames between them, and that options are made once on the way."""

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels import llama
from fnmodels.models.common.context import with_context
from fnmodels.options import ForwardOptions

PACKAGES = [Path(package.__file__).parent for package in (fnmodels, P, train)]
ROAD = ["__call__", "step", "sums", "next_token_loss", "hidden_states", "run_stack", "context"]
CONFIG = llama.Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def frames_of_packages():
    """The names of the functions of the three packages on the stack, the outermost first."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        if any(Path(frame.f_code.co_filename).is_relative_to(package) for package in PACKAGES):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


@pytest.fixture
def roads(monkeypatch):
    """The frames around each call of a block, which is a product."""
    seen = []

    @with_context
    def block(layer, x, mask, freqs, /, *, config, kind, ctx):
        seen.append(frames_of_packages())
        return x * (1 + sum(leaf.sum() for leaf in fnmodels.tree.leaves(layer)))

    monkeypatch.setattr(llama, "block", block)
    return seen


def packed_batch():
    return fnmodels.pack([torch.arange(3), torch.arange(3, 7), torch.arange(8, 15)], 8).batch()


def run_step(**options):
    optimizer = train.adamw(1e-3, spec=llama.spec(CONFIG))
    step = train.make_step(functools.partial(train.next_token_loss, config=CONFIG), optimizer, **options)
    tokens = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(tokens)
    batch = {"tokens": tokens, "positions": ones.cumsum(1) - 1, "segment_ids": ones, "labels": tokens.roll(-1, 1)}
    step(train.init_state(P.init(CONFIG, 0), optimizer), batch)


def test_a_plain_step_reaches_a_block_in_eight_frames(roads):
    run_step()
    assert roads == [ROAD, ROAD]  # and the block


def test_a_recomputing_step_has_one_more_frame_around_the_context(roads):
    run_step(remat="full")
    forward = [*ROAD[:-1], "recomputed", "context"]
    assert roads[:2] == [forward, forward]
    assert len(roads) == 4 and all(frames[-1] == "context" for frames in roads)


def test_a_step_with_compiled_blocks_has_no_frame_of_its_own_around_the_context(roads, monkeypatch):
    # In place of the compiler, which does not trace `sys._getframe`.
    monkeypatch.setattr("train.remat.full_graph", lambda block: lambda *args, **more: block(*args, **more))
    run_step(compile="block")
    assert roads == [ROAD, ROAD]


def test_options_are_made_once_on_the_road_and_adapted_once(roads, monkeypatch):
    made = []
    init = ForwardOptions.__post_init__
    monkeypatch.setattr(ForwardOptions, "__post_init__", lambda self: (made.append(self), init(self))[1])
    run_step()  # makes the plan, whose blocks are bound to options of their own
    made.clear()
    run_step()
    assert not made  # the usual ones pass as they are, for the model finds the layout of rows of one document itself
    loss, weights = train.loss.ModelLoss(functools.partial(train.next_token_loss, config=CONFIG)), P.init(CONFIG, 0)
    loss(weights, packed_batch())
    made.clear()
    loss(weights, packed_batch())
    assert len(made) == 1  # what the run makes of the usual ones where the model is entered: with a layout


def test_a_plan_of_layers_is_shared_by_calls_and_knows_other_options(roads):
    from fnmodels.stack.plan import plan_stack

    plan = plan_stack(CONFIG, None, (), ForwardOptions())
    assert plan_stack(dataclasses.replace(CONFIG), None, (), ForwardOptions()) is plan
    assert plan_stack(CONFIG, None, (), ForwardOptions("math")) is not plan
    assert plan_stack(CONFIG, range(1), (), ForwardOptions()).used == ("full",)
    assert plan_stack(CONFIG, None, (), ForwardOptions(lambda *args, **more: None)) is not plan
    assert plan.layers[0].block.func is llama.block


def test_a_plan_keeps_no_function_of_the_caller():
    from fnmodels.stack.plan import _kept, plan_stack

    before = _kept.cache_info().currsize
    plan_stack(CONFIG, None, (), ForwardOptions(lambda *args, **more: None))
    assert _kept.cache_info().currsize == before


def test_a_layout_that_the_run_makes_is_not_checked_and_one_that_is_passed_is(roads, monkeypatch):
    from fnmodels.ops.attention import select

    checked = []
    monkeypatch.setattr(select, "check_layout", lambda mask, layout: checked.append(layout))
    run_step()
    assert not checked
    batch = packed_batch()
    layout = fnmodels.inputs.document_layout(batch["positions"], batch["segment_ids"])
    loss = train.loss.ModelLoss(functools.partial(train.next_token_loss, config=CONFIG, layout=layout))
    loss(P.init(CONFIG, 0), batch)
    assert checked == [layout]


def test_the_layout_of_another_batch_is_refused_in_a_loss_of_a_step():
    batch = packed_batch()
    tokens = batch["tokens"]
    other = fnmodels.inputs.document_layout(torch.arange(8).expand_as(tokens), torch.ones_like(tokens))
    loss = train.loss.ModelLoss(functools.partial(train.next_token_loss, config=CONFIG, layout=other))
    with pytest.raises(ValueError, match="describes other documents than the mask"):
        loss(P.init(CONFIG, 0), batch)
