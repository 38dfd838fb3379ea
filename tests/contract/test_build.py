"""Building every family: variants, spec and initialization; and no state outside of the parameters."""

import ast
import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common.spec import InTurn, Parts
from params.initialize import draw
from tests.support.cases import (
    KERNELS,
    Case,
    batch_of,
    cases,
    check_shapes,
    family_modules,
    generic_params,
    gradients,
    published_of,
    representatives,
    richest,
    segments,
    short,
    structures,
    supports,
    trainable,
    variants_of,
    with_kernels,
)
from tests.support.status import CHECKED, DIALECTS

every_structure = pytest.mark.parametrize("case", structures(), ids=str)
every_short_structure = pytest.mark.parametrize("case", [short(case) for case in structures()], ids=str)
every_family = pytest.mark.parametrize("family", family_modules())
MIXED = segments((-3, 5, 4), (12,), (7, 1, -4), (1, 10, -1))
# fnmodels.as_module is the one adapter: for libraries that take modules, and no model is written with it.
FILES = [path for path in sorted(Path(fnmodels.__file__).parent.rglob("*.py")) if path.name != "module.py"]


def test_families_are_found() -> None:
    assert "llama" in family_modules()


def test_every_model_type_has_a_variant() -> None:
    assert {case.config.model_type for case in cases()} == fnmodels.families().keys() - DIALECTS.keys()


def test_a_family_without_variants_fails() -> None:
    with pytest.raises(FileNotFoundError, match="write tests/variants/unheard_of"):
        variants_of("unheard_of")


@every_family
def test_a_family_names_its_largest_published_members(family: str) -> None:
    assert variants_of(family).published().keys() == variants_of(family).sizes().keys() != set()


PUBLISHED = [(family, name) for family in family_modules() for name in variants_of(family).published()]


@pytest.mark.parametrize(("family", "name"), PUBLISHED)
def test_published_sizes_on_meta(family: str, name: str, record_property: Callable[[str, object], None]) -> None:
    """A published model runs on meta tensors: spec, masks, tables, every layer, the head."""
    config = published_of(family)[name]
    count = P.count(config)
    assert count == variants_of(family).sizes()[name]
    check_shapes(config)
    record_property(CHECKED, (config.model_type, count))


@with_kernels(representatives())
def test_forward_reads_no_values(case: Case, kernel: str) -> None:
    """On meta tensors `.item()`, boolean indexing and data-dependent shapes would raise; each family above."""
    mixed = batch_of(case.config, MIXED)
    weights, *prepared = tree.map(lambda t: t.to("meta"), (generic_params(case.config), *mixed.prepared()))
    logits = fnmodels.forward(weights, *prepared, config=case.config, kernel=kernel)
    assert logits.shape == (*MIXED.shape, case.config.vocab_size)


@every_structure
def test_spec_is_the_tree(case: Case) -> None:
    family = fnmodels.family_of(case.config)
    spec = tree.flatten(family.spec(case.config))
    weights, shapes = tree.flatten(P.init(case.config, 0)), tree.flatten(P.abstract(case.config))
    assert list(spec) == list(weights) == list(shapes)
    for path, leaf in spec.items():
        assert leaf.shape == weights[path].shape == shapes[path].shape, path
        assert leaf.dtype == weights[path].dtype == shapes[path].dtype, path
    assert P.count(case.config) == sum(w.numel() for w in weights.values())
    kinds = set(family.kinds(case.config))
    mixed = batch_of(case.config, MIXED)
    _, masks, freqs_cis = mixed.prepared()
    assert masks.keys() == freqs_cis.keys() == kinds
    assert hash(case.config) == hash(type(case.config).from_hf(case.config.to_hf()))


@every_short_structure
def test_init_is_a_function_of_seed_and_path(case: Case) -> None:
    """D2: independent of earlier draws and of their order."""
    before = torch.get_rng_state()
    first = tree.flatten(P.init(case.config, 3))
    torch.manual_seed(17)
    second = tree.flatten(P.init(case.config, 3))
    third = tree.flatten(P.init(case.config, 4))
    torch.set_rng_state(before)
    spec = tree.flatten(fnmodels.family_of(case.config).spec(case.config))
    alone = {path: draw(leaf, 3, path) for path, leaf in reversed(spec.items())}
    for path, tensor in first.items():
        assert torch.equal(tensor, second[path]) and torch.equal(tensor, alone[path]), path
        constant = bool((tensor == tensor.flatten()[0]).all()) or isinstance(spec[path].init, InTurn | Parts)
        assert torch.equal(tensor, third[path]) == constant, path
    fixed = {path for path, leaf in spec.items() if isinstance(leaf.init, InTurn | Parts)}
    drawn = [t.flatten()[:16] for path, t in first.items() if t.std() > 0 and path not in fixed]
    assert len({tuple(t.tolist()) for t in drawn}) == len(drawn), "two leaves begin alike"
    half = tree.flatten(P.init(case.config, 3, dtype=torch.bfloat16))
    assert all(torch.equal(first[path].to(tensor.dtype), tensor) for path, tensor in half.items())


