"""Names that differ between releases of torch: private ones without a public form, and a keyword of varlen_attn.

Each private name is looked up once, with a fallback if it is missing, which gives the same results more slowly.
tests/fnmodels/ops/test_torch_internals.py says which names the installed torch has.
"""

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim.adamw import adamw

from fnmodels.inputs.values import aside, batched_gradient

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_PLAIN = (Tensor, torch.nn.Parameter)

# The transforms of torch.func around this call, outermost first: "Grad", "Vmap", "Jvp"; None if unknown. Dynamo enters
# them while it traces, so they are those of the code that it is tracing, and a constant of the graph.
transforms: Callable[[], tuple[str, ...] | None]  # made by __getattr__


def find(path: str) -> Any:
    """`torch.<path>`, or None if this torch has no such name."""
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


# {path below `torch`: the object, or None if missing}
PRIVATE: dict[str, Any] = {
    path: find(path)
    for path in (
        "_C._aoti.AOTIModelPackageLoader",
        "_C._functorch.get_interpreter_stack",
        "_C._functorch.peek_interpreter_stack",
        "_C._len_torch_dispatch_stack",
        "_C._len_torch_function_stack",
        "_functorch.pyfunctorch.temporarily_clear_interpreter_stack",
        "_foreach_norm",
        "_fused_adamw_",
        "_grouped_mm",
        "_scaled_mm",
        "_softmax_backward_data",
        "Tensor._version",
        "_convert_weight_to_int4pack_for_cpu",
        "_weight_int4pack_mm_for_cpu",
        "_weight_int8pack_mm",
        "cpu.get_capabilities",
        "distributed.distributed_c10d._get_default_store",
        "ops.aten._unsafe_view",
        "ops.mkldnn._is_mkldnn_bf16_supported",
        "ops.mkldnn._linear_pointwise",
        "ops.mkldnn._reorder_linear_weight",
    )
}
_CPU = found() if (found := PRIVATE["cpu.get_capabilities"]) else {}
# What oneDNN is held to, by the name of the last instructions that it may use.
_LIMIT = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
# Whether bf16 matrices are multiplied in tiles (AMX).
MATRIX_TILES = bool(_CPU.get("amx_bf16", False)) and (_LIMIT in ("ALL", "DEFAULT") or "AMX" in _LIMIT)
SECOND_LEVEL_CACHE = int(_CPU.get("l2_cache_size", 0)) or 1 << 20  # bytes per core; 1 MiB if unknown
# aten operators whose results selective rematerialization saves: matrix products and attention.
COSTLY = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def quiet() -> bool:
    """Whether no transform of torch.func and no mode is active. False if unknown."""
    interpreter = PRIVATE["_C._functorch.peek_interpreter_stack"]
    return without_modes() and interpreter is not None and interpreter() is None


def transformed() -> bool:
    """Whether a transform of torch.func is active. False if unknown."""
    interpreter = PRIVATE["_C._functorch.peek_interpreter_stack"]
    return not torch.compiler.is_compiling() and interpreter is not None and interpreter() is not None


def is_outermost() -> bool:
    """Whether this is eager code outside of all transforms of torch.func and of forward mode. False if unknown."""
    interpreter = PRIVATE["_C._functorch.peek_interpreter_stack"]
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) >= 0 or interpreter is None:
        return False
    return interpreter() is None


def needs_second_order() -> bool:
    """Whether the transforms of torch.func around this call include forward mode or two reverse modes."""
    if torch.compiler.is_compiling():
        from .torch_internals import transforms  # here, for making it imports dynamo

        active = transforms() or ()
    elif getattr(forward_ad, "_current_level", -1) >= 0:  # of torch.func.linearize, which is no transform there
        return True
    else:
        active = () if is_outermost() else _transforms() or ()
    return "Jvp" in active or active.count("Grad") > 1


