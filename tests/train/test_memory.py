"""What the step holds at its peak, counted in bytes of live tensors: exact, and the same on a busy machine."""

import functools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import params as P
from fnmodels import llama, tree
from train import adamw, init_state, make_step, next_token_loss
from train.engine import Engine

CONFIG = llama.Config(64, 32, 64, 3, 4, 2, tie_word_embeddings=True)
LOSS = functools.partial(next_token_loss, config=CONFIG)
PARAMS = P.init(CONFIG, seed=0)
BYTES = 4 * P.count(CONFIG)


class Live(TorchDispatchMode):
    """The most bytes at once of tensors that were made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(t.untyped_storage()) for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage(), given)
        return out

    def add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = id(storage), storage.nbytes()
        if key in given or key in self.known:  # a view, or written in place
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _rows(count: int, length: int = 64) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(CONFIG.vocab_size, (2, count, length), generator=draws)
    positions = torch.arange(length).expand(count, length)
    return {"tokens": tokens, "positions": positions, "segment_ids": torch.ones_like(tokens), "labels": labels}


def _cut(count: int) -> list[dict[str, torch.Tensor]]:
    whole = _rows(count)
    return [{name: tensor[i : i + 1] for name, tensor in whole.items()} for i in range(count)]


def _peak(run) -> int:
    with Live() as live:
        run()
    return live.peak


def _step(parts: int, *, accumulate: bool) -> int:
    optimizer = adamw(1e-3)
    step = make_step(LOSS, optimizer, accumulate=parts if accumulate else 1, clip=1.0)
    state = init_state(PARAMS, optimizer)
    return _peak(lambda: step(state, _rows(parts) if accumulate else _cut(parts)))


def _engine(parts: int) -> int:
    engine, batches = Engine(CONFIG, PARAMS, adamw(1e-3)), _cut(parts)
    return _peak(lambda: [engine.forward_backward([batch], LOSS) for batch in batches])


RUNS = {
    "accumulate": functools.partial(_step, accumulate=True),
    "a list": functools.partial(_step, accumulate=False),
    "the engine": _engine,
}


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_flat_in_the_number_of_microbatches(name: str) -> None:
    two, eight = (RUNS[name](parts) for parts in (2, 8))
    inputs = sum(t.nbytes for t in tree.leaves(_rows(8)))
    assert two - inputs <= eight <= two + inputs, (two, eight, inputs)
    assert eight > 2 * BYTES  # the sums and a part's own gradients: what is counted is there


def test_the_count_sees_what_a_loop_would_hold() -> None:
    """Losses summed before one backward hold the activations of every part."""

    def run(parts: int) -> int:
        leaves = tree.map(lambda p: p.detach().requires_grad_(), PARAMS)

        def all_at_once() -> None:
            sums = [LOSS(leaves, batch)[0] for batch in _cut(parts)]
            torch.autograd.grad(torch.stack(sums).sum(), tree.leaves(leaves))

        return _peak(all_at_once)

    assert run(8) > 1.5 * run(2)


def test_one_large_batch_takes_what_its_parts_do_not() -> None:
    optimizer = adamw(1e-3)
    peaks = []
    for accumulate in (1, 8):
        step, state = make_step(LOSS, optimizer, accumulate=accumulate), init_state(PARAMS, optimizer)
        peaks.append(_peak(lambda step=step, state=state: step(state, _rows(8))))
    assert peaks[0] > 2 * peaks[1]
