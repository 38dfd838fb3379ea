"""`kernel="invariant"` over meshes: the bits of a token's log-probability do not depend on the mesh, given its tp."""

import dataclasses
import functools
import json
import warnings
from typing import Any

import pytest
import torch

import fnmodels
import train
from fnmodels import llama, tree
from tests.support.cases import cases, generic_params
from tests.support.ranks_pool import Ranks
from tests.train.parallel.test_engine import placed_params
from tests.train.parallel.test_stages import even
from train.engine import Engine
from train.parallel import Mesh, Strategy

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
DENSE = llama.Config(1000, **SIZES, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True)
ROUTED = dataclasses.replace(next(case.config for case in cases() if case.name == "qwen3_moe"), vocab_size=1000)
CONFIGS = {"dense": DENSE, "bf16": DENSE, "routed": ROUTED}
LENGTHS, SHORT = [5, 130, 37, 61], [5, 30, 17, 11]
SINGLE = "one row each"
PACKINGS = {SINGLE: [[0], [1], [2], [3]], "pairs": [[0, 1], [3, 2], [1], [0]], "others": [[3, 0], [2], [1], [0, 2]]}
TWO = {SINGLE: [[0], [1], [2], [3]], "two rows": [[0, 1], [3, 2]]}


def bits(
    name: str,
    text: str,
    kernel: str,
    strategy: dict[str, Any],
    packings: dict[str, list[list[int]]] = PACKINGS,
) -> dict[str, dict[int, list[float]]]:
    """{packing: {document: log-probabilities}} over a mesh; "" is one process."""
    config, draw = CONFIGS.get(name) or even(name), torch.Generator().manual_seed(0)
    lengths = LENGTHS if name in CONFIGS else SHORT
    documents = [torch.randint(1, min(config.vocab_size, 1000), (length,), generator=draw) for length in lengths]
    score = functools.partial(train.token_logprobs, config=config, kernel=kernel)
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    params, over = tree.map(lambda t: t.to(dtype), generic_params(config)), dict[str, Any]()
    if text:
        over = {"mesh": Mesh.parse(text), "strategy": Strategy(**strategy)}
        params = placed_params(config, over["mesh"], params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the process group that is there
        engine = Engine(config, params, None, **over)
    found: dict[str, dict[int, list[float]]] = {}
    for packing, rows in packings.items():
        size = max(sum(lengths[number] for number in row) for row in rows)
        size += size % 2  # for sequence parallelism
        each = [fnmodels.pack([documents[number] for number in row], size).batch() for row in rows]
        batch = {key: torch.cat([one[key] for one in each]) for key in each[0]}
        logp = engine.infer([batch], score)[0][0]
        found[packing] = {}
        for row, numbers in enumerate(rows):
            begin = 0
            for number in numbers:
                found[packing][number] = logp[row, begin : begin + lengths[number] - 1].tolist()
                begin += lengths[number]
    return found


# Experts have the meshes that divide them, other layers the rest; over four ranks each model has some in turn.
MESHES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("fsdp=2", {}, ("dense",)),
    ("ep=2", {}, ("routed",)),
    ("fsdp=4", {}, ("bf16",)),
    ("ep=2,fsdp=2", {}, ("routed",)),
    ("tp=2", {}, ("dense", "bf16", "routed")),
    ("tp=2", {"sequence": True}, ("dense", "routed")),
    ("tp=2,fsdp=2", {}, ("dense",)),
    ("tp=2,dp=2", {"sequence": True}, ("bf16",)),
    ("tp=2,ep=2", {}, ("routed",)),
    ("tp=4", {}, ("dense", "bf16")),
    ("tp=4", {"sequence": True}, ("dense", "routed")),
]


def _as_json(found: Any) -> Any:
    return json.loads(json.dumps(found))


def _off(found: Any, wanted: Any) -> float:
    return max(
        abs(a - b)
        for packing in PACKINGS
        for number in wanted[packing]
        for a, b in zip(found[packing][number], wanted[packing][number], strict=True)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_have_the_bits_of_any_mesh_of_the_same_tp(ranks: Ranks, name: str) -> None:
    """Without tp those of one process, in any packing."""
    alone = _as_json(bits(name, "", "invariant", {}))
    by_tp = {"1": alone}
    for mesh, strategy in [(mesh, strategy) for mesh, strategy, names in MESHES if name in names]:
        each = ranks(Mesh.parse(mesh).world)(bits, name, mesh, "invariant", strategy)
        tp = dict(part.split("=") for part in mesh.split(",")).get("tp", "1")
        wanted = by_tp.setdefault(tp, each[0])
        assert all(one == wanted for one in each), (mesh, strategy, _off(each[0], wanted))
        for packing in PACKINGS:
            assert all(wanted[packing][number] == wanted[SINGLE][number] for number in wanted[packing]), (mesh, packing)
    assert 0 < _off(by_tp["2"], alone) < (0.2 if name == "bf16" else 2e-5)  # other sums, of the same numbers


@pytest.mark.parametrize("name", ["olmo2", "deepseek_v3", "gpt_oss", "qwen3_next", "gemma2", "minimax_m2"])
@pytest.mark.parametrize("sequence", [False, True])
def test_layers_of_other_families_have_the_bits_of_any_packing(ranks: Ranks, name: str, sequence: bool) -> None:
    """Over tp: norms over heads, latents, sinks, recurrent layers."""
    each = ranks(2)(bits, name, "tp=2", "invariant", {"sequence": sequence}, TWO)
    assert each[0] == each[1] and each[0][SINGLE] == each[0]["two rows"]


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_other_kernels_have_bits_that_depend_on_the_packing(ranks: Ranks, mesh: str) -> None:
    for kernel in ("math", "invariant"):
        found = ranks(2)(bits, "dense", mesh, kernel, {}, PACKINGS | TWO)[0]
        same = all(logp == found[SINGLE][n] for packing in found.values() for n, logp in packing.items())
        assert same == (kernel == "invariant")


def trained(name: str, text: str, strategy: dict[str, Any]) -> list[float]:
    """Loss and norm of the gradient of two updates over a mesh; "" is one process."""
    config, draw = CONFIGS[name], torch.Generator().manual_seed(1)
    batch = fnmodels.pack([torch.randint(0, 1000, (40,), generator=draw) for _ in range(4)], 40).batch()
    params, over = generic_params(config), dict[str, Any]()
    if text:
        over = {"mesh": Mesh.parse(text), "strategy": Strategy(**strategy)}
        params = placed_params(config, over["mesh"], params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine(config, params, train.adamw(1e-3), **over)
    loss, found = functools.partial(train.next_token_loss, config=config, kernel="invariant"), list[float]()
    for _ in range(2):
        engine.forward_backward([batch], loss)
        metrics = engine.optim_step()
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return found


@pytest.mark.parametrize(("name", "mesh", "strategy"), [("dense", "tp=2", {"sequence": True}), ("routed", "ep=2", {})])
def test_updates_over_a_mesh_are_those_of_one_process(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any]
) -> None:
    wanted = trained(name, "", {})
    for found in ranks(2)(trained, name, mesh, strategy):
        assert found == pytest.approx(wanted, rel=1e-4) and wanted[2] < wanted[0]
