import random

import numpy as np
import pytest
import torch

from train.checkpoint.rng_state import random_state, set_random_state


def draws():
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()  # noqa: NPY002


@pytest.fixture(autouse=True)
def put_back():
    before = random_state()
    yield
    set_random_state(before)


@pytest.mark.parametrize("draws_before", range(4))
def test_what_is_drawn_next_comes_again(draws_before):
    """Also in the middle of a pair of normal numbers, of which the second is kept."""
    for _ in range(draws_before):
        random.gauss(0, 1)
        np.random.randn()  # noqa: NPY002
    before = random_state()
    assert all(isinstance(leaf, torch.Tensor) for leaf in before.values())
    expected = draws()
    assert draws() != expected
    set_random_state(before)
    assert draws() == expected


def test_another_number_of_devices_is_refused():
    here = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"of {here + 1} CUDA devices; here there are {here}"):
        set_random_state(random_state() | {f"cuda{i}": torch.zeros(16) for i in range(here + 1)})


def test_another_generator_of_numpy_is_refused(monkeypatch):
    monkeypatch.setattr(np.random, "get_state", lambda **_: ("PCG64", np.zeros(3), 0, 0, 0.0))
    with pytest.raises(ValueError, match="PCG64"):
        random_state()
