"""Files of llama.cpp's converter of the architectures that no other writer writes here: what their folders hold."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import fnmodels
import params as P
from fnmodels.models.common.registry import config_class, family_for
from tests.support.cases import generic, generic_params
from tests.support.gguf_converted import ABSENT, MODELS, PUBLISHED
from tests.support.gguf_converter import convert, write_tokens
from tests.support.oracle import model_of, save
from tests.support.wrappers import as_published, perturbed

# What the converter does not write, or of a model that is read as another of the same maths.
UNWRITTEN = {
    "nemotron_h": {"max_position_embeddings"},
    "nemotron_h_moe": {"max_position_embeddings", "intermediate_size"},
    "bert": {"pooler"},
}
# Models whose files have other tensors than their folders: multipliers in weights, BERT for RoBERTa and DistilBERT.
REARRANGED = ("falcon-h1-multiplied", "xlm-roberta", "distilbert")


def options(name: str) -> dict[str, Any]:
    """Of `load_pretrained`, for a folder of which the file has the text alone."""
    return {"part": "text"} if "text_config" in MODELS[name][1] else {}


def save_published(name: str, folder: Path) -> None:
    """The model's folder, with the experts of Qwen 3 VL as it is published with them."""
    values = copy.deepcopy(MODELS[name][1])
    if name == "bailingmoe2":
        config = config_class(family_for(values["model_type"])).from_hf(values)
        P.save_pretrained(folder, config, generic_params(config, torch.float32))
        return
    if MODELS[name][0] == "t5":
        model_class = getattr(transformers, values["architectures"][0])
        perturbed(model_class(AutoConfig.for_model(**values))).save_pretrained(folder)
        if not values.get("tie_word_embeddings", True):  # the installed transformers ties it all the same
            tensors = load_file(folder / "model.safetensors")
            tensors["lm_head.weight"] = generic("lm_head.weight", torch.empty(64, values["d_model"]))
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    if "text_config" not in values:
        save(model_of(values), folder)
        return
    model = perturbed(AutoModelForImageTextToText.from_config(AutoConfig.for_model(**values)))
    model.save_pretrained(folder, state_dict=as_published(model), save_original_format=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each model, and one with the converter's file."""
    place = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_published(name, place / name)
        published = place / "published" / name
        shutil.copytree(place / name, published)
        write_tokens(published, 64)
        own, absent = PUBLISHED.get(name, {}), ABSENT.get(name, ())
        (published / "published.json").write_text(json.dumps([own, absent]))
        fields = json.loads((published / "config.json").read_text()) | own
        (published / "config.json").write_text(json.dumps({n: v for n, v in fields.items() if n not in absent}))
    failures = convert([place / "published" / name for name in MODELS])
    assert failures == {}
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in REARRANGED])
def test_a_converted_file_is_the_folder(name: str, place: Path) -> None:
    config, params = P.load_pretrained(place / "published" / name / "it.gguf")
    wanted, expected = P.load_pretrained(place / name, **options(name))
    assert type(config) is type(wanted)
    assert config.model_type == wanted.model_type
    unwritten = UNWRITTEN.get(name, set())
    differing = {field for field, value in vars(wanted).items() if getattr(config, field) != value}
    assert differing - {"extra", "dropout"} <= unwritten, differing
    assert config == wanted or differing & unwritten
    tensors, read = dict(P.export(wanted, expected)), dict(P.export(config, params))
    assert read.keys() == {key for key in tensors if "pooler" not in key or "pooler" not in unwritten}
    for key, tensor in read.items():
        torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", REARRANGED)
def test_a_file_with_other_tensors_gives_the_states_of_the_folder(name: str, place: Path) -> None:
    ids = torch.arange(24).view(2, 12) * 5 % 60 + 2
    found = []
    for path in (place / name, place / "published" / name / "it.gguf"):
        config, params = P.load_pretrained(path)
        with torch.no_grad():
            found.append(fnmodels.forward(params, *fnmodels.prepare(config, ids), config=config))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
