"""The engine equals the step: any split into microbatches and calls gives one big batch's update."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from fnmodels import tree
from tests.support.cases import batch_of, cases, generic_params, off, segments
from train import (
    adafactor,
    adamw,
    chain,
    init_state,
    lion,
    logprob_loss,
    make_step,
    next_token_loss,
    partition,
    sgd,
    token_logprobs,
    with_ema,
)
from train.engine import Engine
from train.optim import clip_norm
from train.optim.base import with_traits

CONFIG = next(case.config for case in cases() if case.name == "llama")
LOSS = functools.partial(next_token_loss, config=CONFIG)
PARAMS = generic_params(CONFIG)


def _batch(segment_ids: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    made = batch_of(CONFIG, segment_ids, seed=seed)
    return made.batch()


WHOLE = _batch(segments((7, 5), (12,), (3, -9), (1, -11)))


def _rows(lo: int, hi: int) -> dict[str, torch.Tensor]:
    return {name: tensor[lo:hi] for name, tensor in WHOLE.items()}


def _cut(lo: int, hi: int, length: int) -> dict[str, torch.Tensor]:
    """Rows without the padding at their end: microbatches of unequal length."""
    return {name: tensor[lo:hi, :length] for name, tensor in WHOLE.items()}


SPLITS: dict[str, list[list[Any]]] = {
    "one call": [[_rows(0, 4)]],
    "unequal rows": [[_rows(0, 1), _rows(1, 4)]],
    "two calls": [[_rows(0, 2)], [_rows(2, 3), _rows(3, 4)]],
    "unequal lengths": [[_cut(0, 2, 12), _cut(2, 3, 3), _cut(3, 4, 1)]],
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_split_is_the_step_of_one_batch(name: str, clip: float | None) -> None:
    optimizer = adamw(0.01, eps=1e-2)  # large enough not to magnify roundings of gradients near 0
    state, metrics = make_step(LOSS, optimizer, clip=clip)(init_state(PARAMS, optimizer), WHOLE)
    engine = Engine(CONFIG, PARAMS, optimizer, clip=clip)
    added = [engine.forward_backward(batches, LOSS) for batches in SPLITS[name]]
    found = engine.optim_step()
    assert off(engine.params, state.params) < 1e-6
    for key in ("loss", "grad_norm", "count"):
        torch.testing.assert_close(found[key], metrics[key], rtol=1e-5, atol=1e-6)
    assert sum(int(a["count"]) for a in added) == int(metrics["count"])
    torch.testing.assert_close(sum(a["total"] for a in added) / metrics["count"], metrics["loss"])


def test_one_row_of_packed_documents_is_the_rows() -> None:
    """[B, S] and [1, T] agree."""
    packed = _batch(segments((7, 5, 12, 3, 1)))
    flat = torch.cat([WHOLE["tokens"][row][WHOLE["segment_ids"][row] > 0] for row in range(4)])
    packed["tokens"] = flat[None]
    packed["labels"] = torch.cat([WHOLE["labels"][row][WHOLE["segment_ids"][row] > 0] for row in range(4)])[None]
    losses = []
    for batch in (packed, WHOLE):
        engine = Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2))
        engine.forward_backward([batch], LOSS)
        losses.append((engine.optim_step()["loss"], engine.params))
    torch.testing.assert_close(losses[0][0], losses[1][0])
    assert off(losses[0][1], losses[1][1]) < 1e-6


def test_inference_and_export_see_the_updated_weights() -> None:
    engine = Engine(CONFIG, PARAMS, adamw(0.01))
    fn = functools.partial(token_logprobs, config=CONFIG)
    before = engine.infer([WHOLE], fn)[0][0]
    engine.forward_backward([WHOLE], LOSS)
    engine.optim_step()
    (after, _, valid), *_ = engine.infer([WHOLE, _rows(0, 1)], fn)
    assert not after.requires_grad
    assert float(after.sum()) > float(before.sum()) and not after[~valid].any()
    exported = dict(engine.export())
    assert torch.equal(exported["model.embed_tokens.weight"], engine.params["embed_tokens"])
    assert len(exported) == len(tree.leaves(engine.params))


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_the_update_a_loss_sees_the_very_numbers_that_were_inferred(dtype: torch.dtype, remat: str) -> None:
    """So that the first ratio of a policy's update is 1 exactly, where the loss hands on what it is given."""
    engine = Engine(CONFIG, tree.map(lambda t: t.to(dtype), PARAMS), adamw(0.01), remat=remat)
    parts = [_rows(0, 1), _rows(1, 4)]
    inferred = [logp for logp, _, _ in engine.infer(parts, functools.partial(token_logprobs, config=CONFIG))]
    seen = []

    def loss(params: Any, batch: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logp, _, valid = token_logprobs(params, batch, config=CONFIG, **how)
        seen.append(logp.detach())
        return -logp.sum(), valid.sum()

    engine.forward_backward(parts, loss)
    assert all(torch.equal(old, new) for old, new in zip(inferred, seen, strict=True))
    engine.optim_step()
    engine.forward_backward(parts, loss)
    assert not torch.equal(inferred[0], seen[2])


def test_engines_are_apart_and_leave_what_they_were_given() -> None:
    before = tree.map(torch.clone, PARAMS)
    one, two = (Engine(CONFIG, PARAMS, adamw(0.01)) for _ in range(2))
    one.forward_backward([WHOLE], LOSS)
    one.optim_step()
    assert off(two.params, before) == 0 and off(PARAMS, before) == 0 and off(one.params, before) > 0


def test_remat_and_compiled_blocks_are_kept_with_the_loss() -> None:
    engine = Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2), remat="full")
    plain = Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2))
    for one in (engine, plain):
        for _ in range(2):
            one.forward_backward([_rows(0, 2), _rows(2, 4)], LOSS)
            one.optim_step()
    assert off(engine.params, plain.params) == 0


