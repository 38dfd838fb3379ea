"""What a server of Tinker's protocol keeps for its clients: its bounds, and the samplers with their weights."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ApiError
from ..worker import Served

IDS = 1024  # of samplers of a session, those without weights included; the ones that were used last
Stamp = tuple[tuple[str | int, ...], ...]
Read = tuple[Served, Stamp]


@dataclass(frozen=True)
class Bounds:
    """What is kept at most.

    Args:
        sessions: Sessions of clients.
        models: Models that are trained, of all sessions.
        samplers: Momentary samplers of a model, those that were used last. Loops draw from the newest one, asynchronous
            ones also from some before it, and a reference is used in each step, so that eight let them run.
        named: Samplers of saved weights in memory, of all sessions; others are read again when they are used.
        losses: Custom losses of all sessions.
        results: Bytes of results, those under way by what they may have at most.
    """

    sessions: int = 256
    models: int = 64
    samplers: int = 8
    named: int = 32
    losses: int = 1024
    results: int = 1 << 30


@dataclass(eq=False)
class _Sampler:
    """A sampler: of the base model, momentary weights of a model, or saved weights."""

    served: Served | None  # None: not in memory
    model_id: str | None = None  # whose momentary weights it has
    path: str | None = None  # of its saved weights
    stamp: Stamp = ()  # of the files at `path`
    gone: str = ""  # why it has no weights any more
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Samplers:
    """The samplers of all sessions by their ids, which begin with that of their session.

    Requests under way hold the weights that they use, whatever is dropped here. All methods are called in the server's
    thread.

    Args:
        bounds: How many are kept.
        read: Reads the weights at an address: (the model that answers, the stamp of its files).
    """

    def __init__(self, bounds: Bounds, read: Callable[[str], Awaitable[Read]]) -> None:
        self._bounds, self._read = bounds, read
        self._sessions: dict[str, OrderedDict[str, _Sampler]] = {}  # each in the order of use
        self._named: OrderedDict[str, _Sampler] = OrderedDict()  # those in memory, in the order of use

    def begin(self, session: str) -> None:
        """A session, which may have samplers from now on until it is forgotten."""
        self._sessions[session] = OrderedDict()

    def add_base(self, sampler_id: str, base: Served) -> None:
        """A sampler of the base model."""
        self._add(sampler_id, _Sampler(base))

    def add_momentary(self, sampler_id: str, model_id: str, served: Served) -> None:
        """A sampler of a model's weights of this moment, in place of the one whose last use is longest ago."""
        self._add(sampler_id, _Sampler(served, model_id=model_id))
        most = self._bounds.samplers
        for old in self._momentary(model_id)[:-most]:
            self._drop(old, f"of each model the {most} momentary ones that were used last are")

    async def add_named(self, sampler_id: str, path: str) -> None:
        """A sampler of saved weights. ApiError where they cannot be read."""
        served, stamp = await self._read(path)
        made = _Sampler(served, path=path, stamp=stamp)
        self._add(sampler_id, made)
        self._remember(sampler_id, made)

    def check(self, sampler_id: str) -> None:
        """ApiError for a sampler that is not there."""
        self._entry(sampler_id)

    async def find(self, sampler_id: str) -> Served:
        """The model of a sampler, read again where it is not in memory. ApiError where there is none."""
        found = self._entry(sampler_id)
        self._sessions[_session(sampler_id)].move_to_end(sampler_id)
        if found.path is None:
            assert found.served is not None
            return found.served
        async with found.reading:
            served = found.served or await self._again(sampler_id, found, found.path)
        if self._is_known(sampler_id, found):
            self._remember(sampler_id, found)
        return served

    async def _again(self, sampler_id: str, sampler: _Sampler, path: str) -> Served:
        served, stamp = await self._read(path)
        if stamp != sampler.stamp:
            raise ApiError(
                410,
                f"The weights of the sampler {sampler_id!r} are no longer kept: others were saved at {path!r} since it "
                "was made. create_sampling_client makes a sampler of these.",
            )
        if self._is_known(sampler_id, sampler):
            sampler.served = served
        return served

    def unload(self, model_id: str) -> None:
        """Drops the momentary samplers of a model; those of saved weights stay."""
        for old in self._momentary(model_id):
            self._drop(old, f"its model {model_id!r} was unloaded, and momentary ones go with it")

    def forget(self, session: str) -> None:
        """Forgets the samplers of a session."""
        for sampler_id in self._sessions.pop(session, ()):
            self._named.pop(sampler_id, None)

    def _entry(self, sampler_id: str) -> _Sampler:
        found = self._of(sampler_id).get(sampler_id)
        if found is None:
            raise ApiError(404, f"There is no sampler {sampler_id!r}: it was forgotten, or the server started anew.")
        if found.gone:
            raise ApiError(410, f"The weights of the sampler {sampler_id!r} are no longer kept: {found.gone}.")
        return found

    def _is_known(self, sampler_id: str, sampler: _Sampler) -> bool:
        return self._of(sampler_id).get(sampler_id) is sampler

    def _of(self, name: str) -> OrderedDict[str, _Sampler]:
        """The samplers of the session of an id; none where it was forgotten."""
        return self._sessions.get(_session(name), OrderedDict())

    def _momentary(self, model_id: str) -> list[_Sampler]:
        return [one for one in self._of(model_id).values() if one.model_id == model_id and not one.gone]

    def _drop(self, sampler: _Sampler, why: str) -> None:
        sampler.served = None
        sampler.gone = (
            f"{why}. Weights that save_weights_for_sampler saves under a name stay on disk, and create_sampling_client "
            "loads them again"
        )

    def _add(self, sampler_id: str, sampler: _Sampler) -> None:
        own = self._sessions.get(_session(sampler_id))
        if own is None:
            raise ApiError(404, f"There is no session of the sampler {sampler_id!r}: it was forgotten meanwhile.")
        self._named.pop(sampler_id, None)
        own[sampler_id] = sampler
        own.move_to_end(sampler_id)
        while len(own) > IDS:
            old = next((name for name, one in own.items() if one.gone), next(iter(own)))
            del own[old]
            self._named.pop(old, None)

    def _remember(self, sampler_id: str, sampler: _Sampler) -> None:
        self._named[sampler_id] = sampler
        self._named.move_to_end(sampler_id)
        while len(self._named) > self._bounds.named:
            self._named.popitem(last=False)[1].served = None


def _session(name: str) -> str:
    return name.partition(":")[0]


def stamp_of(folder: Path) -> Stamp:
    """What changes where other files are saved in a folder."""
    files = sorted((file.name, file.stat()) for file in folder.iterdir())
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files)
