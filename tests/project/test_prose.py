"""The guides read as prose: short sentences, no names of machines, no history, and the field's terms.

A planted sentence for each rule shows that it finds what it is for.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prose import blocks, sentences, without_code

ROOT = Path(__file__).parents[2]
GUIDES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
]
LONGEST = 40  # words of a sentence

# A kernel's requirement is the name of an instruction set or a compute capability, and no machine's.
MACHINE = (
    r"\b(?:Xeon|EPYC|Ryzen|Threadripper|Graviton|AMD|Intel|NVIDIA|GeForce|RTX|Zen ?\d|(?:Sapphire|Granite) Rapids|"
    r"Apple M\d|[ABHV][12378]00|L40S?|T4|MI\d{3}X?)\b"
)
HISTORY = (
    r"\b(?:[Ss]ince then|no longer|formerly|previously|nowadays|than before|used to (?:be|have|take|do)|took|"
    r"(?:earlier|older|former|previous) (?:versions?|releases?|measurements?|tables?|figures?)|"
    r"(?:was|were|been) (?:measured|timed|tried)|not (?:yet )?(?:measured|timed|tried)|has not run|"
    r"\d(?:\.\d+|x| ?(?:s|ms|GB|MiB)) before|from \d[\d.]* to \d[\d.]* (?:s|ms|GB|MiB))\b"
)
REPLACED = {
    r"\bslopes?\b": "gradient",
    r"\b(?:leaf|leaves) that (?:do not |does not )?trains?\b": "trainable parameters",
    r"\b(?:fp32|bf16|S x S|random|million) numbers\b|\bnumbers per (?:token|row)\b": "elements",
    r"\b(?:told|tells|asks|asked|(?:is|are|was|were) said)\b": "the flag or the argument",
    r"\b(?:somebody|someone|anybody|nobody|whoever)\b": "the caller",
    r"\bwhole (?:batch|leaf|leaves|matrix|model|parameters?|rows?|stack|tensors?|tree|vectors?)\b": "full or global",
    r"\b(?:each|its|this|your) parts? of (?:a|each|the) (?:batch|leaf|parameter|plan|tensor)s?\b": "shard or local",
}
PLANTED = {
    "a Xeon takes 2 s": MACHINE,
    "33 ms on an H100": MACHINE,
    "2 cores of an AMD machine": MACHINE,
    "An earlier version had 0.97x": HISTORY,
    "a norm takes 2.0 ms (2.5 before)": HISTORY,
    "the loop took 30.2 s": HISTORY,
    "it was not timed yet": HISTORY,
    "the slope of the loss": "gradient",
    "No leaf that trains": "trainable parameters",
    "memory for S x S numbers": "elements",
    "as the flag is told": "the flag or the argument",
    "somebody passes None": "the caller",
    "the counts of the whole batch": "full or global",
    "a rank holds its part of a tensor": "shard or local",
}


def words_that_house_replaces(text: str) -> Iterator[str]:
    for pattern, better in REPLACED.items():
        for match in re.finditer(pattern, text):
            yield f"{match[0]!r}: {better}"


def faults(markdown: str) -> list[str]:
    """Each as `line: what is wrong`. Code blocks are left out, and inline code where words are judged."""
    found = [f"{s.line}: {s.words} words: {s.text}" for s in sentences(markdown) if s.words > LONGEST]
    for block in blocks(markdown):
        text = without_code(block.text)
        found += [f"{block.line}: {match[0]!r} names a machine" for match in re.finditer(MACHINE, text)]
        found += [f"{block.line}: {match[0]!r} is history" for match in re.finditer(HISTORY, text)]
        found += [f"{block.line}: {words}" for words in words_that_house_replaces(text)]
    return found


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_guide_has_short_sentences_without_machines_history_and_house_words(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_guide_that_names_the_invariant_kernel_calls_it_batch_invariant(page: Path) -> None:
    text = page.read_text()
    assert 'kernel="invariant"' not in text or "atch-invariant" in text


@pytest.mark.parametrize("planted", PLANTED)
def test_each_rule_finds_what_it_is_for(planted: str) -> None:
    assert len(faults(f"Before.\n\n- {planted}.\n")) == 1
    assert faults(f"Before.\n\n```text\n{planted}\n```\n\n    {planted}\n\nAfter `{planted}`.\n") == []


@pytest.mark.parametrize(
    "form", ["{}.", "- {}.", "1. {}.", "> {}.", "Short. {}.", "{}: more.", "[{}](a.md).", "**Bold.** {} `code word`."]
)
def test_a_sentence_of_over_forty_words_is_found_wherever_it_stands(form: str) -> None:
    long, short = " ".join(["word"] * 41), " ".join(["word"] * 37)
    assert len(faults(form.format(long.replace(" word", "\nword", 1)))) == 1
    assert faults(form.format(short)) == []
    assert faults(f"| {long} |\n|---|\n\n```\n{long}\n```\n\n# {long}\n\n<!-- {long} -->\n") == []


def test_sentences_end_at_full_stops_and_not_at_abbreviations_or_items() -> None:
    text = "One (e.g. this) is x.y. `a. b` is two! torchrun ends it.\nIt goes\non.\n- item one\n- item\n  two\n\nLast"
    assert [sentence.text for sentence in sentences(text)] == [
        "One (e.g. this) is x.y.",
        "`a. b` is two!",
        "torchrun ends it.",
        "It goes on.",
        "item one",
        "item two",
        "Last",
    ]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each message that a file raises; what is put in at run time counts as one word."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from ((node.lineno, text) for text in map(_text, node.exc.args) if text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "X" for value in node.values)
    return ""


@pytest.mark.parametrize("package", ["params", "train"])
def test_messages_of_errors_have_short_sentences_and_the_terms_of_the_field(package: str) -> None:
    found = {path: list(messages(path)) for path in sorted((ROOT / package).rglob("*.py"))}
    assert sum(map(len, found.values())) > 200
    for path, texts in found.items():
        for line, text in texts:
            where = f"{path.relative_to(ROOT)}:{line}"
            assert all(sentence.words <= LONGEST for sentence in sentences(text)), f"{where}: {text}"
            assert not list(words_that_house_replaces(text)), f"{where}: {text}"
