"""A rollout of verl by `ContinuousBatch`: `actor_rollout_ref.rollout.name=fnmodels`, for machines without vLLM.

Each replica is one process (a Ray actor) with its own copy of the weights, which answers requests by continuous
batching. Trainer processes send it the weights after every update.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

import params as P
from fnmodels.errors import MismatchError
from train.eval.pretrained import end_ids
from train.generation.batching import BatchSettings, ContinuousBatch, Hook
from train.generation.checks import check_request, learned_positions
from train.generation.requests import Request
from train.generation.sampling import Sampling
from train.handover.bucket import Bucket, as_stored, buckets, received

from .pictures import PromptImages
from .routing import layers_of
from .settings import DTYPES, check_rollout

NAME = "fnmodels"
SLOTS = 64  # answers that are generated at once
BUCKET = 256 << 20  # bytes of weights in one message
# sampling_params, as vLLM has them, that become fields of Sampling, and their values without an effect
NUMBERS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
KNOWN = {*NUMBERS, *PENALTIES, "top_k", "max_tokens", "max_new_tokens", "stop_token_ids", "ignore_eos", "logprobs"}
# others: the values that they may have, beside None, because answers are the same
FIXED: dict[str, tuple[Any, ...]] = {"n": (1,), "best_of": (1,), "min_tokens": (0,), "stop": ("", [])}
FIXED["bad_words"] = ([],)
FIXED |= dict.fromkeys(("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), (True, False))
FIXED["include_stop_str_in_output"] = (True, False)


class Arrivals:
    """Requests that have come, each with what its caller waits for."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Request, Future[TokenOutput]]] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> Future[TokenOutput]:
        future: Future[TokenOutput] = Future()
        with self._changed:
            self._waiting.append((request, future))
            self._changed.notify()
        return future

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting))

    def take(self, most: int) -> list[tuple[Request, Future[TokenOutput]]]:
        """The next requests, without those whose callers have gone; no later one can be cancelled."""
        taken: list[tuple[Request, Future[TokenOutput]]] = []
        with self._changed:
            while self._waiting and len(taken) < most:
                request, future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    taken.append((request, future))
        return taken


@dataclass
class Drawn:
    """An answer under way: what its caller waits for, its tokens and what belongs to each."""

    future: Future[TokenOutput]
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


