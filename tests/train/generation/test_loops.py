"""Generation with a cache: however the loop runs, tokens and log-probabilities are those of the plain forward pass."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

import fnmodels
import train
from fnmodels import gemma, gpt2, llama, tree
from fnmodels.cache import step as step_file
from tests.support.cases import generic_params
from tests.variants.gemma import variants
from train.generation.beam import beam_search
from train.generation.loops import serve
from train.generation.requests import Request, best_of
from train.generation.sampling import Sampling, sample_state, sample_step, stack_samplings
from train.generation.serve import admit, empty_state, serve_step
from train.generation.speculative import speculate

V = 40
LLAMA = llama.Config(V, 32, 48, 2, 4, 2, max_position_embeddings=64)
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], [3, 3]]
PARAMS = generic_params(LLAMA)
MIXED = Sampling(
    temperature=torch.tensor([0.0, 0.7, 1.0, 1.5]),
    top_k=torch.tensor([40, 5, 40, 9]),
    top_p=torch.tensor([1.0, 1.0, 0.8, 0.9]),
    frequency=torch.tensor([0.0, 0.4, 0.0, 0.2]),
)


def _plain(prompt: list[int], new: int, sampling: Sampling, seed: int, draw: int = 0) -> tuple[list[int], Tensor]:
    """Tokens and logp without a cache: the full forward pass for every token, drawn by sample_step."""
    state = sample_state(sampling, torch.tensor([seed]), torch.tensor([draw]), prompts=[prompt], vocab=V)
    tokens, logps = list(prompt), []
    for _ in range(new):
        prepared = fnmodels.prepare(LLAMA, torch.tensor([tokens]))
        logits = fnmodels.forward(PARAMS, *prepared, config=LLAMA).detach()
        token, logp, _, state = sample_step(logits[:, -1], state)
        tokens.append(int(token))
        logps.append(logp)
    return tokens[len(prompt) :], torch.cat(logps)


def _row(sampling: Sampling, row: int) -> Sampling:
    own = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(Sampling)}
    return Sampling(**{name: v[row].item() if isinstance(v, Tensor) else v for name, v in own.items()})


def _tokens_computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes [B, S] of all calls of the layers on a cache from here on, prompts and steps."""
    computed: list[tuple[int, ...]] = []
    run = step_file.hidden_states

    def seen(params: Any, inputs: Any, *rest: Any) -> Any:
        computed.append(tuple(inputs["tokens"].shape))
        return run(params, inputs, *rest)

    monkeypatch.setattr(step_file, "hidden_states", seen)
    return computed


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(), MIXED], ids=["greedy", "drawn", "mixed"])
@pytest.mark.parametrize("slots", [1, 3, None])
def test_tokens_and_logp_are_those_of_recomputation(sampling: Sampling, slots: int | None) -> None:
    sizes, seeds = [6, 12, 3, 9], [5, 5, 6, 7]
    found = train.generate(PARAMS, LLAMA, PROMPTS, max_new=sizes, sampling=sampling, seeds=seeds, slots=slots, chunk=4)
    for row, (prompt, new, seed) in enumerate(zip(PROMPTS, sizes, seeds, strict=True)):
        tokens, logp = _plain(prompt, new, _row(sampling, row), seed, draw=int(row == 1))
        assert found.tokens[row] == tokens
        torch.testing.assert_close(found.logp[row], logp, rtol=1e-5, atol=1e-5)
    assert found.reasons == ["max_new"] * 4


def test_logp_is_that_of_the_trainer() -> None:
    found = train.generate(PARAMS, LLAMA, PROMPTS, max_new=8, sampling=Sampling(temperature=0.7, top_k=9), seeds=3)
    for prompt, tokens, logp, kept in zip(PROMPTS, found.tokens, found.logp, found.logp_kept, strict=True):
        row = torch.tensor([prompt + tokens])
        batch = {"tokens": row[:, :-1], "labels": row[:, 1:], "segment_ids": torch.ones_like(row[:, 1:])}
        batch["positions"] = torch.arange(row.shape[1] - 1)[None]
        wanted, _, _ = train.token_logprobs(PARAMS, batch, config=LLAMA, temperature=0.7)
        torch.testing.assert_close(logp, wanted[0, len(prompt) - 1 :].detach(), rtol=1e-5, atol=1e-5)
        assert bool((kept > logp).all())


