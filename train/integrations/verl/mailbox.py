"""The checkpoint engine "fnmodels" of verl: weights through Ray's object store, to rollouts in processes of their own.

    actor_rollout_ref.rollout.checkpoint_engine.backend=fnmodels

verl's other engines between processes need CUDA or RDMA. This one needs nothing, and is for machines without them.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from train.handover.bucket import Bucket, buckets

NAME = "fnmodels"


class Mailbox:
    """The buckets of one set of weights, which stay until all receivers have read them."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._changed = asyncio.Condition()

    async def put(self, bucket: Bucket) -> None:
        """Adds the next bucket."""
        async with self._changed:
            self._buckets.append(bucket)
            self._changed.notify_all()

    async def get(self, number: int) -> Bucket:
        """A bucket, once it has come."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._buckets) > number)
        return self._buckets[number]


class MailboxEngine(CheckpointEngine):
    """An end of the way from a trainer's processes, of which the first sends, to those of rollouts.

    Args:
        bucket_size: Bytes of a message.
    """

    def __init__(self, bucket_size: int, **_: Any) -> None:
        self._bucket_size = bucket_size
        self._mailbox: Any = None
        self._sends = False

    def prepare(self) -> dict[str, Any]:
        """What `build_topology` gets of this process: nothing."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of `init_process_group` for each process of the trainer and of the rollouts."""
        name = f"{NAME}_weights_{uuid.uuid4().hex}"
        senders = [rank == 0 for rank in range(actor_wg_world_size)]
        receivers = [False] * rollout_world_size
        return (
            {"name": [name] * len(senders), "sends": senders},
            {"name": [name] * len(receivers), "sends": receivers},
        )

    def init_process_group(self, *, name: str, sends: bool) -> None:
        """Finds the mailbox of this set of weights, or makes it."""
        made = ray.remote(Mailbox).options(name=name, get_if_exists=True, num_cpus=0)
        self._mailbox, self._sends = made.remote(), sends

    def finalize(self) -> None:
        """Removes the mailbox: all have read it."""
        if self._sends:
            ray.kill(self._mailbox)
        self._mailbox = None

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Sends all weights. All processes of the trainer iterate alike, because the tensors are gathered."""
        for bucket in buckets(weights, self._bucket_size):
            if self._sends:
                await self._mailbox.put.remote(bucket.to("cpu"))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """(name, tensor) of all weights."""
        number, last = 0, False
        while not last:
            bucket: Bucket = await self._mailbox.get.remote(number)
            for pair in bucket.tensors():
                yield pair
            number, last = number + 1, bucket.last


def register_mailbox() -> None:
    """Registers the checkpoint engine "fnmodels"."""
    CheckpointEngineRegistry.register(NAME)(MailboxEngine)
