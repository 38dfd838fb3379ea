"""Test cases shared by contract and parity tests: tiny variants of all families, generic parameters, and batches.

Families are found by looking (`fnmodels.families`). Their tiny configurations stand in `tests/variants/<family>.py`, in
a function `variants() -> {name: config.json or Config}`; a family without that file fails the suite. Beside it:
`published() -> {name: config.json}`, the largest published members, and `sizes() -> {name: number of parameters}`.
Where they are needed:

    TOTALS              {preset: parameters as published}; a text where the publisher rounds, "8.4B"
    FILES               {preset: config.json as published, every field}, which must be that preset
    NO_FILE             {model type: why}: it has no file of its own
    CONTRADICTIONS      [(preset, changes of its file, the error)]: second names that say something else
    REFUSED             {model type: {fields}} that are refused whatever they say, though transformers reads them
    ROUTER              the dtypes of the reference's router
    SEEDS               {variant: seed} of the tokens on which a model with experts is compared with transformers: where
                        every expert is used and no choice is close
    BLIND               {variant: {fields of Config}} for fields that a variant has no use for
    BIDIRECTIONAL       {variants} whose tokens see later ones
    SEPARATE            {form of batch, or "variant form": why} for batches that transformers itself reads wrongly:
                        parity compares their documents one by one
    STANDS_FOR          {model type: another} where transformers knows a model under the other name only
    UNREADABLE          {variant: why} where transformers does not read the published files
    ABSENT              {model type: how the names of buffers end that transformers has and no published file: 0}
    LEFT_OUT            {model type: how the names end of tensors that no parameter holds: no result reads
                        them, or they follow from the config}
    as_published        (tensors by their names as transformers saves them, its config) -> as published; where it errs
    OLDER_NAMES         {field: its name in older files}; OLDER_ROPES where there is a table for each layer type, and
                        older files say it otherwise
    TRAINING_TOLERANCE  {variant: tolerance of ten steps} where fp32 itself gives no 1e-5
    WIDE_LOGITS         {model types} whose logits are fp32 in a model of lower precision too
"""

import dataclasses
import functools
import importlib
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
from fnmodels import testing, tree
from fnmodels.inputs.mask import attention_part
from fnmodels.inputs.order import Segments
from fnmodels.inputs.windows import Windows
from fnmodels.models.common import context
from fnmodels.models.common.carried import own_choices
from fnmodels.models.common.family import LayerKind, field_of, parsed, stored_layers, traits_of
from fnmodels.models.common.registry import ordered_kinds
from fnmodels.ops.rotary import frequencies
from tests.support.entered import entered
from tests.support.naming import covering_names, fewest, pairs_of
from tests.support.shared_trees import SharedTrees

PARTS = Path(__file__).parent / "parts.txt"  # the variants of `parts`, a name per line
OPERATIONS = Path(__file__).parent / "operations.txt"  # those of `layer_structures`
ALIKE = re.compile(r"models/(?!common/)\S+ (block|embed|unembed)\b")  # what each family has one of, in its own file


def family_modules() -> list[str]:
    """The short names of all family modules."""
    return sorted({name.rpartition(".")[2] for name in fnmodels.families().values()})


def variants_of(family: str) -> ModuleType:
    """The module with the tiny configurations of a family; says what is missing."""
    path = Path(__file__).parents[1] / "variants" / f"{family}.py"
    if not path.is_file():
        raise FileNotFoundError(
            f"The family {family!r} has no tests: write tests/variants/{family}.py with a function "
            "variants() -> {name: config.json or Config}."
        )
    return importlib.import_module(f"tests.variants.{family}")


@functools.cache
def collected(name: str) -> dict[str, Any]:
    """All families' optional tables of this name, as one."""
    return {key: value for family in family_modules() for key, value in getattr(variants_of(family), name, {}).items()}


@functools.cache
def published_of(family: str) -> dict[str, Any]:
    """{name: Config} of the family's largest published members."""
    read = getattr(fnmodels, family).Config.from_hf
    return {name: read(values) for name, values in variants_of(family).published().items()}