class Server:
    """One replica: answers to prompts by the weights that were sent last."""

    def __init__(self, folder: str, config: Any, seed: int, trust_remote_code: bool = False) -> None:
        self.settings, self.seed, self.count = config, seed, 0
        self.config = P.load_config(folder, part="text")
        self.images = PromptImages.of(Path(folder), trust_remote_code)
        self.stop_ids = end_ids(Path(folder))
        self.weights: tuple[Any, Any, int | None] | None = None  # config, params of that, version
        self._arriving: list[Bucket] = []
        self._requests, self._replaced = Arrivals(), False  # whether weights came since `_serve` has begun
        self._closed = False  # whether requests are handed back
        threading.Thread(target=self._serve_forever, daemon=True).start()

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **more: Any,
    ) -> TokenOutput:
        """The answer to a prompt; log_probs are those of the full softmax at the temperature, as the actor's.

        image_data: Pictures, for each of which the prompt has as many image tokens as it has features.
        """
        if self._closed:
            return _handed_back()
        if video_data or more.get("audio_data"):
            raise NotImplementedError("The request has videos or sounds; the rollout takes text and images.")
        images = self._images(image_data or [], more.get("mm_processor_kwargs"))
        request = self._request(list(prompt_ids), sampling_params, images)
        return await asyncio.wrap_future(self._requests.add(request))

    def _images(self, pictures: Sequence[Any], options: Mapping[str, Any] | None) -> list[Tensor]:
        if not pictures:
            return []
        if self.images is None:
            raise NotImplementedError(
                f"The request has images; the rollout reads none for a {self.config.model_type}, or verl made no "
                "processor of the checkpoint, of which it warns."
            )
        if self.weights is not None and self.weights[0] == self.config:
            raise ValueError(
                "The request has images, and the weights that were sent are those of the text alone: set "
                "actor_rollout_ref.actor.fnmodels.images=True."
            )
        return self.images.read(pictures, options)

    def _request(self, prompt: list[int], given: Mapping[str, Any], images: Sequence[Tensor] = ()) -> Request:
        """A request; None in sampling_params is absence. ValueError for bad values, NotImplementedError for others."""
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            if name not in KNOWN and value not in FIXED.get(name, ()):
                raise NotImplementedError(f"sampling_params has {name}={value!r}, which the rollout does not have.")
        values = {name: float(given.get(name, none)) for name, none in NUMBERS.items()}
        values |= {name.removesuffix("_penalty"): float(given.get(name, none)) for name, none in PENALTIES.items()}
        top_k = int(given.get("top_k", -1))
        sampling = Sampling(top_k=None if top_k in (-1, 0) else top_k, **values)
        limit = given.get("max_tokens", given.get("max_new_tokens", self.settings.response_length))
        if limit < 1:
            raise ValueError(f"sampling_params has max_tokens={limit!r}; an answer has at least one token.")
        ends = () if given.get("ignore_eos", self.settings.ignore_eos) else self.stop_ids
        stop_ids = (*ends, *given.get("stop_token_ids", ()))
        self.count += 1
        room = self._capacity() - len(prompt)
        if room < 1:
            raise ValueError(f"The prompt has {len(prompt)} tokens; the rollout has room for {self._capacity()}.")
        records = bool(getattr(self.settings, "enable_rollout_routing_replay", False))
        more: dict[str, Any] = {"images": images, "record_routing": records}
        request = Request(prompt, min(limit, room), sampling, self.seed, self.count, stop_ids, **more)
        # here, so that a mistake is its caller's alone and no other answer waits for it
        config = self.images.config if self.images is not None else self.config
        check_request(self.count, request, config, learned=learned_positions(self.config))
        return request

    def _capacity(self) -> int:
        return int(self.settings.max_model_len or self.settings.prompt_length + self.settings.response_length)

    def _serve_forever(self) -> None:
        while True:
            self._requests.wait()
            self._replaced = False  # before `_serve` reads the weights; those that come later set it
            running: dict[int, Drawn] = {}
            try:
                self._serve(running)
            except Exception as error:  # the callers that wait get it
                left = [answer.future for answer in running.values()]
                for future in (*left, *(future for _, future in self._requests.take(len(self._requests)))):
                    future.set_exception(error)

    @torch.no_grad()
    def _serve(self, running: dict[int, Drawn]) -> None:
        """Answers requests until there are none, or other weights have come: one call uses one version of them.

        running: The answers under way, by the number of their request.
        """
        if self.weights is None:
            raise RuntimeError("The rollout has no weights yet: update_weights comes first.")
        config, params, version = self.weights
        settings = BatchSettings(logits_fn=self._edit())
        slots = min(self.settings.max_num_seqs, SLOTS)
        batch = ContinuousBatch(params, config, slots=slots, capacity=self._capacity(), settings=settings)
        while True:
            if not self._replaced and (room := batch.room()):
                taken = [(request.draw, request, future) for request, future in self._requests.take(room)]
                running |= {number: Drawn(future) for number, _, future in taken}
                if taken:
                    batch.take([(number, request) for number, request, _ in taken])
            if not batch.busy and (self._replaced or not self._requests):
                return
            for event in batch.advance(shrink=not self._requests):
                answer = running[event.row]
                answer.tokens.append(event.token)
                answer.logp.append(event.logp)
                answer.experts += [] if event.routing is None else [event.routing]
                if event.reason is not None:
                    del running[event.row]
                    answer.future.set_result(self._output(answer, event.reason, version))

    def _output(self, answer: Drawn, reason: str, version: int | None) -> TokenOutput:
        return TokenOutput(
            token_ids=answer.tokens,
            log_probs=answer.logp,
            routed_experts=layers_of(torch.cat(answer.experts), self.config).numpy() if answer.experts else None,
            stop_reason="completed",
            extra_fields={"global_steps": version, "finish_reason": reason},
        )

    def _edit(self) -> Hook | None:
        """Masks the image and video tokens before a draw, because verl takes each for a picture; not for log_probs."""
        if self.images is None:
            return None
        never = torch.tensor(self.images.placeholders)
        return lambda logits, _: logits.index_fill(-1, never.to(logits.device), -torch.inf)

    def receive(self, bucket: Bucket, version: int | None) -> None:
        """Some of a checkpoint's tensors; with the last bucket, if all have come, the weights are replaced."""
        if bucket.number == 0:  # a sender that failed has left the first buckets of its sequence
            self._arriving = []
        self._arriving.append(bucket)
        if bucket.last:
            arrived, self._arriving = self._arriving, []
            self.weights = *self._model_of(list(received(arrived))), version
            self._replaced = True

    def _model_of(self, tensors: list[tuple[str, Tensor]]) -> tuple[Any, Any]:
        """(config, params) of the whole model, or of its text where the tensors are of that alone.

        MismatchError where they are of neither.
        """
        if self.images is not None:
            try:
                return self.images.config, P.from_tensors(self.images.config, tensors)
            except MismatchError as error:
                try:
                    return self.config, P.from_tensors(self.config, tensors)
                except MismatchError:
                    raise error from None
        return self.config, P.from_tensors(self.config, tensors)

    def sleep(self) -> None:
        """Frees the weights, where the configuration says so: new ones come before the next request."""
        if self.images is not None:
            self.images.forget()
        if self.settings.free_cache_engine:
            self.weights = None
            self._replaced = True

    def close(self) -> None:
        """Hands back the requests that wait and those that come, for other replicas; answers under way go on."""
        self._closed = True
        for _, future in self._requests.take(len(self._requests)):
            future.set_result(_handed_back())

    def resume_generation(self) -> None:
        """Takes requests again."""
        self._closed = False

    def idle(self) -> None:
        """Calls for the memory of caches, which lasts as long as an answer, or for weights that are in place."""

    wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = idle