def test_a_wrong_clip_is_named() -> None:
    with pytest.raises(ValueError, match=r"clip is -1\.0"):
        Engine(CONFIG, PARAMS, adamw(0.01), clip=-1.0)


def test_calls_out_of_order_raise() -> None:
    engine = Engine(CONFIG, PARAMS, adamw(0.01))
    with pytest.raises(RuntimeError, match="after forward_backward"):
        engine.optim_step()
    with pytest.raises(ValueError, match="at least one microbatch"):
        engine.forward_backward([], LOSS)
    engine.forward_backward([WHOLE], LOSS)
    engine.zero_grad()
    with pytest.raises(RuntimeError, match="after forward_backward"):
        engine.optim_step()


def test_a_call_that_raises_leaves_the_gradients_as_they_were() -> None:
    """Some of its microbatches were computed, and none weighs in the next update; the calls before it all do."""

    def loss(params: Any, batch: Any) -> Any:
        if batch["tokens"].shape[1] == 3:
            raise MemoryError
        return LOSS(params, batch)

    engine, plain = (Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2)) for _ in range(2))
    engine.forward_backward([_rows(0, 1)], loss)
    with pytest.raises(MemoryError):
        engine.forward_backward([_rows(1, 2), _cut(2, 3, 3)], loss)
    plain.forward_backward([_rows(0, 1)], loss)
    assert off(engine.gradients(), plain.gradients()) == 0
    found = []
    for one in (engine, plain):
        one.forward_backward([_rows(0, 2)], loss)
        found.append(one.optim_step())
    assert off(engine.params, plain.params) == 0 and torch.equal(found[0]["loss"], found[1]["loss"])


def test_an_aux_that_does_not_fit_the_earlier_ones_changes_nothing() -> None:
    """It is found out after the pass, where gradients could have been added already."""

    def loss(params: Any, batch: Any) -> Any:
        return (*LOSS(params, batch), {"rows": batch["tokens"].new_ones(len(batch["tokens"]))})

    engine = Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2))
    engine.forward_backward([_rows(0, 2)], loss)
    before = {path: grad.clone() for path, grad in tree.flatten(engine.gradients()).items()}
    with pytest.raises(RuntimeError, match="size"):
        engine.forward_backward([_rows(0, 3)], loss)
    assert all(torch.equal(before[path], grad) for path, grad in tree.flatten(engine.gradients()).items())
    assert engine.optim_step()["aux"]["rows"].tolist() == [1, 1]


