"""The command that makes a Hugging Face folder of a GGUF file: config.json, safetensors, the tokenizer.

    fnmodels-convert X.gguf FOLDER                     fp32, which holds the values of quantized blocks exactly
    fnmodels-convert X.gguf FOLDER --dtype bfloat16    half the size

Nothing is written unless everything in the file is read. `--without-tokenizer` makes a folder of a file whose tokenizer
is of a kind that is not read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fnmodels.errors import printable
from params.checkpoint.gguf_folder import convert

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


if __name__ == "__main__":
    sys.exit(main())