def _handed_back() -> TokenOutput:
    """What verl's clients of asynchronous trainers take for a request to send again."""
    return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields={"global_steps": None})


class ServerAdapter(BaseRollout):
    """A trainer process' end: sends weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        **more: Any,
    ) -> None:
        """All ranks iterate alike, because the tensors are gathered; each sends them to its own replica.

        Weights of another process come as an asynchronous iterator, whose tensors are views of its buffers.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"wire_format is {wire_format!r}; the rollout takes 'named_tensors'.")
        if isinstance(weights, AsyncIterable):
            weights = [(name, tensor.clone()) async for name, tensor in weights]
        server, version = ray.get_actor(_actor_name(self.replica_rank)), more.get("global_steps")
        for bucket in buckets(as_stored(weights, DTYPES[self.config.dtype]), BUCKET):
            await server.receive.remote(bucket.to("cpu"), version)

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: weights come by `update_weights`, caches are made for each batch."""

    async def release(self) -> None:
        await ray.get_actor(_actor_name(self.replica_rank)).sleep.remote()


class Replica(RolloutReplica):
    """A server for each process of the trainer. ValueError for replicas of several processes."""

    async def launch_servers(self) -> None:
        check_rollout(self.config)
        if self.world_size != 1:
            raise ValueError(
                f"The rollout's tensor_model_parallel_size x data x pipeline is {self.world_size}, and a replica of "
                f"{NAME} is one process."
            )
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        name = _actor_name(self.replica_rank)
        made = ray.remote(Server).options(
            name=name, scheduling_strategy=here, max_concurrency=self.max_concurrency, num_cpus=0
        )
        folder = os.path.expanduser(self.model_config.path)
        trusts = bool(getattr(self.model_config, "trust_remote_code", False))
        server = made.remote(folder, self.config, self.config.seed + self.replica_rank, trusts)
        self.servers = [server]
        self._server_handle, self._server_address = server, name

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Hands back requests where verl asks for it. Answers under way end with the weights they began with."""
        if reject_request:
            await self._server_handle.close.remote()


def _actor_name(rank: int) -> str:
    return f"fnmodels_rollout_{rank}"


def register_rollout() -> None:
    """Registers the rollout "fnmodels"."""
    _ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{ServerAdapter.__name__}"
    RolloutReplicaRegistry.register(NAME, lambda: Replica)