def test_a_prompt_is_answered_alike_in_any_batch_and_order() -> None:
    options = {"max_new": 8, "sampling": Sampling(temperature=1.2)}
    together = train.generate(PARAMS, LLAMA, PROMPTS, seeds=[1, 2, 3, 4], **options)
    turned = train.generate(PARAMS, LLAMA, PROMPTS[::-1], seeds=[4, 3, 2, 1], slots=2, **options)
    assert turned.tokens[::-1] == together.tokens
    for row, prompt in enumerate(PROMPTS):
        assert train.generate(PARAMS, LLAMA, [prompt], seeds=[row + 1], **options).tokens == [together.tokens[row]]


def test_equal_prompts_differ_by_their_noise_and_shared_beginnings_change_nothing(monkeypatch) -> None:
    shared = list(range(1, 25))
    prompts = [shared, shared, [*shared, 30, 31], shared[:20] + [35], shared]
    options = {"max_new": 6, "sampling": Sampling(temperature=2.0), "seeds": 1}
    computed = _tokens_computed(monkeypatch)
    found = train.generate(PARAMS, LLAMA, prompts, **options)
    assert found.tokens[0] != found.tokens[1] != found.tokens[4]
    for row, prompt in enumerate(prompts):
        assert found.tokens[row] == _plain(prompt, 6, options["sampling"], 1, draw=row)[0]
    assert computed[0] == (1, 20) and computed[1][0] == 3  # the beginning, and the three that differ


def test_the_stream_is_what_generate_returns() -> None:
    options = {"max_new": [4, 6, 5, 3], "sampling": Sampling(), "seeds": 2, "slots": 2}
    found = train.generate(PARAMS, LLAMA, PROMPTS, **options)
    rows: list[list[int]] = [[], [], [], []]
    sums = [0.0] * 4
    for row, token, logp in train.stream(PARAMS, LLAMA, PROMPTS, **options):
        rows[row].append(token)
        sums[row] += logp
    assert rows == found.tokens and sums == pytest.approx([float(x.sum()) for x in found.logp], rel=1e-5)


def test_requests_are_taken_when_a_slot_is_free() -> None:
    """A queue that goes on: requests are pulled one by one, and long ones do not hold up short ones."""
    pulled, ended = [], []

    def queue():
        for row, size in enumerate([9, 2, 2, 2, 2]):
            pulled.append((row, len(ended)))
            yield Request(PROMPTS[row % 4], size, Sampling(temperature=0))

    for event in serve(PARAMS, LLAMA, queue(), slots=2, capacity=20):
        if event.reason:
            ended.append(event.row)
    assert ended == [1, 2, 3, 4, 0]
    assert pulled == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_free_slots_wait_for_each_other_a_quarter_of_a_step() -> None:
    """Of 8 slots one that is free alone waits for a second one, at most two steps; the answers stay the same."""
    pulled, ended = [], []

    def queue():
        for row, size in enumerate([2, 12, 12, 12, 12, 12, 12, 12, 3, 3]):
            pulled.append(len(ended))
            yield Request(PROMPTS[row % 4], size, Sampling(temperature=0))

    steps = []
    for event in serve(PARAMS, LLAMA, queue(), slots=8, capacity=40):
        steps.append(event.row)
        if event.reason:
            ended.append(event.row)
    assert steps.index(8) == 2 * 8 + 7  # a step of seven rows, in which the eighth slot was idle
    assert sorted(ended) == list(range(10)) and pulled[8] == 1


def test_prompts_are_computed_in_chunks_between_steps_of_the_others(monkeypatch) -> None:
    widths = _tokens_computed(monkeypatch)
    requests = [Request([5, 6], 9), Request([5], 1), Request(list(range(20)), 2)]
    assert len(list(serve(PARAMS, LLAMA, requests, slots=2, capacity=30, chunk=6))) == 12
    long = [shape for shape in widths if shape[0] == 1 and shape[1] > 1]
    assert [width for _, width in long] == [6, 6, 6, 1][: len(long)] and len(long) >= 3
    first = widths.index((1, 6))
    assert widths[first : first + 6] == [(1, 6), (2, 1)] * 3  # one chunk, one step, and so on


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), MIXED], ids=["greedy", "mixed"])
def test_the_last_steps_are_of_active_slots_alone(monkeypatch, sampling: Sampling) -> None:
    """Idle slots are left out once no request waits; the answers are those of each prompt alone."""
    computed = _tokens_computed(monkeypatch)
    sizes, seeds = [12, 3, 9, 6], [5, 6, 7, 8]
    found = train.generate(PARAMS, LLAMA, PROMPTS, max_new=sizes, sampling=sampling, seeds=seeds)
    assert [rows for rows, _ in computed[1:]] == [4] * 3 + [3] * 3 + [2] * 3 + [1] * 3
    for row, (prompt, new, seed) in enumerate(zip(PROMPTS, sizes, seeds, strict=True)):
        tokens, logp = _plain(prompt, new, _row(sampling, row), seed)
        assert found.tokens[row] == tokens
        torch.testing.assert_close(found.logp[row], logp, rtol=1e-5, atol=2e-5)