def test_limits_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match="clip is nan"):
        Engine(CONFIG, PARAMS, adamw(0.01), clip=float("nan"))


def _stepped(engine: Engine, **values: Any) -> dict[str, Any]:
    engine.forward_backward([WHOLE], LOSS)
    return engine.optim_step(**values)


def test_hyperparameters_of_one_update_are_those_of_an_optimizer_with_them() -> None:
    values: dict[str, Any] = {"lr": 0.03, "betas": (0.5, 0.7), "weight_decay": 0.2}
    one, other = Engine(CONFIG, PARAMS, with_ema(adamw(0.01), 0.9)), Engine(CONFIG, PARAMS, with_ema(adamw(0.01), 0.9))
    assert float(_stepped(one, **values)["lr"]) == pytest.approx(0.03)
    other.optimizer = with_ema(adamw(0.03, betas=(0.5, 0.7), weight_decay=0.2), 0.9)
    _stepped(other)
    assert off(one.params, other.params) == 0
    other.optimizer = with_ema(adamw(0.01), 0.9)
    assert float(_stepped(one)["lr"]) == pytest.approx(0.01)  # the values were for one update
    _stepped(other)
    assert off(one.params, other.params) == 0


@pytest.mark.parametrize("make", [adamw, lion, adafactor, sgd, lambda lr: chain(clip_norm(1.0), adamw(lr))])
def test_every_optimizer_takes_a_rate_from_outside(make: Any) -> None:
    one, other = Engine(CONFIG, PARAMS, make(0.01)), Engine(CONFIG, PARAMS, make(0.002))
    _stepped(one, lr=0.002)
    _stepped(other)
    assert off(one.params, other.params) == 0


def test_wrong_hyperparameters_keep_the_gradients() -> None:
    engine = Engine(CONFIG, PARAMS, adamw(0.01))
    engine.forward_backward([WHOLE], LOSS)
    with pytest.raises(ValueError, match="adamw has no momentum; its hyperparameters are lr, betas, eps"):
        engine.optim_step(momentum=0.9)
    wrong: list[dict[str, Any]] = [{"divide_by": x} for x in (0, float("inf"), torch.ones(2), torch.tensor(-1.0), "2")]
    wrong += [{"spec": None}, {"optimizer": 1}]
    for values in wrong:
        with pytest.raises(ValueError, match=r"divide_by is .*; it must be|adamw has no (spec|optimizer); its"):
            engine.optim_step(**values)
    engine.optim_step()
    groups = Engine(CONFIG, PARAMS, partition({"*": adamw(0.01)}))
    groups.forward_backward([WHOLE], LOSS)
    with pytest.raises(ValueError, match="no single lr to replace"):
        groups.optim_step(lr=0.1)


def test_an_optimizer_of_another_state_or_of_other_parameters_is_refused() -> None:
    engine = Engine(CONFIG, PARAMS, adamw(0.01))
    with pytest.raises(ValueError, match="opt_state is not of this step's optimizer"):
        engine.optimizer = sgd(0.01, momentum=0.9)
    frozen = tree.map(lambda _: False, PARAMS) | {"embed_tokens": True}
    engine = Engine(CONFIG, PARAMS, sgd(0.01))
    with pytest.raises(ValueError, match="trains other parameters"):
        engine.optimizer = with_traits(sgd(0.01), trainable=frozen)


