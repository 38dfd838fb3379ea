"""Calls leave nothing behind: no state, no writes into their inputs, no trace in other threads."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fnmodels.ops.torch_internals import version

from .. import tree
from .assertions import assert_close
from .subject import MIXED, Subject, named_tensors, rows_of_documents


def check_history_independence(subject: Subject) -> None:
    """f(x), f(longer x), f(x): the last equals the first bit for bit, so no state is kept between calls.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: A call changes what a later call returns.
    """
    short, long = subject.tokens(2, 8), subject.tokens(2, 40, seed=1)
    first = subject.alone(short)
    subject.alone(long)
    again = subject.alone(short)
    if not torch.equal(first, again):
        raise AssertionError("A call changes what a later call returns: something is cached outside of the arguments.")


def check_inputs_unchanged(subject: Subject) -> None:
    """Forward and backward neither write into tensors of params or batch nor add or remove entries.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: It names the input that is changed.
    """
    for backward in (False, True):
        positions, segment_ids = rows_of_documents(*MIXED)
        batch = subject.prepare(subject.tokens(*positions.shape), positions, segment_ids)
        params = tree.map(lambda p, grad=backward: _leaf(p, grad), subject.params)
        before = {path: (leaf, version(leaf), leaf.detach().clone()) for path, leaf in named_tensors(params, batch)}
        logits = subject.forward(params, batch)
        if backward:
            logits.square().sum().backward()
        after = dict(named_tensors(params, batch))
        if after.keys() != before.keys():
            raise AssertionError(f"The forward pass changes the entries of its input: {before.keys() ^ after.keys()}.")
        for path, (leaf, writes, value) in before.items():
            if after[path] is not leaf or version(leaf) != writes or not torch.equal(leaf, value):
                which = "backward" if backward else "forward"
                raise AssertionError(f"The {which} pass writes into its input {path!r}.")


def _leaf(param: Tensor, requires_grad: bool) -> Tensor:
    return param.detach().clone().requires_grad_(requires_grad and param.is_floating_point())


def check_threads(subject: Subject) -> None:
    """Concurrent calls from two threads return the same logits as separate calls.

    Args:
        subject: The model to test.

    Raises:
        AssertionError: They do not.
    """
    inputs = [subject.tokens(2, 8), subject.tokens(2, 8, seed=1), subject.tokens(2, 17, seed=2)]
    want = [subject.alone(tokens) for tokens in inputs]
    sentence = "Two threads that call at once disturb each other"
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(subject.alone, tokens) for tokens in inputs * 4]
    for call, value in zip(calls, want * 4, strict=True):
        if (error := call.exception()) is not None:
            raise AssertionError(f"{sentence} (one raises {error!r}, which it does not alone)") from error
        assert_close(call.result(), value, subject.tolerance, sentence)
