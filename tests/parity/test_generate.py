"""Greedy generation with a cache equals transformers.generate, for every model type, past its windows."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from tests.support.cases import Case, cases, causal, cost_of, seed_of, tokens_of
from tests.support.naming import fewest
from tests.support.oracle import model_of, params_of

PROMPT, NEW = 5, 20
MARGIN = 1e-3  # of the best logit to the next, below which two implementations may choose differently


def one_per_type() -> list[Case]:
    """Per model type the variant with the most kinds of layers, its rope not one that changes with the length."""
    found: dict[str, Case] = {}
    for case in cases():
        rope = getattr(case.config, "rope", None)
        if case.values is None or not causal(case) or getattr(rope, "kind", "") in ("dynamic", "longrope"):
            continue
        kinds = len(set(fnmodels.family_of(case.config).kinds(case.config)))
        model_type = case.config.model_type
        best = found.get(model_type)
        if best is None or kinds > len(set(fnmodels.family_of(best.config).kinds(best.config))):
            found[model_type] = case
    return list(found.values())


def greedy(params: Any, config: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [1, NEW], the margin of each choice [NEW])."""
    cache = fnmodels.init_cache(config, 1, PROMPT + NEW)
    new, margins = tokens, []
    for step in range(NEW):
        prepared = fnmodels.prepare_step(config, new, cache)
        run = fnmodels.decode_ if step else fnmodels.prefill
        logits, cache = run(params, *prepared, cache, config=config, at="last")
        best = logits.topk(2).values[0]
        margins.append(best[0] - best[1])
        new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, new), dim=1)
    return tokens[:, PROMPT:], torch.stack(margins)


@pytest.mark.parametrize("case", one_per_type(), ids=lambda case: case.config.model_type)
def test_greedy_is_that_of_transformers(case: Case) -> None:
    model: Any = model_of(case.values)
    tokens = tokens_of(case.config, 1, PROMPT, seed=seed_of(case))
    with torch.no_grad():
        ours, margins = greedy(params_of(model, case.config), case.config, tokens)
        model.config.use_cache = True
        how = {
            "do_sample": False,
            "max_new_tokens": NEW,
            "min_new_tokens": NEW,
            "use_cache": True,
            "eos_token_id": None,
        }
        theirs = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **how)[:, PROMPT:]
    close = (margins < MARGIN).nonzero()
    upto = int(close[0]) if len(close) else NEW
    assert upto > 10, f"a tie after {upto} tokens: SEEDS in tests/variants/{case.family}.py, {{{case.name!r}: seed}}"
    assert theirs.shape == ours.shape and torch.equal(ours[:, :upto], theirs[:, :upto])


FAR = 90  # tokens: variants with longer windows than 21 are left out


def one_per_ring() -> list[Case]:
    """Few variants with all kinds of layers that keep only the last tokens.

    The test above has 20 tokens of every type, past windows of 5 to 7.
    """
    found: dict[Case, set[str]] = {}
    for case in one_per_type():
        cache = fnmodels.init_cache(case.config, 1, FAR)
        rings = {kind: slots.segments.shape[1] for kind, slots in cache.slots.items() if slots.ring}
        if rings and max(rings.values()) <= FAR - PROMPT - 64:
            found[case] = {kind for kind in cache.kinds if kind in rings}
    return list(fewest(found, cost_of))


@pytest.mark.parametrize("case", one_per_ring(), ids=lambda case: case.config.model_type)
def test_64_tokens_past_the_window(case: Case) -> None:
    """Each token of transformers.generate is the likeliest after those before it, up to rounding, with rings."""
    model: Any = model_of(case.values)
    params, tokens = params_of(model, case.config), tokens_of(case.config, 1, PROMPT, seed=seed_of(case))
    model.config.use_cache = True
    how = {"do_sample": False, "max_new_tokens": FAR - PROMPT, "min_new_tokens": FAR - PROMPT, "eos_token_id": None}
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        row = model.generate(tokens, attention_mask=mask, pad_token_id=0, use_cache=True, **how)
    cache, decided = fnmodels.init_cache(case.config, 1, FAR), 0
    for at in range(PROMPT, FAR):
        new = row[:, :at] if at == PROMPT else row[:, at - 1 : at]
        prepared = fnmodels.prepare_step(case.config, new, cache)
        logits, cache = fnmodels.decode_(params, *prepared, cache, config=case.config, at="last")
        best, second = logits[0].topk(2).values.tolist()
        assert best - float(logits[0, row[0, at]]) < MARGIN, f"token {at}"
        decided += best - second > MARGIN
    assert decided > (FAR - PROMPT) * 0.8
