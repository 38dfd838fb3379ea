"""On a device without fp64 nothing asks for it: rotary tables are computed on the CPU.

The device is a type of which torch makes fake tensors without a driver; they have no values. It stands for Apple's
"mps", and refuses every operation that takes or makes fp64, as that does. Where values are read, the CPU itself stands
for it, but for what `in_fp64` moves to the CPU.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fnmodels
import train
from fnmodels import tree
from fnmodels.ops import dtypes
from fnmodels.ops.dropout import Dropout
from fnmodels.ops.rotary import Rope, query_temperature, rotary_table
from tests.contract.test_fp64 import EVERY
from tests.support import one_process, small_steps
from tests.support.cases import Case, batch_of, cases, causal, generic_params, representatives, richest, segments, short
from tests.support.encoder_losses import optimizer_of, weights_of
from train.eval.scoring import score_continuations

CPU = torch.device("cpu")
DEVICE = torch.device("lazy", 0)


class RefusesFp64(TorchDispatchMode):
    """TypeError, as on the device, for an operation there that takes or makes fp64."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device == self.device and value.dtype == torch.float64:
                raise TypeError(f"{func}: Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.fixture
def without_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert "mps" in dtypes.WITHOUT_FP64
    monkeypatch.setattr(dtypes, "WITHOUT_FP64", (DEVICE.type,))
    with FakeTensorMode(allow_non_fake_inputs=True), RefusesFp64():
        yield


@pytest.fixture
def cpu_without_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a device without fp64, in `RefusesFp64(CPU)` too, but within `in_fp64`."""
    on_the_cpu = dtypes._on_the_cpu

    def aside(*args: Any) -> Any:
        with _disable_current_modes():
            return on_the_cpu(*args)

    monkeypatch.setattr(dtypes, "WITHOUT_FP64", (CPU.type,))
    monkeypatch.setattr(dtypes, "_on_the_cpu", aside)


def warmup(step: torch.Tensor) -> torch.Tensor:
    return 1e-3 * train.warmup_stable_decay(step, total=8, warmup=2)


def params_of(config: Any) -> Any:
    spec = fnmodels.family_of(config).spec(config)
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=torch.float32, device=DEVICE), spec)


def fake_batch_of(config: Any) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(8, device=DEVICE).expand(2, 8)
    return {"tokens": tokens, "positions": positions, "segment_ids": tokens + 1, "labels": tokens}


# Fake tensors take half a second per model: they show what the operations and the devices of tables do.
@pytest.mark.parametrize("case", representatives(), ids=str)
@pytest.mark.usefixtures("without_fp64")
def test_a_forward_pass_asks_for_no_fp64(case: Case) -> None:
    config = case.config
    batch = fake_batch_of(config)
    places = {"positions": batch["positions"], "segment_ids": batch["segment_ids"], "length": 8}
    inputs, masks, freqs_cis = fnmodels.prepare(config, batch["tokens"], **places)
    assert all(leaf.device == DEVICE for leaf in tree.leaves((inputs, masks, freqs_cis)))
    logits = fnmodels.forward(params_of(config), inputs, masks, freqs_cis, config=config, kernel="math")
    assert logits.device == DEVICE


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
@pytest.mark.usefixtures("without_fp64")
def test_a_training_step_asks_for_no_fp64(name: str) -> None:
    config = short(next(case for case in cases() if case.name == name)).config
    loss = functools.partial(train.next_token_loss, config=config, kernel="math", length=8)
    params, optimizer = params_of(config), train.adamw(1e-3, spec=fnmodels.family_of(config).spec(config))
    grads = torch.func.grad(lambda p: loss(p, fake_batch_of(config))[0])(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert all(leaf.device == DEVICE for leaf in tree.leaves(train.apply_updates(params, updates)))
    step = train.make_step(loss, optimizer, inplace=False)
    _, metrics = step(train.init_state(params, optimizer), fake_batch_of(config))
    assert metrics["loss"].device == DEVICE


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.usefixtures("cpu_without_fp64")
def test_a_step_of_encoders_towers_pairs_sounds_and_flows_asks_for_no_fp64(name: str) -> None:
    config, loss, halves = EVERY[name]()
    batch = {entry: torch.cat([half[entry] for half in halves]) for entry in halves[0]}
    batch = {entry: t.float() if t.is_floating_point() else t for entry, t in batch.items()}
    optimizer, params = optimizer_of(name), tree.map(torch.Tensor.float, weights_of(config))
    with RefusesFp64(CPU):
        _, metrics = train.make_step(loss, optimizer)(train.init_state(params, optimizer), batch)
    assert metrics["finite"]


@pytest.mark.parametrize("case", [short(case) for case in richest()], ids=str)
@pytest.mark.usefixtures("cpu_without_fp64")
def test_a_forward_pass_of_every_family_asks_for_no_fp64(case: Case) -> None:
    batch, params = batch_of(case.config, segments((4, 2), (5, -1))), generic_params(case.config)
    with torch.no_grad(), RefusesFp64(CPU):
        logits = batch.forward(params)
    assert logits[batch.valid].isfinite().all()


@pytest.mark.parametrize("case", [short(case) for case in richest() if causal(case)], ids=str)
@pytest.mark.usefixtures("cpu_without_fp64")
def test_decoding_asks_for_no_fp64(case: Case) -> None:
    batch, params = batch_of(case.config, segments((6,))), generic_params(case.config)
    with torch.no_grad(), RefusesFp64(CPU):
        cache = fnmodels.init_cache(case.config, 1, 6, dtype=torch.float32, length=batch.length)
        for columns in (slice(0, 5), slice(5, 6)):
            part = batch.take(slice(None), columns)
            prepared = fnmodels.prepare_step(case.config, part.tokens, cache, segment_ids=part.segment_ids)
            logits, cache = fnmodels.decode(params, *prepared, cache, config=case.config)
    assert logits.isfinite().all()


@pytest.mark.usefixtures("cpu_without_fp64")
def test_dropout_asks_for_no_fp64() -> None:
    case = short(next(case for case in cases() if case.name == "deberta_v2"))
    config = dataclasses.replace(case.config, dropout=Dropout(weights=0.1, mlp=0.2, embedding=0.3))
    with RefusesFp64(CPU):
        prepared = fnmodels.prepare(config, torch.tensor([[1, 2, 3]]), rng=2**40)
        assert fnmodels.forward(generic_params(config), *prepared, config=config).isfinite().all()


OPTIMIZERS = {
    "sgd": train.sgd(1e-3, momentum=0.9, nesterov=True),
    "lion": train.lion(warmup),
    "adafactor": train.adafactor(1e-3),
    "muon": train.partition({"*.w": train.muon(warmup), "*": train.adamw(warmup)}),
    "frozen": train.partition({"one.*": None, "*": train.adamw(1e-3)}),
    "chain": train.chain(train.optim.clip_norm(0.1), train.adamw(1e-3)),
    "ema": train.with_ema(train.adamw(1e-3), 0.9),
    "small": train.optim.with_small_state(train.adamw(1e-3), bits=8),
    "master": train.optim.with_master(train.adamw(1e-3)),
    "rounded": train.optim.with_stochastic_rounding(train.adamw(1e-3), seed=0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("cpu_without_fp64")
def test_optimizers_and_metrics_ask_for_no_fp64(name: str) -> None:
    """In place and beside it, with microbatches and a clip; over params in bf16 what is for these."""
    optimizer, start = (
        OPTIMIZERS[name],
        small_steps.params(torch.bfloat16 if name in ("master", "rounded") else torch.float32),
    )
    batches = [{"x": batch["x"], "y": batch["y"]} for batch in small_steps.BATCHES]
    with RefusesFp64(CPU):
        for options in ({}, {"accumulate": 3, "inplace": False}):
            step, state = (
                train.make_step(small_steps.loss, optimizer, clip=1.0, **options),
                train.init_state(start, optimizer),
            )
            for batch in batches:
                state, metrics = step(state, batch)
            assert metrics["finite"]
        state, metrics = train.pure_step(small_steps.loss, optimizer, clip=1.0)(
            train.init_state(start, optimizer), batches[0]
        )
        assert metrics["finite"]
        assert train.make_eval_step(small_steps.loss)(state.params, batches)["loss"].isfinite()


LOSSES = ("llama", "deepseek", "mtp", "policy", "forward", "reverse", "batch", "length", "dense", "sparse blocks")


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("cpu_without_fp64")
def test_losses_of_text_ask_for_no_fp64(name: str) -> None:
    """With terms of the head and of routers, a teacher, further tokens, a policy and indexers."""
    params, optimizer = (
        tree.map(torch.Tensor.float, one_process.weights_of(one_process.config_of(name))),
        one_process.optimizer_of(name),
    )
    loss, batch, options = one_process.loss_of(name), one_process.batch_for(name), one_process.OPTIONS.get(name, {})
    with RefusesFp64(CPU):
        _, metrics = train.make_step(loss, optimizer, clip=0.5, **options)(train.init_state(params, optimizer), batch)
    assert metrics["finite"]


@pytest.mark.usefixtures("cpu_without_fp64")
def test_preferences_samples_and_scores_ask_for_no_fp64() -> None:
    config = short(next(case for case in cases() if case.name == "llama")).config
    params = generic_params(config)
    batch = batch_of(config, segments((4, 2), (5, -1))).batch()
    ways = (train.Sampling(), train.Sampling(temperature=0.8, top_p=0.9), train.Sampling(top_k=3, min_p=0.1))
    with torch.no_grad(), RefusesFp64(CPU):
        logp = train.token_logprobs(params, batch, config=config)[0]
        total, count, *_ = train.policy_loss(logp, logp - 0.1, torch.ones_like(logp), batch["labels"] >= 0)
        assert (total / count).isfinite() and logp.isfinite().all()
        for sampling in ways:
            prompts = [[1, 2, 3], [4, 5]]
            answers = train.generate(params, config, prompts, max_new=3, sampling=sampling)
            assert all(len(answer) == 3 for answer in answers.tokens)
        chosen, rejected = logp[:1].sum(1), logp[1:].sum(1)
        assert train.dpo_loss(chosen, rejected, chosen - 0.1, rejected)[0].isfinite()
        scored = score_continuations(params, config, [([1, 2], [3, 4]), ([5], [6])])
        assert len(scored) == 2


# {file: (its uses of fp64, why no device is asked for it)}
USES = {
    "fnmodels/diffusion.py": (1, "times of a sampler, made on the CPU"),
    "fnmodels/inputs/audio.py": (2, "filters, made on the CPU"),
    "fnmodels/inputs/load_balance.py": (1, "on the CPU"),
    "fnmodels/inputs/waves.py": (1, "on the CPU"),
    "fnmodels/models/decoder/minimax.py": (3, "numbers of a file, on the CPU"),
    "fnmodels/models/diffusion/flux.py": (3, "in_fp64"),
    "fnmodels/models/vision/common/position_table.py": (11, "in_fp64"),
    "fnmodels/models/vision/common/qwen_tower.py": (1, "in_fp64"),
    "fnmodels/models/vision/dinov3_vit.py": (1, "in_fp64"),
    "fnmodels/models/vision/gemma4_vision.py": (1, "in_fp64"),
    "fnmodels/models/vision/kimi_k25_vision.py": (1, "in_fp64"),
    "fnmodels/models/vision/llama4_vision.py": (1, "in_fp64"),
    "fnmodels/models/vision/muse_glimmer_vision.py": (1, "in_fp64"),
    "fnmodels/models/vision/pixtral.py": (2, "in_fp64"),
    "fnmodels/ops/attention/select.py": (1, "asks whether a dtype is fp64"),
    "fnmodels/ops/dtypes.py": (1, "`widest`"),
    "fnmodels/ops/rotary.py": (9, "in_fp64"),
    "fnmodels/testing/packing.py": (2, "on the CPU"),
    "fnmodels/testing/positions.py": (2, "on the CPU"),
    "params/gguf/rotary_factors.py": (2, "numbers of a file, on the CPU"),
    "params/initialize.py": (2, "drawn on the CPU"),
    "params/io/safetensors_file.py": (2, "names of dtypes"),
    "train/checkpoint/rng_state.py": (2, "states of generators, on the CPU"),
    "train/eval/over_mesh.py": (1, "on the CPU"),
    "train/integrations/tinker/traced.py": (1, "names of dtypes"),
    "train/job/metrics_log.py": (1, "on the CPU"),
    "train/parallel/pipeline/gradients.py": (2, "where another rank has fp64"),
}


def test_every_use_of_fp64_is_known() -> None:
    """A new one runs on any device unless it is named here: take `ops.dtypes.widest`, `in_fp64` or the CPU."""
    root, found = Path(fnmodels.__file__).parents[1], dict[str, int]()
    for file in sorted(f for package in ("fnmodels", "params", "train") for f in (root / package).rglob("*.py")):
        words = re.findall(r"(?<!is )torch\.float64|\.double\(\)", file.read_text())
        if words:
            found[file.relative_to(root).as_posix()] = len(words)
    assert found == {name: count for name, (count, _) in USES.items()}


@pytest.mark.usefixtures("without_fp64")
def test_a_planted_table_in_fp64_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "WITHOUT_FP64", ())
    with pytest.raises(TypeError, match="float64"):
        rotary_table(Rope(), 8, torch.zeros(1, 4, dtype=torch.int64, device=DEVICE))


def test_tables_from_the_cpu_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.tensor([[0, 5, 1_000_003]])
    made = [rotary_table(Rope(), 8, positions), query_temperature(positions, beta=0.1, period=4)]
    monkeypatch.setattr(dtypes, "WITHOUT_FP64", ("cpu",))
    again = [rotary_table(Rope(), 8, positions), query_temperature(positions, beta=0.1, period=4)]
    assert all(map(torch.equal, made, again)) and dtypes.widest(positions.device) == torch.float32
