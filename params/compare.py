"""Layer-by-layer comparison of a checkpoint in fnmodels with the same checkpoint in transformers, for porting a family.

    python -m params.compare CHECKPOINT_FOLDER [--against transformers] [--length TOKENS]

Both load the same files. The names and shapes of their leaves are compared first, then the leaves' values, then the
activations on one short random batch, layer by layer, and the logits where tokens are padded, packed and shifted.
Features that only take effect beyond that length (a sliding window, say) are listed as not compared.
"""

import argparse
import dataclasses
import importlib
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import family_of, forward, prepare, tap_names, tree
from fnmodels.errors import MismatchError, UnsupportedError, UserError
from fnmodels.models.common.registry import DecoderConfig, field_of, may_have, ordered_kinds, to_hf
from fnmodels.models.common.storage import extract_parameter
from fnmodels.ops.rotary import Rope
from fnmodels.tree import Tree
from params.checkpoint.config import load_config
from params.checkpoint.load import load_pretrained
from params.checkpoint.shard_index import as_lines
from params.checkpoint.tensor_map import by_name, published_names, stored_leaves

from .command_line import Parser, run_command

BOUND = 2e-5  # of an fp32 activation, times max(1, its standard deviation): 5-10x the difference of two correct kernels
LENGTH, SHORTEST, SHIFT = 24, 4, 3
# {model type: arrangements of batches on which transformers itself is wrong}.
_THEIR_MISTAKES = {
    "falcon": ("packed",),  # its masks do not separate documents
    "gpt_oss": ("packed",),  # its masks do not separate documents
    "llama4": ("packed", "shifted"),  # its temperature depends on the index in the row, not on the position
    "llama4_text": ("packed", "shifted"),
}
_CLASSES = {"mistral4": "Mistral4ForCausalLM"}  # of model types that AutoModelForCausalLM of 5.23 does not know
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

