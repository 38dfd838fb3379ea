"""Encoder-decoders without a head, BartModel and its like: hidden states, files and what needs logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.models.encoder_decoder import bart
from fnmodels.models.encoder_decoder.classes import headless
from tests.fnmodels.models import test_moonshine, test_pairs, test_whisper
from tests.support.cases import generic
from tests.support.oracle import assert_close
from tests.variants.moonshine import TINY as MOONSHINE
from tests.variants.whisper import TINY

VARIANTS = {name: values for name, values in test_pairs.VARIANTS.items() if name not in test_pairs.ALONE}
VARIANTS["whisper"] = TINY | {"max_source_positions": 10}
VARIANTS["moonshine"] = MOONSHINE
WHOLE = {"whisper": test_whisper.reference, "moonshine": test_moonshine.reference}
SINES = ("pegasus", "marian")  # transformers 5.24 asks for the tables of its class without a head, which it computes


def reference(values: dict[str, Any]) -> Any:
    """transformers' model without a head, every parameter generic."""
    cls = getattr(transformers, headless(values["architectures"][0]))
    config = transformers.AutoConfig.for_model(**values)
    model = cls._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None
        for path, leaf in model.named_parameters():
            if leaf.requires_grad:
                leaf.copy_(generic(path, leaf))
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_of_the_class_without_a_head_returns_its_hidden_states(name: str, tmp_path: Path) -> None:
    model = reference(VARIANTS[name])
    model.save_pretrained(tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert config.head == config.decoder.head == "none"
    target = torch.randint(2, 61, (2, 5), generator=torch.Generator().manual_seed(1))
    if name == "whisper":
        clips = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(0))
        frames, positions, sources = fnmodels.inputs.frame_rows(list(clips), config, length=10)
        given = {"positions": positions, "segment_ids": sources}
        prepared, theirs = fnmodels.prepare_pair(config, frames, target, **given), {"input_features": clips}
    elif name == "moonshine":
        clips = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
        waves, positions, sources = fnmodels.inputs.sample_rows(list(clips), config)
        given = {"positions": positions, "segment_ids": sources}
        prepared, theirs = fnmodels.prepare_pair(config, waves, target, **given), {"input_values": clips}
    else:
        source = torch.randint(2, 61, (2, 9), generator=torch.Generator().manual_seed(0))
        prepared, theirs = fnmodels.prepare_pair(config, source, target), {"input_ids": source}
    with torch.no_grad():
        wanted = model(**theirs, decoder_input_ids=target, use_cache=False).last_hidden_state
    assert_close(fnmodels.forward(weights, *prepared, config=config), wanted, bound=2e-5)

    flat, held = tree.flatten(weights), tree.flatten(P.from_tensors(config, model.state_dict().items()))
    assert flat.keys() == held.keys() and all(torch.equal(leaf, held[path]) for path, leaf in flat.items())
    P.save_pretrained(tmp_path / "ours", config, weights)
    assert P.load_config(tmp_path / "ours") == config
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    tables = {f"{stack}.embed_positions.weight" for stack in ("encoder", "decoder") if name in SINES}
    assert not info["unexpected_keys"] and set(info["missing_keys"]) == tables
    found = dict(again.named_parameters())
    assert all(torch.equal(found[path], leaf) for path, leaf in model.named_parameters() if leaf.requires_grad)


@pytest.mark.parametrize("name", ["bart", "t5_v1_1", "t5gemma", "mt5", *WHOLE])
def test_a_folder_with_a_head_is_read_without_it(name: str, tmp_path: Path) -> None:
    whole = WHOLE[name]() if name in WHOLE else test_pairs.reference(name)
    whole.save_pretrained(tmp_path)
    config, weights = P.load_pretrained(tmp_path, head="none")
    with_head, flat = P.load_pretrained(tmp_path)[1], tree.flatten(weights)
    assert config.head == config.decoder.head == "none" and not [path for path in flat if "lm_head" in path]
    assert all(torch.equal(leaf, tree.flatten(with_head)[path]) for path, leaf in flat.items())


def test_a_head_that_is_the_embedding_is_added_as_in_transformers(tmp_path: Path) -> None:
    """As for facebook/bart-base, a BartModel, whose class with a head has a bias of zeros."""
    reference(VARIANTS["bart"]).save_pretrained(tmp_path)
    model = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    config, weights = P.load_pretrained(tmp_path)
    config, weights = replace(config, head="lm"), weights | {"lm_head_bias": torch.zeros(config.vocab_size)}
    assert tree.flatten(weights).keys() == tree.flatten(bart.spec(config)).keys()
    source, target = torch.randint(2, 61, (2, 9)), torch.randint(2, 61, (2, 5))
    with torch.no_grad():
        wanted = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
    prepared = fnmodels.prepare_pair(config, source, target)
    assert_close(fnmodels.forward(weights, *prepared, config=config), wanted, bound=2e-5)


def test_what_needs_logits_refuses_a_model_without_a_head() -> None:
    """Its hidden states would be read as logits."""
    config = test_pairs.config_of("bart")
    bare = bart.Config.from_hf(VARIANTS["bart"] | {"architectures": ["BartModel"]})
    weights = P.init(bare, 0)
    batch = fnmodels.pair_batch([([5, 6], [7, 8])], 4, 4, start=2)
    assert train.losses.pair_loss(P.init(config, 0), batch, config=config)[1] == 2
    with pytest.raises(ValueError, match="head is 'none': it has no logits"):
        train.losses.pair_loss(weights, batch, config=bare)
    with pytest.raises(ValueError, match="head is 'none': a checkpoint of a class such as"):
        train.generate(weights, bare, [[5, 6]], max_new=2)
