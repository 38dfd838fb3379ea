"""What a graph that is being traced is traced under. Import this where something is compiled: it imports dynamo.

Dynamo enters the transforms of torch.func while it traces, so the answers are those of the code that it is tracing.
"""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_interpreter_stack


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.maybe_current_level() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def forward_mode() -> bool:
    """Whether one of them is jvp, alone or around or inside of others (jacfwd, Hessian products)."""
    return any(interpreter.key() == TransformType.Jvp for interpreter in get_interpreter_stack() or ())