# Taps of what is added to the residual stream: {tap: the reference's field that multiplies what its module returns}.
_ADDED = {"mamba": "ssm_out_multiplier", "attention": "attention_out_multiplier", "mlp": ""}
# The reference's module whose output equals our tap: where a norm follows a sublayer, that norm. The first entry whose
# modules a layer has all of is used: post_attention_layernorm alone is a norm before the MLP. Where several modules are
# named, their sum, without those that are None in a layer.
_SUBLAYERS = (
    {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"},
    {"attention": "post_self_attn_layernorm", "mlp": "post_mlp_layernorm"},
    {"attention": "attention.output.dense", "mlp": "output.dense"},  # BERT
    {"attention": "attention.attn", "mlp": "output.dense"},  # MPNet
    {"attention": "attention", "mlp": "ffn"},  # DistilBERT
    {"attention": "self_attn", "mlp": "mlp"},
    {"mamba": "mamba", "attention": "self_attn", "mlp": "feed_forward"},  # Falcon-H1
    {"attention": "self_attn", "mlp": "feed_forward"},  # Llama 4
    {"attention": "mamba", "mlp": "feed_forward"},  # Bamba
    {"attention": "attn", "mlp": "mlp"},  # GPT-2
    {"attention": "attention", "mlp": "mlp"},  # GPT-NeoX
    {"attention": "self_attention", "mlp": "mlp"},  # Falcon
    {"attention": "linear_attn", "mlp": "mlp"},  # Gated DeltaNet
    {"attention": "conv", "mlp": "feed_forward"},  # LFM2
    {"attention": "mixer", "mlp": "mixer"},  # one sublayer, of which ours has the tap
    {"attention": "mamba self_attn", "mlp": "shared_mlp block_sparse_moe"},  # Granite 4
)


@dataclass(frozen=True)
class Row:
    """The comparison of one activation: largest absolute difference (inf if shapes differ) and the allowed bound."""

    tap: str
    off: float
    bound: float

    @property
    def equal(self) -> bool:
        return self.off <= self.bound  # False for NaN


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. See DESCRIPTION and EPILOG."""
    return run_command("python -m params.compare", _parser, _compare, argv)


def _compare(arguments: argparse.Namespace) -> int:
    return 0 if compare(arguments.folder, arguments.against, arguments.length) else 1


def _parser() -> Parser:
    parser = Parser(
        prog="python -m params.compare",
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
    return parser


def compare(folder: Path, against: str | None = None, length: int = LENGTH) -> bool:
    """Print the comparison of `folder` on two rows of `length` tokens; returns whether everything is equal.

    against: a reference that must be installed; None takes transformers if it is installed, else ours runs alone.
    Raises UserError, CheckpointError or OSError where the models cannot be compared.
    """
    if length < SHORTEST:
        raise UserError(f"--length is {length}, but must be at least {SHORTEST}")
    config: Any = load_config(folder, part="text")
    if field_of(config, "head") not in ("lm", "masked_lm"):
        raise UnsupportedError(f"Only logits of tokens are compared, and this model's head is {config.head!r}.")
    optional = may_have(family_of(config), "OPTIONAL")  # transformers does not load these
    config = dataclasses.replace(config, **dict.fromkeys(optional.values(), 0))
    params, mismatch = _params(folder, optional)
    transformers = _transformers()
    if transformers is None and (mismatch or against):
        raise mismatch or UnsupportedError(
            f"fnmodels loads {folder}, all {len(tree.leaves(params))} leaves of it; transformers is not installed, "
            "and it is what to compare with."
        )
    if "embed_positions" in params and length > config.max_position_embeddings:
        raise UnsupportedError(f"--length is {length}, but this model has {config.max_position_embeddings} positions.")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, length), generator=generator)
    batches = _batches(config, length)
    if transformers is None:
        with torch.no_grad():
            logits = _ours(config, params, tokens, batches[0])["logits"]
        finite = bool(logits.isfinite().all())
        print(
            f"fnmodels loads {folder}, all {len(tree.leaves(params))} leaves of it, and runs: logits "
            f"{list(logits.shape)}, {'all' if finite else 'NOT all'} finite. transformers is not installed, so nothing "
            "was compared."
        )
        return finite
    reference = _reference(transformers, folder, config)
    theirs = _published(config, _on_disk(reference))
    faults = _leaf_faults(config, {name: tuple(leaf.shape) for name, leaf in theirs.items()})
    if faults:
        print(f"The first difference is in the leaves, ours against transformers' ({len(faults)}):{as_lines(faults)}")
        return False
    if mismatch is not None:  # our spec is the reference's, so it is the files that are wrong
        raise mismatch
    values = _value_faults(config, params, theirs)
    print(f"{len(theirs)} tensors on disk: names and shapes are equal; leaves with other values: {len(values)}")

    rows = []
    for batch in batches:
        with torch.no_grad():
            one, two = _ours(config, params, tokens, batch), _theirs(reference, config, tokens, batch)
        plain = batch is batches[0]
        taps = [tap for tap in _order(len(params["layers"])) if tap in one and tap in two] if plain else ["logits"]
        valid = batch.segment_ids > 0
        rows += [_row(tap if plain else f"{tap}, {batch.form}", one[tap][valid], two[tap][valid]) for tap in taps]
    _print(rows)
    for missed in _unreached(config, length):
        print(f"Not compared, as {length} tokens do not reach it (--length): {missed}.")
    print(_conclusion(rows, values))
    return not values and all(row.equal for row in rows)


@dataclass(frozen=True)
class Batch:
    """One arrangement ("plain", "padded", "packed", "shifted") of two rows; positions and segment_ids [2, S]."""

    form: str
    positions: Tensor
    segment_ids: Tensor


def _batches(config: DecoderConfig, length: int) -> list[Batch]:
    """The plain arrangement, then the others on which transformers is right.

    The first row always reaches the largest position, and the shifted arrangement is last: transformers' dynamic rope
    keeps the largest length it has seen.
    """
    positions, ones = torch.arange(length).expand(2, -1), torch.ones(2, length, dtype=torch.long)
    boundary = length * 2 // 3
    padding, second = ones.clone(), ones.clone()
    padding[1, boundary:], second[1, boundary:] = 0, 2
    restarted = positions.clone()
    restarted[1, boundary:] = torch.arange(length - boundary)
    found = [Batch("plain", positions, ones), Batch("padded", positions, padding), Batch("packed", restarted, second)]
    if length + SHIFT <= config.max_position_embeddings:
        found.append(Batch("shifted", positions + SHIFT, ones))
    return [batch for batch in found if batch.form not in their_mistakes(config)]


def their_mistakes(config: DecoderConfig) -> tuple[str, ...]:
    """The arrangements on which transformers itself is wrong for this model."""
    # Its convolutions and recurrent states run on from one document into the next.
    ordered = ("packed",) if ordered_kinds(config) else ()
    mixed = () if may_have(family_of(config), "CAUSAL") else ("packed",)  # encoders never separate documents
    return (*_THEIR_MISTAKES.get(config.model_type, ()), *ordered, *mixed)


def _unreached(config: DecoderConfig, length: int) -> list[str]:
    """Features of the model that have no effect on rows of up to `length` positions."""
    found = []
    for name in ("sliding_window", "attention_chunk_size", "floor_scale"):
        size = getattr(config, name, None)
        if size and size >= length:
            found.append(f"{name} {size}")
    ropes = {value for value in vars(config).values() if isinstance(value, Rope)}
    for rope in sorted(ropes, key=str):
        if rope.kind in ("dynamic", "longrope") and rope.original_max_position_embeddings >= length:
            found.append(f"{rope.kind} rope beyond {rope.original_max_position_embeddings} positions")
    return found


def _params(folder: Path, drop: Collection[str]) -> tuple[Tree, MismatchError | None]:
    """(our parameters, None), or ({}, the error that says how the files do not fit our spec)."""
    try:
        return load_pretrained(folder, dtype=torch.float32, drop=drop, part="text")[1], None
    except MismatchError as error:
        return {}, error


def _transformers() -> Any:
    """The transformers package, or None where it is not installed. Only this function imports it."""
    try:
        return importlib.import_module("transformers")  # by name, so that type checkers do not follow the import
    except ImportError:
        return None


def _reference(transformers: Any, folder: Path, config: DecoderConfig) -> Any:
    """The folder's model in transformers: fp32, with the eager implementations of attention and experts."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = _CLASSES.get(config.model_type, "AutoModelForCausalLM")
    if not may_have(family_of(config), "CAUSAL"):
        (name,) = to_hf(config)["architectures"]
    try:
        model = getattr(transformers, name).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
        )
    except Exception as error:  # transformers raises errors of many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"transformers cannot load {folder}: {reason}") from error
    if _layers(model) is None:
        raise UnsupportedError(f"transformers' {type(model).__name__} has no list of `layers` to compare.")
    return model.eval()


