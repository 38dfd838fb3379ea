"""Shell patterns over the dotted paths of leaves, which choose the leaves of an optimizer or a transform.

A pattern that gets no leaf is most likely mistyped. That is judged on all leaves of a model: a pipeline stage has some
of them alone, so `train.init_state` judges the paths of all stages, in every process.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping

Patterns = Mapping[str, re.Pattern[str]]


def patterns_of(texts: Iterable[str]) -> Patterns:
    """{shell pattern: what matches as it does}, translated once: fnmatch itself has no place in a compiled graph."""
    return {text: re.compile(fnmatch.translate(text)) for text in texts}


def first_match(path: str, patterns: Patterns) -> str | None:
    """The first of the patterns that matches the path; None: none of them."""
    return next((text for text, pattern in patterns.items() if pattern.match(path) is not None), None)


def check_used(patterns: Iterable[str], used: Collection[str | None], paths: Iterable[str]) -> None:
    """ValueError for a pattern that is not among the `used` ones. paths: of the model's leaves."""
    idle = [pattern for pattern in patterns if pattern not in used]
    if idle:
        raise ValueError(f"The pattern {idle[0]!r} gets no leaf; the paths are like {next(iter(paths), 'none')}.")
