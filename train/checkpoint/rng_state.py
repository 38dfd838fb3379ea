"""The states of the global random generators as a tree of tensors, to be saved beside a State by programs that use
them.

Nothing in fnmodels uses them: initial values come from (seed, path), batches from (seed, step). A loss with dropout, or
streamed and shuffled data, does; its resumed run equals an uninterrupted one bit for bit if it saves
`{"state": state, "random": random_state()}` and restores the latter.
"""

import math
import random

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The states of the global random generators: torch's on the CPU and on each CUDA device in use, Python's, NumPy's.

    Returns:
        {name: uint8 or int64 tensor}, which `train.checkpoint.save` can write.

    Raises:
        ValueError: NumPy's global generator is not the default MT19937.
    """
    _, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is meant
    if kind != "MT19937":
        raise ValueError(f"NumPy's global generator is a {kind}; only the default MT19937 can be saved.")
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        **{f"cuda{index}": state for index, state in enumerate(devices)},
        "python": torch.tensor(words),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restores the global random generators.

    Args:
        state: The result of `random_state`.

    Raises:
        ValueError: The number of CUDA devices differs.
    """
    cuda = [state[name] for name in sorted(state, key=lambda name: (len(name), name)) if name.startswith("cuda")]
    if cuda and len(cuda) != torch.cuda.device_count():
        raise ValueError(
            f"The random state is of {len(cuda)} CUDA devices; here there are {torch.cuda.device_count()}."
        )
    torch.set_rng_state(state["torch"].cpu())
    for index, one in enumerate(cuda):
        torch.cuda.set_rng_state(one.cpu(), index)
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    words = np.array(keys, np.uint32)
    np.random.set_state(("MT19937", words, position, has_gauss, state["numpy_gauss"].item()))  # noqa: NPY002
