"""The command that makes a Hugging Face folder of a GGUF file: config.json, safetensors, the tokenizer.

    fnmodels-convert X.gguf FOLDER                     fp32, which holds the values of quantized blocks exactly
    fnmodels-convert X.gguf FOLDER --dtype bfloat16    half the size

Nothing is written unless everything in the file is read. `--without-tokenizer` makes a folder of a file whose tokenizer
is of a kind that is not read.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fnmodels.errors import memory_for, printable
from fnmodels.files import cache_folder, write_new
from params.checkpoint.config import CONFIG
from params.checkpoint.load_gguf import read_gguf
from params.checkpoint.manifest import digest
from params.checkpoint.save import write_model
from params.gguf.blocks import check_installed
from params.gguf.header import GgufFile, open_gguf
from params.gguf.tokenizer import special_ids, tokenizer_config, tokenizer_json

from .command_line import Parser, program_name, run_command

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; returns the exit code."""
    return run_command(_name(), _parser, _convert, argv)


def _name() -> str:
    return program_name("fnmodels-convert", "params.convert")


def _parser() -> Parser:
    parser = Parser(prog=_name(), description="Make a Hugging Face folder of a GGUF file.")
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if needed; an older model there is replaced")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the parameters (default: float32)")
    parser.add_argument("--without-tokenizer", action="store_true", help="write no files of the tokenizer")
    return parser


def _convert(arguments: argparse.Namespace) -> int:
    names = convert(
        arguments.file, arguments.folder, DTYPES[arguments.dtype], tokenizer=not arguments.without_tokenizer
    )
    print(printable(f"wrote {', '.join(('a model', *names))} into {arguments.folder}"))
    return 0


def convert(path: Path, folder: Path, dtype: torch.dtype | None = None, *, tokenizer: bool = True) -> tuple[str, ...]:
    """Make a Hugging Face folder of a GGUF file, in one save as by `params.save_pretrained`.

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

        def write(temporary: Path) -> None:
            for name, content in companions.items():
                write_new(temporary / name, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

        write_model(folder, config, params, beside=write)
    return tuple(companions)


def converted(path: Path) -> Path:
    """The folder of a GGUF file in the cache folder, in fp32; it is made where there is none of a file with its bytes.

    Raises:
        CheckpointError, UserError: as of `convert`.
    """
    folder = cache_folder() / f"gguf-{digest(path)}"
    while not os.path.lexists(folder / CONFIG):
        try:
            convert(path, folder)
        except BlockingIOError:  # another process of this run is at it
            time.sleep(0.2)
    return folder


def _companions(file: GgufFile) -> dict[str, dict[str, Any]]:
    """{name: content} of the files of the tokenizer, and of the tokens that end a text."""
    ids = special_ids(file.path, file.metadata)
    keys = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    return {
        "tokenizer.json": tokenizer_json(file.path, file.metadata),
        "tokenizer_config.json": tokenizer_config(file.path, file.metadata),
        "generation_config.json": {key: ids[name] for name, key in keys.items() if name in ids},
    }


if __name__ == "__main__":
    sys.exit(main())
