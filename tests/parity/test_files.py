"""Checkpoint folders go between transformers and params in both directions, tensor for tensor."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fnmodels
import params as P
from tests.support.cases import Case, cases, collected, forward, structures, tokens_of
from tests.support.oracle import EAGER, assert_close, auto_class, model_of, params_of, save

WITH_REFERENCE = [case for case in structures() if case.values is not None]
LIMITS = ["5GB", "20KB"]  # of a shard: one file or several, in turns, since the tensors' names decide which


@pytest.mark.parametrize(("case", "limit"), list(zip(WITH_REFERENCE, itertools.cycle(LIMITS), strict=False)), ids=str)
def test_there_and_back(case: Case, limit: str, tmp_path: Path) -> None:
    """L5: a checkpoint from transformers is loaded and saved with the same names, dtypes and bits, and read there."""
    model = model_of(case.values)
    save(model, tmp_path / "theirs", max_shard_size=limit)
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert config == case.config
    wanted = P.flatten(params_of(model, case.config))
    flat = P.flatten(weights)
    assert flat.keys() == wanted.keys() and all(torch.equal(flat[path], wanted[path]) for path in flat)
    tokens = tokens_of(config, 2, 24)
    ours = forward(weights, fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        reference = model(input_ids=tokens, use_cache=False).logits
    assert_close(ours, reference)

    P.save_pretrained(tmp_path / "ours", config, weights, max_shard_size=limit)
    assert ((tmp_path / "ours/model.safetensors.index.json").exists()) == (limit == "20KB")
    theirs, back = (
        {k: v for file in sorted((tmp_path / name).glob("*.safetensors")) for k, v in load_file(file).items()}
        for name in ("theirs", "ours")
    )
    assert back.keys() == theirs.keys()
    assert all(back[k].dtype == theirs[k].dtype and torch.equal(back[k], theirs[k]) for k in back)
    if case.name in collected("UNREADABLE"):
        return
    how = EAGER | {"attn_implementation": model.config._attn_implementation}
    again, report = auto_class(model.config).from_pretrained(
        tmp_path / "ours", output_loading_info=True, **how, dtype="auto"
    )
    left_out = collected("LEFT_OUT").get(case.config.model_type, ())
    assert all(name.endswith(left_out) for name in report["missing_keys"])
    assert not any(report[kind] for kind in ("unexpected_keys", "mismatched_keys"))
    assert again.dtype == torch.float32
    read, written = again.state_dict(), model.state_dict()
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in read.keys() - report["missing_keys"])
    with torch.no_grad():  # bits of products with one row depend on where a mapped file has it in memory
        assert_close(again.eval()(tokens, use_cache=False).logits, reference)


# Variants that transformers saves under other names than the published ones: {variant: fields with which shapes agree}.
RESAVED = {"olmo_hybrid": {"linear_num_value_heads": 2, "linear_value_head_dim": 6}, "kimi_linear": {}}


@pytest.mark.parametrize("name", RESAVED)
def test_other_names_of_what_transformers_saves_are_read(name: str, tmp_path: Path) -> None:
    values = next(case.values for case in cases() if case.name == name) | RESAVED[name]
    model = model_of(values)
    model.save_pretrained(tmp_path)
    config, weights = P.load_pretrained(tmp_path)
    wanted, flat = P.flatten(params_of(model, config)), P.flatten(weights)
    assert flat.keys() == wanted.keys() and all(torch.equal(flat[path], wanted[path]) for path in flat)


def test_convolutions_in_three_equal_parts_are_refused(tmp_path: Path) -> None:
    """transformers 5.23 splits those of 12, 12 and 40 channels into 22, 22 and 20, and no file says which is which."""
    case = next(case for case in cases() if case.name == "olmo_hybrid")
    model_of(case.values).save_pretrained(tmp_path)
    with pytest.raises(
        P.MismatchError, match=r"q_conv1d.*found \[22, 1, 4\](?s:.*)equal parts of what they are together"
    ):
        P.load_pretrained(tmp_path)
