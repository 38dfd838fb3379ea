"""The calls that a traced loss may make: the functions, the form of their arguments, and the elements that they cost.

A graph may come from anybody, so the size of each result is known before its call, and a `Budget` bounds their sum.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ELEMENTS = 1 << 22  # of a value within a loss at most
BUDGET = 1 << 28  # elements of all steps over the data of a call: those of 250 steps over a million tokens
LEAST = 256  # elements that a step costs at least, for a call takes time by itself
SORTING, SORTS = 16, ("sort", "topk", "median")  # elements that each element of these costs, for they take longer
PARTS = 64  # of a tuple within a loss at most

_BOTH = """
    abs add sub mul div true_divide neg exp expm1 log log1p log2 log10 logsumexp sqrt rsqrt square pow reciprocal sign
    sigmoid tanh relu softmax log_softmax clamp clip clamp_min clamp_max minimum maximum min max amin amax sum mean var
    std median cumsum logcumsumexp prod where eq ne lt le gt ge logical_and logical_or logical_not logical_xor isfinite
    isnan isinf nan_to_num flip roll gather index_select any all argmax argmin unsqueeze squeeze reshape flatten
    transpose sin cos erf floor ceil round numel sort topk count_nonzero masked_fill detach
"""
_FUNCTIONS = f"{_BOTH} logaddexp xlogy zeros_like ones_like full_like stack cat sgn lerp"
_METHODS = f"{_BOTH} float double long int bool to type_as view view_as expand_as size dim clone contiguous"
METHODS = frozenset(_METHODS.split())
_OF_NN = """
    softplus logsigmoid relu gelu silu elu hardtanh leaky_relu sigmoid tanh softmax log_softmax smooth_l1_loss mse_loss
    l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
"""
_OPERATORS = "add sub mul truediv neg pos abs pow lt le gt ge eq ne and_ or_ xor invert not_ getitem floordiv mod"
_MATH = "exp log log2 log10 log1p sqrt floor ceil fabs isfinite"
_ATTRIBUTES, _PARTS = ("shape", "ndim", "dtype", "T", "mT"), ("values", "indices")  # of tensors, and of pairs of them

CALLS: dict[str, Callable[..., Any]] = {f"torch.{name}": getattr(torch, name) for name in _FUNCTIONS.split()}
CALLS |= {f"torch.nn.functional.{name}": getattr(F, name) for name in _OF_NN.split()}
CALLS |= {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
CALLS |= {f"math.{name}": getattr(math, name) for name in _MATH.split()}
CALLS |= {"torch._C._nn.softplus": F.softplus, "torch._C._nn.log_sigmoid": F.logsigmoid, "torch._C._nn.gelu": F.gelu}

# Keyword arguments: none that writes into a tensor, or makes one on another device or in another layout.
_KEYWORDS = """
    input self other tensors dim dims axis keepdim keepdims dtype min max correction unbiased descending stable shifts
    index k largest sorted nan posinf neginf reduction beta alpha negative_slope min_val max_val threshold weight
    pos_weight log_target delta approximate condition mask value fill_value rounding_mode exponent end target start_dim
    end_dim dim0 dim1 shape size decimals eps _stacklevel size_average reduce