@dataclass(frozen=True, eq=False)
class Case:
    """One tiny model: where it comes from, its config.json (None where a Config was given) and its Config."""

    family: str
    name: str
    values: Any
    config: Any

    def __str__(self) -> str:
        return self.name


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every variant of every family."""
    found = []
    for family in family_modules():
        module = getattr(fnmodels, family)
        given = variants_of(family).variants()
        assert given, f"tests/variants/{family}.py has no variants."
        for name, values in given.items():
            is_json = isinstance(values, dict)
            config = module.Config.from_hf(values) if is_json else values
            found.append(Case(family, name, values if is_json else None, config))
    names = [case.name for case in found]
    assert len(set(names)) == len(names), f"Two variants have one name: {sorted(names)}."
    return tuple(found)


def causal(case: Case) -> bool:
    """Whether no token of the model sees a later one."""
    decodes = traits_of(fnmodels.family_of(case.config)).causal
    return decodes and case.name not in getattr(variants_of(case.family), "BIDIRECTIONAL", ())


@functools.cache
def tap_names(config: Any) -> dict[str, str]:
    """`fnmodels.tap_names`, which runs every kind of layer."""
    return fnmodels.tap_names(config)


def taps_of(config: Any) -> tuple[str, ...]:
    """The names of taps within layers, without those of norms, in the order of the first layer that passes each."""
    names = (name.split(".", 2)[2] for name in tap_names(config) if name.startswith("layers."))
    return tuple(name for name in dict.fromkeys(names) if "norm" not in name)


def shared_of(config: Any, params: Any, inputs: Any) -> dict[str, Tensor]:
    """The argument `shared` of `run_layers` for a decoder whose layers read ids, or frequencies that are parameters."""
    family = fnmodels.family_of(config)
    if traits_of(family).reads_ids or traits_of(family).shares_tables:
        return {"shared": family.shared(params, inputs, config=config)}  # type: ignore[attr-defined]
    return {}


def layer_inputs_of(config: Any, params: Any, inputs: Any) -> dict[str, Tensor]:
    """What `run_layers` needs more for a model whose layers read embeddings of the token ids, or these."""
    if of_model := shared_of(config, params, inputs):
        return of_model
    if not field_of(config, "hidden_size_per_layer_input"):
        return {}
    family: Any = fnmodels.family_of(config)
    x = family.embed(params, inputs, config=config)
    return {"layer_inputs": family.layer_inputs(params, inputs, x, config=config)}


def beside(config: Any, params: Any, inputs: Any, index: int, lent: dict[str, Any]) -> dict[str, Any]:
    """The keyword tensors that the block of a layer needs more; lent: what `keep` has kept of the layers before."""
    kind = fnmodels.family_of(config).kinds(config)[index]
    more = {"valid": inputs["valid"]} if index in sparse_layers(config) else {}
    for name, value in layer_inputs_of(config, params, inputs).items():
        more |= {name: value} if name == "shared" else {"layer_input": value[:, :, index]}
    more |= {"kv": lent[lender]} if (lender := LayerKind.parse(kind).lender) else {}
    more |= {"choices": lent["chosen"]} if LayerKind.parse(kind).shares_choice and "chosen" in lent else {}
    return more | ({"left": lent["left"]} if LayerKind.parse(kind).joins else {})


def keep(lent: dict[str, Any], kind: str, aux: dict[str, Any]) -> None:
    """Moves from the aux of a layer to `lent` what it leaves for later ones."""
    lent["left"] = aux.pop("left", None)
    lent |= {name: aux.pop(name) for name in ("chosen",) if name in aux}
    lent |= {LayerKind.parse(kind).stem: aux.pop("kv")} if "kv" in aux else {}


def is_ordered(case: Case) -> bool:
    """Whether some of its layers read tokens in their order (recurrent, convolution)."""
    return bool(ordered_kinds(case.config))


def attending_layers(config: Any) -> list[int]:
    """The layers that have attention, some of which may have a recurrent mixer too."""
    family, none = fnmodels.family_of(config), torch.zeros(1, 0, dtype=torch.int64)
    masks, layers = family.attention_masks(config, none, none), layers_run(config, family.spec(config)["layers"])
    kinds = enumerate(family.kinds(config))
    return [i for i, kind in kinds if "attention" in layers[i] and not isinstance(masks[kind], Segments)]


def sublayers(config: Any) -> list[tuple[str, ...]]:
    """Per layer, which of the sublayers "mamba", "attention" (or what replaces it) and "mlp" its parameters are of.

    None of a shared block of Zamba 2 adds to the residual stream: they are one inside another, see `is_inner`.
    """
    layers = layers_run(config, fnmodels.family_of(config).spec(config)["layers"])
    return [() if is_inner(layer) else tuple(name for name in SUBLAYERS if name in layer) for layer in layers]


def is_inner(layer: Any) -> bool:
    """Whether a layer leaves its result for the next one alone: a shared block, with adapters for each use."""
    return "adapters" in layer


def layers_run(config: Any, layers: Sequence[Any]) -> list[Any]:
    """Those of `layers`, one of each stored layer, in the order in which they run, which may be several times."""
    return [layers[i] for i in stored_layers(config, fnmodels.family_of(config).kinds(config))]


def attending(group: tuple[Case, ...]) -> tuple[Case, ...]:
    """Those with a layer of attention."""
    return tuple(case for case in group if attending_layers(case.config))


@functools.cache
def structures() -> tuple[Case, ...]:
    """Few variants of each family, causal or not, with all its kinds of layers and names of parameters between them.

    Stored names count too. For tests of what all blocks, or all files, treat alike; what depends on the values of a
    config, such as a scaling of the rope, runs on `cases()`.
    """
    families: dict[Any, dict[Case, set[str]]] = {}
    for case in cases():
        _, kinds, names, _ = structure(case)
        stored = pairs_of(fnmodels.family_of(case.config).hf_names(case.config))
        families.setdefault((case.family, causal(case)), {})[case] = {*kinds, *names, *stored}
    found = {case for parts in families.values() for case in fewest(parts)}
    return tuple(case for case in cases() if case in found)


@functools.cache
def namings() -> tuple[Case, ...]:
    """Those of `structures` that have between them each pair of a path and its stored name, for tests of files."""
    return tuple(covering_names(structures(), lambda case: fnmodels.family_of(case.config).hf_names(case.config)))


def structure(case: Case) -> tuple[Any, ...]:
    """The key that cases of one structure share."""
    family = fnmodels.family_of(case.config)
    kinds = frozenset(family.kinds(case.config))
    names = frozenset(path.split(".", 2)[-1] for path in tree.flatten(family.spec(case.config)))
    return case.family, kinds, names, causal(case)


def short(case: Case) -> Case:
    """The case with the fewest layers that have all of its kinds."""
    return dataclasses.replace(case, config=shortest(case.config))


@functools.cache
def block_structures() -> tuple[Case, ...]:
    """Few variants of each block, causal or not, with all its kinds of layers between them, cut short.

    For tests of what a family's own block decides, such as the places of its taps. Biases, tied heads and rope
    scalings, by which variants differ otherwise, are operations on one token; layers meet in the residual stream alone,
    whatever kinds of them a model has beside each other.
    """
    blocks: dict[Any, dict[Case, frozenset[str]]] = {}
    for case in cases():
        blocks.setdefault((block_of(case), causal(case)), {})[case] = structure(case)[1]
    found = {case for kinds in blocks.values() for case in fewest(kinds)}
    return tuple(short(case) for case in cases() if case in found)


@functools.cache
def attention_of(case: Case) -> str:
    """What attention gets from the case's layers, a group for `richest`: rules, softcap, sinks, latent or lent keys."""
    family, none = fnmodels.family_of(case.config), torch.zeros(1, 0, dtype=torch.int64)
    kinds, masks = family.kinds(case.config), family.attention_masks(case.config, none, none)
    rules = {re.sub(r"\d", "", str(getattr(attention_part(mask), "rule", None))) for mask in masks.values()}
    together = any(isinstance(mask, dict) for mask in masks.values())  # with a recurrent mixer in one layer
    leaves = {path.rpartition(".")[2] for path in tree.flatten(family.spec(case.config))} & {"sinks", "kv_b_proj"}
    lent, softcap = any(kind.source for kind in parsed(kinds)), getattr(case.config, "attention_softcap", None)
    return str((sorted(rules), together, sorted(leaves), lent, softcap, bool(own_choices(kinds))))


