"""Updates of large leaves in parts that stay in a CPU's cache between their passes."""

from collections.abc import Iterator

from torch import Tensor

SIZE = 1 << 18  # elements: 1 MiB of fp32; with fewer, calls take longer than passes


def cache_chunks(*tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """(index of the first element, views of the same elements of each tensor), in turn; the tensors have one shape.

    On a CPU they are flat views of SIZE elements, and a shorter last one: a function of several passes takes a third of
    the time or less by parts. Tensors of at most SIZE elements, on other devices or not contiguous are one part as they
    are.
    """
    count = tensors[0].numel()
    if count <= SIZE or not all(t.device.type == "cpu" and t.is_contiguous() for t in tensors):
        yield 0, list(tensors)
        return
    for first, *parts in zip(range(0, count, SIZE), *(t.view(-1).split(SIZE) for t in tensors), strict=True):
        yield first, parts
