"""What a graph that is being traced is traced under. Import this where something is compiled: it imports dynamo."""

from __future__ import annotations

import torch
from torch._C._functorch import get_interpreter_stack


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transforms() -> tuple[str, ...]:
    """The transforms of torch.func around this call, outermost first: "Grad", "Vmap", "Jvp".

    Dynamo enters them while it traces, so it is those of the code that it is tracing; and a constant of the graph.
    """
    return tuple(interpreter.key().name for interpreter in get_interpreter_stack() or ())
