"""Messages of training passes with bytes that are not those of the protocol: each gets a sentence, as ValueError."""

import random
import struct
from typing import Any

import numpy as np
import pytest

from train.server.tinker.wire import training_pass


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message."""

    def varint(size: int) -> bytes:
        found = bytearray()
        while size > 127:
            found.append(size & 127 | 128)
            size >>= 7
        return bytes([*found, size])

    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    return varint(number << 3) + varint(value)


NUMBERS = np.arange(6, dtype=np.float32).tobytes()


def _datum(tensor: bytes) -> bytes:
    chunk = field(1, field(1, np.arange(6, dtype=np.int32).tobytes()))
    return field(3, field(1, chunk) + field(2, field(1, b"weights") + field(2, tensor)))


def _good() -> bytes:
    message = field(1, b"model") + field(2, 1) + _datum(field(1, NUMBERS) + field(3, 1) + field(4, 2) + field(4, 3))
    message += field(4, b"ppo") + field(5, field(1, b"low") + field(2, 0.5))
    return message + field(6, 0) + field(7, field(1, b"high") + field(2, field(1, 0.5)))


WRONG: list[tuple[Any, str]] = [
    (_datum(field(1, NUMBERS) + field(3, 1) + field(4, 5)), r"has 6 numbers, which are none of the shape \[5\]"),
    (_datum(field(1, NUMBERS) + field(3, 1) + field(4, 2**63)), "none of the shape"),
    (_datum(field(1, NUMBERS) + field(3, 1) + field(4, 2**65)), "a number does not end"),
    (_datum(field(3, 1) + field(4, 0) + field(4, 2**62) + field(4, 2**62)), "none of the shape"),
    (_datum(field(1, NUMBERS) + field(3, 1) + b"".join(field(4, 1) for _ in range(70)) + field(4, 6)), "of the shape"),
    (_datum(field(1, NUMBERS[:-1]) + field(3, 1)), "have 23 bytes, which is no multiple of 4"),
    (_datum(field(1, NUMBERS) + field(3, 9)), "has the dtype 9"),
    (_datum(field(1, 7) + field(3, 1)), "field 1 of a message must be bytes"),
    (field(5, field(1, b"low") + field(2, b"half")), "has 4 bytes as 'low'; a number has 8"),
    (field(5, field(1, b"low") + field(2, 3)), "field 2 of a message must be bytes"),
    (field(5, 3), "field 5 of a message must be a message"),
    (field(7, field(1, b"low") + field(2, 3)), "field 2 of a message must be bytes"),
    (field(3, 3), "field 3 of a message must be a message"),
    (field(3, field(1, 3)), "field 1 of a message must be a message"),
    (field(3, field(1, field(1, 3))), "field 1 of a message must be a message"),
    (field(1, b"\xff\xfe"), "must be a text in UTF-8"),
    (field(1, 3), "field 1 of a message must be bytes"),
    (field(2, b"1"), "field 2 of a message must be a number"),
    (field(99, b"x"), "has a field 99, which is none of the 7 that this server knows"),
    (field(3, field(5, b"x")), "has a field 5, which is none of the 4"),
    (_datum(field(1, NUMBERS) + field(3, 1) + field(6, 1)), "has a field 6, which is none of the 4"),
    (field(3, field(3, field(1, field(9, 1)))), "has a field 9, which is none of the 3"),
    (field(7, field(1, b"low") + field(2, field(3, 1))), "has a field 3, which is none of the 2"),
    (field(7, field(1, b"low") + field(2, field(1, b"half"))), "has 4 bytes as 'low'; a number has 8"),
]


@pytest.mark.parametrize(("message", "words"), WRONG)
def test_a_wrong_message_gets_a_sentence(message: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        training_pass(message)


def test_numbers_of_a_loss_are_read_from_both_places() -> None:
    """Newer clients write them twice; texts stand in the second place alone."""
    assert training_pass(_good()).config == {"low": 0.5, "high": 0.5}


def test_no_damage_of_a_message_is_another_error() -> None:
    """Bytes that are changed, left out and put in: each message is read, or is refused as ValueError."""
    assert training_pass(_good()).data[0].loss_fn_inputs["weights"].to_torch().shape == (2, 3)
    rng, refused = random.Random(0), 0
    for _ in range(4000):
        data = bytearray(_good())
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            kind = rng.randrange(3)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at]
            else:
                data.insert(at, rng.randrange(256))
        try:
            training_pass(bytes(data))
        except ValueError:
            refused += 1
    assert 1000 < refused < 4000