@functools.cache
def tables_of(case: Case) -> str:
    """What makes the case's rotary tables, a group for `richest`: the function, its scalings and how they are given."""
    family: Any = fnmodels.family_of(case.config)
    kinds = sorted({f"{kind.slides} {kind.rotates}" for kind in parsed(family.kinds(case.config))})
    ropes = [getattr(case.config, name, None) for name in ("rope", "local_rope")]
    given = [[f.name for f in dataclasses.fields(rope) if getattr(rope, f.name) != f.default] for rope in ropes if rope]
    scalings = [getattr(rope, "kind", None) for rope in ropes]
    axes = [bool(field_of(case.config, name)) for name in ("mrope_section", "mrope_interleaved")]
    return str((family.freqs_cis.__module__, kinds, scalings, given, axes))


def kinds_of(case: Case) -> str:
    """The kinds of its layers, a group for `richest`: tests that take seconds run once per combination of kinds."""
    return str(sorted(set(fnmodels.family_of(case.config).kinds(case.config))))


def block_of(case: Case) -> str:
    """The module of the case's block, which families may share."""
    block: Any = fnmodels.family_of(case.config).block
    return str(block.__module__)


@functools.cache
def richest(group: Callable[[Case], str] = block_of) -> tuple[Case, ...]:
    """Per block, or group, the variant with the most kinds of layers and the fewest layers. For tests that compile."""

    def richness(case: Case) -> tuple[int, int]:
        kinds = fnmodels.family_of(case.config).kinds(case.config)
        return len(set(kinds)), -len(kinds)

    groups: dict[str, list[Case]] = {}
    for case in cases():
        groups.setdefault(group(case), []).append(case)
    return tuple(max(members, key=richness) for members in groups.values())