def test_prompts_of_other_lengths_are_computed_apart(monkeypatch) -> None:
    """A long prompt does not make short ones as long as itself, with and without a beginning that all share."""
    computed = _tokens_computed(monkeypatch)
    apart = ([], [3, 41, 2, 30, 20, 38], [(3, 40), (1, 19), (2, 2)])
    after = (list(range(20)), [1, 30, 2, 4, 28, 3], [(2, 29), (4, 3)])
    for begin, sizes, widths in (apart, after):
        prompts = [begin + [(7 * row + i * i) % V for i in range(size)] for row, size in enumerate(sizes)]
        computed.clear()
        found = train.generate(PARAMS, LLAMA, prompts, max_new=3, seeds=list(range(6)))
        assert computed[:-3] == [(1, 20)] * bool(begin) + widths
        for row, prompt in enumerate(prompts):
            tokens, logp = _plain(prompt, 3, Sampling(), row)
            assert found.tokens[row] == tokens
            torch.testing.assert_close(found.logp[row], logp, rtol=1e-5, atol=2e-5)


def test_a_step_is_pure_and_its_idle_slots_change_nothing() -> None:
    def state(fill: float):
        made = empty_state(LLAMA, 3, 16, dtype=torch.float32)
        cache = fnmodels.init_cache(LLAMA, 1, 16)
        step = fnmodels.prepare_step(LLAMA, torch.tensor([[1, 2]]), cache)
        _, cache = fnmodels.prefill(PARAMS, *step, cache, config=LLAMA)
        made = admit(
            made, [1], cache, [[1, 2, 3]], seeds=[4], ids=[0], lengths=[16], sampling=Sampling(), vocab=LLAMA.vocab_size
        )
        for entry in made.cache.layers:
            for tensor in entry.values():
                tensor[0].fill_(fill)
        return made

    with torch.no_grad():
        begun = state(0.0)
        before = [leaf.clone() for leaf in fnmodels.tree.leaves(begun) if isinstance(leaf, Tensor)]
        after = serve_step(PARAMS, begun, config=LLAMA)
        again = serve_step(PARAMS, state(float("nan")), config=LLAMA)
    leaves = [leaf for leaf in fnmodels.tree.leaves(begun) if isinstance(leaf, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))
    assert torch.equal(after.last, again.last) and torch.equal(after.logp[1], again.logp[1])
    assert after.last[[0, 2]].tolist() == [0, 0] and after.draws.steps.tolist() == [0, 1, 0]


def _letters() -> Tokenizer:
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN")}, []))
    made.decoder, made.pre_tokenizer = decoders.Fuse(), pre_tokenizers.Split("", "isolated")
    return made


def test_stops_and_texts() -> None:
    tokenizer = _letters()
    options = {"max_new": 10, "sampling": Sampling(temperature=0), "tokenizer": tokenizer}
    free = train.generate(PARAMS, LLAMA, PROMPTS, **options)
    assert free.texts == [tokenizer.decode(tokens) for tokens in free.tokens]
    row = max(range(4), key=lambda i: len(set(free.tokens[i][:6])))
    tokens, text = free.tokens[row], free.texts[row]
    end = tokens[4]
    found = train.generate(PARAMS, LLAMA, [PROMPTS[row]], **options, stop_ids=[end])
    size = tokens.index(end) + 1
    assert found.tokens == [tokens[:size]] and found.reasons == ["stop_id"] and found.texts == [text[: size - 1]]
    torch.testing.assert_close(found.logp[0], free.logp[row][:size], rtol=1e-5, atol=1e-5)
    stop = text[3:6]
    found = train.generate(PARAMS, LLAMA, [PROMPTS[row]], **options, stop_texts=[stop, "?"])
    assert found.texts == [text[: text.index(stop)]] and found.reasons == ["stop_text"]
    assert found.tokens == [tokens[: text.index(stop) + 3]]
    events = list(serve(PARAMS, LLAMA, [Request([1], 3, stop_texts=("?",))], slots=1, capacity=4, tokenizer=tokenizer))
    assert [event.reason for event in events] == [None, None, "max_new"]


