"""Recorded routing: the experts of every token that generation computed are those of one forward over the sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from fnmodels import llama
from tests.support.cases import cases, generic_params, is_routed, routing_of, sparse_layers
from train.generation.batching import BatchSettings, ContinuousBatch
from train.generation.requests import Request
from train.generation.routing import check_records, expert_layers, replayable

CASES = [case for case in cases() if case.name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")]
PROMPTS = [[5, 3, 9, 1, 7, 2, 8], [4], [5, 3, 9, 1, 7, 2, 8], [*range(1, 21)], [*range(1, 21), 3, 4]]


def _wanted(params: Any, config: Any, tokens: list[int], **options: Any) -> Tensor:
    prepared = fnmodels.prepare(config, torch.tensor([tokens]))
    return routing_of(params, prepared, config, **options)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "options",
    [{}, {"slots": 2}, {"chunk": 3}, {"kernel": "invariant"}, {"slots": 1, "chunk": 4}],
    ids=["all", "two slots", "chunks", "invariant", "one slot"],
)
def test_the_experts_of_an_answer_are_those_of_a_forward(case: Any, options: dict[str, Any]) -> None:
    params = generic_params(case.config)
    plain = train.generate(params, case.config, PROMPTS, max_new=[3, 5, 4, 1, 6], seeds=3, compile="none", **options)
    found = train.generate(
        params, case.config, PROMPTS, max_new=[3, 5, 4, 1, 6], seeds=3, record_routing=True, **options
    )
    assert found.tokens == plain.tokens and not plain.routing and found.compile == "none"
    assert all(torch.equal(a, b) for a, b in zip(found.logp, plain.logp, strict=True))
    kernel = {"kernel": options["kernel"]} if "kernel" in options else {}
    for prompt, answer, routing in zip(PROMPTS, found.tokens, found.routing, strict=True):
        tokens = prompt + answer
        assert routing.dtype == torch.int16 and len(routing) == len(tokens) - 1
        assert torch.equal(routing, _wanted(params, case.config, tokens[:-1], **kernel))
        full = replayable(routing, len(tokens))
        assert torch.equal(full[:-1], routing.long()) and full[-1, 0].tolist() == list(range(routing.shape[-1]))


def test_events_have_the_experts_of_the_tokens_since_the_last_one_where_the_request_asks() -> None:
    case = CASES[0]
    params = generic_params(case.config)
    requests = [Request([5, 3, 9], 3, record_routing=True), Request([1, 7], 2), Request([2], 2, record_routing=True)]
    events = list(train.serve(params, case.config, requests, slots=2, capacity=8))
    sizes = [[e.routing if e.routing is None else len(e.routing) for e in events if e.row == row] for row in range(3)]
    assert sizes == [[3, 1, 1], [None, None], [1, 1]]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_compiled_step_is_for_requests_that_do_not_record(mixed: bool) -> None:
    """Requests of an iterator are not known beforehand, so the caller's step is there and runs where none records."""
    config, params, calls = CASES[0].config, generic_params(CASES[0].config), list[int]()
    eager = fnmodels.cache.eager_step(config)

    def step(params: Any, tokens: Tensor, cache: Any, **places: Any) -> Any:
        calls.append(len(tokens))
        return eager(params, tokens, cache, **places)

    requests = [Request([5, 3, 9], 2, record_routing=True), Request([1, 7], 2, record_routing=True)]
    requests += [Request([1, 7, 4], 6, record_routing=not mixed)]
    run, how = train.serve(params, config, iter(requests), slots=3, capacity=12, compile=step), ""
    events = []
    while True:
        try:
            events.append(next(run))
        except StopIteration as done:
            how = done.value
            break
    assert how == ("step" if mixed else "none") and len(calls) == (4 if mixed else 0)
    wanted = train.generate(params, config, [[1, 7, 4]], max_new=6, compile="none")
    assert [event.token for event in events if event.row == 2] == wanted.tokens[0]


def test_a_new_request_records_beside_one_that_goes_on_from_its_cache() -> None:
    config, params = CASES[0].config, generic_params(CASES[0].config)
    batch = ContinuousBatch(params, config, slots=2, capacity=20)
    batch.take([(0, Request([1, 2, 3], 2, keep=True))])
    first = [event for _ in range(3) for event in batch.advance()]
    said, held = [event.token for event in first], first[-1].held
    batch.take([(1, Request([1, 2, 3, *said, 9], 2, held=held)), (2, Request([5, 3, 9], 2, record_routing=True))])
    events = [event for _ in range(4) for event in batch.advance()]
    assert all(event.routing is None for event in events if event.row == 1)
    tokens = [5, 3, 9, *(event.token for event in events if event.row == 2)]
    found = torch.cat([event.routing for event in events if event.row == 2 and event.routing is not None])
    assert torch.equal(found, _wanted(params, config, tokens[:-1]))


@pytest.mark.parametrize("chunk", [1, 64])
def test_turns_record_what_each_of_them_computes(chunk: int) -> None:
    """The pieces of all turns are those of the conversation, beside others that begin or do not record."""
    config, params = CASES[0].config, generic_params(CASES[0].config)
    batch = ContinuousBatch(params, config, slots=3, capacity=24, settings=BatchSettings(None, chunk=chunk))
    talks: dict[int, list[int]] = {0: [1, 2, 3], 1: [4, 5]}
    pieces: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    held: dict[int, Any] = {0: None, 1: None}
    for turn, observed in enumerate(([9, 8], [7, 6, 5], [])):
        asked = [
            (row, Request(list(talks[row]), 2 + row, keep=turn < 2, held=held[row], record_routing=True))
            for row in talks
        ]
        batch.take([*asked, (2, Request([5, 3, 9], 2))])
        while batch.busy:
            for event in batch.advance():
                if event.row == 2:
                    assert event.routing is None
                    continue
                talks[event.row].append(event.token)
                pieces[event.row] += [] if event.routing is None else [event.routing]
                held[event.row] = event.held
        for row in talks:
            talks[row] += observed
    for row, tokens in talks.items():
        assert torch.equal(torch.cat(pieces[row]), _wanted(params, config, tokens[:-1]))


def test_layers_with_experts_are_those_of_the_config() -> None:
    for case in cases():
        if hasattr(fnmodels.family_of(case.config), "kinds"):
            assert expert_layers(case.config) == sparse_layers(case.config)
            assert bool(expert_layers(case.config)) == is_routed(case.config)


def test_a_model_without_experts_is_refused() -> None:
    dense = llama.Config(32, 16, 32, 1, 2, 2)
    with pytest.raises(ValueError, match=r"Request 0 has record_routing.*this model has no layers with experts"):
        train.generate(generic_params(dense), dense, [[1]], max_new=1, record_routing=True)
    with pytest.raises(ValueError, match="this model has an encoder"):
        check_records(0, CASES[0].config, paired=True)
    with pytest.raises(ValueError, match="of 3 tokens; the sequence has 2"):
        replayable(torch.zeros(3, 1, 2, dtype=torch.int16), 2)
