"""Per-token log-probabilities and entropies: one alignment, equal to the dense computation, in little memory."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
import train.losses.softmax_stats
from fnmodels import tree
from tests.support.cases import batch_of, cases, generic_params, segments, trainable
from train import Balance, cross_entropy, init_state, make_step, next_token_loss, sgd, token_logprobs
from train.losses import document_sums, routed_logprobs
from train.losses.logprobs import head_logprobs, logprobs
from train.losses.softmax_stats import Scores, scores

CASE = next(case for case in cases() if case.name == "llama")
CONFIG = CASE.config


def _batch():
    batch = batch_of(CONFIG, segments((7, 5), (-2, 10), (9, -3)))
    given = {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": batch.segment_ids}
    return given | {"labels": batch.labels}


def _dense(params, batch):
    """Written out, from all the logits."""
    prepared = fnmodels.prepare(CONFIG, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"])
    p = torch.softmax(fnmodels.forward(params, *prepared, config=CONFIG, kernel="math"), -1)
    valid = batch["labels"] >= 0
    logp = p.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0].log()
    return torch.where(valid, logp, 0), torch.where(valid, -(p * p.log()).sum(-1), 0), valid


@pytest.mark.parametrize("chunk", [None, 1, 5, 36, 1000])
def test_values_and_gradients_equal_the_dense_ones(chunk) -> None:
    params, batch = trainable(generic_params(CONFIG, torch.float64)), _batch()
    weight = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for logp, entropy, valid in (token_logprobs(params, batch, config=CONFIG, chunk=chunk), _dense(params, batch)):
        loss = (weight[0] * logp + weight[1] * entropy).sum()
        found.append([logp, entropy, valid, *torch.autograd.grad(loss, tree.leaves(params))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_fp32_is_within_a_millionth() -> None:
    params, batch = generic_params(CONFIG), _batch()
    with torch.no_grad():
        ours, theirs = token_logprobs(params, batch, config=CONFIG, chunk=7), _dense(params, batch)
        assert all(float((a - b).abs().max()) <= 1e-5 for a, b in zip(ours[:2], theirs[:2], strict=True))
        x = torch.randn(3, 12, CONFIG.hidden_size)
        dense = logprobs(fnmodels.family_of(CONFIG).unembed(params, x, config=CONFIG), batch["labels"])
        ours = head_logprobs(params, x, batch["labels"], config=CONFIG, chunk=5)
        assert all(float((a - b).abs().max()) <= 1e-6 for a, b in zip(ours[:2], dense, strict=True))


def test_of_a_large_vocabulary_every_token_is_within_a_millionth_of_fp64() -> None:
    """Entropies that are not divided are 7e-7 off here, and products by oneDNN 1.1e-6 at 8,192 tokens."""
    words, dim, tokens = 131072, 512, 64
    config = fnmodels.models.decoder.llama.Config(words, dim, dim, 1, 8, 8, tie_word_embeddings=False)
    draws = torch.Generator().manual_seed(0)
    params = {"norm": torch.ones(dim), "lm_head": torch.randn(words, dim, generator=draws) * 2 * dim**-0.5}
    x, labels = torch.randn(1, tokens, dim, generator=draws), torch.randint(words, (1, tokens), generator=draws)
    with torch.no_grad():
        ours = head_logprobs(params, x, labels, config=config)[:2]
        with torch.backends.mkldnn.flags(enabled=False):
            assert all(map(torch.equal, ours, head_logprobs(params, x, labels, config=config)))
        wide = {name: leaf.double() for name, leaf in params.items()}
        every = torch.log_softmax(fnmodels.models.decoder.llama.unembed(wide, x.double(), config=config), -1)
        dense = (every.gather(-1, labels[..., None])[..., 0], -(every.exp() * every).sum(-1))
    for found, wanted in zip(ours, dense, strict=True):
        assert float((found - wanted).abs().max() / wanted.abs().max()) <= 6e-7


def test_their_sum_is_the_cross_entropy() -> None:
    logits = torch.randn(3, 12, 61, generator=torch.Generator().manual_seed(0))
    labels = _batch()["labels"]
    logp, _ = logprobs(logits, labels)
    torch.testing.assert_close(-logp.sum(), cross_entropy(logits, labels)[0])


def test_labels_of_another_shape_are_named() -> None:
    """They would be broadcast, or read in another order."""
    logits = torch.randn(2, 3, 7)
    for labels in (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"labels must be \[2, 3\]"):
            logprobs(logits, labels)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_what_the_routers_did(accumulate: int) -> None:
    """The negative log-probabilities with what `balance` adds are the loss of the next tokens, and so is their step."""
    config = next(case for case in cases() if case.name == "deepseek_v3").config
    made = batch_of(config, segments((7, 5), (-2, 10), (9, -3), (-12,)))
    batch = made.batch()
    batch["labels"][2, :4] = -100
    how = {"config": config, "kernel": "math", "balance": Balance(sequence=0.5, z=0.25)}

    def ours(params, batch, *, aux=True, layer_fn=None):
        logp, entropy, valid, added, sums = routed_logprobs(params, batch, **how, chunk=5, layer_fn=layer_fn)
        plain = token_logprobs(params, batch, config=config, kernel="math")
        assert all(map(torch.equal, (logp, entropy, valid), plain))
        return added - logp.sum(), valid.sum(), sums

    optimizer = sgd(0.1, spec=fnmodels.family_of(config).spec(config))
    found = []
    for loss in (ours, functools.partial(next_token_loss, **how)):
        step = make_step(loss, optimizer, balance_rate=0.01, accumulate=accumulate, remat="full")
        state, metrics = step(init_state(generic_params(config), optimizer), batch)
        assert metrics["aux"].keys() == {"counts", "sequence_balance", "router_z"}
        names = ("loss", "count", "grad_norm")
        found.append([*tree.leaves(state.params), *(metrics[n] for n in names), *metrics["aux"].values()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    _, _, _, added, sums = routed_logprobs(generic_params(config), batch, config=config)
    assert added == 0 and [*sums] == ["counts"]
    with pytest.raises(ValueError, match="models with experts, and llama has none"):
        routed_logprobs(generic_params(CONFIG), _batch(), config=CONFIG)


def test_a_temperature_is_that_of_sampling() -> None:
    logits, labels = torch.randn(4, 61), torch.arange(4)
    cool = torch.distributions.Categorical(logits=logits / 0.7)
    logp, entropy = logprobs(logits, labels, temperature=0.7)
    torch.testing.assert_close(logp, cool.log_prob(labels))
    torch.testing.assert_close(entropy, cool.entropy())
    with pytest.raises(ValueError, match="temperature is 0"):
        logprobs(logits, labels, temperature=0)


def test_a_forbidden_token_leaves_entropy_and_gradient_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    logp, entropy = logprobs(logits, torch.tensor([1]))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits[:, :2]).entropy())
    (grad,) = torch.autograd.grad((logp + entropy).sum(), logits)
    assert torch.isfinite(grad).all()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of the tests' logits in a block."""
    monkeypatch.setattr(train.losses.softmax_stats, "BLOCK", 2 * 7)


