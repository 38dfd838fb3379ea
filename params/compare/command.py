"""`python -m params.compare`: compares leaves, then activations, and prints where the models first differ."""

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import family_of, tree
from fnmodels.errors import MismatchError, UnsupportedError, UserError, printable
from fnmodels.models.common.family import field_of, traits_of
from fnmodels.tree import Tree
from params.checkpoint.config import load_config
from params.checkpoint.hub import local_folder
from params.checkpoint.load import load_pretrained
from params.checkpoint.shard_index import as_lines

from ..command_line import Parser, program_name, run_command
from ..imported import add_family_flag, imported_family
from .activations import our_taps, tap_order, their_taps
from .batches import SHORTEST, Arrangement, batches_of, unreached
from .leaves import leaf_faults, value_faults
from .reference import as_published, load_reference, on_disk, transformers_if_installed
from .table import ComparedTap, compared, conclusion, largest_difference, nudged_by_rounding, print_rows

LENGTH = 24


DESCRIPTION = """\
Load a checkpoint with fnmodels and with a reference, run both in fp32 on one short random batch,
and print where they first differ: in which leaf, or after which part of which layer, and by how much.
Both models are in memory at once, on the CPU. Without --against, where transformers is not installed,
the checkpoint is loaded and run by itself.
"""
EPILOG = """\
exit code: 0 equal (or run by itself), 1 different, 2 an error in the folder or the installation

example:
  python -m params.compare ~/models/Qwen3-0.6B
  python -m params.compare ~/models/gemma-2-2b --against transformers --length 4200
"""


def _name() -> str:
    return program_name("fnmodels-params-compare", "params.compare")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. See DESCRIPTION and EPILOG."""
    return run_command(_name(), _parser, _compare, argv)


def _compare(arguments: argparse.Namespace) -> int:
    family = None if arguments.family is None else imported_family(arguments.family)
    return 0 if compare(local_folder(arguments.folder), arguments.against, arguments.length, family) else 1


def _parser() -> Parser:
    parser = Parser(
        prog=_name(),
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="CHECKPOINT_FOLDER", help="config.json and safetensors")
    parser.add_argument(
        "--against",
        choices=["transformers"],
        help="the reference to compare with, which must be installed (default: transformers, if it is)",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=LENGTH,
        metavar="TOKENS",
        help="length of each of the two rows (default: %(default)s)",
    )
    add_family_flag(parser)
    return parser


def compare(folder: Path, against: str | None = None, length: int = LENGTH, family: Any = None) -> bool:
    """Print the comparison of `folder` on two rows of `length` tokens; returns whether everything is equal.

    against: a reference that must be installed; None takes transformers if it is installed, else ours runs alone.
    family: as in `load_pretrained`.
    Raises UserError, CheckpointError or OSError where the models cannot be compared.
    """
    if length < SHORTEST:
        raise UserError(f"--length is {length}, but must be at least {SHORTEST}")
    config: Any = load_config(folder, part="text", family=family)
    if field_of(config, "head") not in ("lm", "masked_lm"):
        raise UnsupportedError(f"Only logits of tokens are compared, and this model's head is {config.head!r}.")
    optional = traits_of(family_of(config)).optional  # transformers does not load these
    config = dataclasses.replace(config, **dict.fromkeys(optional.values(), 0))
    params, mismatch = _params(folder, optional, family)
    transformers = transformers_if_installed()
    if transformers is None and (mismatch or against):
        raise mismatch or UnsupportedError(
            f"fnmodels loads {folder}, all {len(tree.leaves(params))} leaves of it; transformers is not installed, "
            "and it is what to compare with."
        )
    if "embed_positions" in params and length > config.max_position_embeddings:
        raise UnsupportedError(f"--length is {length}, but this model has {config.max_position_embeddings} positions.")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, length), generator=generator)
    batches = batches_of(config, length)
    if transformers is None:
        return _runs_alone(folder, config, params, tokens, batches[0])
    reference = load_reference(transformers, folder, config)
    theirs = as_published(config, on_disk(reference))
    faults = leaf_faults(config, theirs)
    if faults:
        lines = printable(as_lines(faults))
        print(f"The first difference is in the leaves, ours against transformers' ({len(faults)}):{lines}")
        return False
    if mismatch is not None:  # our spec is the reference's, so it is the files that are wrong
        raise mismatch
    values = value_faults(config, params, theirs)
    print(f"{len(theirs)} tensors on disk: names and shapes are equal; leaves with other values: {len(values)}")

    rows = [row for batch in batches for row in _rows(config, params, reference, tokens, batch)]
    print_rows(rows)
    for missed in unreached(config, length):
        print(f"Not compared, as {length} tokens do not reach it (--length): {missed}.")
    print(printable(conclusion(rows, values)))
    return not values and all(row.equal for row in rows)


def _params(folder: Path, drop: Collection[str], family: Any) -> tuple[Tree, MismatchError | None]:
    """(our parameters, None), or ({}, the error that says how the files do not fit our spec)."""
    try:
        return load_pretrained(folder, family=family, dtype=torch.float32, drop=drop, part="text")[1], None
    except MismatchError as error:
        return {}, error


def _runs_alone(folder: Path, config: Any, params: Tree, tokens: Tensor, batch: Arrangement) -> bool:
    """Prints what our model alone does; returns whether its logits are finite."""
    with torch.no_grad():
        logits = our_taps(config, params, tokens, batch)["logits"]
    finite = bool(logits.isfinite().all())
    print(
        f"fnmodels loads {folder}, all {len(tree.leaves(params))} leaves of it, and runs: logits "
        f"{list(logits.shape)}, {'all' if finite else 'NOT all'} finite. transformers is not installed, so nothing "
        "was compared."
    )
    return finite


def _rows(config: Any, params: Tree, reference: Any, tokens: Tensor, batch: Arrangement) -> list[ComparedTap]:
    """The activations that both models have in the plain arrangement, and the logits in the others."""
    with torch.no_grad():
        ours, theirs = our_taps(config, params, tokens, batch), their_taps(reference, config, tokens, batch)
        plain, valid = batch.form == "plain", batch.segment_ids > 0
        layers = len(family_of(config).kinds(config))
        taps = [tap for tap in tap_order(layers) if tap in ours and tap in theirs] if plain else ["logits"]
        rows = [compared(tap, ours[tap][valid], theirs[tap][valid]) for tap in taps]
        if not all(row.equal for row in rows):  # a fault, or a model that makes more of rounding than others
            nudged = our_taps(config, tree.map(nudged_by_rounding, params), tokens, batch)
            off = {row.tap: largest_difference(ours[row.tap][valid], nudged[row.tap][valid]) for row in rows}
            rows = [dataclasses.replace(row, rounded=off[row.tap]) for row in rows]
    return rows if plain else [dataclasses.replace(row, tap=f"{row.tap}, {batch.form}") for row in rows]
