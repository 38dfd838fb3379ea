"""Docstrings of the reference have sections that the site shows as tables: a row for each argument, results, errors."""

import ast
import inspect
import re
import textwrap
from typing import Any

import pytest

from tests.support.docstrings import Docstring, arguments, documented, is_protocol, parsed, returns

DOCUMENTED = documented()
DONE = ("fnmodels", "params", "train")
NOT_CALLED = {"train.Batch"}  # a dict, whose keys have comments


def names(package: str) -> dict[str, Any]:
    return {name: value for name, value in DOCUMENTED.items() if name.split(".")[0] == package}


def faults(name: str, value: Any) -> list[str]:
    """What the docstring lacks, as sentences."""
    try:
        docstring = parsed(value)
    except AssertionError as error:
        return [f"{name}: {error}"]
    is_class = inspect.isclass(value)
    is_made = not is_class or not (name in NOT_CALLED or issubclass(value, Exception) or is_protocol(value))
    wanted = arguments(value) if is_made else []
    rows = docstring.rows.get("Args", {})
    found = [f"{name}: no row for {argument}" for argument in wanted if argument not in rows]
    found += [f"{name}: a row for {row}, which is no argument" for row in rows if row not in wanted]
    if re.fullmatch(r"(See )?`[\w.]+`\.?|", docstring.text):
        found.append(f"{name}: the text is {docstring.text!r}, which says nothing")
    return found if is_class else found + faults_of_results(name, value, docstring)


def faults_of_results(name: str, function: Any, docstring: Docstring) -> list[str]:
    has = {"Returns", "Yields"} & set(docstring.rows)
    found = [f"{name}: an empty section" for rows in docstring.rows.values() if not rows]
    if returns(function) != bool(has):
        found.append(f"{name}: {'no' if returns(function) else 'a'} section Returns or Yields")
    unnamed = raised(function) - set(docstring.rows.get("Raises", {}))
    return found + [f"{name}: {error} is raised, and not in Raises" for error in sorted(unnamed)]


def raised(function: Any) -> set[str]:
    """The names of the exceptions that the body raises itself, outside of the functions in it."""

    def of(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            return {node.exc.func.id}
        inner = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef | ast.Lambda))
        return set().union(*map(of, inner))

    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return of(tree)


@pytest.mark.parametrize("package", DONE)
def test_docstrings_of_the_reference_have_a_row_for_every_argument(package: str) -> None:
    values = names(package)
    assert len(values) > 40
    assert [fault for name, value in values.items() for fault in faults(name, value)] == []


def test_sentences_of_docstrings_are_short() -> None:
    long = []
    for name, value in DOCUMENTED.items():
        docstring = parsed(value)
        texts = [docstring.text, *(text for rows in docstring.rows.values() for text in rows.values())]
        sentences = [part for text in texts for part in re.split(r'(?<=[.:;])\s+(?=[A-Z"{\[])|\n\n', text)]
        long += [f"{name}: {sentence}" for sentence in sentences if len(sentence.split()) > 45]
    assert long == []


def test_griffe_reads_the_same_rows_as_the_site_does() -> None:
    griffe = pytest.importorskip("griffe")
    options = {"returns_multiple_items": False, "returns_named_value": True, "warnings": False}
    for name, value in DOCUMENTED.items():
        sections = griffe.Docstring(inspect.getdoc(value) or "").parse("google", **options)
        rows = {section.kind.value: section.value for section in sections if section.kind.value != "text"}
        own = parsed(value).rows
        assert [row.name for row in rows.get("parameters", ())] == list(own.get("Args", {})), name
        assert [str(row.annotation) for row in rows.get("raises", ())] == list(own.get("Raises", {})), name
        results = [row for kind in ("returns", "yields") for row in rows.get(kind, ())]
        assert [(row.name, row.annotation) for row in results if row.name or row.annotation] == [], name
        assert len(results) == len({"Returns", "Yields"} & set(own)), name


def test_faults_of_a_docstring_are_found() -> None:
    def bare(x: int) -> int:
        """`parsed`."""
        if x < 0:
            raise ValueError("x")
        return x

    def ragged(x: int, *rest: int) -> None:
        """Prints.

        Args:
            x: An element.
            y: Another.
        Rest: none.
        """

    assert len(faults("bare", bare)) == 4
    assert faults("ragged", ragged) == ["ragged: 'Rest: none.' ends a section: the site would show it as text"]