def test_the_caller_may_divide() -> None:
    """A loss that is a mean already is divided by 1, and gives the update of the sum divided by its count."""
    one, other = (
        Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2), clip=0.5),
        Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2), clip=0.5),
    )

    def mean(params: Any, batch: Any) -> Any:
        total, count = LOSS(params, batch)
        return total / count, count

    one.forward_backward([WHOLE], mean)
    found, wanted = one.optim_step(divide_by=torch.tensor(1.0)), _stepped(other)
    assert off(one.params, other.params) < 1e-6
    for key in ("loss", "count", "grad_norm"):
        torch.testing.assert_close(found[key], wanted[key])


def test_an_engine_without_an_optimizer_infers_from_the_very_tensors() -> None:
    fn = functools.partial(token_logprobs, config=CONFIG)
    reference, engine = Engine(CONFIG, PARAMS, None), Engine(CONFIG, PARAMS, adamw(0.01))
    assert reference.params["embed_tokens"] is PARAMS["embed_tokens"]
    assert torch.equal(reference.infer([WHOLE], fn)[0][0], engine.infer([WHOLE], fn)[0][0])
    assert dict(reference.export()).keys() == dict(engine.export()).keys()
    for call in (lambda: reference.forward_backward([WHOLE], LOSS), reference.optim_step):
        with pytest.raises(RuntimeError, match="has no optimizer"):
            call()


def test_params_that_are_not_copied_are_trained_in_place() -> None:
    given = tree.map(torch.clone, PARAMS)
    engine = Engine(CONFIG, given, adamw(0.01), copy=False)
    _stepped(engine)
    assert off(given, engine.params) == 0 and off(given, PARAMS) > 0


def test_a_saved_engine_goes_on_bit_for_bit(tmp_path: Path) -> None:
    engine, resumed = (Engine(CONFIG, PARAMS, adamw(0.01)) for _ in range(2))
    with pytest.raises(FileNotFoundError, match="holds no saved step"):
        resumed.load(tmp_path)
    _stepped(engine)
    engine.save(tmp_path, {"epoch": 3})
    _stepped(engine)
    resumed.forward_backward([WHOLE], LOSS)
    assert resumed.load(tmp_path) == {"epoch": 3} and int(resumed.state.step) == 1
    with pytest.raises(RuntimeError, match="after forward_backward"):
        resumed.optim_step()
    _stepped(resumed)
    assert off(engine.params, resumed.params) == 0
    assert all(map(torch.equal, tree.leaves(engine.state.opt_state), tree.leaves(resumed.state.opt_state)))


def test_an_offloaded_engine_frees_its_memory_and_comes_back_bit_for_bit() -> None:
    engine, plain = (Engine(CONFIG, PARAMS, adamw(0.01)) for _ in range(2))
    for one in (engine, plain):
        _stepped(one)
    leaves = tree.leaves(engine.state)
    engine.offload()
    assert all(leaf.untyped_storage().nbytes() == 0 for leaf in leaves if leaf.numel())
    for call in (lambda: engine.params, lambda: _stepped(engine), lambda: engine.export()):
        with pytest.raises(RuntimeError, match="offloaded to the host"):
            call()
    engine.onload()
    for one in (engine, plain):
        _stepped(one)
    assert off(engine.params, plain.params) == 0
    rows = PARAMS["embed_tokens"].clone()
    view = Engine(CONFIG, PARAMS | {"embed_tokens": torch.cat((rows, rows))[: len(rows)]}, adamw(0.01), copy=False)
    with pytest.raises(ValueError, match="embed_tokens does not own its memory"):
        view.offload()
    assert torch.equal(view.params["embed_tokens"], rows)


def test_entries_that_are_no_dense_tensors_are_refused_in_a_sentence() -> None:
    engine = Engine(CONFIG, PARAMS, adamw(0.01))
    jagged = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.7}, "'temperature' is of type float"),
        ({"mask": jagged}, "'mask' is a nested"),
        ({"mask": torch.eye(2).to_sparse()}, "'mask' has the layout torch.sparse_coo"),
    ]
    for wrong, said in faults:
        for call in (lambda given: engine.forward_backward([given], LOSS), lambda given: engine.infer([given], LOSS)):
            with pytest.raises(ValueError, match=said):
                call(WHOLE | wrong)


