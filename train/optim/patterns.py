"""Shell patterns over the dotted paths of leaves, which choose the leaves of an optimizer or a transform.

A pattern that gets no leaf is most likely mistyped. That is judged on all leaves of a model: a pipeline stage has some
of them alone, so `train.init_state` judges the paths of all stages, in every process.
"""

import fnmatch
from collections.abc import Collection, Iterable


def first_match(path: str, patterns: Iterable[str]) -> str | None:
    """The first of the patterns that matches the path; None: none of them."""
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(path, pattern)), None)


def check_used(patterns: Iterable[str], used: Collection[str | None], paths: Iterable[str]) -> None:
    """ValueError for a pattern that is not among the `used` ones. paths: of the model's leaves."""
    idle = [pattern for pattern in patterns if pattern not in used]
    if idle:
        raise ValueError(f"The pattern {idle[0]!r} gets no leaf; the paths are like {next(iter(paths), 'none')}.")
