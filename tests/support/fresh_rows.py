"""Patches of tests are seen by `fnmodels.preparation.prepare_again`, which shares tables between batches."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest


def forget_rows_at_patches() -> None:
    """From now on each patch by MonkeyPatch, and each undoing, forgets what batches share.

    A planted bug is in the tables of the test that plants it, and in those of no other. Once per process, before forks.
    """
    for name in ("setattr", "delattr", "setitem", "delitem", "undo"):
        setattr(pytest.MonkeyPatch, name, _forgetting(getattr(pytest.MonkeyPatch, name)))


def _forgetting(patch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(patch)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = patch(*args, **kwargs)
        if (module := sys.modules.get("fnmodels.preparation")) is not None:
            module._of_rows.cache_clear()
        return result

    return patched