def test_logits_fn_sees_the_answers_and_restricts_them() -> None:
    def alternating(logits: Tensor, tokens: list[list[int]]) -> Tensor:
        """Even and odd tokens in turn."""
        odd = torch.tensor([len(row) % 2 for row in tokens])
        return logits.masked_fill(torch.arange(V) % 2 != odd[:, None], -torch.inf)

    found = train.generate(PARAMS, LLAMA, PROMPTS, max_new=[7, 3, 5, 4], slots=2, logits_fn=alternating)
    assert all([token % 2 for token in tokens] == [i % 2 for i in range(len(tokens))] for tokens in found.tokens)
    assert bool((torch.cat(found.logp_kept) >= torch.cat(found.logp)).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": [[1], []]}, "prompt of request 1 is empty"),
        ({"max_new": 0}, "max_new of request 0 is 0"),
        ({"max_new": [1, 2]}, "max_new has 2 values"),
        ({"seeds": [1]}, "seeds has 1 values"),
        ({"stop_texts": ["x"]}, "need a tokenizer"),
        ({"stop_texts": "x"}, "stop_texts is 'x'"),
        ({"sampling": Sampling(top_p=2.0)}, "top_p is 2.0"),
        ({"prompts": [[1], [2, 40]]}, "Token 1 of the prompt of request 1 is 40; token ids are integers from 0 to 39"),
        ({"prompts": [[1], [2, -1]]}, "Token 1 of the prompt of request 1 is -1"),
        ({"prompts": [[1], torch.tensor([1.5])]}, "Token 0 of the prompt of request 1 is tensor"),
        ({"prompts": [[1], [1.5]]}, r"Token 0 of the prompt of request 1 is 1\.5"),
        ({"prompts": [1, 2, 3]}, "A prompt is 1; prompts is a sequence of prompts"),
        ({"prompts": torch.tensor([1, 2, 3])}, r"A prompt is tensor\(1\); prompts is a sequence of prompts"),
        ({"stop_ids": 2}, "stop_ids is 2; it must be a sequence of token ids"),
        ({"stop_ids": None}, "stop_ids is None"),
        ({"max_new": 2.5}, r"max_new is 2\.5; it must be an integer"),
        ({"max_new": [2.5] * len(PROMPTS)}, r"max_new is \[2\.5"),
        ({"seeds": "a"}, "seeds has 1 values"),
    ],
)
def test_mistakes_are_named(change: dict, words: str) -> None:
    given = {"prompts": PROMPTS, "max_new": 2} | change
    with pytest.raises(ValueError, match=words):
        train.generate(PARAMS, LLAMA, given.pop("prompts"), **given)
    with pytest.raises(ValueError, match="capacity is 5"):
        list(serve(PARAMS, LLAMA, [Request([1, 2, 3], 4)], slots=1, capacity=5))


GPT2 = gpt2.Config(V, 32, 48, 2, 4, max_position_embeddings=20)
LEARNED = generic_params(GPT2)
GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("head", ["none", "classification"])
def test_a_model_without_a_head_for_tokens_is_refused(head: str) -> None:
    """Whose hidden states or scores would be read as logits."""
    config = dataclasses.replace(LLAMA, head=head, num_labels=V if head == "classification" else 0)
    weights = generic_params(config)
    with pytest.raises(ValueError, match=f"the model's head is '{head}'"):
        train.generate(weights, config, PROMPTS, max_new=2)
    with pytest.raises(ValueError, match=f"the model's head is '{head}'"):
        beam_search(weights, config, PROMPTS[0], beams=2, max_new=2)
    with pytest.raises(ValueError, match=f"the model's head is '{head}'"):
        speculate(PARAMS, LLAMA, weights, config, PROMPTS, max_new=2)


