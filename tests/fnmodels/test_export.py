"""Programs made of the forward pass: exported for any batch and length, saved and loaded; Inductor; AOTInductor."""

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.func import grad, grad_and_value, jacfwd, jacrev, jvp, vmap
from torch.nn.functional import cross_entropy

import fnmodels
from fnmodels import deepseek_v4, deepseek_v41, llama, tree
from fnmodels.tree import nodes
from tests.support.cases import (
    Case,
    batch_of,
    cases,
    generic_params,
    is_routed,
    richest,
    segments,
    short,
    shortest,
)
from tests.support.traced import quickly_compiled
from tests.variants import deepseek_v4 as deepseek_v4_variants
from tests.variants import deepseek_v41 as deepseek_v41_variants

SHAPES = ((3, 8), (2, 5), (4, 12), (1, 2))  # the first is exported, the others are run
FAMILIES = {case.family: case for case in richest()}
# One layer, where the number of layers only makes graphs longer.
SHORT = Case("llama", "short", None, llama.Config(32, 16, 24, 1, 4, 2, head_dim=8, tie_word_embeddings=True))
_GEMMA = dataclasses.replace(FAMILIES["gemma"].config, num_hidden_layers=1, layer_kinds=("sliding",))
SOFTCAP = Case("gemma", "softcap", None, _GEMMA)


# One of each way in which a program gets its shapes: tests/contract/test_compile.py traces the blocks of all.
# A mixer that goes along the sequence beside attention, no order, layers that run several times, windows with sinks and
# experts, chosen keys, convolutions, lent keys, latent keys, states of blocks with a bias of scores.
_NAMES = {"falcon_h1", "camembert", "ouro_expected", "gpt_oss", "glm_moe_dsa", "lfm2_moe", "gemma4_text_e"}
_NAMES |= {"longcat_flash_biases", "inkling2_short"}
EXPORTED = [short(case) for case in cases() if case.name in _NAMES]
assert {case.name for case in EXPORTED} == _NAMES
_LENT = ("indexed", "indexed_shared_moe")  # a layer that chooses keys, and one that takes its choice


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def symbols() -> Iterator[None]:
    """Shapes are symbols and seldom seen twice: torch's cache of results of such shapes takes a third of the time."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


class AsInput(torch.nn.Module):
    """The shell torch.export asks for; parameters are one more input."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, params: Any, inputs: Any, masks: Any, freqs_cis: Any) -> Tensor:
        return fnmodels.forward(params, inputs, masks, freqs_cis, config=self.config)


class AsState(torch.nn.Module):
    """The same, with the parameters saved in the program."""

    def __init__(self, config: Any, params: Any) -> None:
        super().__init__()
        self.config, self.flat = config, tree.flatten(params)
        for path, leaf in self.flat.items():
            self.register_parameter(path.replace(".", "/"), torch.nn.Parameter(leaf, requires_grad=False))

    def forward(self, inputs: Any, masks: Any, freqs_cis: Any) -> Tensor:
        params = tree.unflatten({path: getattr(self, path.replace(".", "/")) for path in self.flat})
        return fnmodels.forward(params, inputs, masks, freqs_cis, config=self.config)


