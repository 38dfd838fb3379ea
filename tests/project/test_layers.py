"""What the contracts in pyproject.toml (`make lint` runs lint-imports) leave open about where modules live."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

from tests.project.test_readme import ROOT

PACKAGES = ("fnmodels", "params", "train")
MOST = 20  # Python files of one folder, besides __init__.py
ARGUMENTS = 8  # of a function, besides self; more only in these public ones, whose arguments are keywords with defaults
LONGER = {
    "fnmodels.apply.run_layers",
    "fnmodels.cache.prepare.prepare_step",
    "fnmodels.mtp.hidden",
    "fnmodels.models.common.context.attend",
    "fnmodels.models.common.context.context",  # a family's block, as `with_context` makes it
    "fnmodels.ops.attention.math.math_attention",
    "fnmodels.ops.attention.select.attention",
    "fnmodels.ops.moe.layer.moe",
    "fnmodels.ops.recurrent.conv.short_conv",
    "fnmodels.ops.recurrent.delta_rule.delta_rule",
    "fnmodels.ops.recurrent.selective_scan.selective_scan",
    "fnmodels.ops.recurrent.ssd.ssd",
    "fnmodels.ops.recurrent.two_keys.two_key_rule",
    "fnmodels.pairs.prepare_pair",  # the rows of two stacks
    "fnmodels.preparation.prepare",
    "fnmodels.research.patching.patch_grid",
    "params.checkpoint.load.load_pretrained",
    "train.engine.__init__",
    "train.generation.beam.beam_search",
    "train.generation.loops.generate",
    "train.generation.loops.serve",
    "train.generation.loops.stream",
    "train.generation.serve.admit",
    "train.generation.speculative.speculate",
    "train.generation.transcribe.transcribe",
    "train.losses.distillation.distill",
    "train.losses.indexers.loss.indexer_loss",
    "train.losses.masked_tokens.mask_tokens",
    "train.losses.multi_token.mtp_loss",
    "train.losses.next_token.next_token_loss",
    "train.losses.policy.policy_loss",
    "train.step.make.make_step",
    "train.update.update",
}
FAMILIES = {ROOT / "fnmodels" / "models" / folder for folder in ("decoder", "encoder", "vision", "vision_language")}
EVERY = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_too_full(package: str) -> None:
    folders = {path.parent for path in EVERY if path.is_relative_to(ROOT / package)} - FAMILIES
    sizes = {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert folders
    assert not {str(folder): size for folder, size in sizes.items() if size > MOST}


def test_no_module_imports_itself_by_a_detour() -> None:
    """Packages' own __init__ and imports inside of functions included."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
    assert not [module for module, others in imported.items() if any(graph.chain_exists(x, module) for x in others)]


def test_nothing_of_ours_is_imported_for_types_alone() -> None:
    """An import under TYPE_CHECKING would be a cycle that nothing shows."""
    found = [f"{path}: {module}" for path in EVERY for module in _for_types(path) if module.split(".")[0] in PACKAGES]
    assert not found


def test_internal_functions_have_few_arguments() -> None:
    found = set()
    for path in EVERY:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and _arguments(node) > ARGUMENTS:
                found.add(f"{module}.{getattr(node, 'name', 'lambda')}")
    assert found == LONGER


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in given)


def _for_types(path: Path) -> list[str]:
    """Modules that are imported under `if TYPE_CHECKING:`; relative ones by the name of the package."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    found += [alias.name for alias in inner.names]
                elif isinstance(inner, ast.ImportFrom):
                    found.append(inner.module if inner.module and not inner.level else PACKAGES[0])
    return found


def test_each_path_for_cpus_names_the_row_that_it_earns() -> None:
    rows = (ROOT / "benchmarks" / "dev" / "results" / "ops_cpu.md").read_text()
    files = [path for path in EVERY if path.is_relative_to(ROOT / "fnmodels" / "ops" / "cpu")]
    paths = [path for path in files if path.name != "__init__.py"]
    assert len(paths) > 10
    for path in paths:
        named = (ast.get_docstring(ast.parse(path.read_text())) or "").rpartition("\n\nRow: ")[2].removesuffix(".")
        assert f"| {named} |" in rows, f"{path} names {named!r}"
