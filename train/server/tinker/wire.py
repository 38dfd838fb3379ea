"""The protobuf messages of Tinker's protocol: requests of a training pass, and its results and answers.

The format of protobuf is a list of (number of the field, value), so that two small functions read and write it.
"""

import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnmodels.models.common.config_json import shown
from train.integrations.tinker import types

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # of the enum DType
Fields = dict[int, list[Any]]  # integers of varints, bytes of all others, in order
_NUMPY = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}
CELLS = 1 << 24  # of a table that is sent sparse, at most
EMPTY = -99999.0  # the log-probability of a cell of a table without a token


@dataclass(frozen=True)
class Values:
    """Numbers of a datum, in the form that `types.Datum` takes."""

    tensor: Tensor

    def to_torch(self) -> Tensor:
        """The numbers."""
        return self.tensor


@dataclass(frozen=True)
class Span:
    """Tokens of a datum, which are those of a sequence's prompt, or sampled ones, from `offset` on."""

    sampled: bool
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True)
class TrainingPass:
    """A message ForwardBackwardRequest. spans: of each datum the sequences of its tokens, empty where it names none."""

    model_id: str
    seq_id: int
    data: list[types.Datum]
    spans: list[list[Span]]
    loss_fn: str
    config: dict[str, float]
    texts: dict[str, str]  # those of the numbers that are texts, such as the id of a custom loss
    forward_only: bool


def place_of(data: bytes) -> tuple[str, int] | tuple[None, None]:
    """(model_id, seq_id) of a message ForwardBackwardRequest, whatever else is wrong in it; None where they are not
    to be read."""
    try:
        fields = _fields(data, None)
        return _text(fields, 1), _last(fields, 2)
    except ValueError:
        return None, None


def training_pass(data: bytes) -> TrainingPass:
    """The message in the body of a request. ValueError for other bytes, and for what is not supported."""
    fields = _fields(data, 7)
    config = {_text(pair, 1): _double(pair, _text(pair, 1)) for pair in _messages(fields, 5, 2)}
    # newer clients write numbers a second time, beside texts
    values = {_text(pair, 1): _fields(_last_bytes(pair, 2), 2) for pair in _messages(fields, 7, 2)}
    texts = {name: _text(value, 2) for name, value in values.items() if 2 in value}
    config |= {name: _double({2: value.get(1, [])}, name) for name, value in values.items() if name not in texts}
    data_of = _messages(fields, 3, 4)
    return TrainingPass(
        _text(fields, 1),
        _last(fields, 2),
        [_datum(one) for one in data_of],
        [[_span(span) for span in _messages(one, 3, 2)] for one in data_of],
        _text(fields, 4),
        config,
        texts,
        bool(_last(fields, 6)),
    )


def _double(pair: Fields, name: str) -> float:
    """The number of an entry of loss_fn_config, 0 where the message leaves it out."""
    double = _last_bytes(pair, 2) if pair.get(2) else bytes(8)
    if len(double) != 8:
        raise ValueError(f"loss_fn_config has {len(double)} bytes as {name!r}; a number has 8.")
    number: float = struct.unpack("<d", double)[0]
    return number


def _datum(fields: Fields) -> types.Datum:
    chunks = [_chunk(chunk) for chunk in _messages(fields, 1, 3)]
    inputs = {}
    for pair in _messages(fields, 2, 2):
        inputs[_text(pair, 1)] = Values(_tensor(_fields(_last_bytes(pair, 2), 4)))
    return types.Datum(types.ModelInput(chunks), inputs)


def _chunk(fields: Fields) -> types.Chunk:
    if texts := _messages(fields, 1, 1):
        return types.EncodedTextChunk(_array(_last_bytes(texts[-1], 1), np.int32).tolist())
    images = _messages(fields, 2, 4)
    if not images:
        raise ValueError("A chunk of a datum is neither encoded text nor an image; sounds are not supported here.")
    image = images[-1]
    if 4 in image:
        raise ValueError("An image of a datum has override_dimensions, which are not supported here: leave them out.")
    expected = _last(image, 3) if 3 in image else None
    return types.ImageChunk(_last_bytes(image, 1), _text(image, 2), expected)


def _span(fields: Fields) -> Span:
    sampled = 2 in fields
    found = _messages(fields, 2 if sampled else 1, 3)
    if not found:
        raise ValueError("A span of a datum names neither tokens of a prompt nor sampled ones.")
    return Span(sampled, _text(found[-1], 1), _last(found[-1], 2), _last(found[-1], 3))