def test_inference_keeps_a_bounded_number_of_functions() -> None:
    engine = Engine(CONFIG, PARAMS, None, compile="block")
    functions = [functools.partial(token_logprobs, config=CONFIG, temperature=1.0 + i) for i in range(10)]
    for function in functions:
        engine.infer([], function)
    assert list(engine._infers) == functions[-8:]


def _weighted(logp: torch.Tensor, entropy: torch.Tensor, batch: Any) -> tuple[Any, ...]:
    """The mean over rows of each row's mean: a sum over positions that no shard of them knows."""
    valid = (batch["labels"] != -100).to(logp)
    of_row = ((logp + 0.1 * entropy) * valid).sum(1) / valid.sum(1).clamp(min=1)
    return -of_row.square().sum(), torch.tensor(len(logp)), {"rows": of_row.detach().sum()}


def test_a_loss_of_log_probabilities_returns_those_of_the_training_pass() -> None:
    fn = functools.partial(token_logprobs, config=CONFIG, temperature=0.7)
    parts = [_rows(0, 1), _cut(1, 4, 12), _cut(2, 3, 3)]
    engine, plain = (Engine(CONFIG, PARAMS, adamw(0.01, eps=1e-2)) for _ in range(2))
    inferred = engine.infer(parts, fn)
    loss = logprob_loss(_weighted, config=CONFIG, temperature=0.7)
    found = engine.forward_backward(parts, loss)
    for (logp, entropy, _), outputs in zip(inferred, found["outputs"], strict=True):
        assert torch.equal(outputs["logp"], logp) and torch.equal(outputs["entropy"], entropy)
        assert not outputs["logp"].requires_grad
    assert len(engine.forward_backward(parts[:1], loss)["outputs"]) == 1

    def by_hand(params: Any, batch: Any) -> Any:
        return _weighted(*fn(params, batch)[:2], batch)

    plain.forward_backward([*parts, parts[0]], by_hand)
    metrics, expected = engine.optim_step(), plain.optim_step()
    assert off(engine.params, plain.params) < 1e-6 and metrics.keys() == expected.keys()
    torch.testing.assert_close(metrics["aux"]["rows"], expected["aux"]["rows"])
    step = make_step(loss, adamw(0.01))
    assert "outputs" not in step(init_state(PARAMS, adamw(0.01)), WHOLE)[1]
    with pytest.raises(ValueError, match="of the outputs must return"):
        engine.forward_backward(parts, logprob_loss(lambda logp, *_: logp.sum(), config=CONFIG))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("chunk", [5, None])
def test_each_sequence_may_have_a_temperature(chunk: int | None) -> None:
    each = torch.tensor([0.5, 1.0, 2.0, 0.7])
    engine = Engine(CONFIG, PARAMS, adamw(0.01))
    (found,) = engine.infer([WHOLE], functools.partial(token_logprobs, config=CONFIG, temperature=each, chunk=chunk))
    named = logprob_loss(_weighted, config=CONFIG, temperature="temperature", chunk=chunk)
    trained = engine.forward_backward([WHOLE | {"temperature": each}], named)
    assert torch.equal(trained["outputs"][0]["logp"], found[0])
    total = 0.0
    for row, temperature in enumerate(each.tolist()):
        fn = functools.partial(token_logprobs, config=CONFIG, temperature=temperature, chunk=chunk)
        (one,) = engine.infer([_rows(row, row + 1)], fn)
        for x, y in zip(found, one, strict=True):
            torch.testing.assert_close(x[row : row + 1], y)
        total += float(_weighted(one[0], one[1], _rows(row, row + 1))[0])
    assert float(trained["total"]) == pytest.approx(total, rel=1e-5)
    for wrong, said in (
        (torch.ones(3), r"temperature is \[3\] beside labels \[4, 12\]"),
        (-each, "A temperature is -2.0"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.infer([WHOLE], functools.partial(token_logprobs, config=CONFIG, temperature=wrong))
