"""XLM with a vector for the language of each token, as transformers adds it, packed and from its files."""

from pathlib import Path
from typing import Any

import torch
import transformers

import fnmodels
import params as P
from tests.support.cases import generic, positions_of, segments
from tests.support.oracle import assert_close
from tests.variants.xlm import TINY

ROWS = segments((-2, 7, 4), (6, 6, -1))


def test_languages_of_packed_texts(tmp_path: Path) -> None:
    """Each document alone in transformers, with the language of each of its tokens and without any."""
    model: Any = transformers.XLMWithLMHeadModel(transformers.XLMConfig(**TINY | {"n_langs": 3})).eval()
    with torch.no_grad():
        for path, leaf in model.named_parameters():
            leaf.copy_(generic(path, leaf))
    model.save_pretrained(tmp_path)
    config, params = P.load_pretrained(tmp_path)
    assert config.languages == 3 and params["embed_languages"].shape == (3, 32)
    generator = torch.Generator().manual_seed(0)
    tokens, languages = (torch.randint(size, ROWS.shape, generator=generator) for size in (61, 3))
    inputs, masks, freqs = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    results = []
    for given in ({}, {"languages": languages}):
        got = fnmodels.forward(params, {**inputs, **given}, masks, freqs, config=config)
        results.append(got[ROWS > 0])
        for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
            own = ROWS[row] == segment
            with torch.no_grad():
                theirs = model(tokens[row, own][None], langs=languages[row, own][None] if given else None).logits[0]
            assert_close(got[row, own], theirs)
    assert (results[0] - results[1]).abs().max() > 0.1