def _array(data: bytes, dtype: Any) -> "np.ndarray[Any, Any]":
    """A copy of the numbers in bytes. ValueError for a part of a number."""
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise ValueError(f"The numbers of a datum have {len(data)} bytes, which is no multiple of {size}.")
    return np.frombuffer(data, dtype).copy()


def _tensor(fields: Fields) -> Tensor:
    """An entry of a datum, dense also where the message has it in compressed sparse rows."""
    sparse = _messages(fields, 2, 3)
    kind, raw = _last(fields, 3), _last_bytes(sparse[-1] if sparse else fields, 1)
    if kind == BFLOAT16:
        values = torch.from_numpy(_array(raw, np.int16)).view(torch.bfloat16).float()
    elif kind in _NUMPY:
        values = torch.from_numpy(_array(raw, _NUMPY[kind]))
    else:
        raise ValueError(f"An entry of a datum has the dtype {kind}, which is none of the protocol.")
    shape = _shape(fields)
    if sparse:
        rows, columns = (torch.from_numpy(_array(_last_bytes(sparse[-1], part), np.int64)) for part in (2, 3))
        return dense(values, rows, columns, shape)
    if shape and (len(shape) > 8 or math.prod(shape) != len(values) or max(shape) > max(1, len(values))):
        raise ValueError(f"An entry of a datum has {len(values)} numbers, which are none of the shape {shown(shape)}.")
    return values.reshape(shape) if shape else values


def _shape(fields: Fields) -> list[int]:
    return [size for part in fields.get(4, []) for size in (_varints(part) if isinstance(part, bytes) else [part])]


def dense(values: Tensor, rows: Tensor, columns: Tensor, shape: Sequence[int], fill: int = 0) -> Tensor:
    """A table in compressed sparse rows, `fill` where it has no value. ValueError for one that is none.

    rows: where each row begins among the values, and the end of the last one. columns: of each value.
    """
    if len(shape) != 2 or min(shape) < 1 or shape[0] != len(rows) - 1 or math.prod(shape) > CELLS:
        raise ValueError(
            f"A sparse entry has {len(rows)} row indices and the shape {shown(list(shape))}; it needs two sizes, one "
            f"row index more than rows, and {CELLS:,} cells at most."
        )
    counts = rows.diff()
    ordered = rows[0] == 0 and rows[-1] == len(values) == len(columns) and bool((counts >= 0).all())
    if not ordered or bool(((columns < 0) | (columns >= shape[1])).any()):
        raise ValueError(f"A sparse entry with {len(values)} values has row or column indices that are none of them.")
    found = values.new_full(tuple(shape), fill)
    found[torch.repeat_interleave(counts), columns] = values
    return found


def training_output(output: types.ForwardBackwardOutput, replayed: int = 0) -> bytes:
    """The message ForwardBackwardOutput: records with the numbers of data of as many columns behind each other.

    replayed: tokens whose experts were those of their sampler, a metric where there are some.
    """
    message = _field(1, output.loss_fn_output_type.encode())
    for _, group in itertools.groupby(output.loss_fn_outputs, _columns):
        message += _field(2, _record(list(group)))
    metrics = output.metrics | ({"routing/replayed:sum": replayed} if replayed else {})
    for name, value in metrics.items():
        message += _field(3, _field(1, name.encode()) + _field(2, float(value)))
    return message


def _columns(outputs: Mapping[str, types.TensorData]) -> list[list[int]]:
    return [(one.shape or [0])[1:] for one in outputs.values()]


def _record(outputs: Sequence[Mapping[str, types.TensorData]]) -> bytes:
    """The message ArrayRecord of data whose outputs have as many columns."""
    record = b""
    for name, columns in zip(outputs[0], _columns(outputs[0]), strict=True):
        each = [np.asarray(one[name].data, np.float32) for one in outputs]
        offsets = np.cumsum([0, *(len(one) * 4 for one in each)], dtype=np.int64)
        batched = _field(1, np.concatenate(each).tobytes()) + _field(2, offsets.tobytes()) + _field(3, FLOAT32)
        batched += b"".join(_field(4, size) for size in columns)
        record += _field(2, _field(1, name.encode()) + _field(2, batched))
    return record + _field(3, len(outputs))


@dataclass(frozen=True)
class Drawn:
    """An answer: tokens with nats, whether it ended by a stop, and the likeliest tokens of each place (or none)."""

    tokens: list[int]
    logp: list[float]
    stopped: bool
    likeliest: list[Sequence[tuple[int, float]]]


