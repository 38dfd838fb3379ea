"""Checkpoint folders go between transformers and params in both directions, tensor for tensor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fnmodels
import params as P
from tests.support.cases import Case, forward, structures, tokens_of
from tests.support.oracle import EAGER, assert_close, logits_of, model_of, params_of

every_case = pytest.mark.parametrize("case", [case for case in structures() if case.values is not None], ids=str)


@every_case
@pytest.mark.parametrize("shard", ["one", "several"])
def test_there_and_back(case: Case, shard: str, tmp_path: Path) -> None:
    """L5: a checkpoint from transformers is loaded and saved with the same names, dtypes and bits."""
    model = model_of(case.values)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5GB" if shard == "one" else "20KB")
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert config == case.config
    wanted = P.flatten(params_of(model, case.config))
    flat = P.flatten(weights)
    assert flat.keys() == wanted.keys() and all(torch.equal(flat[path], wanted[path]) for path in flat)
    tokens = tokens_of(config, 2, 24)
    ours = forward(weights, fnmodels.prepare(config, tokens), config=config, kernel="math")
    assert_close(ours, logits_of(case.values, tokens))

    P.save_pretrained(tmp_path / "ours", config, weights)
    theirs, back = (
        {k: v for file in sorted((tmp_path / name).glob("*.safetensors")) for k, v in load_file(file).items()}
        for name in ("theirs", "ours")
    )
    assert back.keys() == theirs.keys()
    assert all(back[k].dtype == theirs[k].dtype and torch.equal(back[k], theirs[k]) for k in back)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **EAGER).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens, use_cache=False).logits, logits_of(case.values, tokens))