def without_modes() -> bool:
    """Whether no mode is active: recorders, tracers, counters. False if unknown."""
    try:
        return not (PRIVATE["_C._len_torch_function_stack"]() or PRIVATE["_C._len_torch_dispatch_stack"]())
    except TypeError:  # None is no function
        return False


def traced() -> bool:
    """Whether eager code is traced with values that must not be read, as `torch.func.linearize` does it."""
    return not (torch.compiler.is_compiling() or without_modes() or get_proxy_mode() is None)


def undisturbed(function: Callable[..., T], *args: Any) -> T:
    """function(*args) of plain tensors, outside of all transforms and modes."""
    if quiet():
        return function(*args)
    without_transforms = PRIVATE["_functorch.pyfunctorch.temporarily_clear_interpreter_stack"]
    if without_transforms is None or not without_modes():
        return aside(function, *args)
    with without_transforms():
        return function(*args)


def differentiated_once(*tensors: Tensor) -> bool:
    """Whether the only derivative of these tensors is that of one `torch.func.grad` or `vjp` around this call.

    There may be vmaps around both. False if unknown, under modes, and outside of torch.func, where a later call may ask
    for a second derivative.
    """
    stack = PRIVATE["_C._functorch.get_interpreter_stack"]
    levels = stack() if stack is not None and without_modes() else None
    names = sorted(level.key().name for level in levels or ())
    if names[:1] != ["Grad"] or set(names[1:]) - {"Vmap"}:
        return False
    inner = [torch.func.debug_unwrap(t) for t in tensors]
    return not any(t.requires_grad or forward_ad.unpack_dual(t).tangent is not None for t in inner)


def is_plain_eager(*tensors: Tensor, cuda: bool = False) -> bool:
    """Whether these are dense CPU tensors and only reverse-mode autograd is active, so that a custom Function is safe.

    cuda: they may be CUDA tensors too.

    False under torch.func's transforms, forward mode, modes of any kind (recorders, tracers, counters, selective
    checkpoints), autocast and compilation, which handle torch's operations but not ours.
    """
    if torch.compiler.is_compiling() or not quiet() or _autocast(cuda):
        return False
    for t in tensors:  # a loop, for each linear layer of a decoding step asks
        if type(t) not in _PLAIN or not (t.is_cpu or (cuda and t.is_cuda)) or t.layout is not torch.strided:
            return False
        if batched_gradient(t):
            return False
    return all(forward_ad.unpack_dual(t).tangent is None for t in tensors)


def _autocast(cuda: bool) -> bool:
    return torch.is_autocast_enabled("cpu") or (cuda and torch.is_autocast_enabled("cuda"))


def in_graph(*tensors: Tensor, cuda: bool = False) -> bool:
    """`is_plain_eager` for a custom operator in a graph of torch.compile: no transform of torch.func is active in it.

    False under torch.export, whose graphs run elsewhere and with sizes that are not known yet.
    """
    from .torch_internals import transforms  # here, for making it imports dynamo

    plain = all(type(t) in _PLAIN and (t.is_cpu or (cuda and t.is_cuda)) for t in tensors)
    return plain and not torch.compiler.is_exporting() and not _autocast(cuda) and transforms() == ()


def traced_as_constant(function: Function) -> Function:
    """The function; dynamo calls it and takes the result as a constant.

    `torch.compiler.assume_constant_result` does the same, and imports dynamo.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def __getattr__(name: str) -> Any:
    """`transforms`, created when traced code imports it, because marking its result as a constant imports dynamo."""
    if name != "transforms":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    marked = torch.compiler.assume_constant_result(_transforms)
    globals()[name] = marked
    return marked


def _transforms() -> tuple[str, ...] | None:
    stack = PRIVATE["_C._functorch.get_interpreter_stack"]
    return None if stack is None else tuple(interpreter.key().name for interpreter in stack() or ())


def has_onednn_linear() -> bool:
    """Whether `onednn_linear` is oneDNN's product."""
    return PRIVATE["ops.mkldnn._linear_pointwise"] is not None and torch.backends.mkldnn.is_available()


