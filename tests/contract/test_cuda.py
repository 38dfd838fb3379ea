"""Every family on a CUDA device: the results of the CPU, and training in bf16. Skipped without a device."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.inputs import noise_keys
from fnmodels.ops.dropout import dropped
from tests.support.cases import (
    Batch,
    Case,
    batch_of,
    cases,
    decisions_of,
    generic_params,
    gradients,
    off,
    richest,
    segments,
    structures,
    summed_loss,
    trainable,
)

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
every_case = pytest.mark.parametrize("case", cases(), ids=str)
every_structure = pytest.mark.parametrize("case", structures(), ids=str)
ROWS = ((-3, 17, 12), (32,), (7, 1, -24))


def results(
    case: Case,
    batch: Batch,
    device: str,
    kernel: str,
    *,
    dtype: torch.dtype = torch.float32,
    decided: dict[str, Tensor],
) -> Any:
    """Logits, 0 on padding, and the gradients of all leaves, all rounded to fp32 and on the CPU."""
    parts = {name: getattr(batch, name).to(device) for name in ("tokens", "positions", "segment_ids")}
    moved = Batch(case.config, **parts, length=batch.length)
    weights = trainable(tree.map(lambda p: p.to(device, dtype), generic_params(case.config)))
    inputs, masks, freqs_cis = moved.prepared()
    assert {t.device.type for t in tree.leaves((inputs, freqs_cis)) if t.ndim} == {torch.device(device).type}
    inputs = {**inputs, **{name: choice.to(device) for name, choice in decided.items()}}
    layout = fnmodels.layout(masks) if kernel == "auto" else None
    logits = fnmodels.forward(weights, inputs, masks, freqs_cis, config=case.config, kernel=kernel, layout=layout)
    grads = gradients(summed_loss(logits.to(torch.promote_types(dtype, torch.float32)), moved.labels), weights)
    logits = logits.masked_fill(~moved.valid[..., None], 0)
    return tree.map(lambda t: t.detach().float().cpu(), {"logits": logits, "grads": grads})


def decided_on_the_cpu(case: Case, batch: Batch) -> dict[str, Tensor]:
    """The experts and keys chosen in fp32 on the CPU: another device may choose differently between close scores."""
    return decisions_of(generic_params(case.config), batch.prepared(), case.config)


@every_case
def test_logits_and_gradients_are_as_near_to_fp64_as_those_of_the_cpu(case: Case) -> None:
    """The devices round differently, so each is compared with fp64 on the CPU."""
    batch = batch_of(case.config, segments(*ROWS))
    decided = decided_on_the_cpu(case, batch)
    exact = results(case, batch, "cpu", "math", dtype=torch.float64, decided=decided)
    noise = off(results(case, batch, "cpu", "math", decided=decided), exact)
    for kernel in ("math", "auto"):
        assert off(results(case, batch, "cuda", kernel, decided=decided), exact) < max(2e-5, 4 * noise), kernel


@every_structure
def test_bf16_is_as_near_to_fp32_as_the_written_out_kernel_is(case: Case) -> None:
    """In two of three batches: some gradients of one draw in some hundred amplify a rounding five times."""
    far = [[each for each in roundings(case, seed) if not each[1] < 4 * each[2] + 1e-2] for seed in range(3)]
    worst = [f"{path}: {error:.1e}, math {noise:.1e}" for found in far for path, error, noise in found]
    assert sum(map(bool, far)) < 2, ", ".join(worst)


def roundings(case: Case, seed: int) -> list[tuple[str, float, float]]:
    """(path, error of kernel="auto" in bf16 relative to fp32, that of kernel="math") for logits and gradients."""
    batch = batch_of(case.config, segments(*ROWS), seed=seed)
    decided = decided_on_the_cpu(case, batch)
    exact = tree.flatten(results(case, batch, "cpu", "math", decided=decided))
    got, plain = (
        tree.flatten(results(case, batch, "cuda", kernel, dtype=torch.bfloat16, decided=decided))
        for kernel in ("auto", "math")
    )
    # A key bias hardly changes a softmax: its gradient is the rounding left by cancelled larger terms.
    least = 0.05 * max(wanted.norm() for wanted in exact.values())
    found = []
    for path, wanted in exact.items():
        error, noise = (float((f[path] - wanted).norm() / wanted.norm().clamp(min=least)) for f in (got, plain))
        found.append((path, error, noise))
    return found


@every_structure
def test_initial_values_are_those_of_the_cpu(case: Case) -> None:
    on_cpu, on_cuda = (P.init(case.config, 0, device=device) for device in ("cpu", "cuda"))
    assert {t.device.type for t in tree.leaves(on_cuda)} == {"cuda"}
    assert off(tree.map(Tensor.cpu, on_cuda), on_cpu) < 1e-6


STEPS = [(case, "none") for case in structures()] + [(case, "block") for case in richest()]


@pytest.mark.parametrize(("case", "compile"), STEPS, ids=str)
def test_a_step_is_that_of_the_cpu(case: Case, compile: str) -> None:
    """Packed and padded rows through forward, loss, backward, AdamW and, for MoE models, the balance loss or bias."""
    torch.compiler.reset()
    batch = batch_of(case.config, segments(*ROWS))
    parts = batch.batch()
    parts |= decided_on_the_cpu(case, batch)
    spec = fnmodels.family_of(case.config).spec(case.config)
    loss_fn = functools.partial(train.next_token_loss, config=case.config, length=batch.length)
    found = []
    for device in ("cpu", "cuda"):
        optimizer = train.adamw(1e-3, eps=1e-3, spec=spec)  # an eps under which noise does not decide a sign
        step = train.make_step(loss_fn, optimizer, clip=1.0, compile=compile if device == "cuda" else "none")
        weights = {path: leaf.to(device) for path, leaf in tree.flatten(generic_params(case.config)).items()}
        state = train.init_state(tree.unflatten(weights), optimizer)
        given = {name: t.to(device) for name, t in parts.items()}
        for _ in range(2):
            state, metrics = step(state, given)
        named = {name: metrics[name].float() for name in ("loss", "grad_norm")}
        found.append(tree.map(lambda t: t.detach().cpu(), {"params": state.params, "metrics": named}))
    assert off(*found) < 1e-4


@pytest.mark.parametrize("case", richest()[:3], ids=str)
def test_dropout_has_the_masks_of_the_cpu_and_remat_refuses_draws_alone(case: Case) -> None:
    """Fused kernels without dropout leave the generator as it is."""
    batch = batch_of(case.config, segments(*ROWS))
    keys = noise_keys(3, batch.positions, batch.segment_ids)
    assert torch.equal(noise_keys(3, batch.positions.cuda(), batch.segment_ids.cuda()).cpu(), keys)
    ones = torch.ones(*keys.shape, 64)
    assert torch.equal(dropped(ones.cuda(), keys.cuda(), 0.3, "mlp").cpu(), dropped(ones, keys, 0.3, "mlp"))
    entries = {name: entry.cuda() for name, entry in batch.batch().items()}
    weights = tree.map(Tensor.cuda, generic_params(case.config))

    def loss(params: Any, **options: Any) -> Tensor:
        return train.next_token_loss(params, entries, config=case.config, length=batch.length, **options)[0]

    again = torch.func.grad(functools.partial(loss, layer_fn=fnmodels.remat))(weights)
    assert off(tree.map(Tensor.cpu, again), tree.map(Tensor.cpu, torch.func.grad(loss)(weights))) < 1e-4
    with pytest.raises(ValueError, match="draws random numbers"):
        fnmodels.remat(lambda x: x * torch.rand_like(x))(torch.ones(3, device="cuda"))
