"""Published files' peculiarities: unused buffers, names without their first component, redundant tied heads."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common import storage
from fnmodels.models.common.family import traits_of
from tests.support.cases import Case, cases, generic_params, tokens_of
from tests.support.oracle import assert_close, model_of

FILE = "model.safetensors"
# Buffers in older files, by the first component of names: {variant: {name: tensor}}.
BUFFERS = {
    "llama": {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "mistral": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "falcon": {"transformer.h.0.self_attention.rotary_emb.inv_freq": torch.ones(4)},
    "stablelm": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "gpt2": {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    },
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9, dtype=torch.float16),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(2),
    },
}
# Names that are similar to a buffer's: a parameter's, another family's, a part of a longer name.
STRANGERS = {
    "llama": ("model.layers.0.attention.bias", "rotary_emb.inv_freq", "x.model.layers.0.self_attn.rotary_emb.inv_freq"),
    "gpt2": ("transformer.h.0.attn.bias.x", "transformer.h.0.mlp.bias", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    "gpt_neox": ("gpt_neox.layers.0.attention.unmasked_bias", "gpt_neox.layers.0.mlp.masked_bias"),
}


def case_of(name: str) -> Case:
    return next(case for case in cases() if case.name == name)


def folder_of(case: Case, folder: Path, added: dict[str, Tensor] | None = None, cut: str = "") -> Path:
    """A checkpoint of generic parameters, with tensors added, and the prefix `cut` removed from names."""
    P.save_pretrained(folder, case.config, generic_params(case.config))
    content = load_file(folder / FILE) | (added or {})
    save_file({name.removeprefix(cut): tensor.clone() for name, tensor in content.items()}, folder / FILE)
    return folder


def assert_loads(case: Case, folder: Path) -> None:
    for options in ({}, {"copy": True}):
        config, loaded = P.load_pretrained(folder, **options)
        flat, wanted = tree.flatten(loaded), tree.flatten(generic_params(case.config))
        assert config == case.config and flat.keys() == wanted.keys()
        assert all(torch.equal(flat[path], wanted[path]) for path in wanted)


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_older_files_are_ignored(name: str, tmp_path: Path) -> None:
    assert_loads(case_of(name), folder_of(case_of(name), tmp_path, BUFFERS[name]))


@pytest.mark.parametrize(("name", "stranger"), [(name, other) for name in STRANGERS for other in STRANGERS[name]])
def test_nothing_else_is_ignored(name: str, stranger: str, tmp_path: Path) -> None:
    folder_of(case_of(name), tmp_path, {stranger: torch.ones(3)})
    with pytest.raises(P.MismatchError, match="unexpected"):
        P.load_pretrained(tmp_path)


def test_a_tensor_under_two_names_is_unexpected(tmp_path: Path) -> None:
    """The name that transformers writes for a dense layer of Kimi Linear, beside the published one."""
    gate = generic_params(case_of("kimi_linear").config)["layers"][0]["mlp"]["gate_proj"]
    folder_of(case_of("kimi_linear"), tmp_path, {"model.layers.0.block_sparse_moe.gate_proj.weight": gate})
    with pytest.raises(
        P.MismatchError, match=r"block_sparse_moe\.gate_proj\.weight' in model\.safetensors: unexpected"
    ):
        P.load_pretrained(tmp_path)


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("qwen3", "model."), ("gpt_neox", "gpt_neox.")])
def test_names_without_their_first_part(name: str, prefix: str, tmp_path: Path) -> None:
    """Names as in OpenAI's GPT-2 and in models saved without a head. We save the full names."""
    case = case_of(name)
    folder_of(case, tmp_path, BUFFERS.get(name), cut=prefix)
    assert not any(other.startswith(prefix) for other in load_file(tmp_path / FILE))
    assert_loads(case, tmp_path)
    P.save_pretrained(tmp_path, *P.load_pretrained(tmp_path))
    names = fnmodels.family_of(case.config).hf_names(case.config)
    assert load_file(tmp_path / FILE).keys() == {n for stored in names.values() for n in storage.disk_names(stored)}