Likeliest = Sequence[Sequence[tuple[int, float]] | None]


@dataclass(frozen=True)
class DrawnPrompt:
    """What a SampleResponse says of a prompt; None: nothing.

    targets: the message Tensor with further tokens' log-probabilities. drawn: those with drawn tokens, and their nats.
    """

    logp: Sequence[float | None] | None = None
    likeliest: Likeliest | None = None
    targets: bytes | None = None
    drawn: tuple[bytes, bytes] | None = None


def sample_output(answers: Sequence[Drawn], prompt: DrawnPrompt, answer_k: int, prompt_k: int) -> bytes:
    """The message SampleResponse. answer_k, prompt_k: columns of the tables of likeliest tokens; 0: no table."""
    message = b""
    for answer in answers:
        part = _field(1, 0 if answer.stopped else 1) + _field(2, np.asarray(answer.tokens, np.int32).tobytes())
        part += _field(3, np.asarray(answer.logp, np.float32).tobytes())
        if answer_k:
            part += _field(4, _table(answer.likeliest, answer_k))
        message += _field(1, part)
    if prompt.logp is not None:
        nats = np.asarray([np.nan if one is None else one for one in prompt.logp], np.float32)
        message += _field(2, nats.tobytes())
    if prompt_k and prompt.likeliest is not None:
        message += _field(3, _table(prompt.likeliest, prompt_k))
    if prompt.targets is not None:
        message += _field(5, prompt.targets)
    if prompt.drawn is not None:
        message += _field(6, b"".join(_field(number, one) for number, one in enumerate(prompt.drawn, 1)))
    return message


def tensor_message(
    values: "np.ndarray[Any, Any]",
    shape: Sequence[int],
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> bytes:
    """The message Tensor of float32 or int64; rows, columns: of compressed sparse rows, as in `dense`."""
    kind = FLOAT32 if values.dtype == np.float32 else INT64
    if rows is None or columns is None:
        message = _field(1, values.tobytes())
    else:
        parts = (values.tobytes(), rows.numpy().tobytes(), columns.numpy().tobytes())
        message = _field(2, b"".join(_field(number, part) for number, part in enumerate(parts, 1)))
    return message + _field(3, kind) + b"".join(_field(4, size) for size in shape)


def _table(rows: Likeliest, k: int) -> bytes:
    ids, nats = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), EMPTY, np.float32)
    for place, row in enumerate(rows):
        for rank, (token, logp) in enumerate((row or ())[:k]):
            ids[place, rank], nats[place, rank] = token, logp
    return _field(1, ids.tobytes()) + _field(2, nats.tobytes()) + _field(3, k) + _field(4, len(rows))


def _fields(data: bytes, last: int | None) -> Fields:
    """{number: values in order}: integers of varints, bytes of all others. ValueError for bytes that are no message.

    last: the last number that the message has in the protocol, beyond which a field is refused; None: any is taken.
    """
    found: Fields = {}
    for number, value in _read(data):
        if last is not None and not 0 < number <= last:
            raise ValueError(f"A message has a field {number}, which is none of the {last} that this server knows.")
        found.setdefault(number, []).append(value)
    return found


def _read(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            size, at = _varint(data, at)
        if (not size and kind != 2) or at + size > len(data):
            raise ValueError("The body is no message of the protocol: a field goes beyond its end.")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 and value < 2**64:
            return value, at
    raise ValueError("The body is no message of the protocol: a number does not end.")


def _varints(data: bytes) -> list[int]:
    at, found = 0, list[int]()
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return _number(number << 3 | 2) + _number(len(value)) + value
    if isinstance(value, float):
        return _number(number << 3 | 1) + struct.pack("<d", value)
    return _number(number << 3) + _number(value)


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _messages(fields: Fields, number: int, last: int | None) -> list[Fields]:
    """All messages that stand under a number. ValueError for something else there. last: as in `_fields`."""
    if not all(isinstance(value, bytes) for value in fields.get(number, [])):
        raise ValueError(f"The field {number} of a message must be a message.")
    return [_fields(value, last) for value in fields.get(number, [])]


def _last(fields: Mapping[int, list[Any]], number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"The field {number} of a message must be a number.")
    return value


def _last_bytes(fields: Mapping[int, list[Any]], number: int) -> bytes:
    value = fields.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"The field {number} of a message must be bytes.")
    return value


def _text(fields: Mapping[int, list[Any]], number: int) -> str:
    try:
        return _last_bytes(fields, number).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"The field {number} of a message must be a text in UTF-8.") from error