@functools.cache
def covering() -> tuple[Case, ...]:
    """A few of the richest variants that have all of their kinds of layers and names of parameters between them.

    For tests that take seconds: the code of a block follows from its kind and its parameters.
    """
    return tuple(fewest({c: {*map(_code_of, structure(c)[1])} | structure(c)[2] for c in richest()}))


@functools.cache
def representatives() -> tuple[Case, ...]:
    """`covering`, one variant of each `attention_of`, and the plain Llama, in which bugs are planted; cut short.

    For tests of a tenth of a second per variant that try what is common to all blocks; what a block does by itself is
    tried by tests of every family.
    """
    llama = next(case for case in cases() if case.name == "llama")
    return tuple(map(short, dict.fromkeys((llama, *covering(), *richest(attention_of)))))


@functools.cache
def parts_of(case: Case) -> set[str]:
    """The functions of ops, models and stack that its forward enters, and what they branch by.

    They branch by what the kinds of its layers say, the names of its parameters and its `attention_of`.
    """
    names = structure(case)[2]
    batch, params = batch_of(case.config, segments((4,))), generic_params(case.config)
    prepared = batch.prepared()
    run = functools.partial(forward, params, prepared, config=case.config, kernel="math")
    functions = entered(run, fnmodels, ("ops", "models", "stack"))
    return {*functions, *_flags_of(case), *names, attention_of(case)}


@functools.cache
def parts() -> tuple[Case, ...]:
    """Few variants, of any family, with the `parts_of` all variants between them, and the plain Llama; cut short.

    For tests of what wrappers, taps and transforms do to operations, whichever family has them. Their names are
    recorded, since to choose them takes the time of a forward pass per variant; `test_selection` compares.
    """
    named = {case.name: case for case in cases()}
    return tuple(short(named[name]) for name in PARTS.read_text().split())


def chosen_parts() -> tuple[str, ...]:
    """The names of the variants that `parts` records."""
    return _few(parts_of)


def operations_of(case: Case) -> set[str]:
    """`parts_of` without what each family has one of, and whether tokens see later ones.

    A family's own `block`, `embed` and `unembed` put operations together. Parity tries those of every variant, in
    packed and padded rows too.
    """
    return {part for part in parts_of(case) if not ALIKE.match(part)} | {f"causal {causal(case)}"}


@functools.cache
def layer_structures() -> tuple[Case, ...]:
    """Few variants, of any family, with the `operations_of` all variants between them, and the plain Llama; cut short.

    For tests of what operations do with tokens, masks, positions and states, whichever family calls them. Their names
    are recorded as those of `parts`.
    """
    named = {case.name: case for case in cases()}
    return tuple(short(named[name]) for name in OPERATIONS.read_text().split())


def chosen_operations() -> tuple[str, ...]:
    """The names of the variants that `layer_structures` records."""
    return _few(operations_of)


def _few(of: Callable[[Case], set[str]]) -> tuple[str, ...]:
    few = fewest({case: of(case) for case in cases()}, cost_of)
    return tuple(dict.fromkeys(("llama", *(case.name for case in few))))


@functools.cache
def covering_blocks() -> dict[Case, tuple[str, ...]]:
    """The kinds of layers in `covering` with a mixer, a mask or names of parameters that no kind before them has."""
    seen, found = set[str](), dict[Case, tuple[str, ...]]()
    for case in covering():
        family = fnmodels.family_of(case.config)
        kinds, flat = family.kinds(case.config), tree.flatten(family.spec(case.config))
        for kind in dict.fromkeys(kinds):
            layer = f"layers.{kinds.index(kind)}."
            parts = {path.removeprefix(layer) for path in flat if path.startswith(layer)}
            parts.add(_code_of(kind))
            if parts - seen:
                found[case] = (*found.get(case, ()), kind)
            seen |= parts
    return found


def _code_of(kind: str) -> str:
    """The kind without what is seen by a layer's parameters: experts, and that a first layer lacks a norm."""
    return re.sub(r"_moe$|_first$|\d", "", kind)


def _flags_of(case: Case) -> set[str]:
    """All that the kinds of its layers say, word by word: functions branch by a word, never by a whole kind."""
    return set[str]().union(*map(_words_of, structure(case)[1]))


def _words_of(kind: str) -> set[str]:
    """Those of the kind without what is seen by a layer's parameters: experts, and that a first layer lacks a norm."""
    return {re.sub(r"\d", "", word) for word in kind.split("_")} - {"", "moe", "first"}


