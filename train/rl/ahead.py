"""Rollouts of later updates beside the training of the present one, with weights of bounded age.

The conversations of update n begin with the weights after n - bound updates, as soon as these are there; those of the
first updates with the weights at the start. So the weights of a conversation depend on its update alone, and not on the
clock. Each conversation has one set of weights from its first to its last turn.
"""

import threading
from collections.abc import Callable

from fnmodels import tree
from fnmodels.tree import Tree

from .conversation import Trajectory
from .helpers import Helpers

Found = tuple[list[Trajectory], int]  # conversations, and the tokens computed for their prompts
Roll = Callable[[Tree, int, int, Callable[[], bool]], Found]  # (weights, update, version, stopped)


class Ahead:
    """The conversations of updates, in order.

    Args:
        roll: Makes the conversations of an update.
        bound: Updates between the weights that begin a conversation and those that are trained on it, at most; 0: each
            update's conversations are made when it begins, and no weights are copied.
        updates: The number of updates of the run, beyond which nothing is begun.
        found: {update: its conversations} that a saved run had made ahead.
    """

    def __init__(self, roll: Roll, bound: int, updates: int, found: dict[int, Found]) -> None:
        self._roll, self.bound, self._updates, self._found = roll, bound, updates, dict(found)
        self._begun = max(found, default=-1) + 1  # the first update whose conversations are not begun
        self._open = set[int]()  # updates whose conversations are under way
        self._stop = threading.Event()
        self._helper = Helpers(min(bound, 1))

    def take(self, params: Tree, number: int) -> Found:
        """The conversations of update `number`, once the weights have seen that many updates.

        Args:
            params: The weights now. Those that later conversations begin with are copied.
            number: The update, from 0.

        Returns:
            The conversations, whose weights are at most `bound` updates old.
        """
        further = range(max(self._begun, number), min(number + self.bound + 1, self._updates))
        # the engine writes into its own, and a conversation may outlast the update
        weights = tree.map(lambda leaf: leaf.detach().clone(), params) if self.bound and further else params
        for update in further:
            self._begin(weights, update, number)
        while number in self._open:
            self._receive()
        found = self._found.pop(number)
        ages = [number - one.version for one in found[0]]
        if min(ages) < 0 or max(ages) > self.bound:
            raise ValueError(
                f"Update {number} would train on a conversation of weights {max(ages, key=abs)} updates ago; the bound "
                f"is {self.bound}."
            )
        return found

    def pending(self) -> dict[int, Found]:
        """The conversations made ahead, once they are complete: a saved run continues with them."""
        while self._open:
            self._receive()
        return dict(self._found)

    def close(self) -> None:
        """Gives up what is under way."""
        self._stop.set()
        self._helper.close()

    def _begin(self, weights: Tree, update: int, version: int) -> None:
        self._begun = update + 1
        self._open.add(update)
        self._helper.submit(update, lambda: self._roll(weights, update, version, self._stop.is_set))

    def _receive(self) -> None:
        for update, found in self._helper.finished(wait=True):
            self._found[update] = found
            self._open.remove(update)