def prepared(config: Any, batch: int, length: int) -> tuple[Any, Any, Any]:
    """Two documents in the first row, a pad at the end of each other."""
    rows = [(length // 2, length - length // 2), *[(length - 1, -1)] * (batch - 1)]
    return batch_of(config, segments(*rows)).prepared()


def dynamic(arguments: Any) -> ShapesCollection:
    """Batch and sequence of every tensor: one rule for all, so nothing has to be listed."""
    shapes = ShapesCollection()
    for tensor in tree.leaves(arguments):
        shapes[tensor] = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    return shapes


def exported(config: Any, shell: torch.nn.Module, *params: Any) -> ExportedProgram:
    arguments = prepared(config, *SHAPES[0])
    return export(shell, (*params, *arguments), dynamic_shapes=dynamic(arguments))


def assert_runs(config: Any, params: Any, run: Callable[..., Tensor], tolerance: float, shapes: Any = SHAPES) -> None:
    for shape in shapes:
        arguments = prepared(config, *shape)
        want = fnmodels.forward(params, *arguments, config=config)
        # Sums in another order differ by the rounding of their largest terms, also where the sum is small.
        atol = tolerance * max(1.0, float(want.abs().max()))
        torch.testing.assert_close(run(*arguments), want, rtol=tolerance, atol=atol)


def choosing(config: Any) -> Any:
    """With a choice of keys in every shape: a program with one is for rows of more than index_topk tokens."""
    counts = {field.name for field in dataclasses.fields(config)} & {"index_topk", "index_topk_blocks"}
    if set(_LENT) <= set(getattr(config, "layer_kinds", ())):
        config = dataclasses.replace(config, num_hidden_layers=len(_LENT), layer_kinds=_LENT)
    blocks = {"indexer_budget": 1, "indexer_compress_ratio": 1} if hasattr(config, "indexer_budget") else {}
    return dataclasses.replace(config, **dict.fromkeys(counts, 1), **blocks)


def tolerance_of(case: Case) -> float:
    """A graph computes experts as "dense" does, and eager mode as "loop" or "grouped"."""
    return 1e-5 if is_routed(case.config) else 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", [SOFTCAP, FAMILIES["mixtral"]], ids=str)
def test_export_with_parameters_as_input(case: Case, symbols: None) -> None:
    config = shortest(case.config)
    params = generic_params(config)
    program = exported(config, AsInput(config), params)
    file = io.BytesIO()
    program.example_inputs = None  # they are pickled, which torch refuses to read back; masks in the signature are not
    torch.export.save(program, file)
    file.seek(0)
    run = torch.export.load(file).module()
    assert_runs(config, params, lambda *arguments: run(params, *arguments), tolerance_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPORTED, ids=str)
def test_export_with_parameters_as_state(case: Case, symbols: None) -> None:
    config = choosing(case.config)
    params = generic_params(config)
    program = exported(config, AsState(config, params))
    assert len(program.state_dict) == len(tree.leaves(params))
    assert_runs(config, params, program.module(), tolerance_of(case))


def windowed(family: str) -> Any:
    """A layer that chooses 3 windows: of 2 tokens in DeepSeek V4.1, of 3 in V4."""
    if family == "deepseek_v41":
        config: Any = deepseek_v41.Config.from_hf(deepseek_v41_variants.PLAIN)
        kinds = ("indexed_by2_moe",)
    else:
        config, kinds = deepseek_v4.Config.from_hf(deepseek_v4_variants.TINY), ("indexed_moe",)
    assert config.index_topk == 3
    return dataclasses.replace(config, num_hidden_layers=1, layer_kinds=kinds, sinkhorn_iterations=1)


# (family, length that is exported, lengths that its program serves, those on which it raises), see docs/transforms.md
RANGES = [
    ("deepseek_v41", 12, (8, 20), (3, 5, 7)),
    ("deepseek_v41", 7, (6,), (3, 5, 8)),
    ("deepseek_v41", 5, (4,), (3, 6, 8)),
    ("deepseek_v41", 3, (2,), (4, 12)),
    ("deepseek_v4", 13, (12, 20), (5, 9, 11)),
    ("deepseek_v4", 7, (6, 11), (5, 12)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "length", "served", "refused"), RANGES, ids=str)
def test_a_program_that_chooses_windows_is_for_a_range_of_their_number(
    family: str, length: int, served: tuple[int, ...], refused: tuple[int, ...], symbols: None
) -> None:
    config = windowed(family)
    params, arguments = generic_params(config), prepared(config, 3, length)
    program = export(AsInput(config), (params, *arguments), dynamic_shapes=dynamic(arguments)).module()
    assert_runs(config, params, lambda *given: program(params, *given), 1e-5, [(2, size) for size in served])
    for size in refused:
        with pytest.raises(AssertionError, match="Guard failed"):
            program(params, *prepared(config, 2, size))


def test_a_saved_rule_is_the_same_rule() -> None:
    rule = fnmodels.inputs.Causal() & (fnmodels.inputs.Window(3) | fnmodels.inputs.SameSpan())
    context = nodes._from_json(nodes._to_json((("q", "k"), (("rule", rule),))))
    assert context == (("q", "k"), (("rule", rule),)) and hash(context[1][0][1]) == hash(rule)
    with pytest.raises(ValueError, match="no dataclass that is imported here"):
        nodes._from_json({"module": "os", "class": "system", "fields": {}})


def dot(a: Any, b: Any) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]).sum()


