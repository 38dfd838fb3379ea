"""Continue a prompt with a checkpoint folder that has a tokenizer.json: `python -m train.sample FOLDER --prompt TEXT`.

Every token recomputes the full context, without a KV cache: enough for a look at what a model has learned.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from train.command_line import Parser, program_name, run_command
from train.eval.generate import complete
from train.job.setting_types import NUMBER, integer
from train.job.settings import flag

# Keywords of `complete`: {name: (type, default, metavar and help of the flag)}.
SAMPLING = {
    "tokens": (integer(1), 100, "N", "maximal number of new tokens"),
    "temperature": (NUMBER, 0.8, "T", "0 takes the likeliest token each time"),
    "top_k": (integer(1), 50, "K", "sample from the K likeliest tokens"),
    "seed": (integer(0), 0, "N", "seed of the sampling"),
}


def _name() -> str:
    return program_name("fnmodels-sample", "train.sample")


def parser() -> Parser:
    flags = Parser(
        prog=_name(),
        description="Continue a prompt with the model of a folder: config.json, *.safetensors, tokenizer.json.",
    )
    flags.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT_FOLDER", help="a run folder, one from Hugging Face, or adapters"
    )
    flags.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    for name, (kind, default, metavar, text) in SAMPLING.items():
        help = f"{text} (default %(default)s)"
        flags.add_argument(flag(name), type=kind.parse, default=default, metavar=metavar, help=help)
    return flags


def sample(arguments: argparse.Namespace) -> int:
    from train.eval.pretrained import check_vocabulary, end_ids, load_model, load_tokenizer

    folder = arguments.checkpoint
    tokenizer = load_tokenizer(folder)
    config, params = load_model(folder)
    check_vocabulary(tokenizer, config.vocab_size, folder)
    options = {name: getattr(arguments, name) for name in SAMPLING}
    print(complete(params, config, tokenizer, arguments.prompt, end_ids(folder), **options))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, sample, argv, needs=("tokenizers",))