"""
KEYWORDS = frozenset(_KEYWORDS.split())
# of functions that can write into their input: the positional arguments before "inplace"
_BEFORE_INPLACE = {"relu": 1, "silu": 1, "elu": 2, "hardtanh": 3, "leaky_relu": 2}
_OWN_SIZES = ("getitem", "getattr", "gather", "view_as", "type_as", "to", "numel", "size", "dim")


class Budget:
    """The elements that the steps of a loss may still have, over all data of a call, in whatever rows they are."""

    def __init__(self, elements: int = BUDGET) -> None:
        self.elements = self.left = elements

    def spend(self, elements: int) -> None:
        """Takes from the budget. ValueError where it is spent."""
        self.left -= max(elements, LEAST)
        if self.left < 0:
            raise ValueError(
                f"the steps up to here have more than {self.elements:,} elements over the data of a call, which is "
                "all that they may have."
            )


@dataclass(frozen=True)
class Call:
    """A call of an allowed function or method. target: its name. args, kwargs: values, the tensor of a method first."""

    target: str
    is_method: bool
    args: list[Any]
    kwargs: dict[str, Any]

    @cached_property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.rpartition(".")[2]

    def result(self, budget: Budget) -> Any:
        """The value. ValueError or TypeError, before anything is made, for one that would be too large."""
        if self.is_method and (not self.args or not isinstance(self.args[0], Tensor)):
            raise TypeError("a method needs a tensor.")
        if self.target.startswith("operator."):
            self._check_operands()
        if self.name == "to":
            self._check_conversion()
        size = self._size()
        _check_size(size)
        read = max((one.numel() for one in self._tensors), default=0)
        budget.spend(max(size, read) * (SORTING if self.name in SORTS else 1))
        return _checked(self._run())

    def _run(self) -> Any:
        if self.is_method:
            return getattr(self.args[0], self.target)(*self.args[1:], **self.kwargs)
        if self.target == "getattr":
            return self._attribute()
        if self.target == "operator.pow" and not self._tensors:
            return _power(*self.args)
        return CALLS[self.target](*self.args, **self.kwargs)

    def _attribute(self) -> Any:
        if len(self.args) != 2 or self.kwargs:
            raise TypeError("getattr needs a tensor and a name.")
        held, attribute = self.args
        names: tuple[str, ...] = _ATTRIBUTES if isinstance(held, Tensor) else ()
        if isinstance(held, tuple) and hasattr(held, "values"):
            names = _PARTS
        if not isinstance(attribute, str) or attribute not in names:
            raise ValueError(f"the attribute {attribute!r} may not be read; of a tensor there are {_ATTRIBUTES}.")
        return getattr(held, attribute)

    def _check_operands(self) -> None:
        """TypeError for a text, list or tuple, of which an operator makes another that is as long as one likes."""
        if self.target == "operator.getitem":
            if not self.args or not isinstance(self.args[0], (Tensor, tuple)):
                raise TypeError("an index needs a tensor or a tuple.")
            return
        for one in self.args:
            if not isinstance(one, (Tensor, bool, int, float)):
                raise TypeError(f"{type(one).__name__} is neither a tensor nor a number.")

    def _check_conversion(self) -> None:
        """TypeError for another conversion than that to a dtype or to the dtype of a tensor."""
        given = [*self.args[1:], *self.kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], (torch.dtype, Tensor)):
            raise TypeError("a tensor is converted to a dtype alone; it stays on its device.")

    @cached_property
    def _tensors(self) -> list[Tensor]:
        """The tensors among the arguments, and those in a list or tuple of them."""
        found = []
        for one in (*self.args, *self.kwargs.values()):
            parts = one if isinstance(one, (list, tuple)) else (one,)
            found += [part for part in parts if isinstance(part, Tensor)]
        return found

    def _size(self) -> int:
        """The elements of the result, or a bound of them, by the shapes of the tensors alone."""
        tensors = self._tensors
        if self.name in ("stack", "cat"):
            given = self.args[0] if self.args else self.kwargs.get("tensors")
            if not isinstance(given, (list, tuple)) or not all(isinstance(one, Tensor) for one in given):
                raise TypeError("a list of tensors is needed.")
            return sum(one.numel() for one in given)
        if self.name == "index_select":
            args = [_shape_alone(one) for one in self.args]
            kwargs = {name: _shape_alone(one) for name, one in self.kwargs.items()}
            return torch.index_select(*args, **kwargs).numel()
        if self.name == "getitem":
            held = self.args[0]
            if len(self.args) != 2 or not isinstance(held, Tensor):
                return 0
            return 0 if len(tensors) == 1 and _is_view(self.args[1]) else _indexed(held, self.args[1])
        if self.name in _OWN_SIZES:
            return max((one.numel() for one in tensors), default=0)
        if self.name == "where" and len(tensors) == 1 and len(self.args) + len(self.kwargs) == 1:
            return tensors[0].numel() * max(tensors[0].ndim, 1)  # the places of what is true
        if tensors and all(one.shape == tensors[0].shape for one in tensors):
            return tensors[0].numel()
        return math.prod(torch.broadcast_shapes(*(one.shape for one in tensors))) if tensors else 0


def _check_size(elements: int) -> None:
    if elements > ELEMENTS:
        raise ValueError(f"a value would have {elements:,} elements; {ELEMENTS:,} are allowed.")


def _power(base: Any, exponent: Any) -> Any:
    """The power of numbers, an integer where both are and it has 64 bits at most."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if abs(base) > 1 and exponent > 64:
            raise ValueError("an integer is beyond 64 bits.")
        return base ** (exponent if abs(base) > 1 else min(exponent, 2 + exponent % 2))
    return float(base) ** float(exponent)


