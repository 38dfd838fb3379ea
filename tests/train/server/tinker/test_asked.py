"""What requests ask of their prompts: log-probabilities of further tokens, of the last places alone, and draws."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import params as P
from tests.support.served import Served, serving, write_checkpoint
from tests.train.server.tinker.test_protocol import _post, _result
from train.server import scores as scores_file
from train.server.scores import Cells, Draws, ScoredPrompt, score_prompts
from train.server.tinker.wire import _array, _fields, _last_bytes, _messages, _shape

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TOKENS = [72, 101, 108, 108, 111, 44]
PLACES = len(TOKENS) - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, saves=folder.parent / "saves", context=64) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Tensor:
    """Log-probabilities [places, V] of every token, by transformers."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([TOKENS])).logits
    return torch.log_softmax(logits[0, :-1].float(), -1)


def _body(tokens: list[int] = TOKENS, temperature: float = 1.0, **fields: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    params = {"max_tokens": 1, "seed": 3, "temperature": temperature}
    return {"base_model": "tiny", "prompt": prompt, "sampling_params": params} | fields


def _asked(server: Served, **fields: Any) -> Any:
    """The fields of the message SampleResponse."""
    content = _result(server, _post(server, "asample", _body(**fields))["request_id"])
    assert isinstance(content, str), content
    return _fields(content.encode(errors="surrogateescape"), None)


def _tensor(message: Any) -> Tensor:
    """The values of a dense message Tensor."""
    dtype = {1: np.float32, 2: np.int64}[message[3][-1]]
    return torch.from_numpy(_array(_last_bytes(message, 1), dtype)).reshape(_shape(message))


def _dense(ids: Tensor) -> dict[str, Any]:
    return {"data": ids.flatten().tolist(), "dtype": "int64", "shape": list(ids.shape)}


def test_a_dense_table_has_the_log_probabilities_of_its_ids(server: Served, wanted: Tensor) -> None:
    ids = torch.randint(0, 260, (PLACES, 4), generator=torch.Generator().manual_seed(0))
    ids[1, 2:], ids[3] = -1, -1
    found = _tensor(_messages(_asked(server, target_prompt_logprobs=_dense(ids)), 5, None)[0])
    expected = wanted.gather(1, ids.clamp(min=0)).masked_fill(ids == -1, 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert bool((found[ids == -1] == 0).all()) and bool((found[ids != -1] < 0).all())


def test_a_sparse_table_comes_back_in_its_layout(server: Served, wanted: Tensor) -> None:
    rows, columns, ids = [0, 2, 2, 3, 3, 5], [1, 7, 3, 0, 2], [70, -1, 71, 72, 73]
    given = {"data": ids, "dtype": "int64", "shape": [PLACES, 9]}
    given |= {"sparse_crow_indices": rows, "sparse_col_indices": columns}
    message = _messages(_asked(server, target_prompt_logprobs=given), 5, None)[0]
    sparse = _messages(message, 2, None)[0]
    values, *layout = (
        _array(_last_bytes(sparse, n), kind).tolist() for n, kind in ((1, np.float32), (2, np.int64), (3, np.int64))
    )
    assert layout == [rows, columns] and _shape(message) == [PLACES, 9]
    places = [0, 0, 2, 4, 4]
    nats = [0.0 if token == -1 else float(wanted[place, token]) for place, token in zip(places, ids, strict=True)]
    assert values == pytest.approx(nats, abs=1e-5)


def test_only_the_last_places_are_scored_where_the_request_says_so(server: Served, wanted: Tensor) -> None:
    ids = torch.full((PLACES, 1), 70)
    fields: dict[str, Any] = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 2}
    fields |= {"target_prompt_logprobs": _dense(ids), "prompt_alt_tokens_k": 1}
    found = _asked(server, **fields)
    nats = _array(_last_bytes(found, 2), np.float32)
    assert np.isnan(nats[:4]).all() and len(nats) == len(TOKENS)
    own = wanted[torch.arange(PLACES), torch.tensor(TOKENS[1:])]
    assert nats[4:].tolist() == pytest.approx(own[3:].tolist(), abs=1e-5)
    best = _array(_last_bytes(_messages(found, 3, None)[0], 2), np.float32).reshape(-1, 2)
    assert (best[:4] == -99999.0).all() and best[4:].tolist() == pytest.approx(wanted.topk(2).values[3:], abs=1e-5)
    # which says nothing of the two others
    torch.testing.assert_close(_tensor(_messages(found, 5, None)[0])[:, 0], wanted[:, 70], rtol=1e-5, atol=1e-5)
    assert _tensor(_messages(_messages(found, 6, None)[0], 1, None)[0]).shape == (PLACES, 1)


def _drawn(server: Served, **fields: Any) -> tuple[Tensor, Tensor]:
    message = _messages(_asked(server, **fields), 6, None)[0]
    return _tensor(_messages(message, 1, None)[0]), _tensor(_messages(message, 2, None)[0])


def test_draws_have_the_model_s_log_probabilities_and_the_requests_temperature(server: Served, wanted: Tensor) -> None:
    tokens, nats = _drawn(server, prompt_alt_tokens_k=64, temperature=0.5)
    torch.testing.assert_close(nats, wanted.gather(1, tokens), rtol=1e-5, atol=1e-5)
    likeliest, _ = _drawn(server, prompt_alt_tokens_k=2, temperature=0.0)
    assert torch.equal(likeliest, wanted.argmax(1)[:, None].expand(-1, 2))
    again, _ = _drawn(server, prompt_alt_tokens_k=64, temperature=0.5)
    assert torch.equal(again, tokens)  # of one seed


def test_draws_are_as_frequent_as_their_probability(folder: Path, wanted: Tensor) -> None:
    config, params = P.load_pretrained(folder)
    counts = torch.zeros(PLACES, 260)
    for seed in range(64):
        (found,) = score_prompts(params, config, [ScoredPrompt(TOKENS, draws=Draws(64, 0.25, seed))])
        assert found.drawn is not None
        counts.scatter_add_(1, found.drawn[0], torch.ones(PLACES, 64))
    share = (wanted / 0.25).softmax(-1)
    expected = share * 64 * 64
    common = expected > 20
    deviations = ((counts - expected) / (expected * (1 - share)).sqrt())[common]
    assert common.sum() > 40 and deviations.abs().max() < 4.5 and 0.5 < deviations.square().mean() < 1.6
    plain = wanted.softmax(-1) * 64 * 64  # a planted bug: the temperature is left out
    assert ((counts - plain) / plain.sqrt())[common].abs().max() > 10


def test_prompts_in_one_row_have_the_answers_that_each_has_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of the others, and wherever a chunk of the row ends."""
    config, params = P.load_pretrained(folder)
    cells = [Cells(torch.tensor([0, 0, 2]), torch.tensor([5, 6, 7])), Cells(torch.tensor([4]), torch.tensor([9]))]
    asked = [
        ScoredPrompt(TOKENS[:4], likeliest=2, cells=cells[0], draws=Draws(2, 1.0, 4)),
        ScoredPrompt(TOKENS, draws=Draws(3, 0.5, 5)),
        ScoredPrompt([7]),
        ScoredPrompt(TOKENS[::-1], likeliest=3, cells=cells[1]),
    ]
    alone = [score_prompts(params, config, [one])[0] for one in asked]
    for chunk in (512, 3):
        monkeypatch.setattr(scores_file, "automatic_chunk", lambda *_, chunk=chunk: chunk)
        for found, own in zip(score_prompts(params, config, asked), alone, strict=True):
            assert found.logp[1:] == pytest.approx(own.logp[1:], abs=1e-5) and found.logp[0] is None
            ids = [[token for token, _ in place or ()] for place in found.likeliest]
            assert ids == [[token for token, _ in place or ()] for place in own.likeliest]
            assert (found.cells is None) == (own.cells is None) and (found.drawn is None) == (own.drawn is None)
            if found.cells is not None and own.cells is not None:
                torch.testing.assert_close(found.cells, own.cells, rtol=1e-5, atol=1e-5)
            if found.drawn is not None and own.drawn is not None:
                assert torch.equal(found.drawn[0], own.drawn[0])
    assert alone[0].cells is not None and len(alone[0].cells) == 3 and alone[2].logp == [None]


IDS = torch.full((PLACES, 1), 70)
SPARSE = {"sparse_crow_indices": [0, 1, 1, 1, 1, 1], "sparse_col_indices": [0]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"target_prompt_logprobs": _dense(IDS) | {"dtype": "float32"}}, 'dtype is "float32"; it must be "int64"'),
    ({"target_prompt_logprobs": _dense(IDS[:-1])}, "shape is [4, 1]; it must be [5, K], for the prompt has 6 tokens"),
    ({"target_prompt_logprobs": _dense(IDS) | {"shape": [5]}}, "it must be [tokens of the prompt - 1, K]"),
    ({"target_prompt_logprobs": _dense(IDS) | {"shape": [5, 2]}}, "it must be 10 ids, as its shape [5, 2] says"),
    ({"target_prompt_logprobs": _dense(IDS + 200)}, "token ids from 0 to 259, or -1 for none"),
    ({"target_prompt_logprobs": _dense(IDS * 0 - 1)}, "of which at least one is not -1"),
    ({"target_prompt_logprobs": _dense(IDS) | {"data": [0.5] * 5}}, "a list of integers"),
    ({"target_prompt_logprobs": _dense(IDS) | {"more": 1}}, "target_prompt_logprobs.more is not supported"),
    ({"target_prompt_logprobs": _dense(IDS) | SPARSE}, "6 ascending numbers from 0 to 5, the ids in data"),
    ({"target_prompt_logprobs": _dense(IDS) | SPARSE | {"data": [7], "sparse_col_indices": [1]}}, "1 numbers from 0"),
    ({"target_prompt_logprobs": _dense(IDS) | {"data": [7], "sparse_crow_indices": [0]}}, "must be a list of integers"),
    ({"prompt_logprobs_last_n": 1}, "it must be left out, or prompt_logprobs must be true"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 6}, "an integer from 1 to 5, for the prompt has 6 tokens"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "an integer from 1 to 5"),
    ({"prompt_alt_tokens_k": 65}, "an integer from 0 to 64"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_what_cannot_be_asked_is_refused_with_a_sentence(server: Served, fields: dict[str, Any], words: str) -> None:
    status, content, _ = server.send("/api/v1/asample", _body(**fields))
    assert status == 400 and words in content["error"]["message"], content
