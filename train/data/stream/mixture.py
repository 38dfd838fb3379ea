"""The batch of a step from streamed sources, by weight, and the position that a run saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from train.batch import Entries
from train.data.rows import make_batch
from train.data.sampling import drawn_samples, permute, place_samples, rank_slice
from train.data.tokenized import joined

from .documents import Cursor, Documents, Report, train_documents
from .windows import Background, Encode, Window, windows


@dataclass(frozen=True)
class StreamOptions:
    """Options of reading a stream.

    Attributes:
        length: Tokens of a row.
        window: Rows of a window, within which rows are shuffled.
        seed: Of the order of files and rows.
        batch_rows: Rows of a batch, over all ranks.
    """

    length: int
    window: int
    seed: int
    batch_rows: int


@dataclass
class _Stream:
    """One source in the course of a run: the windows that its next rows are in."""

    documents: Documents
    key: tuple[int, int]  # of its shuffles: the seed, and the number of the source
    options: StreamOptions
    encode: Encode
    report: Report | None
    held: dict[int, tuple[Window, np.ndarray]] = field(default_factory=dict)  # {number: (window, order of its rows)}
    begins: dict[int, Cursor] = field(default_factory=lambda: {0: Cursor()})  # of the held windows and the next one
    making: Background[Window] | None = None

    def row(self, sample: int) -> Entries:
        """Sample `sample` of this source. RuntimeError where the window of it has been left."""
        number, place = divmod(sample, self.options.window)
        while number not in self.held:
            self._advance(number)
        window, order = self.held[number]
        return make_batch(window.rows, [int(order[place])])

    def _advance(self, number: int) -> None:
        newest = max(self.begins)
        if number < newest:
            raise RuntimeError(f"window {number} of {self.documents.name} has been left: seek a position before it")
        if self.making is None:
            start = self.begins[newest]
            found = train_documents(self.documents, start._replace(skip=0), self.key, self.report)
            made = windows(found, self.encode, self.options.length, self.options.window, start)
            self.making = Background(made, "stream")
        window, count = next(self.making), self.options.window
        self.held[newest] = window, permute(np.arange(count), count, *self.key, newest)
        self.begins[newest + 1] = window.end

    def leave(self, sample: int) -> None:
        """Forgets the windows before that of `sample`, whose beginning it makes known."""
        number = sample // self.options.window
        while number > max(self.begins):  # a rank that needs no row of the windows between
            self._advance(max(self.begins))
        self.held = {held: window for held, window in self.held.items() if held >= number}
        self.begins = {begun: cursor for begun, cursor in self.begins.items() if begun >= number}

    def begin(self, sample: int) -> tuple[int, Cursor]:
        """(number, cursor) of the window of `sample`, which is held or the next one; other samples raise KeyError."""
        number = sample // self.options.window
        return number, self.begins[number]

    def seek(self, number: int, cursor: Cursor) -> None:
        if self.making:
            self.making.close()
        self.held, self.begins, self.making = {}, {number: cursor}, None


class StreamMixture:
    """Streamed sources mixed by weight: a batch is a function of the sources, the seed and the step.

    Unlike `train.data.mixture.batch` it is read in the order of the steps, from step 0 or from a position that
    `position` returned.
    """

    def __init__(
        self,
        sources: Sequence[Documents],
        weights: Sequence[int],
        encode: Encode,
        options: StreamOptions,
        report: Report | None = None,
    ) -> None:
        """report: is called, in a thread, with "name (reason)" of each record that is left out."""
        self.options, self.weights = options, tuple(weights)
        self._streams = [
            _Stream(source, (options.seed, number), options, encode, report) for number, source in enumerate(sources)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stream.documents.name for stream in self._streams)

    def batch(self, step: int, *, rank: int = 0, ranks: int = 1) -> Entries:
        """The batch of step `step` (from 0), tensors [B, S]; a data-parallel rank gets its contiguous slice.

        RuntimeError for a step before the last one; ValueError where `ranks` does not divide the rows.
        """
        options = self.options
        chosen = place_samples(self.weights, options.seed, step, options.batch_rows)
        rows = [self._streams[source].row(sample) for source, sample in rank_slice(chosen, rank, ranks)]
        for stream, samples in zip(self._streams, self._samples(step + 1), strict=True):
            stream.leave(samples)
        return joined(rows)

    def position(self, steps: int) -> list[dict[str, Any]]:
        """The positions of the sources after `steps` steps, the last ones made, as JSON for `seek`."""
        begins = [stream.begin(samples) for stream, samples in zip(self._streams, self._samples(steps), strict=True)]
        return [{"window": number, "cursor": list(cursor)} for number, cursor in begins]

    def seek(self, position: Sequence[Mapping[str, Any]]) -> None:
        """Continues from a position that `position` returned, with the same sources and options."""
        for stream, place in zip(self._streams, position, strict=True):
            stream.seek(int(place["window"]), Cursor(*map(int, place["cursor"])))

    def epochs(self, steps: int) -> dict[str, float]:
        """The passes over each source until the window of its next row, by source name."""
        found = {}
        for stream, samples in zip(self._streams, self._samples(steps), strict=True):
            _, cursor = stream.begin(samples)
            found[stream.documents.name] = cursor.epoch + stream.documents.share(cursor, shuffle=stream.key)
        return found

    def close(self) -> None:
        """Ends the threads."""
        for stream in self._streams:
            if stream.making:
                stream.making.close()

    def _samples(self, steps: int) -> list[int]:
        return drawn_samples(steps * self.options.batch_rows, self.weights)
