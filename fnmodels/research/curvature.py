"""Curvature as linear operators over params trees: Hessian, Gauss-Newton, Fisher, NTK, spectra, traces, influence.

An operator is a function from a tree to a tree with the structure of the params: no matrix is ever formed. All sums are
over what the loss or the forward function sums: divide by a count there, or divide the products.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from fnmodels import tree
from fnmodels.ops.unread import unread_gradients
from fnmodels.tree import Tree

from .compiled import CompiledBlocks

Operator = Callable[[Tree], Tree]


def hvp(loss: Callable[[Tree, Any], Tensor], params: Tree, batch: Any, *, compile: str | None = None) -> Operator:
    """Products with the Hessian of a loss, v -> H v.

    The gradient and its graph are made once; each product is one backward pass through them, without a forward pass.
    The graph is kept as long as the operator. The kernel must have a second derivative ("math" has).

    Args:
        loss: (params, batch) -> 0-d tensor.
        params: The tree of parameters, where the Hessian is taken.
        batch: Passed to `loss`.
        compile: A backend of torch.compile ("inductor") for the blocks that fnmodels.forward runs in `loss`, compiled
            once per kind of layer in the first product, which takes a minute or more. The gradient's graph is made anew
            for each product; on a CPU the reused eager operator was faster: leave it out there. None: eager.

    Returns:
        The function of a tree like `params`.

    Raises:
        ValueError: Leaves of params are not floating, or the loss runs no blocks to compile.
    """
    _check_floating(params)
    if compile is not None:
        compiled = functools.partial(CompiledBlocks(compile), loss)
        return lambda vector: _hessian_product(*_gradient_graph(compiled, params, batch), params, vector, keep=False)
    graph = _gradient_graph(loss, params, batch)
    return lambda vector: _hessian_product(*graph, params, vector, keep=True)


def _gradient_graph(
    loss: Callable[[Tree, Any], Tensor], params: Tree, batch: Any
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """(leaves, gradients of the loss with a graph, whose values are not computed)."""
    tracked = tree.map(lambda leaf: leaf.detach().requires_grad_(), params)
    inputs = tree.leaves(tracked)
    with torch.enable_grad(), unread_gradients():
        value = _tensor_of(loss(tracked, batch), "loss")
        return inputs, torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)


def _hessian_product(
    inputs: list[Tensor], gradients: tuple[Tensor, ...], params: Tree, vector: Tree, *, keep: bool
) -> Tree:
    vectors = tree.leaves(_ordered(params, vector))
    curved = [(g, v) for g, v in zip(gradients, vectors, strict=True) if g.requires_grad]
    if not curved:  # the loss is linear in every parameter
        return tree.map(torch.zeros_like, params)
    outputs, cotangents = zip(*curved, strict=True)
    results = iter(torch.autograd.grad(outputs, inputs, cotangents, retain_graph=keep, materialize_grads=True))
    return tree.map(lambda _: next(results), params)


def ggn_vp(
    forward: Callable[[Tree, Any], Tensor],
    loss: Callable[[Tensor, Any], Tensor],
    params: Tree,
    batch: Any,
    *,
    compile: str | None = None,
) -> Operator:
    """Products with the generalized Gauss-Newton matrix, v -> J^T H J v (Schraudolph 2002).

    J is the Jacobian of `forward` with respect to params, H the Hessian of `loss` with respect to its outputs. The
    kernel must have a forward-mode derivative ("math" has).

    Args:
        forward: (params, batch) -> a tensor of any shape.
        loss: (outputs, batch) -> 0-d tensor.
        params: The tree of parameters, where the matrix is taken.
        batch: Passed to both functions.
        compile: A backend of torch.compile for the blocks, as for `hvp`; None: eager.

    Returns:
        The function of a tree like `params`.

    Raises:
        ValueError: Leaves of params are not floating.
    """

    def curvature(outputs: Tensor, u: Tensor) -> Tensor:
        gradient = grad(lambda o: _tensor_of(loss(o, batch), "loss"))
        product: Tensor = jvp(gradient, (outputs,), (u,))[1]
        return product

    if compile is not None:
        return _compiled_gauss_newton(forward, curvature, params, batch, CompiledBlocks(compile))
    return _gauss_newton(forward, curvature, params, batch)


def fisher_vp(logits: Callable[[Tree, Any], Tensor], params: Tree, batch: Any) -> Operator:
    """Products with the true Fisher matrix of a softmax, v -> F v: its expectation over labels drawn from the model.

    It equals `ggn_vp` with the summed cross entropy.

    Args:
        logits: (params, batch) -> [..., V], summed over all leading dimensions: leave out the positions without a label
            (`logits[labels != -100]`).
        params: The tree of parameters, with floating leaves.
        batch: Passed to `logits`.

    Returns:
        The function of a tree like `params`.
    """

    def curvature(outputs: Tensor, u: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        return p * (u - (p * u).sum(-1, keepdim=True))

    return _gauss_newton(logits, curvature, params, batch)


def empirical_fisher_vp(losses: Callable[[Tree, Any], Tensor], params: Tree, batch: Any) -> Operator:
    """Products with the empirical Fisher matrix, v -> sum_n g_n (g_n . v), where g_n is the gradient of loss n.

    No gradient g_n is stored.

    Args:
        losses: (params, batch) -> [n], of rows or tokens, as the function sums them.
        params: The tree of parameters, with floating leaves.
        batch: Passed to `losses`.

    Returns:
        The function of a tree like `params`.
    """
    return _gauss_newton(losses, lambda _, u: u, params, batch)


def empirical_ntk(
    outputs: Callable[[Tree, Any], Tensor], params: Tree, batch: Any, *, chunk: int | None = None
) -> Tensor:
    """The empirical neural tangent kernel (arXiv 1806.07572): inner products of the gradients of outputs.

    Args:
        outputs: (params, batch) -> [n], a number per row or token.
        params: The tree of parameters.
        batch: Passed to `outputs`.
        chunk: Half the number of gradients that are in memory at once, which takes n / (2 chunk) times as long; None: n
            gradients.

    Returns:
        [n, n].

    Raises:
        TypeError: The outputs are no tensor.
        ValueError: The outputs have another shape, or leaves are not floating.
    """
    _check_floating(params)
    values, pullback = vjp(lambda p: _tensor_of(outputs(p, batch), "function"), params)[:2]
    if values.ndim != 1:
        raise ValueError(f"outputs must return [n], one number per row or token, not {list(values.shape)}.")
    parts = torch.eye(len(values), dtype=values.dtype, device=values.device).split(chunk or max(1, len(values)))

    def gradients(directions: Tensor) -> list[Tensor]:
        return [leaf.flatten(1) for leaf in tree.leaves(vmap(pullback)(directions)[0])]

    total = values.new_zeros(len(values), len(values))
    for index, part in enumerate(parts):
        rows, first = gradients(part), index * len(parts[0])
        for place, other in enumerate(parts[index:], index):
            columns, begin = rows if place == index else gradients(other), place * len(parts[0])
            block = torch.stack([row @ column.T for row, column in zip(rows, columns, strict=True)]).sum(0)
            total[first : first + len(part), begin : begin + len(other)] = block
            total[begin : begin + len(other), first : first + len(part)] = block.T
    return total


def lanczos(operator: Operator, start: Tree, steps: int) -> tuple[Tensor, Tensor]:
    """Ritz values of a symmetric operator by the Lanczos iteration; each new vector is made orthogonal to all before
    it, twice.

    The weighted Ritz values are the spectral density that `start` sees: for random starts their mean estimates that of
    the operator, and the largest and smallest values converge to the extreme eigenvalues. It holds k trees.

    Args:
        operator: A function of trees, such as of `hvp`.
        start: The first vector, a tree.
        steps: The number of products at most; it stops earlier where the Krylov space ends.

    Returns:
        Ritz values [k], ascending, and their weights [k], which sum to 1, with k <= steps.
    """
    vector, inverse = tree.ravel(start)
    basis = [vector / vector.norm()]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(min(steps, len(vector))):
        product = tree.ravel(_ordered(start, operator(inverse(basis[-1]))))[0]
        diagonal.append(basis[-1] @ product)
        size = product.norm()
        span = torch.stack(basis)
        for _ in range(2):
            product = product - span.T @ (span @ product)
        rest = product.norm()
        if rest <= 100 * torch.finfo(rest.dtype).eps * size:
            break
        beside.append(rest)
        basis.append(product / rest)
    off = torch.stack(beside[: len(diagonal) - 1]) if len(diagonal) > 1 else vector.new_empty(0)
    values, vectors = torch.linalg.eigh(torch.stack(diagonal).diag() + off.diag(1) + off.diag(-1))
    return values, vectors[0].square()


def hutchinson_trace(operator: Operator, params: Tree, samples: int, generator: torch.Generator) -> Tensor:
    """Unbiased estimates of an operator's trace, z . A z for random signs z (Hutchinson 1989).

    Args:
        operator: A function of trees, such as of `hvp`.
        params: A tree of the operator's structure, of which shapes and dtypes are read.
        samples: The number of estimates, each of one product.
        generator: Draws the signs, on the CPU.

    Returns:
        [samples].
    """

    def signs(leaf: Tensor) -> Tensor:
        return (2 * torch.randint(2, leaf.shape, generator=generator) - 1).to(leaf)

    draws = (tree.map(signs, params) for _ in range(samples))
    return torch.stack([tree.vdot(z, operator(z)) for z in draws])


def conjugate_gradients(
    operator: Operator, right: Tree, *, damping: float = 0.0, tolerance: float = 1e-6, steps: int = 100
) -> Tree:
    """Solves (A + damping I) x = right for a symmetric operator A for which the sum is positive definite.

    Args:
        operator: A function of trees, such as of `ggn_vp`.
        right: The right side, a tree.
        damping: Added to the diagonal.
        tolerance: Of the residual's norm, relative to that of `right`.
        steps: The number of products at most.

    Returns:
        x, a tree like `right`.

    Raises:
        ValueError: A direction of negative curvature is met (raise `damping`, or take `ggn_vp`), or `steps` steps do
            not reach the tolerance.
    """
    x = tree.map(torch.zeros_like, right)
    residual = direction = right
    squared = tree.vdot(residual, residual)
    limit = tolerance**2 * squared
    for _ in range(steps):
        if squared <= limit:
            return x
        product = tree.axpy(damping, direction, operator(direction))
        curvature = tree.vdot(direction, product)
        if not curvature > 0:
            raise ValueError(
                f"The operator plus damping {damping} is not positive definite: a direction has curvature "
                f"{float(curvature):.3g}. Raise the damping, or take the Gauss-Newton operator (ggn_vp)."
            )
        scale = squared / curvature
        x, residual = tree.axpy(scale, direction, x), tree.axpy(-scale, product, residual)
        before, squared = squared, tree.vdot(residual, residual)
        direction = tree.axpy(squared / before, direction, residual)
    if squared <= limit:
        return x
    reached = tolerance * float((squared / limit).sqrt())
    raise ValueError(
        f"{steps} steps of conjugate gradients leave a relative residual of {reached:.3g}, "
        f"above the tolerance {tolerance}: allow more steps or raise the damping {damping}."
    )


def influence(operator: Operator, row_gradients: Tree, query: Tree, **options: Any) -> Tensor:
    """Influence functions (arXiv 1703.04730): -g_n (A + damping I)^-1 query for each training row n.

    It is minus the derivative of the query's loss by the weight of the row: a negative entry lowers the query's loss
    where the row weighs more.

    Args:
        operator: The curvature A of the training loss.
        row_gradients: Leaves [n, *shape], as of `fnmodels.per_sample_gradients`.
        query: The gradient of the loss that is explained.
        **options: damping, tolerance and steps of `conjugate_gradients`, whose errors it raises.

    Returns:
        [n].
    """
    solved = conjugate_gradients(operator, query, **options)
    parts = tree.map(lambda rows, x: rows.flatten(1) @ x.reshape(-1), row_gradients, solved)
    total: Tensor = sum(tree.leaves(parts))
    return -total


def _gauss_newton(
    forward: Callable[[Tree, Any], Tensor], curvature: Callable[[Tensor, Tensor], Tensor], params: Tree, batch: Any
) -> Operator:
    """v -> J^T curvature(outputs, J v)."""
    _check_floating(params)

    def outputs_of(p: Tree) -> Tensor:
        return _tensor_of(forward(p, batch), "function")

    outputs, pullback = vjp(outputs_of, params)[:2]

    def product(vector: Tree) -> Tree:
        along = jvp(outputs_of, (params,), (_ordered(params, vector),))[1]
        (result,) = pullback(curvature(outputs, along))
        return result

    return product


def _compiled_gauss_newton(
    forward: Callable[[Tree, Any], Tensor],
    curvature: Callable[[Tensor, Tensor], Tensor],
    params: Tree,
    batch: Any,
    blocks: CompiledBlocks,
) -> Operator:
    """J v is the derivative of (J^T u) . v by u: compiled blocks have reverse mode alone."""
    _check_floating(params)

    def product(vector: Tree) -> Tree:
        tracked = tree.map(lambda leaf: leaf.detach().requires_grad_(), params)
        inputs, vectors = tree.leaves(tracked), tree.leaves(_ordered(params, vector))
        with torch.enable_grad():
            outputs = _tensor_of(blocks(forward, tracked, batch), "function")
            u = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(outputs, inputs, u, create_graph=True, materialize_grads=True)
            along = torch.autograd.grad(pulled, u, vectors)[0]
            right = curvature(outputs.detach(), along)
            results = iter(torch.autograd.grad(outputs, inputs, right, materialize_grads=True))
        return tree.map(lambda _: next(results), params)

    return product


def _ordered(params: Tree, vector: Tree) -> Tree:
    """`vector` with its dicts in the order of the params', which torch.func.jvp asks for."""
    return tree.map(lambda _, value: value, params, vector)


def _tensor_of(found: Any, what: str) -> Tensor:
    """The result of a caller's function; TypeError unless it is a tensor, as (sum, count) of a train loss is not."""
    if isinstance(found, Tensor):
        return found
    kind = type(found).__name__
    raise TypeError(f"The {what} returned a {kind}; return one tensor, such as the sum of a train loss's (sum, count).")


def _check_floating(params: Tree) -> None:
    wrong = [path for path, leaf in tree.flatten(params).items() if not leaf.is_floating_point()]
    if wrong:
        raise ValueError(f"Only floating parameters have a curvature; {wrong[0]!r} is not: close over it in the loss.")
