"""`Trainer`: the sessions of Tinker's clients, the adapters that they train, and the samplers made of them."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import params as P
from fnmodels.errors import UserError
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.registry import text_config
from fnmodels.tree import Tree
from train.generation.routing import expert_layers
from train.integrations.tinker import types
from train.integrations.tinker.base import Base
from train.integrations.tinker.images import InputReader
from train.integrations.tinker.packed import saved_place, saved_state
from train.integrations.tinker.sampling import SamplingClient
from train.integrations.tinker.traced import TracedLoss
from train.integrations.tinker.training import LoraConfig, TrainingClient

from ..app import Service
from ..errors import ApiError
from ..model import PICTURES
from ..worker import Served, Ticket
from .futures import SMALL, Futures
from .kept import Bounds, Read, Samplers, stamp_of
from .sequences import Sequences

SESSION = 3600.0  # seconds after which a session without a sign of life is forgotten, with its models
STALE = 600.0  # seconds after which it is forgotten where there is no room; Tinker's package gives one every 10
HELD = 128  # requests to a model that wait for an earlier one, at most
SCHEME = "tinker://"
_PATH = re.compile(r"tinker://([0-9a-f]{12})/(weights|sampler_weights)/(.+)", re.DOTALL)
Job = Callable[[], Any]
Done = Callable[[Any], Any]


def _unchanged(result: Any) -> Any:
    return result


def _raised(error: Exception) -> None:
    raise error


@dataclass
class Adapters:
    """A model of a client: `training` once it was made, and what is to be done, in the order of seq_id.

    A request whose predecessor has not arrived yet waits for it, for requests travel by several connections.
    """

    session: str
    base_model: str
    training: TrainingClient | None = None
    next: int = 1
    held: dict[int, tuple[Job, Done]] = field(default_factory=dict)

    def ready(self) -> TrainingClient:
        """The client in this process. ValueError where it could not be made."""
        if self.training is None:
            raise ValueError("The model was not made: the request that makes it failed.")
        return self.training


class Trainer:
    """Sessions and models of Tinker's clients; all methods are called in the server's thread, jobs run in the worker's.

    Args:
        service: The base model and its worker.
        folder: Where states and weights are saved.
        bounds: What is kept at most; None: the default ones.
    """

    def __init__(self, service: Service, folder: Path, bounds: Bounds | None = None) -> None:
        self.service, self.folder, self.bounds = service, folder, bounds or Bounds()
        self.futures, self.samplers = Futures(self.bounds.results), Samplers(self.bounds, self._read_sampler)
        model = service.model
        loaded = model.served.config, model.served.params, model.pictures
        self.base = Base.of(model.folder.resolve(), *loaded, service.kernel)
        self.sessions: dict[str, float] = {}
        self.models: dict[str, Adapters] = {}
        self.losses: dict[str, TracedLoss] = {}
        self.sequences, self.routed = Sequences(), bool(expert_layers(text_config(model.served.config)))

    def begin_session(self) -> str:
        """The id of a new session, which is forgotten when it gives no sign of life for an hour. ApiError 429 where
        there are as many as may be."""
        self.make_room(self.sessions, self.bounds.sessions, "sessions")
        made = uuid.uuid4().hex
        self.sessions[made] = time.monotonic()
        self.samplers.begin(made)
        self._expire(made)
        return made

    def _expire(self, session: str) -> None:
        """Forgets a session that is silent, or looks again when it may be."""
        if session not in self.sessions:  # it made room for another one
            return
        left = self.sessions[session] + SESSION - time.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._expire, session)
        else:
            self._forget(session)

    def make_room(self, kept: Collection[str], most: int, kind: str) -> None:
        """ApiError 429 where there are as many as may be, and no session with some of them is silent.

        kept: their ids, which begin with those of their sessions; of these the one that is silent for longest goes.
        """
        if len(kept) < most:
            return
        silent = min({name.partition(":")[0] for name in kept}, key=self.sessions.__getitem__)
        if time.monotonic() - self.sessions[silent] < STALE:
            raise ApiError(
                429,
                f"This server has {len(kept)} {kind}, which is all that it keeps; those of a session go when its "
                f"client was silent for {STALE / 60:g} minutes: try again later.",
                retry_after=30,
            )
        self._forget(silent)

    def _forget(self, session: str) -> None:
        """Forgets a session with all that is its own."""
        del self.sessions[session]
        self.sequences.forget(session)
        for model_id in [name for name, one in self.models.items() if one.session == session]:
            self.unload(model_id)
        self.samplers.forget(session)
        self.losses = {name: one for name, one in self.losses.items() if name.partition(":")[0] in self.sessions}

    def unload(self, model_id: str) -> None:
        """Forgets a model with its momentary samplers; requests that wait for an earlier one end with an error."""
        model = self.models.pop(model_id, None)
        self.samplers.unload(model_id)
        for number in () if model is None else model.held:
            self.futures.end(f"{model_id}:{number}", ApiError(404, f"The model {model_id!r} was unloaded."))

    def keep(self, session: str) -> None:
        """A sign of life. ApiError for an unknown session."""
        if session not in self.sessions:
            raise ApiError(404, f"There is no session {session!r}: it was forgotten, or the server was started anew.")
        self.sessions[session] = time.monotonic()

    def check_base(self, name: Any) -> None:
        """ApiError for another base model than that of this server."""
        model = self.service.model
        if name not in (model.name, str(model.folder), str(model.folder.resolve())):
            raise ApiError(404, f"There is no base model {name!r} here; this server has {model.name!r}.")

    def read_data(self, data: Sequence[types.Datum]) -> list[types.Datum]:
        """The data with their pictures read. ValueError for a picture that cannot be read, for more than PICTURES
        different ones, and for a datum that is longer than the context, or has ids that the model does not have."""
        reader = InputReader(self.base, files=False, most=PICTURES, context=self.service.limits.context)
        read = [reader.read(datum.model_input, f"datum {number}") for number, datum in enumerate(data)]
        found = [types.Datum(own, datum.loss_fn_inputs) for own, datum in zip(read, data, strict=True)]
        self._check_data(found)
        return found

    def _check_data(self, data: Sequence[types.Datum]) -> None:
        context, vocab = self.service.limits.context, self.service.model.vocab_size
        for number, datum in enumerate(data):
            tokens = datum.model_input.to_ints()
            if len(tokens) > context:
                raise ValueError(f"Datum {number} has {len(tokens)} tokens; the context is {context} tokens.")
            targets = datum.loss_fn_inputs.get("target_tokens")
            labels = [] if targets is None else targets.to_torch().flatten().tolist()
            ids = tokens + [label for label in labels if label != IGNORE]
            if wrong := [token for token in ids if not 0 <= token < vocab]:
                raise ValueError(f"Datum {number} has the id {wrong[0]!r}; token ids are from 0 to {vocab - 1}.")

    def model(self, model_id: str) -> Adapters:
        """The model of an id. ApiError where there is none."""
        if model_id not in self.models:
            raise ApiError(404, f"There is no model {model_id!r}: it was forgotten, or the server was started anew.")
        return self.models[model_id]

    def make(self, session: str, number: int, base_model: str, job: Callable[[Adapters], Any]) -> tuple[str, str]:
        """(the id of the request, that of a new model), which `job` makes; again the same for a repeated request."""
        self.keep(session)
        model_id = f"{session}:train:{number}"
        request_id = f"{model_id}:create"
        if request_id not in self.futures and model_id not in self.models:
            self.make_room(self.models, self.bounds.models, "models")
            self._begin(request_id)
            made = self.models[model_id] = Adapters(session, base_model)
            self._run(request_id, lambda: job(made), _unchanged)
        return request_id, model_id

    def order(
        self,
        model_id: str,
        seq_id: int,
        job: Callable[[TrainingClient], Any],
        done: Done = _unchanged,
        size: int = SMALL,
    ) -> str:
        """The id of a request to a model, which runs after those with smaller seq_id.

        Where there is no room for it nothing has changed, and the client may send it again: a request that is left out
        would let those after it run without it.

        done: makes the client's result of that of the job, or raises ApiError; it runs in the server's thread.
        size: bytes of the result at most.
        """
        model = self.model(model_id)
        self.keep(model.session)
        request_id = f"{model_id}:{seq_id}"
        if request_id in self.futures:  # sent again, for its answer was lost
            return request_id
        if seq_id < model.next:
            raise ApiError(400, f"seq_id is {seq_id}, and {model.next} is the next one of the model.")
        if seq_id > model.next and len(model.held) >= HELD:
            raise ApiError(
                429, f"{HELD} requests wait for that with seq_id {model.next}: try again later.", retry_after=1
            )
        self._begin(request_id, size, awaited=seq_id == model.next and bool(model.held))
        model.held[seq_id] = (lambda: job(model.ready())), done
        while model.next in model.held:
            number, model.next = model.next, model.next + 1
            self._run(f"{model_id}:{number}", *model.held.pop(number))
        return request_id

    @contextmanager
    def turn(self, model_id: Any, seq_id: Any) -> Iterator[None]:
        """What is refused inside has had its turn, for those after it would wait for it for ever. ApiError.

        A request without room has not: its client sends it again.
        """
        try:
            yield
        except (ApiError, ValueError) as error:
            refused = error if isinstance(error, ApiError) else ApiError(400, str(error))
            known = isinstance(model_id, str) and type(seq_id) is int and model_id in self.models
            if known and refused.status in (400, 404) and seq_id >= self.models[model_id].next:
                self.order(model_id, seq_id, lambda training: _raised(refused))
            raise refused from error

    def _begin(self, request_id: str, size: int = SMALL, *, awaited: bool = False) -> None:
        """ApiError where there is no room for a request."""
        self.service.worker.check_room(1)
        self.futures.begin(request_id, size, awaited=awaited)

    def _run(self, request_id: str, job: Job, done: Done) -> None:
        def put(value: Any) -> None:
            try:
                self.futures.end(request_id, value if isinstance(value, Exception) else done(value))
            except ApiError as error:
                self.futures.end(request_id, error)

        try:  # there was room when the request came
            self.service.worker.submit(None, [Ticket(put, job=job)], accepted=True)
        except ApiError as error:  # the server is stopping
            self.futures.end(request_id, error)

    def new(self, lora: LoraConfig) -> TrainingClient:
        """New adapters over the base model; in the worker's thread."""
        return TrainingClient(self.folder, self.base, lora)

    def saved(self, path: str, *, optimizer: bool) -> TrainingClient:
        """Adapters of a saved state, with or without that of the optimizer; in the worker's thread."""
        made = self.new(LoraConfig(**self.progress(path)["lora"]))
        place = self.place(path, "weights")
        (made.load_state_with_optimizer if optimizer else made.load_state)(place)
        return made

    def progress(self, path: str) -> dict[str, Any]:
        """The progress saved beside a state: its base model and its `LoraConfig`. ValueError for another base model."""
        found: dict[str, Any] = saved_state(self.place(path, "weights")).progress
        if Path(found["base"]).resolve() != self.base.folder:
            raise ValueError(
                f"{path!r} was saved of the base model {found['base']!r}; this server has {str(self.base.folder)!r}."
            )
        return found

    def add_sampler(self, sampler_id: str, model_id: str, sampling: SamplingClient) -> None:
        """A sampler of a model's weights of this moment. ApiError where the model was forgotten meanwhile."""
        self.model(model_id)
        self.samplers.add_momentary(sampler_id, model_id, self._served(sampling.params))

    def _served(self, params: Tree) -> Served:
        return Served(*self.base.sampled(params), self.service.model.tokenizer)

    async def _read_sampler(self, path: str) -> Read:
        """The model of saved weights, and the stamp of their files. ApiError where they cannot be read."""

        def read() -> Read:
            place = self.place(path, "sampler_weights")
            while True:
                before = stamp_of(place)
                params = P.lora.load_adapters(place, self.base.config, self.base.params)
                if stamp_of(place) == before:  # else others were saved meanwhile
                    return self._served(params), before

        try:
            found: Read = await self.service.in_thread(read)
        except (ValueError, UserError) as error:
            raise ApiError(404, str(error)) from error
        return found

    def path(self, client: TrainingClient, saved: str) -> str:
        """The address of a folder that a client saved."""
        inside = Path(saved).relative_to(self.folder / f"model-{client.id}")
        return f"{SCHEME}{client.id}/{inside.as_posix()}"

    def is_saved(self, client: TrainingClient, name: str) -> bool:
        """Whether a client has saved a state of this name. ValueError for one that leads out of its folder."""
        return saved_place(self.folder / f"model-{client.id}" / "weights", name).exists()

    def place(self, path: str, kind: str) -> Path:
        """The folder of an address. ValueError for an address of another form or kind, or out of the folder."""
        found = _PATH.fullmatch(path)
        if found is None or found[2] != kind:
            raise ValueError(f"The path {path!r} is none of saved {kind}: tinker://ID/{kind}/NAME.")
        place = saved_place(self.folder / f"model-{found[1]}" / kind, found[3])
        if not place.is_dir():
            raise ValueError(f"There is nothing saved at {path!r}.")
        return place
