"""`train.generate` with an encoder and a decoder: greedy tokens as transformers', sources of any length, beginnings."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fnmodels
import params as P
import train
from tests.fnmodels.test_encode import CONFIGS, SOUNDS, lively, sounds
from train.generation.requests import Request

GREEDY = train.Sampling(temperature=0)
TEXTS = [name for name in CONFIGS if name not in SOUNDS]
SIZES = (9, 3, 1, 6)


def sources(config: Any) -> list[Any]:
    """What the encoder reads: ids without that of padding, or frames."""
    generator = torch.Generator().manual_seed(0)
    if config.model_type in SOUNDS:
        return [sounds(config, (size,), generator)[0].float() for size in SIZES]
    return [torch.randint(3, 61, (size,), generator=generator).tolist() for size in SIZES]


@pytest.mark.parametrize("forced", [None, 7])
@pytest.mark.parametrize("name", TEXTS)
def test_greedy_tokens_are_those_of_transformers(name: str, forced: int | None, tmp_path: Path) -> None:
    """Sources of four lengths in one batch, in two slots; with and without a forced first token."""
    extra = () if forced is None else (("forced_bos_token_id", str(forced)),)
    config, rows = dataclasses.replace(CONFIGS[name], extra=extra), sources(CONFIGS[name])
    params = lively(config)
    P.save_pretrained(tmp_path, CONFIGS[name], params)
    architecture = transformers.AutoConfig.from_pretrained(tmp_path).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids, mask = torch.ones(len(rows), max(SIZES), dtype=torch.long), torch.zeros(len(rows), max(SIZES))
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = torch.tensor(own), 1
    wanted = model.generate(
        input_ids=ids,
        attention_mask=mask,
        decoder_start_token_id=config.decoder_start_token_id,
        forced_bos_token_id=forced,
        max_new_tokens=12,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        use_cache=False,  # transformers' cache of T5 has as many layers as the encoder
    )
    prompt = 1 if forced is None else 2
    found = train.generate(params, config, rows, max_new=13 - prompt, sampling=GREEDY, slots=2)
    assert found.tokens == wanted[:, prompt:].tolist()
    assert found.compile == "none" and found.reasons == ["max_new"] * 4


@pytest.mark.parametrize("name", ["t5", "m2m_100", *SOUNDS])
def test_a_row_is_as_alone(name: str) -> None:
    """Other sources, another order and other slots change no token; beginnings of several tokens too."""
    config, params = CONFIGS[name], lively(CONFIGS[name])
    rows, beginnings = sources(config), [[2, 5, 9], [2], [2, 5], [2, 8, 8, 8]]
    drawn = {"max_new": [4, 7, 5, 6], "sampling": train.Sampling(temperature=0.9), "seeds": [3, 4, 5, 6]}
    together = train.generate(params, config, rows, beginnings=beginnings, slots=3, **drawn)
    for row, source in enumerate(rows):
        own = {key: value[row] if isinstance(value, list) else value for key, value in drawn.items()}
        alone = train.generate(params, config, [source], beginnings=[beginnings[row]], **own)
        assert alone.tokens[0] == together.tokens[row]
        torch.testing.assert_close(alone.logp[0], together.logp[row], atol=1e-4, rtol=0)
    seen = list(train.stream(params, config, rows, beginnings=beginnings, **drawn))
    assert sorted((row, token) for row, token, _ in seen) == sorted(
        (row, token) for row, tokens in enumerate(together.tokens) for token in tokens
    )


def test_stop_ids_and_other_sources() -> None:
    """An answer ends at its stop token, and another source gives another answer."""
    config, params = CONFIGS["t5"], lively(CONFIGS["t5"])
    rows = sources(config)
    whole = train.generate(params, config, rows, max_new=8, sampling=GREEDY)
    stop = whole.tokens[0][3]
    found = train.generate(params, config, rows, max_new=8, sampling=GREEDY, stop_ids=[stop])
    assert found.tokens[0] == whole.tokens[0][: whole.tokens[0].index(stop) + 1] and found.reasons[0] == "stop_id"
    assert len({tuple(tokens) for tokens in whole.tokens}) > 1


def test_bad_use_is_a_sentence() -> None:
    config, params = CONFIGS["t5"], lively(CONFIGS["t5"])
    for wrong, said in (
        ({"prompts": [[1], []]}, "prompt of request 1 has 0 tokens"),
        ({"prompts": [[1, 61]]}, "request 0 has the token 61"),
        ({"beginnings": []}, "beginnings has 0 entries"),
        ({"kv_dtype": torch.int8}, "without kv_dtype"),
        ({"compile": "step"}, "without kv_dtype and compile"),
    ):
        given: dict[str, Any] = {"prompts": [[1, 2]], "max_new": 2} | wrong
        with pytest.raises(ValueError, match=said):
            train.generate(params, config, given.pop("prompts"), **given)
    own = fnmodels.stack_params(params, "decoder")
    with pytest.raises(ValueError, match="leave beginnings out"):
        train.generate(own, config.decoder, [[1]], beginnings=[[1]], max_new=2)
    for requests, said in (([Request([0], 2)], "has no source"), (iter([]), "must be a sequence")):
        with pytest.raises(ValueError, match=said):
            next(train.serve(params, config, requests, slots=1, capacity=4))
