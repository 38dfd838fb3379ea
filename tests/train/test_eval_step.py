"""Evaluation and forward-only runs equal the training forward, for every form of a batch."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from fnmodels import tree
from tests.support.cases import batch_of, cases, generic_params, off, segments
from train import adamw, init_state, make_eval_step, make_forward_only, make_step, next_token_loss, token_logprobs
from train.engine import Engine

CONFIG = next(case.config for case in cases() if case.name == "llama")
SPARSE = next(case.config for case in cases() if case.family == "qwen_moe")
LOSS = functools.partial(next_token_loss, config=CONFIG)
LOGPROBS = functools.partial(token_logprobs, config=CONFIG)
PARAMS = generic_params(CONFIG)


def _batch(segment_ids: torch.Tensor, config=CONFIG) -> dict[str, torch.Tensor]:
    made = batch_of(config, segment_ids)
    return made.batch()


WHOLE = _batch(segments((7, 5), (12,), (3, -9), (-12,)))  # the last row has no token at all
PACKED = {name: t[WHOLE["segment_ids"] > 0][None] for name, t in WHOLE.items()}
PACKED["segment_ids"] = torch.tensor([[1] * 7 + [2] * 5 + [3] * 12 + [4] * 3])
FORMS = {
    "rows": WHOLE,
    "packed": PACKED,
    "a list": [
        {name: t[:2] for name, t in WHOLE.items()},
        {name: t[2:3, :3] for name, t in WHOLE.items()},
        {name: t[3:] for name, t in WHOLE.items()},
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_makes_the_same_step_and_evaluates_to_its_loss(form: str) -> None:
    optimizer = adamw(0.01, eps=1e-2)  # large enough not to magnify roundings of gradients near 0
    after, expected = make_step(LOSS, optimizer)(init_state(PARAMS, optimizer), WHOLE)
    state, metrics = make_step(LOSS, optimizer)(init_state(PARAMS, optimizer), FORMS[form])
    assert off(state.params, after.params) < 1e-6
    evaluated = make_eval_step(LOSS)(PARAMS, FORMS[form])
    for found in (metrics, evaluated):
        assert int(found["count"]) == int(expected["count"]) == int((WHOLE["labels"] >= 0).sum())
        torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(evaluated["total"], expected["loss"] * expected["count"])
    assert not any(t.requires_grad for t in evaluated.values())


@pytest.mark.parametrize("compile", ["none", "block"])
def test_evaluation_is_the_training_forward_to_the_bit(compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    optimizer = adamw(0.01)
    _, metrics = make_step(LOSS, optimizer, compile=compile)(init_state(PARAMS, optimizer), WHOLE)
    torch._dynamo.reset()
    counter.clear()
    assert torch.equal(make_eval_step(LOSS, compile=compile)(PARAMS, WHOLE)["loss"], metrics["loss"])
    torch._dynamo.reset()
    of_eval = counter.frame_count
    make_forward_only(LOGPROBS, compile=compile)(PARAMS, WHOLE)
    torch._dynamo.reset()
    assert (of_eval > 0) == (counter.frame_count > of_eval) == (compile == "block")


def test_the_logprobs_of_each_form_are_those_of_the_rows() -> None:
    run = make_forward_only(LOGPROBS)
    logp, entropy, valid = run(PARAMS, WHOLE)
    assert not logp.requires_grad and torch.equal(valid, WHOLE["labels"] >= 0)
    real = WHOLE["segment_ids"] > 0
    for found, expected in zip(run(PARAMS, PACKED), (logp, entropy, valid), strict=True):
        torch.testing.assert_close(found[0], expected[real])
    parts = run(PARAMS, FORMS["a list"])
    assert [part[0].shape for part in parts] == [(2, 12), (1, 3), (1, 12)]
    torch.testing.assert_close(parts[0][0], logp[:2])
    torch.testing.assert_close(parts[1][1], entropy[2:3, :3])


def test_nothing_valid_is_a_loss_of_zero() -> None:
    metrics = make_eval_step(LOSS)(PARAMS, FORMS["a list"][2])
    assert float(metrics["loss"]) == 0 and int(metrics["count"]) == 0


def test_aux_is_summed_over_microbatches() -> None:
    loss = functools.partial(next_token_loss, config=SPARSE, aux=True)
    params, batch = generic_params(SPARSE), _batch(segments((7, 5), (9, -3)), SPARSE)
    whole = make_eval_step(loss)(params, batch)["aux"]["counts"]
    parts = make_eval_step(loss)(params, [{n: t[i : i + 1] for n, t in batch.items()} for i in range(2)])
    assert torch.equal(parts["aux"]["counts"], whole)
    assert int(whole.sum()) == 21 * SPARSE.num_experts_per_tok * len(whole)


def test_microbatches_may_have_sums_of_other_names() -> None:
    def loss(params, batch):
        name = "long" if batch["tokens"].shape[1] > 3 else "short"
        return *LOSS(params, batch), {"rows": torch.tensor(len(batch["tokens"])), name: torch.tensor(1)}

    expected = {"rows": 4, "long": 2, "short": 1}
    _, metrics = make_step(loss, adamw(0.01))(init_state(PARAMS, adamw(0.01)), FORMS["a list"])
    for found in (metrics, make_eval_step(loss)(PARAMS, FORMS["a list"])):
        assert {name: int(value) for name, value in found["aux"].items()} == expected


def test_what_does_not_go_is_named() -> None:
    optimizer = adamw(0.01)
    step = make_step(LOSS, optimizer, accumulate=2)
    with pytest.raises(ValueError, match="list of 3 microbatches, so accumulate is 1, not 2"):
        step(init_state(PARAMS, optimizer), FORMS["a list"])
    with pytest.raises(ValueError, match="list of microbatches is empty"):
        make_step(LOSS, optimizer)(init_state(PARAMS, optimizer), [])
    with pytest.raises(ValueError, match=r"accumulate=2 cannot split 'tokens', whose shape is \(1, 27\)"):
        step(init_state(PARAMS, optimizer), PACKED)
    with pytest.raises(ValueError, match="compile is 'all'"):
        make_forward_only(LOGPROBS, compile="all")
    with pytest.raises(ValueError, match="the loss must run the model by fnmodels"):
        make_forward_only(lambda params, batch: 0, compile="block")(PARAMS, WHOLE)
    with pytest.raises(ValueError, match=r"must return \(sum, count\)"):
        make_eval_step(lambda params, batch: 0.0)(PARAMS, WHOLE)


def _everything() -> list[torch.Tensor]:
    optimizer = adamw(0.01)
    state, metrics = make_step(LOSS, optimizer, clip=1.0)(init_state(PARAMS, optimizer), WHOLE)
    engine = Engine(CONFIG, PARAMS, adamw(0.01))
    engine.forward_backward(FORMS["a list"], LOSS)
    engine.optim_step()
    evaluated = make_eval_step(LOSS)(state.params, WHOLE)
    return tree.leaves([state, metrics, engine.params, evaluated, engine.infer([WHOLE], LOGPROBS)])


def test_a_group_that_somebody_else_made_is_left_alone() -> None:
    """See `guest` in ranks.py for a group of two."""
    expected = _everything()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        found = _everything()
        assert dist.is_initialized() and dist.group.WORLD is group and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("label", [-1, CONFIG.vocab_size])
def test_a_label_that_is_no_token_is_named(label: int) -> None:
    labels = WHOLE["labels"].clone()
    labels[0, 3] = label
    with pytest.raises(ValueError, match=rf"labels\[0, 3\] is {label}, but the vocabulary has {CONFIG.vocab_size}"):
        make_step(LOSS, adamw(0.01))(init_state(PARAMS, adamw(0.01)), WHOLE | {"labels": labels})
