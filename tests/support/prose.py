"""Markdown read as prose: the sentences and the words of a guide, without its code, tables and addresses.

A list item and a paragraph are each read by themselves. A piece of inline code counts as the words that it has
between spaces. Semicolons and colons do not end a sentence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^ *(```|~~~)")
_ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) +")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"</?(?:img|a|br|p|div|sub|sup|details|summary)\b[^<>]*>")
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`+([^`]+)`+")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|resp|approx|Fig|al|No)\.$")
_END = re.compile(r"(?<=[.!?])(?<!\.\.\.)[)\"*_]*\s+")


@dataclass(frozen=True)
class Sentence:
    line: int  # where its paragraph begins, from 1
    text: str  # links are their text

    @property
    def words(self) -> int:
        return sum(any(c.isalnum() for c in word) for word in self.text.split())


@dataclass(frozen=True)
class Block:
    """A paragraph or a list item, on one line; or a row of a table, or a heading."""

    line: int
    kind: str  # "text", "table" or "heading"
    text: str


def blocks(markdown: str) -> Iterator[Block]:
    """The blocks of a page in their order, without code blocks, comments, tags and pictures."""
    markdown = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), markdown)
    markdown = _TAG.sub("", _PICTURE.sub("", markdown))
    begin, lines = 0, list[str]()
    fence, after_item = "", False
    for number, line in enumerate([*markdown.splitlines(), ""], start=1):
        marker, stripped = _FENCE.match(line), line.strip()
        item, row, heading = _ITEM.match(line), stripped.startswith("|"), stripped.startswith("#")
        code = line.startswith("    ") and not lines and not after_item
        ends = bool(fence or marker or item or row or heading or code or not stripped)
        if ends and lines:
            yield Block(begin, "text", " ".join(lines))
            lines = []
        if marker:
            fence = "" if fence == marker[1] else fence or marker[1]
        elif fence or code or not stripped:
            continue
        elif row or heading:
            yield Block(number, "table" if row else "heading", _plain(stripped.lstrip("#")))
        else:
            begin = begin if lines else number
            lines.append(line[item.end() :] if item else stripped)
        if stripped:
            after_item = bool(item) or (after_item and line.startswith("  "))


def _plain(text: str) -> str:
    return _LINK.sub(r"\1", text).strip()


def sentences(markdown: str) -> Iterator[Sentence]:
    """The sentences of the paragraphs and list items of a page."""
    for block in blocks(markdown):
        if block.kind != "text":
            continue
        codes = list[str]()

        def stored(match: re.Match[str], codes: list[str] = codes) -> str:
            codes.append(match[0])
            return f"\x00{len(codes) - 1}\x00"

        text = _CODE.sub(stored, _plain(block.text))
        for sentence in _split(text):
            yield Sentence(block.line, re.sub(r"\x00(\d+)\x00", lambda m, codes=codes: codes[int(m[1])], sentence))


def _split(text: str) -> Iterator[str]:
    begin = 0
    for end in _END.finditer(text):
        if not _ABBREVIATION.search(text[begin : end.start()].rstrip()):
            yield text[begin : end.start()]
            begin = end.end()
    yield text[begin:]


def without_code(text: str) -> str:
    """The text with nothing in place of its inline code."""
    return _CODE.sub("``", text)