def _logits(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 7, generator=draws, dtype=torch.float64)
    logits[1, 2] = -torch.inf
    return logits.to(dtype), torch.tensor([0, 3, -100, 6, 1])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_have_the_derivatives_of_plain_operations(temperature: float) -> None:
    logits, labels = _logits()
    logits[1, 2] = -20.0  # finite, for finite differences

    def ours(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Scores.apply(z, labels, temperature)

    def plain(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores(z, labels, temperature)

    leaf = logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(ours, leaf) and torch.autograd.gradgradcheck(ours, leaf)
    tangent = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for transform in (
        lambda f: f(logits),
        lambda f: torch.func.jvp(f, (logits,), (tangent,)),
        lambda f: torch.func.jacrev(f)(logits),
        lambda f: torch.func.vmap(f)(torch.stack([logits, tangent])),
        lambda f: torch.func.vmap(torch.func.grad(lambda z: f(z)[1].sum()))(torch.stack([logits, tangent])),
        lambda f: torch.func.jvp(torch.func.grad(lambda z: (f(z)[0] + f(z)[1]).sum()), (logits,), (tangent,)),
    ):
        torch.testing.assert_close(transform(ours), transform(plain), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_forbidden_tokens_and_of_bf16_are_those_of_plain_operations(dtype: torch.dtype) -> None:
    logits, labels = _logits(dtype)
    weight = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    found = []
    for function in (Scores.apply, scores):
        leaf = logits.clone().requires_grad_()
        logp, entropy = function(leaf, labels, 1.0)
        (gradient,) = torch.autograd.grad((weight[0] * logp + weight[1] * entropy).sum(), leaf)
        assert logp.dtype == entropy.dtype == torch.float32 and gradient.dtype == dtype and gradient.isfinite().all()
        found.append((logp, entropy, gradient))
    torch.testing.assert_close(*found, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_second_derivatives_go_through_the_chunks() -> None:
    vocab, x = 61, torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = fnmodels.models.decoder.llama.Config(vocab, 8, 8, 1, 1, 1, tie_word_embeddings=True)
    params, labels = generic_params(config, torch.float64), torch.arange(6)[None]
    found = []
    for chunk in (4, None):
        leaf = x.clone().requires_grad_()
        logp, entropy, _ = head_logprobs(params, leaf, labels, config=config, chunk=chunk)
        (gradient,) = torch.autograd.grad((logp + entropy).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


class _Largest(TorchDispatchMode):
    """The most elements that any tensor made under it has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree.leaves(out) if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_logits_of_all_tokens_are_never_held() -> None:
    vocab, tokens, chunk = 4096, 64, 8
    config = fnmodels.models.decoder.llama.Config(vocab, 8, 8, 1, 1, 1, tie_word_embeddings=True)
    params = trainable(generic_params(config))
    x, labels = torch.randn(1, tokens, 8, requires_grad=True), torch.randint(vocab, (1, tokens))
    with _Largest() as seen:
        logp, entropy, _ = head_logprobs(params, x, labels, config=config, chunk=chunk)
        (logp.sum() + entropy.sum()).backward()
    assert seen.elements == chunk * vocab


def test_transforms_take_all_tokens_at_once() -> None:
    params, batch = generic_params(CONFIG), _batch()

    def total(params, chunk="auto"):
        return token_logprobs(params, batch, config=CONFIG, chunk=chunk)[0].sum()

    _, tangent = torch.func.jvp(total, (params,), (params,))
    grads = torch.func.grad(total)(params, None)
    products = [(g * p).sum() for g, p in zip(tree.leaves(grads), tree.leaves(params), strict=True)]
    torch.testing.assert_close(tangent, torch.stack(products).sum(), rtol=1e-4, atol=1e-4)
    for chunk in (5, "auto"):
        for one, other in zip(tree.leaves(torch.func.grad(total)(params, chunk)), tree.leaves(grads), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_documents_are_summed_apart() -> None:
    values, ids = torch.arange(1.0, 9.0).reshape(2, 4), torch.tensor([[1, 1, 2, 0], [0, 1, 3, 3]])
    assert document_sums(values, ids, 3).tolist() == [[3, 3, 0], [6, 0, 15]]
    assert document_sums(values, ids.where(ids > 0, -1), 3).tolist() == [[3, 3, 0], [6, 0, 15]]
    with pytest.raises(ValueError, match="segment_ids"):
        document_sums(values, ids[:, :3], 3)
