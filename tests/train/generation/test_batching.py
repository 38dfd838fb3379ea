"""`ContinuousBatch`: requests that come and are cancelled between steps change no bit of the others."""

import pytest

import train
from tests.train.generation.test_loops import LLAMA, PARAMS, PROMPTS
from train.generation.batching import BatchSettings, ContinuousBatch
from train.generation.checks import check_request
from train.generation.requests import Event, Request
from train.generation.sampling import Sampling


def _alone(request: Request) -> list[tuple[int, float]]:
    options = {"max_new": request.max_new, "sampling": request.sampling, "seeds": request.seed, "compile": "none"}
    found = train.generate(PARAMS, LLAMA, [request.prompt], **options)
    return list(zip(found.tokens[0], found.logp[0].tolist(), strict=True))


def _requests() -> list[Request]:
    settings = (Sampling(), Sampling(temperature=0), Sampling(top_k=5), Sampling(frequency=0.5))
    sizes = (9, 4, 12, 7, 3, 8)
    return [Request(PROMPTS[i % 4], size, settings[i % 4], seed=i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("allocated", [None, 1])
def test_requests_that_come_later_and_slots_that_come_and_go_change_no_answer(allocated: int | None) -> None:
    """Requests arrive at uneven times over slots that grow and shrink; request 2 is cancelled after two tokens."""
    requests, found, widths = _requests(), dict[int, list[Event]](), list[int]()
    batch = ContinuousBatch(PARAMS, LLAMA, slots=4, capacity=24, allocated=allocated)
    arrivals = {0: [0], 1: [1, 2], 6: [3, 4, 5]}
    for step in range(40):
        came = arrivals.get(step, [])
        if came:
            assert batch.room() >= len(came)
            batch.take([(row, requests[row]) for row in came])
        if len(found.get(2, [])) == 2:
            batch.cancel({2, 99})
        for event in batch.advance(shrink=True):
            found.setdefault(event.row, []).append(event)
        widths.append(batch.allocated)
    assert not batch.busy and len(found[2]) == 2
    for row, events in found.items():
        wanted = _alone(requests[row])
        got = [(event.token, event.logp) for event in events]
        assert [token for token, _ in got] == [token for token, _ in wanted[: len(got)]]
        assert [logp for _, logp in got] == pytest.approx([logp for _, logp in wanted[: len(got)]], abs=1e-5)
        assert len(got) == len(wanted) or row == 2
    assert len(set(widths)) > 2 and max(widths) <= 4  # slots were added and left out


def test_a_request_that_is_cancelled_while_its_prompt_is_computed_has_no_event() -> None:
    batch = ContinuousBatch(PARAMS, LLAMA, slots=2, capacity=40, settings=BatchSettings(chunk=4))
    batch.take([(0, Request(list(range(20)), 5)), (1, Request(list(range(18)), 5))])
    rows = [event.row for event in batch.advance()]
    batch.cancel({0})
    while batch.busy:
        rows += [event.row for event in batch.advance()]
    assert rows == [1] * 5


def test_an_event_names_the_likeliest_tokens_before_any_edit() -> None:
    """They are those of the model, at the temperature, whatever the request's own hook forbids."""
    forbidden: set[int] = set()

    def without(logits, tokens):
        return logits.index_fill(0, logits.argmax()[None], -float("inf")) if not tokens else logits

    plain = Request(PROMPTS[0], 3, Sampling(temperature=0.5), seed=1, likeliest=3)
    edited = Request(PROMPTS[0], 1, Sampling(temperature=0), likeliest=2, logits_fn=without)
    events = list(train.serve(PARAMS, LLAMA, [plain, edited], slots=2, capacity=20, compile="none"))
    own = [event for event in events if event.row == 0]
    assert [event.token for event in own] == [token for token, _ in _alone(plain)]
    assert [event.logp for event in own] == pytest.approx([logp for _, logp in _alone(plain)], abs=1e-5)
    for event in events:
        values = [nats for _, nats in event.likeliest]
        assert len(values) == (3 if event.row == 0 else 2) and values == sorted(values, reverse=True)
        assert dict(event.likeliest).get(event.token, event.logp) == event.logp <= values[0]
        forbidden |= {event.likeliest[0][0]} if event.row == 1 else set()
    (last,) = [event for event in events if event.row == 1]
    assert last.token not in forbidden and last.token == last.likeliest[1][0]


def test_a_request_whose_prompt_is_another_than_what_is_held_is_refused() -> None:
    batch = ContinuousBatch(PARAMS, LLAMA, slots=1, capacity=20)
    batch.take([(0, Request([1, 2, 3], 2, keep=True))])
    events = [event for _ in range(3) for event in batch.advance()]
    held, said = events[-1].held, [event.token for event in events]
    assert held is not None and held.tokens == (1, 2, 3, said[0])
    check_request(0, Request([1, 2, 3, *said, 9], 2, held=held), LLAMA)
    for prompt in ([1, 2, 3, said[0]], [1, 2, 4, *said, 9], [1, 2]):
        with pytest.raises(ValueError, match="Request 5 holds 4 tokens of earlier turns; its prompt must begin with"):
            check_request(5, Request(prompt, 2, held=held), LLAMA)
    with pytest.raises(ValueError, match=r"The length of request 0 is 4; it must be at least .* 5"):
        check_request(0, Request([1, 2, 3], 2, keep=True, length=4), LLAMA)