@pytest.mark.parametrize("run", ["generate", "stream", "serve", "speculate", "speculate_alike", "beam_search"])
def test_request_beyond_learned_positions_is_refused_before_the_first_token(run: str, monkeypatch) -> None:
    """Up to the last position it is answered; the last token is not read, so that it needs none."""
    prompts, sizes = [[1, 2, 3], [4] * 9], [18, 12]

    def answers(sizes: list[int]) -> list[list[int]]:
        how: dict[str, Any] = {"sampling": GREEDY}
        if run == "generate":
            return train.generate(LEARNED, GPT2, prompts, max_new=sizes, slots=1, **how).tokens
        if run.startswith("speculate"):
            draft = (LEARNED, GPT2) if run == "speculate_alike" else (PARAMS, LLAMA)
            return speculate(LEARNED, GPT2, *draft, prompts, max_new=sizes, **how)[0].tokens
        if run == "beam_search":
            pairs = list(zip(prompts, sizes, strict=True))
            return [beam_search(LEARNED, GPT2, p, beams=1, max_new=n)[0].tokens for p, n in pairs]
        found: list[list[int]] = [[], []]
        if run == "stream":
            for row, token, _ in train.stream(LEARNED, GPT2, prompts, max_new=sizes, slots=1, **how):
                found[row].append(token)
        else:
            requests = [Request(p, n, GREEDY) for p, n in zip(prompts, sizes, strict=True)]
            for event in serve(LEARNED, GPT2, requests, slots=1, capacity=40):
                found[event.row].append(event.token)
        return found

    assert [len(tokens) for tokens in answers(sizes)] == sizes
    calls = _tokens_computed(monkeypatch)
    words = r"Request \d has 9 tokens and max_new 13, but the model has learned 20 positions: max_new is at most 12"
    with pytest.raises(ValueError, match=words):
        answers([18, 13]) if run != "beam_search" else beam_search(LEARNED, GPT2, prompts[1], beams=1, max_new=13)
    assert not calls
    with pytest.raises(ValueError, match=r"Request 0 has 21 tokens .*: a prompt has at most 20 tokens"):
        train.generate(LEARNED, GPT2, [[1] * 21], max_new=1)


def test_drafts_stay_within_what_the_draft_has_learned() -> None:
    """A draft of fewer positions drafts as long as it can; prompts may be longer than it knows."""
    prompts, sizes = [[1, 2, 3], [4] * 9, [5, 6] * 7], [17, 11, 6]
    for positions in (4, 9, 13):
        config = dataclasses.replace(GPT2, max_position_embeddings=positions)
        draft = {**LEARNED, "embed_positions": LEARNED["embed_positions"][:positions]}
        for params, own in ((LEARNED, GPT2), (PARAMS, LLAMA)):
            found, right = speculate(params, own, draft, config, prompts, max_new=sizes, sampling=GREEDY, chunk=5)
            assert found.tokens == train.generate(params, own, prompts, max_new=sizes, sampling=GREEDY).tokens
            assert right == 1 if own is GPT2 else right < 1


def test_a_request_that_cannot_be_answered_loses_no_answer_before_it() -> None:
    """Neither one that is wrong nor an iterator that fails; each is raised when the others are answered."""

    def failing() -> Any:
        yield from requests[:3]
        raise OSError("the queue is closed")

    requests = [Request(PROMPTS[0], 4, GREEDY), Request([7], 9, GREEDY), Request([3], 2, GREEDY), Request([1, 99], 3)]
    for queue, words in ((iter(requests), "Token 1 of the prompt of request 3 is 99"), (failing(), "queue is closed")):
        found: list[list[int]] = [[], [], []]
        events = serve(PARAMS, LLAMA, queue, slots=2, capacity=20)
        for event in itertools.islice(events, 15):
            found[event.row].append(event.token)
        with pytest.raises((ValueError, OSError), match=words):
            next(events)
        assert [len(tokens) for tokens in found] == [4, 9, 2]


def test_best_of_picks_the_likeliest_of_each_group() -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    found = train.generate(PARAMS, LLAMA, prompts, max_new=[3, 6, 4] * 4, seeds=5)
    for group, best in enumerate(best_of(found, 3)):
        means = [float(found.logp[i].mean()) for i in range(3 * group, 3 * group + 3)]
        assert best == 3 * group + max(range(3), key=means.__getitem__)
    with pytest.raises(ValueError, match="each is 5"):
        best_of(found, 5)