def transforms(config: Any, kernel: str = "math") -> dict[str, Callable[[Any, Any], Any]]:
    """Functions of (params, batch), each compiled as a whole: a compiled function inside torch.func runs eagerly."""

    def losses(params: Any, batch: Any) -> Tensor:
        """[B]."""
        arguments, labels = batch
        logits = fnmodels.forward(params, *arguments, config=config, kernel=kernel)
        each = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return each.view(labels.shape).sum(1)

    def loss(params: Any, batch: Any) -> Tensor:
        return losses(params, batch).sum()

    def scaled(width: Tensor, params: Any, batch: Any) -> Tensor:
        return losses(params | {"embed_tokens": params["embed_tokens"] * width}, batch)

    def ones(params: Any) -> Tensor:
        return torch.ones(params["embed_tokens"].shape[1])

    def squared_gradient(params: Any, batch: Any) -> Tensor:
        gradient = grad(loss)(params, batch)
        return dot(gradient, gradient)

    def members(params: Any) -> Any:
        return tree.map(lambda leaf: torch.stack((leaf, 0.5 * leaf)), params)

    return {
        "per sample": lambda p, batch: vmap(grad(loss), in_dims=(None, 0))(p, fnmodels.rows(batch)),
        "jvp": lambda p, batch: jvp(lambda q: loss(q, batch), (p,), (p,)),
        "hvp": lambda p, batch: jvp(lambda q: grad(loss)(q, batch), (p,), (p,))[1],
        "hvp, reverse over forward": lambda p, batch: grad(lambda q: jvp(lambda r: loss(r, batch), (q,), (p,))[1])(p),
        "double backward": lambda p, batch: grad(squared_gradient)(p, batch),
        "jacrev": lambda p, batch: jacrev(losses)(p, batch),
        "jacfwd": lambda p, batch: jacfwd(scaled)(ones(p), p, batch),
        "ensemble": lambda p, batch: vmap(grad_and_value(loss), in_dims=(0, None))(members(p), batch),
    }


INSIDE = ("hvp", "double backward", "jacrev", "ensemble")  # the others are parts of these
CELLS = [(SHORT, name) for name in INSIDE] + [(SOFTCAP, "per sample")]


def problem(config: Any) -> tuple[Any, Any]:
    batch = batch_of(config, segments((5, 2), (-1, 6)))
    return generic_params(config), (batch.prepared(), batch.labels)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), CELLS, ids=str)
def test_transforms_are_one_graph(case: Case, name: str) -> None:
    """AOTAutograd sees one of them, and those of each kernel in ops/test_kernels.py."""
    config, backend = shortest(case.config), "aot_eager" if name == "hvp" else "eager"
    function, arguments = transforms(config)[name], problem(config)
    got = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    for a, b in zip(tree.leaves(got), tree.leaves(function(*arguments)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(b.abs().max())))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jvp", "hvp, reverse over forward", "jacfwd"])
def test_a_fused_kernel_says_while_it_is_traced_that_it_has_no_forward_mode(name: str) -> None:
    function, arguments = transforms(SHORT.config, "sdpa")[name], problem(SHORT.config)
    with pytest.raises(Exception, match=r'kernel="sdpa" does not support.*kernel="math" supports all of them'):
        torch.compile(function, backend="eager", fullgraph=True)(*arguments)


@pytest.mark.slow
def test_inductor() -> None:
    params = generic_params(SHORT.config)
    run = torch.compile(AsInput(SHORT.config), fullgraph=True)
    # The second shape makes both dimensions dynamic; a batch of one would be compiled anew.
    with quickly_compiled():
        assert_runs(SHORT.config, params, lambda *arguments: run(params, *arguments), 1e-4, SHAPES[:3])


@pytest.mark.slow
def test_a_package_of_compiled_code(tmp_path: Path, symbols: None) -> None:
    """Of experts, and of every operation that a decoder needs."""
    config = shortest(FAMILIES["mixtral"].config)
    params = generic_params(config)
    program = exported(config, AsState(config, params))
    with quickly_compiled():
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert_runs(config, params, torch._inductor.aoti_load_package(path), 1e-4)
