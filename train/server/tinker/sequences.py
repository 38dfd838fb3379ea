"""Sampled sequences that training passes name: their tokens, and the experts that computed these.

A client samples with `record_stability_info`, and says of its data by `Datum.with_provenance` which tokens are those of
which sequence. A pass over such data replays the sampler's experts.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.generation.routing import replayable
from train.integrations.tinker import types
from train.integrations.tinker.packed import ROUTING

from .wire import Span

BYTES = 1 << 30  # of all recorded experts; the oldest sequences are forgotten


@dataclass(frozen=True)
class Recorded:
    """A prompt and its answer. routing: the experts of all tokens but the last, [tokens, layers with experts, k]."""

    prompt: list[int]
    answer: list[int]
    routing: Tensor


class Sequences:
    """Recorded sequences by their ids, which begin with that of their session.

    Args:
        limit: Bytes of the experts that are kept at most.
    """

    def __init__(self, limit: int = BYTES) -> None:
        self._known, self._limit, self._size = OrderedDict[str, Recorded](), limit, 0

    def keep(self, sequence_id: str, recorded: Recorded) -> None:
        """Records a sequence, in place of the oldest ones where there is no room."""
        before = self._known.pop(sequence_id, None)
        self._known[sequence_id] = recorded
        self._size += recorded.routing.nbytes - (0 if before is None else before.routing.nbytes)
        while self._size > self._limit and len(self._known) > 1:
            self._size -= self._known.popitem(last=False)[1].routing.nbytes

    def forget(self, session: str) -> None:
        """Forgets the sequences of a session."""
        for name in [name for name in self._known if name.partition(":")[0] == session]:
            self._size -= self._known.pop(name).routing.nbytes

    def replayed(
        self, data: Sequence[types.Datum], spans: Sequence[Sequence[Span]], session: str
    ) -> tuple[list[types.Datum], int]:
        """(the data with the experts of the sequences that they name, the number of these tokens).

        ValueError for a span of another length, of tokens that the sequence does not have, or of one that is not there,
        and for a target that is predicted from a token without experts.
        """
        found, count = [], 0
        for number, (datum, own) in enumerate(zip(data, spans, strict=True)):
            if not own:
                found.append(datum)
                continue
            tokens = datum.model_input.to_ints()
            routing = self._routing(number, tokens, own, session)
            if len(routing) < len(tokens) and _trains_last(datum):
                raise ValueError(
                    f"Datum {number} has a target behind the last token of a sequence, which the sampler has not "
                    "computed: leave that token out of the input, or give it the target -100 or a weight of 0."
                )
            count += len(routing)
            inputs = {**datum.loss_fn_inputs, ROUTING: types.Routing(replayable(routing, len(tokens)))}
            found.append(types.Datum(datum.model_input, inputs))
        return found, count

    def _routing(self, number: int, tokens: list[int], spans: Sequence[Span], session: str) -> Tensor:
        """The experts of a datum's tokens; the last one may have none."""
        at, pieces = 0, list[Tensor]()
        for span in spans:
            recorded = self._known.get(span.sequence_id)
            if recorded is None or span.sequence_id.partition(":")[0] != session:
                raise ValueError(
                    f"Datum {number} names the sequence {span.sequence_id!r}, which is not recorded: sample with "
                    "record_stability_info=True, and train on it in the same session, before it is forgotten."
                )
            whole, first = recorded.prompt + recorded.answer, span.offset + span.sampled * len(recorded.prompt)
            end = first + span.length
            if end > (len(whole) if span.sampled else len(recorded.prompt)):
                raise ValueError(f"Datum {number} names more tokens than the sequence {span.sequence_id!r} has.")
            if tokens[at : at + span.length] != whole[first:end]:
                raise ValueError(f"Tokens of datum {number} are not those of the sequence {span.sequence_id!r}.")
            at += span.length
            if end > len(recorded.routing) and at < len(tokens):
                raise ValueError(
                    f"Datum {number} goes on behind the last token of the sequence {span.sequence_id!r}, which the "
                    "sampler has not computed: name the prompt that contained it."
                )
            pieces.append(recorded.routing[first:end])
        if at != len(tokens):
            raise ValueError(f"The spans of datum {number} have {at} tokens; it has {len(tokens)}.")
        return torch.cat(pieces)


def _trains_last(datum: types.Datum) -> bool:
    """Whether the last token of a datum predicts a target that counts."""
    last = {name: values.to_torch().flatten()[-1:].tolist() for name, values in datum.loss_fn_inputs.items()}
    ignored = last.get("target_tokens") == [-100]
    return not ignored and not any(last.get(name) == [0] for name in ("weights", "advantages", "mask"))