def _sequence_logp(prompt: list[int], answers: Tensor) -> Tensor:
    rows = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers], 1)
    logits = fnmodels.forward(PARAMS, *fnmodels.prepare(LLAMA, rows[:, :-1]), config=LLAMA).detach()
    logp = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    return logp[:, len(prompt) - 1 :].sum(1)


def test_beams_find_the_likeliest_answer() -> None:
    prompt = [1, 2, 3]
    answers = torch.tensor(list(itertools.product(range(V), repeat=2)))
    best = _sequence_logp(prompt, answers).sort(descending=True)
    found = beam_search(PARAMS, LLAMA, prompt, beams=V, max_new=2)  # all beginnings are kept
    assert [answer.tokens for answer in found[:5]] == answers[best.indices[:5]].tolist()
    assert [answer.logp for answer in found[:5]] == pytest.approx(best.values[:5].tolist(), rel=1e-4)
    greedy = train.generate(PARAMS, LLAMA, [prompt], max_new=6, sampling=Sampling(temperature=0))
    (one,) = beam_search(PARAMS, LLAMA, prompt, beams=1, max_new=6)
    assert one.tokens == greedy.tokens[0] and one.logp == pytest.approx(float(greedy.logp[0].sum()), rel=1e-4)


def test_beams_of_a_prompt_in_a_tensor_are_those_of_its_ids() -> None:
    how: dict[str, Any] = {"beams": 2, "max_new": 3}
    for prompt in (torch.tensor(PROMPTS[0]), np.array(PROMPTS[0])):
        assert beam_search(PARAMS, LLAMA, prompt, **how) == beam_search(PARAMS, LLAMA, PROMPTS[0], **how)
    with pytest.raises(ValueError, match=r"the prompt's length \(0\)"):
        beam_search(PARAMS, LLAMA, torch.tensor([], dtype=torch.int64), **how)


def test_beams_and_drafts_take_int8_caches() -> None:
    how: dict[str, Any] = {"max_new": 6, "sampling": Sampling(temperature=0)}
    wanted, exact = (train.generate(PARAMS, LLAMA, PROMPTS, **how, kv_dtype=kind) for kind in (torch.int8, None))
    assert not torch.equal(wanted.logp[0], exact.logp[0])
    (one,) = beam_search(PARAMS, LLAMA, PROMPTS[0], beams=1, max_new=6, kv_dtype=torch.int8)
    assert one.tokens == wanted.tokens[0] and one.logp == pytest.approx(float(wanted.logp[0].sum()), rel=1e-5)
    drafted, _ = speculate(PARAMS, LLAMA, _noisy(0.3), LLAMA, PROMPTS, **how, kv_dtype=torch.int8)
    assert drafted.tokens == wanted.tokens
    torch.testing.assert_close(drafted.logp[0], wanted.logp[0], rtol=1e-5, atol=1e-5)


def test_beams_end_at_stops_by_their_score() -> None:
    prompt, stop = [4, 5], 17
    answers = torch.tensor([row for row in itertools.product(range(V), repeat=2) if row[0] != stop])
    every = [(row, float(logp)) for row, logp in zip(answers.tolist(), _sequence_logp(prompt, answers), strict=True)]
    every.append(([stop], float(_sequence_logp(prompt, torch.tensor([[stop]])))))
    for penalty in (0.0, 1.0, 3.0):
        best = max(every, key=lambda pair: pair[1] / len(pair[0]) ** penalty)
        found = beam_search(PARAMS, LLAMA, prompt, beams=V, max_new=2, stop_ids=[stop], length_penalty=penalty)
        assert found[0].tokens == best[0]
    with pytest.raises(ValueError, match=r"beams \(0\)"):
        beam_search(PARAMS, LLAMA, prompt, beams=0, max_new=2)


def _noisy(scale: float):
    """A draft model: the model itself with noise on its parameters."""
    generator = torch.Generator().manual_seed(1)
    return fnmodels.tree.map(lambda p: p + scale * p.std() * torch.randn(p.shape, generator=generator), PARAMS)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("scale", [0.0, 0.3, 5.0])