@functools.cache
def cost_of(case: Any) -> float:
    """About what a test on anything with such a config takes, cut short: the layers that run, and the leaves."""
    family, config = fnmodels.family_of(case.config), shortest(case.config)
    return 2 + len(family.kinds(config)) + len(tree.flatten(family.spec(config))) / 8


def shortest(config: Any, times: int = 1) -> Any:
    """The model's first layers that have all of its kinds, `times` over: for tests that trace each layer."""
    if field_of(config, "passes"):
        return config  # whose number of layers follows from its loops
    kinds = fnmodels.family_of(config).kinds(config)
    few = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    if hasattr(config, "sublayers"):  # each layer has sizes of its own
        return dataclasses.replace(config, layers=config.layers[: config.sublayers[few - 1][0] + 1] * times)
    fields = {field.name for field in dataclasses.fields(config)}
    listed = {"layer_kinds": config.layer_kinds[:few] * times} if "layer_kinds" in fields else {}
    return dataclasses.replace(config, num_hidden_layers=few * times, **listed)


def generic(name: str, tensor: Tensor) -> Tensor:
    """Random values that expose errors: norms differ from 1, biases from 0. Seeded by name; fp32, shaped like `tensor`.

    Matrices have 1.3 / sqrt(fan_in); with the usual 0.02 attention is nearly uniform and tests are blind to it.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    # a bias of an expert's choice competes with scores between 0 and 1, and none should be out of reach
    if name.endswith(("selection_bias", "correction_bias", "expert_bias")):
        return 0.1 * noise
    if name.endswith("tid2eid"):  # numbers of experts, of which there are twice as many as a token has
        rows, chosen = tensor.shape
        return ((torch.arange(rows)[:, None] * 5 // 2 + torch.arange(chosen)) % (2 * chosen)).float()
    if name.endswith("token_map"):  # numbers of compressed ids, of which three tokens have one
        return (torch.arange(len(tensor))[:, None] // 3).float()
    if name.endswith(("ngrams.key_scale", "ngrams.query_scale")):
        return 1 + 0.3 * noise
    if name.endswith(("softmax_scaling.scale", "query_scale")):  # of the growth of scores with the position
        return 0.4 * noise
    if name.endswith(("softmax_scaling.bias", "query_shift")):
        return 1 + 0.3 * noise
    if name.endswith("A_log"):
        return 0.3 * noise - 1.5  # a decay over several tokens: one that is over at once would hide what it carries
    if tensor.ndim >= 2:
        return noise * (1.3 / math.sqrt(tensor.shape[-1]))
    if "norm" in name.lower() or ".ln_" in name or name.endswith(("scale", "scalar")):
        return 1 + 0.3 * noise
    return 0.3 * noise


@SharedTrees
def generic_params(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The parameter tree of `config` with generic values. Shared between tests, which fail if they write to it.

    As in a model of this dtype: a leaf with keep_dtype is in no narrower one than its own.
    """

    def value(path: str, leaf: P.Leaf) -> Tensor:
        kept = torch.promote_types(dtype, leaf.dtype) if leaf.keep_dtype else dtype
        return generic(path, torch.empty(leaf.shape, device="meta")).to(kept)

    spec = tree.flatten(fnmodels.family_of(config).spec(config))
    return tree.unflatten({path: value(path, leaf) for path, leaf in spec.items()})


@dataclass(frozen=True)
class Batch:
    """Tokens with everything that says how to read them, each [B, S]; and what `prepare` makes of it."""

    config: Any
    tokens: Tensor
    positions: Tensor
    segment_ids: Tensor
    length: int

    @property
    def valid(self) -> Tensor:
        return self.segment_ids > 0

    @property
    def labels(self) -> Tensor:
        """The next token of the same document, else -100."""
        labels = torch.full_like(self.tokens, -100)
        same = (self.segment_ids[:, 1:] == self.segment_ids[:, :-1]) & self.valid[:, 1:]
        labels[:, :-1] = torch.where(same, self.tokens[:, 1:], -100)
        return labels

    def batch(self) -> dict[str, Tensor]:
        """That of a loss, as `fnmodels.pack(...).batch()`."""
        names = ("tokens", "positions", "segment_ids", "labels")
        return {name: getattr(self, name) for name in names}

    def prepared(self) -> tuple[Any, Any, Any]:
        return fnmodels.prepare(
            self.config, self.tokens, positions=self.positions, segment_ids=self.segment_ids, length=self.length
        )

    def forward(self, params: Any, *, kernel: str = "math", **options: Any) -> Any:
        return forward(params, self.prepared(), config=self.config, kernel=kernel, **options)

    def take(self, rows: slice, columns: slice) -> "Batch":
        """A slice of the batch that keeps the positions, segments and length of the full one."""
        parts = (t[rows, columns] for t in (self.tokens, self.positions, self.segment_ids))
        return Batch(self.config, *parts, length=self.length)


