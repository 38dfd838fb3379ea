"""`as_module` in libraries that take modules, each skipped where it is missing: equal to fnmodels' own functions."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnmodels
from fnmodels import research, tree
from tests.support.cases import cases, generic_params, off, tokens_of

CONFIG = next(case.config for case in cases() if case.name == "llama")
TOKENS = tokens_of(CONFIG, 3, 6)
LABELS = TOKENS.roll(-1, 1)


class Scores(nn.Module):
    """Logits with the vocabulary in dimension 1, where torch's cross-entropy has it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        params = tree.map(Tensor.clone, generic_params(CONFIG, dtype))
        self.model: Any = fnmodels.as_module(CONFIG, params, kernel="math")

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits.mT

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def loss(params: Any, batch: Any) -> Tensor:
    """Cross-entropy, summed."""
    prepared, labels = batch
    logits = fnmodels.forward(params, *prepared, config=CONFIG, kernel="math")
    return F.cross_entropy(logits.mT, labels, reduction="sum")


BATCH = fnmodels.prepare(CONFIG, TOKENS), LABELS


def test_the_gauss_newton_matrix_of_curvlinops() -> None:
    """Its Hessian takes the derivative of a gradient without a graph, which torch's SiLU does not have."""
    curvlinops: Any = pytest.importorskip("curvlinops")
    model = Scores()
    leaves = model.named()
    sums, data = nn.CrossEntropyLoss(reduction="sum"), [(TOKENS, LABELS)]
    matrix = curvlinops.GGNLinearOperator(model, sums, list(leaves.values()), data, check_deterministic=False)
    direction = {name: torch.randn_like(value) for name, value in leaves.items()}
    params = generic_params(CONFIG, torch.float64)

    def logits(params: Any, batch: Any) -> Tensor:
        return fnmodels.forward(params, *batch[0], config=CONFIG, kernel="math").flatten(0, 1)

    wanted = tree.flatten(research.fisher_vp(logits, params, BATCH)(tree.unflatten(direction, like=params)))
    for name, product in zip(leaves, matrix @ list(direction.values()), strict=True):
        torch.testing.assert_close(product.detach(), wanted[name], rtol=1e-8, atol=1e-8)


def test_the_optimizer_of_opacus() -> None:
    """It takes per-sample gradients that it is given: its hooks see no inner module, for only the outermost runs."""
    optimizers: Any = pytest.importorskip("opacus.optimizers")
    model, params = Scores(), generic_params(CONFIG, torch.float64)
    rows = tree.flatten(fnmodels.per_sample_gradients(loss, params, BATCH)[0])
    leaves, limit = model.named(), 0.5
    for name, leaf in leaves.items():
        leaf.grad_sample = rows[name]  # type: ignore[attr-defined]
    inner = torch.optim.SGD(leaves.values(), 0.1)
    optimizers.DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=3).step()
    norms = torch.stack([row.flatten(1).square().sum(1) for row in rows.values()]).sum(0).sqrt()
    assert (norms > limit).all()
    for name, start in tree.flatten(params).items():
        mean = torch.einsum("n,n...->...", limit / norms, rows[name]) / 3
        torch.testing.assert_close(leaves[name].detach(), start - 0.1 * mean, rtol=1e-6, atol=1e-8)


def test_attributions_of_captum() -> None:
    attr: Any = pytest.importorskip("captum.attr")
    model = Scores()

    def logit(embeddings: Tensor) -> Tensor:
        return model(embeddings)[:, 3, -1]

    x = model.model.embed_tokens.detach()[TOKENS].requires_grad_()
    found = attr.InputXGradient(logit).attribute(x)
    assert off(found, (x * torch.autograd.grad(logit(x).sum(), x)[0]).detach()) < 1e-12
    whole = attr.IntegratedGradients(logit).attribute(x, baselines=0.5 * x, n_steps=100).sum((1, 2))
    assert off(whole, (logit(x) - logit(0.5 * x)).detach()) < 1e-4


def test_a_trainer_of_lightning() -> None:
    lightning: Any = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.scores = Scores()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.scores(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    task, batches = Task(), torch.utils.data.DataLoader([(TOKENS, LABELS)], batch_size=None)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_epochs=3, accelerator="cpu", enable_model_summary=False, **quiet).fit(task, batches)
    params = generic_params(CONFIG, torch.float64)
    for _ in range(3):
        gradient = torch.func.grad(loss)(params, BATCH)
        params = tree.map(lambda leaf, g: leaf - 0.1 / LABELS.numel() * g, params, gradient)
    for name, leaf in tree.flatten(params).items():
        torch.testing.assert_close(task.scores.named()[name].detach(), leaf, rtol=1e-8, atol=1e-10)


def test_export_to_onnx() -> None:
    pytest.importorskip("onnxscript")
    reference = importlib.import_module("onnx.reference")
    model = Scores(torch.float32).eval()
    program: Any = torch.onnx.export(model, (TOKENS,), dynamo=True, verbose=False)
    run = reference.ReferenceEvaluator(program.model_proto)
    (found,) = run.run(None, {run.input_names[0]: TOKENS.numpy()})
    with torch.no_grad():
        assert off(torch.from_numpy(found), model(TOKENS)) < 1e-5


def test_optree_knows_our_nodes() -> None:
    """By torch, in whose namespace it has every node that torch's pytrees have."""
    optree = pytest.importorskip("optree")
    importlib.import_module("torch.utils._cxx_pytree")
    masks = fnmodels.prepare(CONFIG, torch.zeros(2, 3, dtype=torch.long))[1]
    found = optree.tree_map(lambda leaf: leaf + 1, masks, namespace="torch")
    assert repr(found) == repr(masks)
    pairs = zip(optree.tree_leaves(found, namespace="torch"), tree.leaves(masks), strict=True)
    assert all(torch.equal(one, other + 1) for one, other in pairs)
