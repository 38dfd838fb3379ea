"""python -m train.eval CHECKPOINT --data TEXT: loss, perplexity and bits per byte of texts under a checkpoint."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch

from fnmodels.errors import UserError
from params.checkpoint.hub import local_folder
from params.imported import add_family_flag, imported_family
from train.comm.torchrun import rank_and_world_size
from train.command_line import Parser, program_name, run_command

from .over_mesh import mesh_of_flag
from .perplexity import Evaluator, TextScore
from .scoring import ROW_TOKENS
from .text_records import TextRecords, text_records, texts_of

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "sdpa", "math", "blocks", "flex", "varlen", "sparse", "invariant")


def _name() -> str:
    return program_name("fnmodels-eval", "train.eval")


def parser() -> Parser:
    flags = Parser(prog=_name(), description="Loss, perplexity and bits per byte of texts under a checkpoint.")
    flags.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a run folder, one of Hugging Face, adapters"
    )
    flags.add_argument(
        "--data",
        required=True,
        metavar="PATH,...",
        help="a text, jsonl or Parquet file, a folder of them, a URL that fsspec reads, or your own f() -> iterable of "
        "texts as module:name or FILE.py:name; or several",
    )
    flags.add_argument("--limit", type=int, metavar="N", help="only the first N documents")
    flags.add_argument("--dtype", choices=DTYPES, help="of the weights; by default as they are stored")
    flags.add_argument("--device", metavar="NAME", help="cpu, cuda, ...; by default the CPU")
    flags.add_argument("--mesh", metavar="AXES", help="how processes of torchrun share the work, as fsdp=2,tp=2")
    flags.add_argument("--kernel", choices=KERNELS, default="auto", help="of attention")
    flags.add_argument("--batch-tokens", type=int, default=ROW_TOKENS, metavar="N", help="tokens computed at once")
    flags.add_argument(
        "--as-harness", action="store_true", help="count special tokens as the `hf` model of lm-evaluation-harness does"
    )
    flags.add_argument("--out", type=Path, metavar="FILE", help="write a line of JSON for each document")
    add_family_flag(flags)
    return flags


def checked(arguments: argparse.Namespace) -> TextRecords:
    """The texts that the flags name. UserError for flags that cannot work, said before the work."""
    for name in ("limit", "batch_tokens"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: it must be at least 1")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise UserError(f"--out {arguments.out}: there is no folder {arguments.out.parent}")
    if arguments.device is not None:
        check_device(arguments.device)
    return text_records(arguments.data)


def evaluate(arguments: argparse.Namespace) -> int:
    records = checked(arguments)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    folder = local_folder(arguments.checkpoint)
    family = None if arguments.family is None else imported_family(arguments.family)
    mesh = None if arguments.mesh is None else mesh_of_flag(arguments.mesh)
    for name in ("device", "kernel"):
        if mesh is not None and getattr(arguments, name) not in (None, "auto"):
            raise UserError(f"--{name} {getattr(arguments, name)} is for one process: leave it or --mesh out")
    evaluator = Evaluator(
        folder,
        dtype,
        arguments.device,
        arguments.batch_tokens,
        arguments.kernel,
        family=family,
        as_harness=arguments.as_harness,
        mesh=mesh,
    )
    skipped: list[str] = []
    texts = islice(texts_of(records.read(), skipped), arguments.limit)
    total, count, lines = TextScore(0.0, 0, 0), 0, list[str]()
    for name, score in evaluator.scores(texts):
        total, count = total + score, count + 1
        own = {"loss": score.loss, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
        lines.append(json.dumps({"document": name, **asdict(score), **own}))
    if mesh is not None and rank_and_world_size()[0]:  # the first process reports what all computed
        return 0
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    if not total.tokens:
        raise UserError(f"no text in {records.name}")
    print(f"documents      {count:,}" + (f" ({len(skipped):,} skipped)" if skipped else ""))
    print(f"tokens         {total.tokens:,} of {total.bytes:,} bytes")
    print(f"loss           {total.loss:.4f} nats per token")
    print(f"perplexity     {total.perplexity:.3f} per token")
    print(f"bits per byte  {total.bits_per_byte:.4f}")
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")
    return 0


def check_device(name: str) -> None:
    """UserError where torch cannot compute on the device of that name."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises another for each kind of device
        raise UserError(f"--device {name}: torch cannot compute there: {str(error).splitlines()[0]:.200}") from error


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, evaluate, argv, needs=("tokenizers",))