@every_short_structure
def test_params_are_the_whole_state(case: Case) -> None:
    """B1: an abstract model filled with NaN and then loaded gives the same bits; every leaf affects the logits."""
    mixed, weights = batch_of(case.config, MIXED), generic_params(case.config)
    poisoned = tree.map(lambda t: torch.full(t.shape, torch.nan, dtype=t.dtype), P.abstract(case.config))
    wanted = mixed.forward(weights)
    for target, source in zip(tree.leaves(poisoned), tree.leaves(weights), strict=True):
        target.copy_(source)
    assert torch.isfinite(wanted[mixed.valid]).all()
    leaves = trainable(poisoned)
    got = mixed.forward(leaves)
    assert torch.equal(got, wanted)
    moved = tree.flatten(gradients(got[mixed.valid].sin().sum(), leaves))
    flat = tree.flatten(weights)
    for path, tensor in flat.items():
        of_blocks = any(hasattr(case.config, name) for name in ("indexed_ratio", "indexer_budget"))
        if moved[path].any() or (".indexer." in path and of_blocks):
            continue  # rows of more windows or blocks than are chosen: tests/parity/test_mutations.py
        if ".exit_gate." in path:
            continue  # read where `exit` asks for it: tests/fnmodels/models/test_ouro.py
        if ".attention.global." in path:
            continue  # read for the head "classification": tests/fnmodels/models/test_longformer.py
        got = mixed.forward(tree.unflatten(flat | {path: torch.full_like(tensor, torch.nan)}))
        # selection biases and indexers enter no sum: they only decide which experts and keys are chosen
        chooses = path.endswith(("selection_bias", "tid2eid", "token_map")) or ".indexer." in path
        assert got.isnan().any() or (chooses and not torch.equal(got, wanted)), path


@every_short_structure
def test_building_changes_no_global_state(case: Case) -> None:
    """R6: generators, defaults, modes, environment, process groups."""

    def state() -> tuple[Any, ...]:
        return (
            *(torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads()),
            *(torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), dict(os.environ)),
            *(torch.get_float32_matmul_precision(), torch.distributed.is_initialized()),
        )

    before = state()
    batch_of(case.config, MIXED).forward(P.init(case.config, 0))
    assert state() == before


def _modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages(fnmodels.__path__, "fnmodels."):
        importlib.import_module(info.name)
    yield from (module for name, module in sys.modules.items() if name.partition(".")[0] == "fnmodels")


def held_tensors() -> list[str]:
    """Names of tensors that are reachable from the library's modules, through containers, functions and classes."""

    def reach(value: Any, name: str, depth: int) -> Iterator[str]:
        if isinstance(value, torch.Tensor):
            yield name
        elif depth and isinstance(value, (dict, list, tuple, set, frozenset)):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in inner:
                yield from reach(item, f"{name}[{key!r}]", depth - 1)
        elif depth and str(getattr(value, "__module__", "")).partition(".")[0] == "fnmodels":
            for key, item in list(getattr(value, "__dict__", {}).items()):
                yield from reach(item, f"{name}.{key}", depth - 1)
            for cell in getattr(value, "__closure__", None) or ():
                yield from reach(cell.cell_contents, f"{name}'s closure", depth - 1)
            yield from reach(getattr(value, "__defaults__", None), f"{name}'s defaults", depth - 1)

    named = [(f"{module.__name__}.{key}", value) for module in list(_modules()) for key, value in vars(module).items()]
    return [found for name, value in named for found in reach(value, name, 4)]


def test_no_tensor_is_kept() -> None:
    check_no_tensor_is_kept(*map(short, richest()))


def check_no_tensor_is_kept(*models: Case) -> None:
    """No module holds a tensor, before or after the forward passes of the models: each kernel's, and one in turn."""
    assert held_tensors() == []

    def alive() -> list[Any]:
        gc.collect()
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    runs = [
        (batch_of(case.config, MIXED), generic_params(case.config), kernel)
        for index, case in enumerate(models)
        for number, kernel in enumerate(KERNELS)
        if supports(case, kernel) and (index < 9 or index % len(KERNELS) == number)
    ]
    before = alive()
    for mixed, weights, kernel in runs:
        mixed.forward(weights, kernel=kernel)
    known = set(map(id, before))  # earlier tests' tensors, which this list keeps alive
    assert [tensor.shape for tensor in alive() if id(tensor) not in known] == []
    assert held_tensors() == []


def test_the_source_is_pure() -> None:
    """No modules with state, no buffers, no `global`, no caches; imports of torch, einops and the standard library.

    A cached function without arguments is a lazy constant (a compiled kernel) and is allowed, and so are the plans of
    stacks, which hold no tensor and are keyed by all that they depend on.
    """
    for file in FILES:
        try:
            check_source(file)
        except AssertionError as error:
            raise AssertionError(f"{file}: {error}") from error


def check_source(file: Path) -> None:
    text = ast.parse(file.read_text())
    constants = [node for node in ast.walk(text) if isinstance(node, ast.FunctionDef) and not ast.unparse(node.args)]
    late = {id(part) for node in constants for decorator in node.decorator_list for part in ast.walk(decorator)}
    for node in ast.walk(text):
        if id(node) in late:
            continue
        if isinstance(node, ast.ClassDef):
            assert not any("Module" in ast.unparse(base) for base in node.bases), node.name
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = ast.unparse(node)
            assert name.rpartition(".")[2] not in {"register_buffer", "register_parameter"}
            if name != "functools.lru_cache" or file.parent.name != "stack":
                assert name not in {"functools.cache", "functools.lru_cache", "functools.cached_property"}
        assert not isinstance(node, (ast.Global, ast.Nonlocal)), ast.unparse(node)
        if isinstance(node, ast.Import):
            roots = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots = {str(node.module).partition(".")[0]}
            assert roots != {"functools"}, "the checks above read functools.NAME"
        else:
            continue
        assert roots <= {"torch", "einops", "fnmodels"} | sys.stdlib_module_names, roots


def test_matrices_decay_and_norms_biases_and_embeddings_do_not() -> None:
    for case in cases():
        for path, leaf in tree.flatten(fnmodels.family_of(case.config).spec(case.config)).items():
            name = path.rpartition(".")[2]
            if name.endswith(("_proj", "lm_head")):
                assert leaf.decay, path
            if len(leaf.shape) == 1 or name.endswith(("norm", "bias")) or name.startswith("embed_"):
                assert not leaf.decay, path
