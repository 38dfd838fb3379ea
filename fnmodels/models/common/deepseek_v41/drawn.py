"""The integers that `numpy.random.default_rng(seed).integers(0, high, count)` draws, by which DeepSeek hashes n-grams.

The seed is spread over a pool of four words (numpy's SeedSequence), which begins PCG64 (O'Neill, 2014; XSL RR 128/64);
an integer below `high` is the upper half of its product with 64 bits (Lemire, arXiv 1805.10941).
"""

_BITS32, _BITS64, _BITS128 = (1 << 32) - 1, (1 << 64) - 1, (1 << 128) - 1
_STEP = 0x2360ED051FC65DA44385DF649FCCF645


def integers(seed: int, high: int, count: int) -> list[int]:
    """`count` integers from 0 to high - 1. seed: below 2^32; high: above 2^32 and at most 2^63."""
    a, b, c, d = _state(seed)
    increment = (((c << 64 | d) << 1) | 1) & _BITS128
    state = ((increment + (a << 64 | b)) * _STEP + increment) & _BITS128
    found: list[int] = []
    while len(found) < count:
        state = (state * _STEP + increment) & _BITS128
        word, turn = (state >> 64) ^ (state & _BITS64), state >> 122
        product = ((word >> turn | word << (-turn & 63)) & _BITS64) * high
        if product & _BITS64 >= (1 << 64) % high:
            found.append(product >> 64)
    return found


def _state(seed: int) -> list[int]:
    """Four words of 64 bits, of numpy's SeedSequence."""
    constant, pool = 0x43B0D7E5, []
    for entropy in (seed, 0, 0, 0):
        pool.append(_hashed(entropy, constant, 0x931E8875))
        constant = constant * 0x931E8875 & _BITS32
    for source in range(4):
        for target in (i for i in range(4) if i != source):
            mixed = 0xCA01F9DD * pool[target] - 0x4973F715 * _hashed(pool[source], constant, 0x931E8875)
            constant = constant * 0x931E8875 & _BITS32
            pool[target] = (mixed & _BITS32) ^ (mixed & _BITS32) >> 16
    constant, words = 0x8B51F9DD, []
    for i in range(8):
        words.append(_hashed(pool[i % 4], constant, 0x58F38DED))
        constant = constant * 0x58F38DED & _BITS32
    return [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)]


def _hashed(value: int, constant: int, factor: int) -> int:
    value = (value ^ constant) * (constant * factor & _BITS32) & _BITS32
    return value ^ value >> 16