def has_bf16_products() -> bool:
    """Whether oneDNN multiplies in bf16 on this CPU, which needs AVX-512 on x86; True if unknown."""
    supported = PRIVATE["ops.mkldnn._is_mkldnn_bf16_supported"]
    return supported is None or bool(supported())


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None = None) -> Tensor:
    """F.linear by oneDNN, not differentiable. gelu: "none" or "tanh", to apply F.gelu with this `approximate` too."""
    product = PRIVATE["ops.mkldnn._linear_pointwise"]
    bias = None if bias is None else bias.contiguous()  # oneDNN reads it without its strides
    if product is None:
        y = F.linear(x, weight, bias)
        return y if gelu is None else F.gelu(y, approximate=gelu)
    attribute: tuple[Any, ...] = ("none", [], "") if gelu is None else ("gelu", [], gelu)
    result: Tensor = product(x, weight, bias, *attribute)
    return result


def no_view(result: Tensor) -> Tensor:
    """`result` of a custom Function as a tensor of its own: autograd refuses operations in place on its views."""
    unsafe_view = PRIVATE["ops.aten._unsafe_view"]
    unviewed: Tensor = result if unsafe_view is None else unsafe_view(result, result.shape)
    return unviewed


def onednn_layout(weight: Tensor) -> Tensor:
    """weight [out, in] in the layout that suits oneDNN, for `onednn_linear` alone; unchanged if this torch has none."""
    reorder, product = PRIVATE["ops.mkldnn._reorder_linear_weight"], PRIVATE["ops.mkldnn._linear_pointwise"]
    packed: Tensor = weight if reorder is None or product is None else reorder(weight)
    return packed


def int8_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x bf16 [n, in] times codes int8 [out, in], scaled by scales bf16 [out]: bf16 [n, out]."""
    product = PRIVATE["_weight_int8pack_mm"]
    result: Tensor = F.linear(x, codes.to(x.dtype)) * scales if product is None else product(x, codes, scales)
    return result


def int4_layout(codes: Tensor) -> Tensor:
    """codes int32 [out, in] of 0 to 15 as `int4_linear` reads them; unchanged if this torch has no such product."""
    pack = PRIVATE["_convert_weight_to_int4pack_for_cpu"]
    packed: Tensor = codes if pack is None or PRIVATE["_weight_int4pack_mm_for_cpu"] is None else pack(codes, 2)
    return packed


def int4_linear(x: Tensor, codes: Tensor, group: int, scales: Tensor) -> Tensor:
    """x bf16 [n, in] times (codes - 8) * scale + middle; scales bf16 [in / group, out, 2] holds both: bf16 [n, out]."""
    product = PRIVATE["_weight_int4pack_mm_for_cpu"]
    if product is not None and codes.dtype is not torch.int32:
        result: Tensor = product(x, codes, group, scales)
        return result
    scale, middle = (t.T[..., None] for t in scales.float().unbind(-1))
    weight = (codes.unflatten(1, (-1, group)) - 8) * scale + middle
    return F.linear(x, weight.flatten(1).to(x.dtype))


def softmax_backward(grad: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the scores in `dtype`, given the gradient of p = softmax(scores, -1)."""
    backward = PRIVATE["_softmax_backward_data"]
    if backward is None:
        scaled = grad * p
        return (scaled - p * scaled.sum(-1, keepdim=True)).to(dtype)
    grad_scores: Tensor = backward(grad, p, -1, dtype)
    return grad_scores


