"""`ranks`: the pool of processes, one for the session (and for each worker of xdist)."""

from collections.abc import Iterator

import pytest

from tests.support.ranks_pool import Pool, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """ranks(4)(function, *JSON) runs a module's function in 4 processes of one gloo group: the list of its results."""
    pool = Pool()
    yield pool.ranks
    pool.close()
