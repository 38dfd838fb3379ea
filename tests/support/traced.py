"""torch.compile for tests: without generated code where what is traced is tested, else with little of it.

A C++ compiler would take most of their time.
"""

import contextlib
import functools
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def without_generated_code(*, lowered: bool = True) -> Iterator[list[Any]]:
    """Graphs run their operations, forward and backward, one by one; they are in the list in the order of tracing.

    lowered: as operations of ATen, derivatives among them, as code is generated from. Without, a quarter of the time
    less, graphs call torch's functions, and autograd is that of eager mode.
    """
    import torch._dynamo
    import torch._inductor
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[Any] = []
    compile, inductor = torch.compile, torch._inductor.compile

    def backend(module: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(module)
        return aot_eager(module, inputs) if lowered else module.forward

    torch._dynamo.reset()
    torch.compile = functools.partial(compile, backend=backend)  # type: ignore[assignment]
    torch._inductor.compile = backend
    try:
        yield graphs
    finally:
        torch.compile, torch._inductor.compile = compile, inductor
        torch._dynamo.reset()


@contextlib.contextmanager
def quickly_compiled() -> Iterator[None]:
    """Generated code has the flags of this package's own, whose precompiled headers other tests have made; the code of
    AOTInductor that calls its loops is not optimized."""
    from fnmodels.ops.torch_compilation import set_up_inductor

    set_up_inductor()
    flags = {"cpp.enable_floating_point_contract_flag": "fast", "aot_inductor.compile_wrapper_opt_level": "O0"}
    with sys.modules["torch"]._inductor.config.patch(flags):
        yield


def main(script: str) -> None:
    """Runs the script with the rest of the command line: `python -m tests.support.traced SCRIPT ...`."""
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    with without_generated_code(lowered=False):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