def _layers(model: Any) -> Any:
    """The reference's list of layers, or None if its modules have unknown names."""
    # Llama 4's text model names a base that only the model with a vision tower has
    base = model.model if model.base_model is model else model.base_model
    base = getattr(base, "encoder", getattr(base, "transformer", base))
    if hasattr(base, "layer"):
        return base.layer
    return getattr(base, "layers", getattr(base, "h", None))


def _on_disk(model: Any) -> dict[str, Tensor]:
    """The reference's tensors by their names in files, not those in memory. A tied head is listed once."""
    loading = importlib.import_module("transformers.core_model_loading")
    all_named = dict(model.named_parameters(remove_duplicate=False))
    saved = {name: tensor for name, tensor in model.state_dict().items() if name not in all_named}  # buffers
    named = {name: tensor for name, tensor in all_named.items() if name not in model.all_tied_weights_keys}
    return dict(loading.revert_weight_conversion(model, named | saved))


def _published(config: DecoderConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reference's tensors under the published names and in their shapes: see a family's RESAVED, EQUAL_PARTS."""
    ours = by_name(stored_leaves(config))
    found = dict(zip(published_names(config, ours, theirs), theirs.values(), strict=True))
    for parts in may_have(family_of(config), "EQUAL_PARTS"):
        for first in (name for name in ours if name.endswith(f".{parts[0]}")):
            names = [first.removesuffix(parts[0]) + part for part in parts]
            rows, sizes = [found[name] for name in names if name in found], [ours[n][0].disk_shape[0] for n in names]
            if sum(map(len, rows)) == sum(sizes):
                found |= dict(zip(names, torch.cat(rows).split(sizes), strict=True))
    return found


def _leaf_faults(config: DecoderConfig, theirs: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Differences in name or shape between the tensors on disk that our spec expects and the reference's."""
    ours = {name: pieces[0].disk_shape for name, pieces in by_name(stored_leaves(config)).items()}
    faults = []
    for name in (*ours, *(name for name in theirs if name not in ours)):
        if name not in theirs:
            faults.append(f"{name}: only ours, {list(ours[name])}")
        elif name not in ours:
            faults.append(f"{name}: only theirs, {list(theirs[name])}")
        elif ours[name] != theirs[name]:
            faults.append(f"{name}: ours is {list(ours[name])}, theirs {list(theirs[name])}")
    return faults


def _value_faults(config: DecoderConfig, params: Tree, theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """{path: largest difference} of the leaves whose values differ from the reference's."""
    flat = tree.flatten(params)
    pairs = {
        parameter.path: extract_parameter(parameter.stored, theirs).detach() for parameter in stored_leaves(config)
    }
    return {path: _off(flat[path], leaf) for path, leaf in pairs.items() if not torch.equal(flat[path], leaf)}


def _ours(config: DecoderConfig, params: Tree, tokens: Tensor, batch: Batch) -> dict[str, Tensor]:
    """{tap: activation} of our model."""
    names = {name.split(".", 2)[2] for name in tap_names(config) if name.startswith("layers.")}
    taps = ("embed", "layers.*.output", *(f"layers.*.{name}" for name in _ADDED if name in names))
    prepared = prepare(config, tokens, positions=batch.positions, segment_ids=batch.segment_ids)
    logits, tapped = forward(params, *prepared, config=config, kernel="math", taps=taps)
    return {**tapped, "logits": logits}


def _theirs(model: Any, config: DecoderConfig, tokens: Tensor, batch: Batch) -> dict[str, Tensor]:
    """{tap: activation} of the reference, by hooks on its modules."""
    tapped: dict[str, Tensor] = {}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tapped["embed"] = args[0] if args else kwargs["hidden_states"]

    # Granite multiplies what a sublayer returns.
    multiplier = getattr(model.config, "residual_multiplier", 1.0)

    def after(tap: str, module: Any, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        own = _ADDED.get(tap.rpartition(".")[2])
        value = value if own is None else value * multiplier * getattr(model.config, own, 1.0)
        value = value.clone()  # Falcon adds the attention's output to the MLP's in place
        value = value if value.ndim == 3 else value.view(*tokens.shape, -1)  # experts may see rows of tokens
        tapped[tap] = tapped[tap] + value if tap in tapped else value

    layers = _layers(model)
    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    for i, layer in enumerate(layers):
        modules = [("output", layer), *_sublayers(layer)]
        handles += [m.register_forward_hook(partial(after, f"layers.{i}.{name}")) for name, m in modules]
    try:
        mask = batch.segment_ids if batch.form == "padded" else None  # else documents begin where positions restart
        positions = batch.positions + field_of(config, "first_position")
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return {**tapped, "logits": logits}


def _sublayers(layer: Any) -> list[tuple[str, Any]]:
    """(tap, module whose output it is, or a summand of it) of one layer; [] if its modules have unknown names."""
    for names in _SUBLAYERS:
        modules = [(tap, name) for tap, several in names.items() for name in several.split()]
        try:
            found = [(tap, attrgetter(name)(layer)) for tap, name in modules]
        except AttributeError:
            continue
        return [(tap, module) for tap, module in found if module is not None]
    return []


def _order(layers: int) -> Iterator[str]:
    """The taps in the order in which the model computes them."""
    yield "embed"
    for i in range(layers):
        yield from (f"layers.{i}.{name}" for name in ("mamba", "attention", "mlp", "output"))
    yield "logits"


def _row(tap: str, ours: Tensor, theirs: Tensor) -> Row:
    return Row(tap, _off(ours, theirs), BOUND * max(1.0, float(theirs.std())))


def _off(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max()) if one.shape == two.shape else math.inf


def _print(rows: Sequence[Row]) -> None:
    width = max(len(row.tap) for row in rows)
    print(f"{'activation':{width}}  difference  allowed")
    for row in rows:
        print(f"{row.tap:{width}}  {row.off:10.1e}  {row.bound:7.1e}{'' if row.equal else '  differs'}")


def _conclusion(rows: Sequence[Row], values: Mapping[str, float]) -> str:
    leaves = ", ".join(f"{path} (by {off:.1e})" for path, off in list(values.items())[:5])
    leaves += f" and {len(values) - 5} more" if len(values) > 5 else ""
    first = next((row for row in rows if not row.equal), None)
    if first is not None:
        why = f" Leaves with other values: {leaves}." if values else " All leaves have the same values."
        return f"The first difference is at {first.tap}: {first.off:.1e}, where {first.bound:.1e} is allowed.{why}"
    if values:
        return f"No activation differs, but these leaves have other values: {leaves}."
    return f"Equal: all {len(rows)} activations are within {BOUND:.0e} x max(1, std)."


if __name__ == "__main__":
    sys.exit(main())
