"""A Hugging Face folder of a GGUF file: config.json, safetensors, the tokenizer."""

import hashlib
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fnmodels.embedding import Embedder
from fnmodels.errors import memory_for
from fnmodels.files import cache_folder, write_new
from params.gguf.architectures import pooling_of
from params.gguf.blocks import check_installed
from params.gguf.header import GgufFile
from params.gguf.parts import open_gguf, part_paths
from params.gguf.tokenizer import ending_ids, special_ids, tokenizer_config, tokenizer_json

from .config import CONFIG
from .embedder import MODULES, write_modules
from .load_gguf import read_gguf
from .manifest import digest
from .save import write_model


def convert(path: Path, folder: Path, dtype: torch.dtype | None = None, *, tokenizer: bool = True) -> tuple[str, ...]:
    """Make a Hugging Face folder of a GGUF file, in one save as by `params.save_pretrained`.

    A file that says how hidden states become one vector of a text gives a folder of sentence-transformers.

    Args:
        path: the file.
        folder: made if needed.
        dtype: of the parameters; None is fp32.
        tokenizer: whether to write its files.

    Returns:
        The names of the files that are written beside the model.
    """
    check_installed()
    with ExitStack() as stack, memory_for(path):
        file = open_gguf(path, stack)
        companions = _companions(file) if tokenizer else {}
        config, params = read_gguf(file, dtype)
        how = pooling_of(file)

        def write(temporary: Path) -> None:
            for name, content in companions.items():
                write_new(temporary / name, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
            if how is not None:  # a file does not say whether vectors are normalized
                write_modules(temporary, config, Embedder((how,), normalize=False), ())

        write_model(folder, config, params, beside=write)
    return (*companions, *([MODULES] if how is not None else []))


def converted(path: Path) -> Path:
    """The folder of a GGUF file in the cache folder, in fp32; it is made where there is none of files with its bytes.

    Raises:
        CheckpointError, UserError: as of `convert`.
    """
    digests = [digest(part) for part in part_paths(path)]
    name = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    folder = cache_folder() / f"gguf-{name}"
    while not os.path.lexists(folder / CONFIG):
        try:
            convert(path, folder)
        except BlockingIOError:  # another process of this run is at it
            time.sleep(0.2)
    return folder


def _companions(file: GgufFile) -> dict[str, dict[str, Any]]:
    """{name: content} of the files of the tokenizer, and of the tokens that end a text."""
    tokenizer = tokenizer_json(file.path, file.metadata)  # first, for its errors name the kind
    ids = special_ids(file.path, file.metadata)
    ends = ending_ids(file.path, file.metadata)
    named = {"bos_token_id": ids.get("bos"), "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    named |= {"pad_token_id": ids.get("padding")}
    named |= {"suppress_tokens": file.metadata.get("tokenizer.ggml.suppress_tokens")}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config(file.path, file.metadata),
        "generation_config.json": {key: value for key, value in named.items() if value is not None},
    }
