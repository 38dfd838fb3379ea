"""The command that reports the contents of a checkpoint folder and every problem with it.

    python -m params.inspect FOLDER             from config.json, headers and sizes alone: as quick for 1 TB as for 1 MB
    python -m params.inspect FOLDER --verify    and every byte: checksums, tied heads, values that are not finite
    python -m params.inspect X.gguf             a GGUF file: its model, types of blocks and tokenizer

The exit code is 0 without problems and 2 with problems, which standard error summarizes in a sentence. The sections of
the report are independent, so that one damage does not hide the next.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fnmodels import family_of
from fnmodels.errors import CheckpointError, FormatError, UserError, printable
from fnmodels.models.common.config_json import IgnoreFields
from fnmodels.models.common.registry import model_type_of
from params import lora
from params.checkpoint.config import CONFIG, read_config
from params.checkpoint.header_checks import check_folder
from params.checkpoint.hub import local_folder
from params.checkpoint.load import load_pretrained
from params.checkpoint.load_gguf import described, is_gguf, read_gguf
from params.checkpoint.manifest import HASH, MANIFEST, manifests, read_manifest, verify
from params.checkpoint.shard_index import open_folder, stem_in
from params.checkpoint.tensor_map import unread_part
from params.gguf.blocks import check_installed, name_of
from params.gguf.parts import open_gguf
from params.gguf.tokenizer import tokenizer_json
from params.io.files import inner_file, read_json
from params.io.safetensors_file import open_tensors
from params.lora.adapter_config import read_config as read_adapter_config
from params.quantized.methods import read_quantization

from .command_line import Parser, program_name, run_command
from .imported import add_family_flag, imported_family
from .initialize import count

Lines = Iterator[tuple[str, str]]  # (label, value)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    return run_command(_name(), _parser, _inspect, argv)


def _name() -> str:
    return program_name("fnmodels-inspect", "params.inspect")


def _parser() -> Parser:
    parser = Parser(prog=_name(), description="Report the contents of a checkpoint folder and every problem with it.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--verify", action="store_true", help="read every byte: checksums, tied heads, finite values")
    parser.add_argument(
        "--ignore-fields",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAME,...",
        help="fields of config.json that no family knows, without which it is read",
    )
    add_family_flag(parser)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    arguments.folder = local_folder(arguments.folder)
    family = None if arguments.family is None else imported_family(arguments.family)
    if not is_gguf(arguments.folder) and not os.path.isdir(
        arguments.folder
    ):  # False too where the system refuses even to look
        read_config(arguments.folder, family)  # raises, and there is nothing else to report
    problems = []
    print(printable(str(arguments.folder)))
    for label, text in report(
        arguments.folder, verified=arguments.verify, family=family, ignore_fields=arguments.ignore_fields
    ):
        lines = text if label == "problem" else text.replace("\n", "\\n")
        print(f"  {label:<12}{printable(lines)}")
        problems += [text] if label == "problem" else []
    if problems:
        more = f", and {_counted(len(problems) - 1, 'problem')} more" if problems[1:] else ""
        raise UserError(f"{arguments.folder}: {problems[0].rstrip('.')}{more}")
    return 0


def report(folder: Path, *, verified: bool = False, family: Any = None, ignore_fields: Collection[str] = ()) -> Lines:
    """(label, value) of each line of the report, and ("problem", sentence) for everything that is wrong.

    verified: read every tensor too, and compare with the checksums. family, ignore_fields: as in `load_pretrained`.
    """
    if is_gguf(folder):
        try:
            yield from _gguf(folder, verified)
        except CheckpointError as error:
            yield "problem", str(error)
        return
    reported = set()

    def reading(section: Callable[..., Lines]) -> Callable[[Path], Lines]:
        return partial(section, family=family, ignore_fields=ignore_fields)

    sections = [reading(_model), _files, reading(_tensors), _checksums]
    if os.path.lexists(folder / lora.CONFIG) and not os.path.lexists(folder / CONFIG):
        sections, verified = [_adapters, _checksums], False
    for section in [*sections, *([reading(_bytes)] if verified else [])]:
        try:
            yield from section(folder)
        except (CheckpointError, OSError) as error:
            text = str(error) if isinstance(error, CheckpointError) else f"{error.strerror}: {error.filename}"
            if text not in reported:  # sections that read the same file meet the same error
                yield "problem", text
            reported.add(text)
        if not os.path.isdir(folder):  # False too where the system refuses even to look
            return


def _model(folder: Path, family: Any, ignore_fields: Collection[str]) -> Lines:
    """Family, layers and parameters, from config.json."""
    config, values = read_config(folder, family, ignore_fields=ignore_fields)
    yield from _config(config, model_type_of(values))
    with IgnoreFields(frozenset(ignore_fields)).asked():
        quantization = read_quantization(values, folder)
    if quantization:
        yield "quantized", quantization.summary
    if ignore_fields:
        yield "without", f"the fields {', '.join(ignore_fields)} of config.json"


def _config(config: Any, model_type: Any) -> Lines:
    yield "family", f"{family_of(config).__name__}, model type {model_type}"
    kinds = Counter(family_of(config).kinds(config))
    yield "layers", f"{sum(kinds.values())}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    yield "parameters", f"{count(config):,}"


def _gguf(path: Path, verified: bool) -> Lines:
    """A GGUF file: its model, how its tensors are stored, and its tokenizer."""
    check_installed()
    with ExitStack() as stack:
        file = open_gguf(path, stack)
        yield "format", f"GGUF, architecture {file.metadata.get('general.architecture')}"
        counts = Counter(name_of(tensor.kind) for tensor in file.tensors.values())
        size = sum(tensor.nbytes for tensor in file.tensors.values())
        yield "tensors", f"{len(file.tensors):,}, {_size(size)}: " + ", ".join(f"{n} {k}" for k, n in counts.items())
        config, _ = described(file)
        yield from _config(config, config.model_type)
        if verified:
            read_gguf(file, check_finite=True)
            yield "values", "all finite"
        tokens = tokenizer_json(path, file.metadata)["model"]["vocab"]
        yield "tokenizer", f"{file.metadata['tokenizer.ggml.model']}, {len(tokens):,} tokens"


def _files(folder: Path) -> Lines:
    """Tensors per file and per dtype, from the headers."""
    with ExitStack() as stack:
        found = open_folder(folder, stack, stem_in(folder))
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for file, entry in found.values():
            for key in (file.path.name, str(entry.dtype).removeprefix("torch.")):
                counts[key] += 1
                sizes[key] += entry.stop - entry.start
        files = sorted({file.path.name for file, _ in found.values()})
        size = _size(sum(sizes[name] for name in files))
        yield "tensors", f"{len(found):,} in {_counted(len(files), 'file')}, {size}"
        for key in files + sorted(counts.keys() - set(files)):
            kind = "file" if key in files else "dtype"
            yield kind, f"{key}: {_counted(counts[key], 'tensor')}, {_size(sizes[key])}"


def _tensors(folder: Path, family: Any, ignore_fields: Collection[str]) -> Lines:
    """Lines on the fit of the tensors in the files to the model that config.json describes."""
    with ExitStack() as stack:
        checked = check_folder(folder, stack, family=family, ignore_fields=ignore_fields)
        tied = getattr(checked.config, "tie_word_embeddings", None)
        if tied is not None:
            beside = ", and in the file all the same" if any(name in checked.found for name in checked.tied) else ""
            yield "head", f"tied to the embedding{beside}" if tied else "its own"
        if checked.prefix:
            yield "names", f"without their first part, {checked.prefix}"
        parts = {name: unread_part(checked.config, checked.prefix + name) for name in checked.leftovers}
        for part in dict.fromkeys(filter(None, parts.values())):
            names = [name for name, of in parts.items() if of == part]
            yield "not read", f"{_counted(len(names), 'tensor')} of the part {part!r}, as {names[0]}: drop=({part!r},)"
        if buffers := [name for name, of in parts.items() if of is None]:
            yield "ignored", f"{_counted(len(buffers), 'leftover buffer')}, as {buffers[0]}"


def _adapters(folder: Path) -> Lines:
    """Rank and base model of adapters, from adapter_config.json, and the tensors of their file."""
    config = read_adapter_config(folder / lora.CONFIG)
    form = "DoRA" if config.dora else "rsLoRA" if config.rslora else "LoRA"
    yield "adapters", f"{form} of rank {config.rank}, alpha {config.alpha:g}"
    base = read_json(folder / lora.CONFIG).get("base_model_name_or_path")
    yield "base model", str(base)
    with ExitStack() as stack:
        entries = open_tensors(folder / lora.WEIGHTS, stack).entries
        size = _size(sum(entry.stop - entry.start for entry in entries.values()))
        yield "tensors", f"{len(entries):,} in {lora.WEIGHTS}, {size}"


def _checksums(folder: Path) -> Lines:
    """The sizes that a save recorded in the manifest, compared with those of the files."""
    manifest = next(iter(manifests(folder)), None)
    if manifest is None:
        yield "checksums", f"none: there is no {MANIFEST}"
        return
    records = read_manifest(folder, manifest)
    yield "checksums", f"{HASH} of {_counted(len(records), 'file')} recorded"
    faults = []
    for name, record in records.items():
        size = inner_file(folder, name).stat().st_size if os.path.lexists(folder / name) else None
        if size != record.size:
            found = "is not there" if size is None else f"has {size:,} bytes"
            faults.append(f"{name} was saved with {record.size:,} bytes and {found}")
    if faults:
        raise FormatError(f"{folder} is not what {manifest} recorded: {'; '.join(faults)}.")


def _bytes(folder: Path, family: Any, ignore_fields: Collection[str]) -> Lines:
    """Reads every byte: tied heads must be equal, values finite, and checksums those of the manifest."""
    load_pretrained(folder, family=family, check_finite=True, ignore_fields=ignore_fields)
    yield "values", "all finite"
    if os.path.lexists(folder / MANIFEST):
        verify(folder)
        yield "verified", "every byte is as it was saved"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(number: float) -> str:
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while number >= 1000 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}"


if __name__ == "__main__":
    sys.exit(main())
