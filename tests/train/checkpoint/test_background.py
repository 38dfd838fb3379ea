"""Saving in a thread: what is written is what was handed over, and what fails is raised at the next step."""

import threading
import time
from typing import Any

import pytest
import torch

from train.checkpoint.background import Saver


def until_checked(saver: Saver) -> None:
    """Steps that do nothing but look, until the save under way is finished."""
    for _ in range(6000):
        saver.check()
        time.sleep(0.01)


class Written:
    """A `write` that can be held up, and what it was given."""

    def __init__(self) -> None:
        self.go, self.seen = threading.Event(), []

    def __call__(self, state: Any, *rest: Any) -> None:
        assert self.go.wait(60)
        self.seen.append((state["w"].clone(), *rest))
        if "fail" in rest:
            raise OSError(28, "No space left on device")


def test_the_step_goes_on_and_what_it_writes_is_not_saved() -> None:
    write, state = Written(), {"w": torch.zeros(3), "none": None}
    with Saver(write) as saver:
        saver.save(state, "a")
        state["w"] += 1  # the step in place, while nothing is on disk yet
        saver.check()
        assert write.seen == []
        write.go.set()
        saver.save(state, "b")
        state["w"] += 1
    assert [(w.tolist(), name) for w, name in write.seen] == [([0.0] * 3, "a"), ([1.0] * 3, "b")]


def test_a_failure_is_raised_at_the_next_step_and_saving_goes_on() -> None:
    write, state = Written(), {"w": torch.zeros(3)}
    write.go.set()
    with Saver(write) as saver:
        saver.save(state, "fail")
        with pytest.raises(OSError, match="No space"):
            until_checked(saver)
        saver.check()
        saver.save(state, "good")
        saver.wait()
        saver.save(state, "fail")
        with pytest.raises(OSError, match="No space"):
            saver.save(state, "good")
    assert [name for _, name in write.seen] == ["fail", "good", "fail"]


def test_the_last_failure_is_raised_on_leaving() -> None:
    write = Written()
    write.go.set()
    with pytest.raises(OSError, match="No space"), Saver(write) as saver:
        saver.save({"w": torch.zeros(3)}, "fail")


def test_a_failure_of_the_loop_is_the_one_that_is_raised() -> None:
    write = Written()
    write.go.set()

    def loop() -> None:
        with Saver(write) as saver:
            saver.save({"w": torch.zeros(3)}, "fail")
            raise RuntimeError("the loop")

    with pytest.raises(RuntimeError, match="the loop") as caught:
        loop()
    assert len(write.seen) == 1 and "No space" in caught.value.__notes__[0]


def test_the_memory_of_the_copy_is_used_again_while_it_fits() -> None:
    places = []
    with Saver(lambda state: places.append(state["w"].data_ptr())) as saver:
        for size in (300, 300, 400):
            saver.save({"w": torch.zeros(size)})
            saver.wait()
    assert places[0] == places[1] and len(places) == 3


def test_a_tree_with_something_else_is_refused_at_once() -> None:
    with Saver(print) as saver, pytest.raises(TypeError, match=r"x\.0 is of type int"):
        saver.save({"x": [3]})