def test_speculative_answers_are_the_plain_ones(sampling: Sampling, scale: float) -> None:
    """Token for token, drawn ones too, whether the draft is always, sometimes or never right."""
    options = {"max_new": [9, 5, 12, 1], "sampling": sampling, "seeds": 8, "stop_ids": [30]}
    found, right = speculate(PARAMS, LLAMA, _noisy(scale), LLAMA, PROMPTS, ahead=3, **options)
    plain = train.generate(PARAMS, LLAMA, PROMPTS, **options)
    assert found.tokens == plain.tokens and found.reasons == plain.reasons
    for a, b in zip(found.logp, plain.logp, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert right == 1.0 if scale == 0 else right < 1
    if scale == 5.0:
        assert right < 0.5


def test_windows_of_drafts_and_models_that_do_not_match() -> None:
    config = gemma.Config.from_hf(variants()["gemma2"] | {"vocab_size": V})
    params = generic_params(config)
    options = {"max_new": 14, "sampling": Sampling(temperature=0.9), "seeds": 1}
    found, _ = speculate(params, config, PARAMS, LLAMA, PROMPTS, **options)
    assert found.tokens == train.generate(params, config, PROMPTS, **options).tokens
    with pytest.raises(ValueError, match="vocabulary of 41"):
        speculate(PARAMS, LLAMA, PARAMS, dataclasses.replace(LLAMA, vocab_size=41), PROMPTS, max_new=2)
    for draft, own in ((PARAMS, None), (None, LLAMA)):
        with pytest.raises(ValueError, match="belong together"):
            speculate(PARAMS, LLAMA, draft, own, PROMPTS, max_new=2)
    with pytest.raises(ValueError, match="ahead is 0"):
        speculate(PARAMS, LLAMA, PARAMS, LLAMA, PROMPTS, max_new=2, ahead=0)


def test_sampled_speculation_has_the_models_distribution() -> None:
    """First two tokens of many rows against exact probabilities, with a draft that is often wrong."""
    rows, keep = 4000, Sampling(top_k=3)
    found, _ = speculate(PARAMS, LLAMA, _noisy(0.5), LLAMA, [[1, 2]] * rows, max_new=2, ahead=1, sampling=keep)
    logits = fnmodels.forward(PARAMS, *fnmodels.prepare(LLAMA, torch.tensor([[1, 2]])), config=LLAMA).detach()[0, -1]
    p = train.generate(PARAMS, LLAMA, [[1, 2]], max_new=1, sampling=keep)  # a row more of the same
    assert p.tokens[0][0] in logits.topk(3).indices
    top = logits.topk(3)
    counts = torch.bincount(torch.tensor([row[0] for row in found.tokens]), minlength=V)[top.indices].double()
    expected = top.values.double().softmax(0) * rows
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert counts.sum() == rows and float(statistic) < 13.8  # 0.1 % of chi-square with 2 degrees of freedom
    for token in top.indices.tolist():
        after = fnmodels.forward(PARAMS, *fnmodels.prepare(LLAMA, torch.tensor([[1, 2, token]])), config=LLAMA)
        best = after.detach()[0, -1].topk(3)
        second = torch.tensor([row[1] for row in found.tokens if row[0] == token])
        counts = torch.bincount(second, minlength=V)[best.indices].double()
        expected = best.values.double().softmax(0) * len(second)
        assert counts.sum() == len(second) and float(((counts - expected) ** 2 / expected).sum()) < 13.8


def test_stacked_settings_keep_equal_fields_as_numbers() -> None:
    stacked = stack_samplings([Sampling(top_k=4), Sampling(top_k=None, top_p=0.5)])
    assert stacked.temperature == 1.0 and isinstance(stacked.top_k, Tensor) and isinstance(stacked.top_p, Tensor)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    wanted = train.generate(PARAMS, LLAMA, PROMPTS, max_new=3, sampling=GREEDY).tokens
    for three in (np.int64(3), torch.tensor(3), np.full(len(PROMPTS), 3), torch.full((len(PROMPTS),), 3)):
        for run in (train.generate, lambda *a, **how: speculate(*a[:2], *a[:2], *a[2:], **how)[0]):
            assert run(PARAMS, LLAMA, PROMPTS, max_new=three, seeds=np.int32(0), sampling=GREEDY).tokens == wanted


def test_generation_under_a_transform_is_refused() -> None:
    members = tree.stack([PARAMS, PARAMS])
    with pytest.raises(ValueError, match=r"not for vmap, grad and jvp of torch.func: take fnmodels.prefill and decode"):
        torch.func.vmap(lambda params: train.generate(params, LLAMA, PROMPTS, max_new=2))(members)
