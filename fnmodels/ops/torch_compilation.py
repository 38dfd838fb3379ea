"""torch.compile, Inductor, AOTInductor and CUDA graphs as this package calls them.

Private names are used where no public one exists.
"""

import gc
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnmodels import tree

from .torch_internals import PRIVATE, find

T = TypeVar("T")
Compiled = Callable[..., Sequence[Any]]  # of a graph: its tensors, in their order -> its outputs

WARM_UPS = 2  # libraries choose their kernels and take their workspaces in the first runs before a capture


def full_graph(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile with fullgraph=True and `options`, by Inductor as `set_up_inductor` leaves it."""
    set_up_inductor()
    return torch.compile(function, fullgraph=True, **options)


def set_up_inductor() -> None:
    """Imports what a compilation needs and sets what Inductor leaves open; settings of the caller stay.

    Without the test of the C++ compiler: Inductor knows the CPU's vector instructions, and compiles torch's vector
    headers three times to see whether the compiler has them too: 6 to 8 s of the first start. A compiler that is new
    enough for these headers has them, and AVX-512's bf16 and VNNI, which are newer, are still tested.

    The width of vectors is that of the instructions in use, said aloud: so it is in the key of Inductor's cache on
    disk, which would else give a process loops of another width, with ATEN_CPU_CAPABILITY=avx2 or from another machine.

    Imports make many objects and no garbage: collecting meanwhile takes a tenth of a start that finds its code on disk.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch._inductor.compile_fx
        import torch._inductor.config

        cpp: Any = getattr(torch._inductor.config, "cpp", None)  # a release without a setting has no attribute for it
        if getattr(cpp, "vec_isa_ok", False) is None:
            cpp.vec_isa_ok = True
        instructions = find("_inductor.cpu_vec_isa.pick_vec_isa")
        if instructions is not None and getattr(cpp, "simdlen", 0) is None and (isa := instructions()):
            cpp.simdlen = isa.bit_width()
    finally:
        if collecting:
            gc.enable()


def one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """`full_graph`. Newer releases count the graphs of each such call apart; older ones raise when all calls for
    functions with the same code, such as one step for each of many models, have more than 8 in sum."""
    # Guards on globals ask whether this package's functions are still the same: half of the guards, 0.2 ms a call.
    inductor: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
    inductor["size_asserts"] = False  # guards have compared the sizes of arguments
    inductor["cpp.enable_floating_point_contract_flag"] = "fast"  # fused multiply-add
    options: dict[str, Any] = {"options": inductor}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    return full_graph(function, **options)


def traces_gradients() -> bool:
    """Whether this torch traces torch.autograd.grad, see `gradient_graph`."""
    import torch._dynamo.config

    return hasattr(torch._dynamo.config, "trace_autograd_ops")


def gradient_graph(
    function: Callable[..., T], around: Callable[[Compiled], Compiled] | None = None
) -> Callable[..., T]:
    """`full_graph` of a function that calls torch.autograd.grad, for one size of each argument.

    around: makes of the compiled code what is called in its place, once guards have passed.

    Unlike torch.func.grad it lets the graph have custom operators, which have derivatives for autograd alone. Guards on
    the globals of these packages and of torch are left out, as in `one_graph`; those of other modules stay, because a
    loss may read them.

    On a CPU the graph's kernels are called from C++: at two layers a step has 85 of them, and calling these from Python
    takes a sixth of it.
    """
    inductor: dict[str, Any] = {"size_asserts": False, "cpp_wrapper": not torch.cuda.is_available()}
    # The calls are one C++ function, for which g++ -O3 takes 280 s at twelve layers, and 18 s with less optimization.
    inductor["cpp_wrapper_build_separate"] = True
    filtered: dict[str, Any] = {"guard_filter_fn": _guards_of_callers}
    options: dict[str, Any] = {"options": filtered | inductor}
    if around is not None:

        def backend(module: Any, inputs: Any) -> Compiled:
            return around(torch._inductor.compile(module, inputs, options=inductor))

        options = {"options": filtered, "backend": backend}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled = full_graph(function, dynamic=False, **options)

    def run(*args: Any) -> T:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled(*args)

    return run


def without_guards() -> Any:
    """A context in which compiled code is called without the guards that it passed before."""
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


def _guards_of_callers(guards: Sequence[Any]) -> list[bool]:
    """For each guard, whether it is kept: not those on globals of these packages' modules and of torch."""
    fixed = re.compile(r"G\['(__import_(torch|fnmodels|params|train|einops|math|functools)(_dot_|'))|__builtins")
    return [not (guard.is_global and fixed.search(guard.name)) for guard in guards]


def beside(stream: torch.cuda.Stream, run: Callable[[], T]) -> T:
    """run() on this stream, between what the current stream has been given before and what it is given after."""
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        made = run()
    here.wait_stream(stream)
    return made


def capture(run: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """(the CUDA graph of what run() launches, which has not run yet; its result, which each replay writes).

    run() has run `WARM_UPS` times before, `beside` this stream. pool: the memory of a graph that is never replayed at
    the same time; None: its own. Another thread, such as a loader's, may use the device meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph leaves its stream the current one where the capture fails.
    capturing = torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local")
    with torch.cuda.stream(stream), capturing:
        made = run()
    return graph, made


def fill(held: Any, given: Any) -> None:
    """Copies the tensors of a tree into those of another, where they are not the same."""

    def copy(mine: Any, new: Any) -> Any:
        return mine.copy_(new) if isinstance(mine, Tensor) and mine is not new else mine

    tree.map(copy, held, given)


def trace_errors() -> tuple[type[Exception], ...]:
    """The exceptions that torch.compile raises for code that it cannot compile."""
    import torch._dynamo.exc

    return (torch._dynamo.exc.TorchDynamoException,)


def has_compiler_to_files() -> bool:
    """Whether this torch can load what `compile_to_file` writes."""
    return PRIVATE["_C._aoti.AOTIModelPackageLoader"] is not None


def compile_to_file(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    path: Path,
    *,
    sizes_of_last: tuple[int, int] | None,
) -> None:
    """Compiles function(*tensors) of plain CPU tensors into a package of AOTInductor at `path` (`*.pt2`).

    sizes_of_last: the least and the most that dimension 0 of the last tensor may have; None: as it is. All other sizes,
    strides and the number of threads are constants of the code, and are not checked by it.
    """
    set_up_inductor()
    import torch._inductor

    def forward(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return function(*tensors)

    graph: Any = torch.nn.Module()  # torch.export takes no function
    graph.forward = forward
    sizes: list[Any] = [None] * len(tensors)
    if sizes_of_last is not None:
        least, most = sizes_of_last
        sizes[-1] = {0: torch.export.Dim("last", min=least, max=most)}
    with torch.no_grad():
        program = torch.export.export(graph, (list(tensors),), dynamic_shapes=(sizes,), strict=False)
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"size_asserts": False, "cpp.enable_floating_point_contract_flag": "fast"},
        )


def load_compiled(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """The function that `compile_to_file` compiled. RuntimeError: the file is damaged."""
    package = PRIVATE["_C._aoti.AOTIModelPackageLoader"](str(path), "model", False, 1, -1)
    run: Callable[[list[Tensor]], list[Tensor]] = package.boxed_run
    return run


def guarded_true(condition: bool | torch.SymBool) -> bool:
    """Whether this holds, with a guard on the sizes of the graph; False where sizes are unknown until it runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # here, for it imports sympy

    return bool(guard_or_false(condition))


def mark_dynamic(tensor: Tensor, dim: int, *, required: bool = True) -> None:
    """Makes this size a symbol of the graphs compiled for `tensor`, from the first on.

    required: torch raises for code that needs a number.
    """
    (torch._dynamo.mark_dynamic if required else torch._dynamo.maybe_mark_dynamic)(tensor, dim)