def fused_adamw_(
    lists: tuple[list[Tensor], ...], count: Tensor, *, lr: float | Tensor, found_inf: Tensor | None, **numbers: float
) -> None:
    """AdamW in place on (params, gradients, first moments, second moments), for update number `count`, 0-d fp32.

    numbers: beta1, beta2, weight_decay and eps. found_inf, 0-d fp32: 1 leaves every tensor unchanged.
    """
    params, grads, firsts, seconds = lists
    options: dict[str, Any] = {"lr": lr, "amsgrad": False, "maximize": False, "found_inf": found_inf, **numbers}
    step = PRIVATE["_fused_adamw_"]
    if step is None:  # the public function counts each parameter's counter up
        counts = [(count - 1).clone() for _ in params]
        adamw(params, grads, firsts, seconds, [], counts, fused=True, **options)
        return
    if isinstance(lr, Tensor):
        options["lr"] = lr.to(count.device)
    step(params, grads, firsts, seconds, [], [count] * len(params), grad_scale=None, **options)


def vector_norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The Euclidean norm of each tensor, 0-d, computed in `dtype`; the tensors have one device and dtype."""
    norms = PRIVATE["_foreach_norm"]
    if norms is None:
        return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
    results: Sequence[Tensor] = norms(tensors, dtype=dtype)
    return results


def is_grouped_product(function: Any) -> bool:
    """Whether `function` is F.grouped_mm, which is written in Python, or the operator that it calls."""
    return function is not None and function in (F.grouped_mm, PRIVATE["_grouped_mm"])


def costly_operators() -> list[Any]:
    """The operators of COSTLY that this torch has; results of missing ones are recomputed."""
    return [getattr(torch.ops.aten, name).default for name in COSTLY if hasattr(torch.ops.aten, name)]


def version(tensor: Tensor) -> int | None:
    """The number of in-place writes to `tensor`; None if unknown. RuntimeError for inference tensors."""
    return None if PRIVATE["Tensor._version"] is None else tensor._version


_version_of = operator.attrgetter("_version")


def versions(tensors: Iterable[Tensor]) -> list[int] | None:
    """`version` of each; None where torch does not count writes, as into inference tensors."""
    if PRIVATE["Tensor._version"] is None:
        return None
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:
        return None


def default_store() -> Any:
    """The store of the default process group; None if unknown."""
    get = PRIVATE["distributed.distributed_c10d._get_default_store"]
    return None if get is None else get()


def dtensor_like(local: Tensor, leaf: Any) -> Tensor | None:
    """`local` as a DTensor with the placement of `leaf`, a DTensor, in a tenth of the time of `DTensor.from_local`.

    None where they differ in dtype or device, where a gradient, a transform or a mode would see it, and if unknown.
    """
    spec = getattr(leaf, "_spec", None)
    if spec is None or torch.is_grad_enabled() or not quiet() or torch.compiler.is_compiling():
        return None
    if (local.dtype, local.device) != (leaf.dtype, leaf.device):
        return None
    made: Tensor = type(leaf)(local, spec, requires_grad=False)
    return made


def varlen_attention(grouped: bool) -> Callable[..., Tensor]:
    """torch's varlen_attn. Older releases detect grouped queries; newer ones need a flag, which is bound here."""
    from torch.nn.attention.varlen import varlen_attn

    needs_flag = grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters
    call: Any = functools.partial(varlen_attn, enable_gqa=True) if needs_flag else varlen_attn
    return cast("Callable[..., Tensor]", call)


def scaled_product(x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """x [M, K] weight [K, N] in float8, each with one scale, in `dtype`. torch 2.11 cannot trace F.scaled_mm."""
    (x_scale, weight_scale), by_tensor = scales, F.ScalingType.TensorWise
    if x.device.type == "cpu":  # oneDNN has no product of e4m3 below AMX, and torch asks the processor, not oneDNN
        return (x.float() @ weight.float() * x_scale * weight_scale).to(dtype)
    product = PRIVATE["_scaled_mm"]
    if product is None:
        return F.scaled_mm(x, weight, x_scale, by_tensor, weight_scale, by_tensor, output_dtype=dtype)
    y: Tensor = product(x, weight, x_scale, weight_scale, out_dtype=dtype)
    return y