def test_embedding_gemma_has_the_class_of_a_text_without_a_head(tmp_path: Path) -> None:
    """A Gemma3TextModel saved by transformers, with bidirectional attention; a Gemma3Model has a vision tower."""
    case = case_of("gemma3_text_bidirectional")
    model = model_of(case.values)
    model.model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["Gemma3TextModel"] and "norm.weight" in load_file(tmp_path / FILE)
    config, loaded = P.load_pretrained(tmp_path)
    assert config == dataclasses.replace(case.config, head="none") and config.bidirectional
    tokens = tokens_of(config, 2, 12)
    hidden = fnmodels.forward(loaded, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert_close(hidden, model.model(input_ids=tokens).last_hidden_state)
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": ["Gemma3Model"]}))
    with pytest.raises(P.UnsupportedError, match="'Gemma3Model'; of 'gemma3_text' supported are Gemma3ForCausalLM"):
        P.load_pretrained(tmp_path)


def test_names_are_whole_or_cut_and_not_mixed(tmp_path: Path) -> None:
    case = case_of("gpt2")
    content = load_file(folder_of(case, tmp_path) / FILE)
    mixed = {name.removeprefix("transformer.") if ".h.0." in name else name: t for name, t in content.items()}
    save_file(mixed, tmp_path / FILE)
    with pytest.raises(P.MismatchError, match=r"transformer.h.0.ln_1.weight: missing(?s:.*)'h.0.ln_1.weight'"):
        P.load_pretrained(tmp_path)
    bare = {name.removeprefix("transformer."): t for name, t in content.items()}
    lost = bare.pop("h.1.ln_1.weight")
    save_file(bare | {"wte.weight": lost}, tmp_path / FILE)
    with pytest.raises(P.MismatchError) as caught:  # under the names that the file has
        P.load_pretrained(tmp_path)
    assert "h.1.ln_1.weight: missing" in str(caught.value) and "wte.weight in model" in str(caught.value)
    assert "transformer" not in str(caught.value).replace(str(tmp_path), "")


# Encoders and Zamba 2 refuse an untied head: tests/parity/test_heads.py, tests/fnmodels/models/test_zamba2.py.
TIED = [case for case in cases() if getattr(case.config, "tie_word_embeddings", False)]
TIED = [case for case in TIED if traits_of(fnmodels.family_of(case.config)).causal and case.family != "zamba2"]


@pytest.mark.parametrize("case", TIED, ids=str)
def test_a_tied_head_may_be_in_the_file(case: Case, tmp_path: Path) -> None:
    """L6, under each family's own name of its head: the same bits as the embedding, or an error."""
    untied: Any = {**case.config.to_hf(), "tie_word_embeddings": False}
    if "text_config" in untied:  # which repeats it
        untied["text_config"] = {**untied["text_config"], "tie_word_embeddings": False}
    family = fnmodels.family_of(case.config)
    head = storage.disk_name(family.hf_names(family.Config.from_hf(untied))["lm_head"])
    embedding = generic_params(case.config)["embed_tokens"]
    assert_loads(case, folder_of(case, tmp_path, {head: embedding}))
    folder_of(case, tmp_path, {head: embedding + 1})
    with pytest.raises(P.MismatchError, match=f"{head} differs from"):
        P.load_pretrained(tmp_path)


def test_a_head_under_another_familys_name_is_unexpected(tmp_path: Path) -> None:
    case = case_of("gpt_neox_tied_tanh")
    folder_of(case, tmp_path, {"lm_head.weight": generic_params(case.config)["embed_tokens"]})
    with pytest.raises(P.MismatchError, match=r"'lm_head\.weight' in model\.safetensors: unexpected"):
        P.load_pretrained(tmp_path)