def forward(params: Any, prepared: tuple[Any, Any, Any], *, config: Any, kernel: str, **options: Any) -> Any:
    """`fnmodels.forward`, where the kernel "auto" gets the batch's layout, as in a train step."""
    if kernel == "auto":
        options["layout"] = fnmodels.layout(prepared[1])
    return fnmodels.forward(params, *prepared, config=config, kernel=kernel, **options)


def check_shapes(config: Any) -> None:
    """A model of published size runs on the meta device, without memory for values.

    Layers of one kind and one shape are run once: a block gets nothing else of its layer, so the others do the same.
    """
    weights = P.abstract(config, dtype=torch.bfloat16)
    assert all(leaf.device.type == "meta" for leaf in tree.leaves(weights))
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    segment_ids = torch.ones_like(tokens)
    prepared = fnmodels.prepare(config, tokens, positions=segment_ids, segment_ids=segment_ids, length=16)
    logits = fnmodels.forward(weights, *prepared, config=config, layer_fn=_once_per_shape)
    assert logits.shape == (2, 16, config.vocab_size) and logits.dtype == logits_dtype(config, torch.bfloat16)


def logits_dtype(config: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the logits of a model with parameters of this one."""
    family = fnmodels.family_of(config).__name__.rpartition(".")[2]
    wide = config.model_type in getattr(variants_of(family), "WIDE_LOGITS", ())
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def _once_per_shape(block: Any) -> Any:
    """A block on the meta device, whose results are kept by the shapes and dtypes of its layer and its input."""
    found: dict[Any, Any] = {}

    def run(layer: Any, x: Tensor, *batch: Any, **more: Any) -> Any:
        leaves = (*tree.flatten(layer).items(), ("", x))
        key = tuple((path, leaf.shape, leaf.dtype) for path, leaf in leaves)
        if key not in found:
            found[key] = block(layer, x, *batch, **more)
        return found[key]

    return run


KERNELS = ("math", "sdpa", "auto")
SUBLAYERS = ("mamba", "attention", "mlp")


def supports(case: Case, kernel: str) -> bool:
    """Whether a kernel can express the model; if not, it must say so and name one that can. "math" and "auto" can.

    Tried once per `attention_of`: a kernel is given nothing else of a model.
    """
    if kernel in ("math", "auto"):
        return True
    if kernel == "blocks":  # a choice of keys is no rule; tests/contract/test_choices.py has what it says
        return not own_choices(fnmodels.family_of(case.config).kinds(case.config))
    key = attention_of(case), kernel
    if key not in _SUPPORTED:
        _SUPPORTED[key] = _is_expressed(case, kernel)
    return _SUPPORTED[key]


_SUPPORTED: dict[tuple[str, str], bool] = {}


def _is_expressed(case: Case, kernel: str) -> bool:
    try:
        batch_of(case.config, segments((2, 1))).forward(generic_params(case.config), kernel=kernel)
    except ValueError as error:
        if 'kernel="math"' not in str(error):
            raise
        return False
    return True


def with_kernels(cases: tuple[Case, ...], kernels: tuple[str, ...] = KERNELS, *, in_turn: bool = False) -> Any:
    """The mark which runs a test with all kernels on the first case of each `attention_of`, with one in turn on others.

    A kernel is given nothing else of a model. in_turn: one on the first cases too, where each kernel meets each form of
    attention in another test.
    """
    pairs, seen = [], set(map(attention_of, cases)) if in_turn else set()
    for index, case in enumerate(cases):
        able = [kernel for kernel in kernels if supports(case, kernel)]
        pairs += [(case, kernel) for kernel in (able[index % len(able) :][:1] if attention_of(case) in seen else able)]
        seen.add(attention_of(case))
    return pytest.mark.parametrize(("case", "kernel"), pairs, ids=[f"{case}-{kernel}" for case, kernel in pairs])


def batch_of(config: Any, segment_ids: Tensor, *, seed: int = 0) -> Batch:
    """Random tokens under given segments. The length that some rope scalings need is 24, beyond the original 16."""
    tokens = tokens_of(config, *segment_ids.shape, seed=seed)
    return Batch(config, tokens, positions_of(segment_ids), segment_ids, length=24)


@functools.cache
def _reach_of_ten(config: Any) -> Tensor:
    """`reach_of` a document of ten tokens."""
    return reach_of(batch_of(config, segments((10,))))


def reach_of(batch: Batch) -> Tensor:
    """bool [S, S] of a batch of one row: whether the logits at t depend on u over all layers, by the masks alone."""
    masks = batch.prepared()[1]
    own = torch.eye(batch.tokens.shape[1], dtype=torch.bool)
    reach = own
    for kind in fnmodels.family_of(batch.config).kinds(batch.config):
        reach = ((_read_by(masks[kind]) | own).float() @ reach.float()) > 0
    return reach


def _read_by(mask: Any) -> Tensor:
    """bool [S, S]: which tokens each one reads in a layer with this mask."""
    if isinstance(mask, dict):
        return torch.stack([_read_by(part) for part in mask.values()]).any(0)
    if isinstance(mask, Windows):  # tokens of windows of the document that have ended
        ids, ends = mask.segments[0], (mask.positions[0] // mask.ratio + 1) * mask.ratio - 1
        return (ids[:, None] == ids) & (mask.slots[0] >= 0) & (ends <= mask.positions[0][:, None])
    if not isinstance(mask, Segments):
        dense: Tensor = mask.dense()[0, 0]
        return dense
    ids = mask.segment_ids[0]
    return ((ids[:, None] == ids) & (ids > 0)).tril()


def subject_of(
    case: Case,
    kernel: str = "math",
    *,
    dtype: torch.dtype = torch.float32,
    length: int | None = 32,
    tolerance: float = 1e-5,
) -> testing.Subject:
    """A case as a `testing.Subject`. length: for rope scalings that need one; None leaves it to each call."""
    config = case.config

    def prepare(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> Any:
        return fnmodels.prepare(config, tokens, positions=positions, segment_ids=segment_ids, length=length)

    def rotary(batch: Any) -> list[tuple[Tensor, Tensor]]:
        entries = {
            (kind, path): leaf for kind, e in batch[2].items() for path, leaf in named_leaves(e) if leaf.ndim == 4
        }
        # "start" is of other positions
        tables = {kind: leaf for (kind, path), leaf in entries.items() if leaf.ndim == 4 and path != "start"}
        return [(t, _frequencies(config, kind, t.shape[2], length)) for kind, t in tables.items() if t.numel()]

    def run(params: Any, batch: Any) -> Tensor:
        inputs, masks, freqs_cis = {**batch[0]}, *batch[1:]
        low = next(iter(tree.leaves(params))).dtype == torch.bfloat16
        if low:  # bf16 makes other choices where they are close: take those of fp32
            inputs |= decisions_of(tree.map(Tensor.float, params), batch, config, kernel=kernel)
        return forward(params, (inputs, masks, freqs_cis), config=config, kernel=kernel)

    reach = _reach_of_ten(config)
    return testing.Subject(
        generic_params(config, dtype),
        prepare,
        run,
        vocab_size=config.vocab_size,
        sees=lambda t, u: bool(reach[t, u]) and (u <= t or not causal(case)),
        rotary=rotary,
        tolerance=tolerance,
        exact=kernel == "math" or not is_routed(config),
    )


def named_leaves(entry: Any) -> list[tuple[str, Tensor]]:
    """(path, tensor) of a table, or of a dict of tables."""
    return [("", entry)] if isinstance(entry, Tensor) else list(tree.flatten(entry).items())


def _frequencies(config: Any, kind: str, pairs: int, length: int | None) -> Tensor:
    rope = getattr(config, "local_rope", config.rope) if LayerKind.parse(kind).slides else config.rope
    return frequencies(rope, 2 * pairs, None if length is None else torch.tensor(length))


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over the labelled tokens; exactly 0 without one."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def gradients(loss: Tensor, params: Any) -> Any:
    """The tree of gradients by the leaves of `params`; zeros where the loss has no path to a leaf."""
    flat = tree.flatten(params)
    found = torch.autograd.grad(loss, list(flat.values()), allow_unused=True, materialize_grads=True)
    return tree.unflatten(dict(zip(flat, found, strict=True)))


def trainable(params: Any) -> Any:
    """The same values as autograd leaves that require gradients."""
    return tree.map(lambda p: p.detach().clone().requires_grad_(), params)


def off(a: Any, b: Any) -> float:
    """The largest difference of two trees relative to the larger of 1 and the size of their values, leaf by leaf."""
    left, right = tree.flatten(a), tree.flatten(b)
    assert left.keys() == right.keys()
    worst = 0.0
    for path, x in left.items():
        y = right[path]
        assert x.shape == y.shape, path
        assert x.dtype == y.dtype, path
        if x.numel():
            x, y = ((t.int() if t.dtype == torch.bool else t).detach() for t in (x, y))
            difference = float((x - y).abs().max()) / max(1.0, float(y.abs().max()))
            worst = max(worst, difference if difference == difference else math.inf)
    return worst


def is_routed(config: Any) -> bool:
    """Whether some of its layers have experts."""
    return bool(sparse_layers(config))


def sparse_layers(config: Any) -> list[int]:
    """The layers that have experts."""
    family = fnmodels.family_of(config)
    routed = traits_of(family).routed
    return [i for i, kind in enumerate(family.kinds(config)) if routed and LayerKind.parse(kind).routed]


def stored_sparse_layers(config: Any) -> list[int]:
    """The index in params["layers"] of each layer that has experts, once for all of its passes."""
    stored = stored_layers(config, fnmodels.family_of(config).kinds(config))
    return list(dict.fromkeys(stored[i] for i in sparse_layers(config)))


def routing_of(case_params: Any, prepared: Any, config: Any, **options: Any) -> Tensor:
    """The experts that a forward chooses, as its `inputs["routing"]` takes them: [B, S, sparse layers, k]."""
    taps = ("layers.*.expert_indices",)
    _, tapped = fnmodels.forward(case_params, *prepared, config=config, taps=taps, **options)
    return torch.stack([tapped[f"layers.{i}.expert_indices"] for i in sparse_layers(config)], dim=2)


def choices_of(case_params: Any, prepared: Any, config: Any, **options: Any) -> Tensor:
    """The keys that a forward chooses, as its `inputs["choices"]` takes them: [B, S, layers with an indexer, k]."""
    taps = ("layers.*.choices",)
    _, tapped = fnmodels.forward(case_params, *prepared, config=config, taps=taps, **options)
    return torch.stack(list(tapped.values()), dim=2)


def decisions_of(case_params: Any, prepared: Any, config: Any, **options: Any) -> dict[str, Tensor]:
    """What a forward decides by comparison, as its inputs take it: of experts and of keys, where the model has them."""
    kinds = fnmodels.family_of(config).kinds(config)
    found = {"routing": routing_of} if is_routed(config) else {}
    found |= {"choices": choices_of} if own_choices(kinds) else {}
    return {name: of(case_params, prepared, config, **options) for name, of in found.items()}


def seed_of(case: Case) -> int:
    """The seed of the tokens on which a variant is compared with transformers."""
    seeds: dict[str, int] = getattr(variants_of(case.family), "SEEDS", {})
    return seeds.get(case.name, 0)


def assert_routed(case: Case, params: Any, prepared: Any, margin: float) -> Tensor:
    """Every expert has tokens in every layer, and no choice changes where router logits move by up to `margin`.

    Returns the logits of the batch.
    """
    moe, seen = context.moe, []

    def watched(layer: Any, x: Tensor, route: Any, **options: Any) -> Any:
        y, aux = moe(layer, x, route, **options)
        seen.append((route, aux, options["valid"]))
        return y, aux

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "moe", watched)
        logits_of_batch: Tensor = fnmodels.forward(params, *prepared, config=case.config, kernel="math")
    assert len(seen) == len(sparse_layers(case.config))
    generator = torch.Generator().manual_seed(0)
    for route, aux, valid in seen:
        how = f"python -m tests.support.find_seeds {case.config.model_type} finds one"
        seeds = f"SEEDS in tests/variants/{case.family}.py, {{{case.name!r}: seed}}, chooses other tokens; {how}"
        assert aux["counts"].min() > 0, f"an expert without a token: {aux['counts'].tolist()}; {seeds}"
        if route.keywords.get("hashed") is not None:
            continue  # by ids
        logits, chosen = aux["router_logits"][valid], aux["expert_indices"][valid].sort(-1).values
        for _ in range(16):
            signs = 2.0 * torch.randint(2, logits.shape, generator=generator) - 1
            moved = route(logits + margin * signs)[1].sort(-1).values
            assert torch.equal(moved, chosen), f"a choice is closer than {margin}; {seeds}"
    return logits_of_batch


def tokens_of(config: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, length), generator=generator)
    # transformers' RoBERTa does not count the padding token, whose id is before that position, wherever it stands
    first = field_of(config, "first_position")
    return torch.where(tokens == first - 1, first, tokens) if first else tokens


def segments(*rows: tuple[int, ...]) -> Tensor:
    """segment_ids from per-row lengths; a negative length is that many pads. `segments((-2, 3, 1))` is 0 0 1 1 1 2."""

    def row(lengths: tuple[int, ...]) -> list[int]:
        ids, document = [], 0
        for length in lengths:
            document += length > 0
            ids += [document if length > 0 else 0] * abs(length)
        return ids

    return torch.tensor([row(lengths) for lengths in rows])


def positions_of(segment_ids: Tensor) -> Tensor:
    """Each document from 0, padding 0. A loop, independent of the library's converters."""
    rows = []
    for ids in segment_ids.tolist():
        row = [0] * len(ids)
        for t in range(1, len(ids)):
            row[t] = row[t - 1] + 1 if ids[t] == ids[t - 1] and ids[t] else 0
        rows.append(row)
    return torch.tensor(rows, dtype=segment_ids.dtype).view(segment_ids.shape)