def _shape_alone(given: Any) -> Any:
    """A tensor of the same shape without elements; anything else as it is."""
    if not isinstance(given, Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")


def _is_view(index: Any) -> bool:
    """True for an index of numbers, slices, None and ellipses, which takes no memory."""
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(one, (list, tuple, Tensor)) for one in parts)


def _indexed(held: Tensor, index: Any) -> int:
    """The elements of a tensor at an index that has tensors or lists."""
    parts = index if isinstance(index, tuple) else (index,)
    made = tuple(one for part in parts for one in _index_shapes(part))
    return _shape_alone(held)[made].numel()


def _index_shapes(part: Any) -> Sequence[Any]:
    """A part of an index, without the elements of its tensors."""
    if isinstance(part, slice):  # its ends may be tensors, whose numbers a shape does not have
        ends = (None if isinstance(one, Tensor) else one for one in (part.start, part.stop, part.step))
        return (slice(*ends),)
    if isinstance(part, (list, tuple)):
        if any(isinstance(one, (Tensor, list, tuple)) for one in part):
            raise TypeError("a list within an index has numbers alone.")
        length = sum(part) if all(isinstance(one, bool) for one in part) else len(part)
        return (torch.empty(length, dtype=torch.int64, device="meta"),)
    if not isinstance(part, Tensor):
        return (part,)
    if part.dtype != torch.bool:
        return (torch.empty(part.shape, dtype=torch.int64, device="meta"),) if part.ndim else (0,)
    places = torch.empty(int(part.sum()), dtype=torch.int64, device="meta")
    return (places,) * part.ndim if part.ndim else (None,)


def _checked(value: Any) -> Any:
    """The value of a step. ValueError or TypeError for one of another kind, or that is too large."""
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    if len(parts) > PARTS:
        raise ValueError(f"a tuple has {len(parts):,} parts; {PARTS} are allowed.")
    for one in parts:
        if isinstance(one, int) and abs(one) >= 2**63:
            raise ValueError("an integer is beyond 64 bits.")
        if not isinstance(one, (Tensor, bool, int, float, torch.dtype)):
            raise TypeError(f"a {type(one).__name__} is no value of a step: a tensor, a number or a few of them.")
        if isinstance(one, Tensor):
            _check_size(one.numel())  # again, for a view by another dtype
    return value


def check_keywords(name: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """ValueError for a call that could write into its input, or make a tensor elsewhere.

    name: of the loss, for the sentence. args, kwargs: in the form in which they travel.
    """
    if wrong := sorted(key for key, one in kwargs.items() if key not in KEYWORDS and (key, one) != ("inplace", False)):
        raise ValueError(f"The custom loss {name!r} calls {target!r} with {wrong[0]!r}, which it may not pass here.")
    most = _BEFORE_INPLACE.get(target.rpartition(".")[2]) if target.startswith("torch.nn.functional.") else None
    if most is not None and any(one is not False for one in args[most:]):
        raise ValueError(f"The custom loss {name!r} calls {target!r} with 'inplace', which it may not pass here.")
