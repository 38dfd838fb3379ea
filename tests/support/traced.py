"""torch.compile without generated code, for tests of what is traced: a C++ compiler would take most of their time."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_generated_code() -> Iterator[list[Any]]:
    """Graphs run their operations, forward and backward, one by one; they are in the list in the order of tracing."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[Any] = []
    compile = torch.compile

    def backend(module: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(module)
        return aot_eager(module, inputs)

    torch._dynamo.reset()
    torch.compile = functools.partial(compile, backend=backend)  # type: ignore[assignment]
    try:
        yield graphs
    finally:
        torch.compile = compile
        torch._dynamo.reset()
