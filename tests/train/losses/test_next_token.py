import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
from fnmodels import llama, tree
from train import cross_entropy, next_token_loss
from train.losses import head_loss
from train.losses.token_chunks import CHUNK, LOGITS, chunk_of

V, D, B, S = 37, 16, 3, 10


def config(tied=True):
    return llama.Config(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


def parameters(config, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    return tree.map(lambda leaf: (torch.randn(leaf.shape, generator=draw) * 0.3).to(dtype), llama.spec(config))


def batch():
    draw = torch.Generator().manual_seed(1)
    segment_ids = torch.tensor([[1] * 10, [1] * 4 + [2] * 6, [1] * 3 + [2] * 5 + [0] * 2])
    labels = torch.randint(V, (B, S), generator=draw)
    labels[:, -2:] = -100
    labels[0, :4] = -100
    return {
        "tokens": torch.randint(V, (B, S), generator=draw),
        "positions": fnmodels.positions_from_segments(segment_ids),
        "segment_ids": segment_ids,
        "labels": labels,
    }


def scalar(chunk, *, tied=True, kernel="math"):
    return lambda params, batch: next_token_loss(params, batch, config=config(tied), chunk=chunk, kernel=kernel)[0]


def value_and_grads(loss, params):
    params = tree.map(lambda p: p.detach().requires_grad_(), params)
    value = loss(params, batch())
    return [value.detach(), *torch.autograd.grad(value, tree.leaves(params))]


def assert_close(ours, theirs, **tolerance):
    for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_the_definition():
    params, data = parameters(config()), batch()
    total, count = next_token_loss(params, data, config=config())
    inputs, masks, freqs = fnmodels.prepare(
        config(), data["tokens"], positions=data["positions"], segment_ids=data["segment_ids"]
    )
    logp = fnmodels.forward(params, inputs, masks, freqs, config=config()).log_softmax(-1)
    expected = [-logp[b, t, data["labels"][b, t]] for b in range(B) for t in range(S) if data["labels"][b, t] != -100]
    torch.testing.assert_close(total, sum(expected))
    assert count.dtype == torch.int64 and int(count) == len(expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 7, 30, 512])
def test_chunks_equal_all_at_once(chunk, tied):
    params = parameters(config(tied))
    assert_close(value_and_grads(scalar(chunk, tied=tied), params), value_and_grads(scalar(None, tied=tied), params))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_sums_are_fp32_and_gradients_keep_their_dtype(dtype, tolerance):
    params = parameters(config(), dtype)
    exact = value_and_grads(scalar(None), tree.map(torch.Tensor.double, params))
    for chunk in (7, None):
        loss, *grads = value_and_grads(scalar(chunk), params)
        assert loss.dtype == torch.float32
        for grad, leaf, reference in zip(grads, tree.leaves(params), exact[1:], strict=True):
            assert grad.dtype == leaf.dtype
            assert (grad.double() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("frozen", ["head", "states"])
def test_either_side_may_be_frozen(frozen):
    params, x, labels = parameters(config(False)), torch.randn(B, S, D, dtype=torch.float64), batch()["labels"]
    x.requires_grad_(frozen == "head")
    for name in ("norm", "lm_head"):
        params[name].requires_grad_(frozen == "states")
    wanted = [x] if frozen == "head" else [params["norm"], params["lm_head"]]
    chunked, dense = (head_loss(params, x, labels, config=config(False), chunk=c)[0] for c in (4, None))
    assert_close(torch.autograd.grad(chunked, wanted), torch.autograd.grad(dense, wanted))


def test_without_gradients_it_is_the_same_sum():
    params = parameters(config())
    with torch.no_grad():
        assert_close(scalar(4)(params, batch()), scalar(None)(params, batch()))


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor had."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_logits_of_all_tokens_are_never_held():
    vocab, chunk, tokens = 1000, 8, 64
    sizes = llama.Config(vocab, D, 24, 1, 4, 2)
    params = tree.map(lambda leaf: torch.randn(leaf.shape, requires_grad=True), llama.spec(sizes))
    x, labels = torch.randn(1, tokens, D, requires_grad=True), torch.randint(vocab, (1, tokens))
    with Largest() as seen:
        total, _ = head_loss(params, x, labels, config=sizes, chunk=chunk)
        torch.autograd.grad(total, [x, params["lm_head"]])
    assert seen.numel <= max(chunk * vocab, D * vocab) < tokens * vocab


@pytest.mark.parametrize("chunk", [4, None])
def test_no_valid_label_gives_zero_and_no_nan(chunk):
    params, data = parameters(config()), batch()
    data["labels"] = torch.full((B, S), -100)
    params = tree.map(lambda p: p.requires_grad_(), params)
    total, count = next_token_loss(params, data, config=config(), chunk=chunk)
    assert float(total.detach()) == 0 and int(count) == 0
    assert all(not g.any() for g in torch.autograd.grad(total, tree.leaves(params)))


@pytest.mark.parametrize("chunk", [4, None])
def test_extreme_logits_stay_exact(chunk):
    one = llama.Config(V, V, 24, 1, 1, 1)
    params = {"norm": torch.ones(V), "lm_head": 1e3 * torch.eye(V), "layers": []}
    x, labels = torch.eye(V)[None].requires_grad_(), torch.arange(V)[None]
    right, _ = head_loss(params, x, labels, config=one, chunk=chunk)
    assert float(right.detach()) == 0.0  # an oracle that copies its labels
    wrong, _ = head_loss(params, x, labels.roll(1, 1), config=one, chunk=chunk)
    logits = llama.unembed(params, x, config=one).double()
    expected = F.cross_entropy(logits[0], labels.roll(1, 1)[0], reduction="sum")
    assert math.isfinite(float(wrong.detach()))
    torch.testing.assert_close(wrong.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("label", [-1, V])
def test_a_label_outside_the_vocabulary_raises(label):
    params, data = tree.map(lambda p: p.requires_grad_(), parameters(config())), batch()
    data["labels"][1, 1] = label
    for chunk in (4, None):
        with pytest.raises(
            ValueError, match=rf"labels\[1, 1\] is {label}, but the vocabulary has {V} entries, 0 to {V - 1}"
        ):
            next_token_loss(params, data, config=config(), chunk=chunk)


def test_cross_entropy_of_logits():
    logits, labels = torch.randn(B, S, V), batch()["labels"]
    total, count = cross_entropy(logits, labels)
    assert int(count) == int((labels != -100).sum())
    torch.testing.assert_close(total, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))


def test_chunks_suit_the_device_and_the_vocabulary():
    cpu, cuda, fp32, bf16 = torch.device("cpu"), torch.device("cuda"), torch.float32, torch.bfloat16
    assert [chunk_of("auto", 8192, cpu, dtype) for dtype in (fp32, bf16)] == [1024, 2048]
    assert [chunk_of("auto", 1000, cuda, dtype) for dtype in (fp32, bf16)] == [LOGITS // 1000] * 2
    assert [chunk_of("auto", 1 << 20, device, fp32) for device in (cpu, cuda)] == [CHUNK, CHUNK]
    assert chunk_of(7, 1000, cuda, fp32) == 7 and chunk_of(None, 9, cuda, fp32) is None
    with pytest.raises(ValueError, match="chunk is 'all'"):
        chunk_of("all", 1000, cpu, fp32)


def test_the_chunk_is_checked():
    with pytest.raises(ValueError, match="chunk is 0"):
        next_token_loss(parameters(config()), batch(), config=config(), chunk=0)


@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda labels: labels[:1, :1], r"labels must be \[3, 10\] like the .*, not \[1, 1\]"),
        (lambda labels: labels.T, r"not \[10, 3\]"),
        (lambda labels: labels.flatten(), r"not \[30\]"),
        (lambda labels: labels.int(), "labels must be int64, not int32"),
    ],
    ids=["one", "transposed", "flat", "int32"],
)
def test_labels_that_do_not_fit_are_named(change, named, grad, chunk):
    params, data = tree.map(lambda p: p.requires_grad_(grad), parameters(config())), batch()
    data["labels"] = change(data["labels"])
    with pytest.raises(ValueError, match=named):
        next_token_loss(params, data, config=config(), chunk=chunk)
    with pytest.raises(ValueError, match=named):
        head_loss(params, torch.randn(B, S, D, dtype=torch.float64), data["labels"], config=config(), chunk=chunk)


@pytest.mark.parametrize("name", ["tokens", "positions", "segment_ids", "labels"])
def test_a_missing_key_is_named(name):
    data = {key: value for key, value in batch().items() if key != name}
    with pytest.raises(ValueError, match=f"The batch has no {name}; its keys are"):
        next_token_loss(parameters(config()), data, config=config())


# Transforms: the chunked head against plain operations.


def tangents(params):
    draw = torch.Generator().manual_seed(2)
    return tree.map(lambda p: torch.randn(p.shape, generator=draw, dtype=p.dtype), params)


def grad(loss, params):
    return torch.func.grad(loss)(params, batch())


def vmap_grad(loss, params):
    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, fnmodels.rows(batch()))


def grad_vmap(loss, params):
    return torch.func.grad(lambda p: torch.func.vmap(loss, in_dims=(None, 0))(p, fnmodels.rows(batch())).sum())(params)


def ensemble(loss, params):
    stacked = tree.map(lambda p: torch.stack([p, -p]), params)
    return torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(stacked, batch())


def jvp(loss, params):
    return torch.func.jvp(lambda p: loss(p, batch()), (params,), (tangents(params),))


def hvp(loss, params):
    return torch.func.jvp(lambda p: torch.func.grad(loss)(p, batch()), (params,), (tangents(params),))[1]


def double_backward(loss, params):
    params = tree.map(lambda p: p.detach().requires_grad_(), params)
    first = torch.autograd.grad(loss(params, batch()), tree.leaves(params), create_graph=True)
    along = sum((g * t).sum() for g, t in zip(first, tree.leaves(tangents(params)), strict=True))
    return list(torch.autograd.grad(along, tree.leaves(params)))


def scaled(loss, params):
    data = batch()
    return lambda s: loss(tree.map(lambda p: p * s[0] + s[1], params), data)


def jacrev_jacrev(loss, params):
    return torch.func.jacrev(torch.func.jacrev(scaled(loss, params)))(torch.tensor([1.0, 0.1], dtype=torch.float64))


def jacfwd_jacfwd(loss, params):
    return torch.func.jacfwd(torch.func.jacfwd(scaled(loss, params)))(torch.tensor([1.0, 0.1], dtype=torch.float64))


def jvp_vmap(loss, params):
    rows = torch.func.vmap(loss, in_dims=(None, 0))
    return torch.func.jvp(lambda p: rows(p, fnmodels.rows(batch())), (params,), (tangents(params),))


@pytest.mark.parametrize(
    "transform",
    [grad, vmap_grad, grad_vmap, ensemble, jvp, hvp, double_backward, jacrev_jacrev, jacfwd_jacfwd, jvp_vmap],
)
def test_transforms_of_the_chunked_head(transform):
    params = parameters(config())
    assert_close(transform(scalar(4), params), transform(scalar(None), params))


def test_against_finite_differences():
    params, labels = parameters(config(False)), torch.randint(V, (1, 3))
    labels[0, 1] = -100
    norm, x = params["norm"].requires_grad_(), torch.randn(1, 3, D, dtype=torch.float64, requires_grad=True)

    def loss(x, norm):
        return head_loss(params | {"norm": norm}, x, labels, config=config(False), chunk=2)[0]

    assert torch.autograd.gradcheck(loss, (x, norm), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (x, norm))


@pytest.mark.slow
def test_it_compiles_as_one_graph():
    short = dataclasses.replace(config(), num_hidden_layers=1, layer_kinds=("full",))
    params = tree.map(lambda p: p.requires_grad_(), parameters(short, torch.float32))
    loss = functools.partial(next_token_loss, config=short, chunk=7)
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (total, _), (compiled, _) = loss(params, batch()), whole(params, batch())
    torch.testing.assert_close(compiled, total)
    leaves = tree.leaves(params)
    assert_close(list(torch.autograd.grad(compiled, leaves)), list(torch.autograd.grad(total, leaves)))


TERMS = {"smoothed": {"label_smoothing": 0.2}, "z": {"z_loss": 0.03}, "both": {"label_smoothing": 0.1, "z_loss": 0.01}}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("terms", [{}, *TERMS.values()], ids=["plain", *TERMS])
@pytest.mark.parametrize("chunk", [None, 4, 512])
def test_smoothing_z_loss_and_weights_are_their_formulas(terms, weighted, chunk):
    params, given = parameters(config()), batch()
    if weighted:
        given["weights"] = torch.linspace(-1, 2, B * S, dtype=torch.float64).reshape(B, S)
        given["weights"][0, 5] = 0
    prepared = fnmodels.prepare(
        config(), given["tokens"], positions=given["positions"], segment_ids=given["segment_ids"]
    )
    eps, z = terms.get("label_smoothing", 0.0), terms.get("z_loss", 0.0)

    def definition(params):
        logits = fnmodels.forward(params, *prepared, config=config(), kernel="math")
        total = 0
        for b, t in (given["labels"] != -100).nonzero().tolist():
            log_p = logits[b, t].log_softmax(-1)
            target = torch.full((V,), eps / V, dtype=torch.float64)
            target[given["labels"][b, t]] += 1 - eps
            loss = -(target * log_p).sum() + z * logits[b, t].logsumexp(-1) ** 2
            total = total + loss * (given["weights"][b, t] if weighted else 1)
        return total

    def ours(params):
        return next_token_loss(params, given, config=config(), chunk=chunk, kernel="math", **terms)[0]

    leaves = tree.map(lambda p: p.detach().requires_grad_(), params)
    found = [[f(leaves), *torch.autograd.grad(f(leaves), tree.leaves(leaves))] for f in (ours, definition)]
    assert_close(*found, rtol=1e-9, atol=1e-9)
    # second derivatives go another way
    tangents = tree.map(torch.ones_like, params)
    twice = [torch.func.jvp(torch.func.grad(f), (params,), (tangents,))[1] for f in (ours, definition)]
    assert_close(*twice, rtol=1e-8, atol=1e-8)


def test_a_label_of_weight_0_does_not_count():
    given = batch()
    given["weights"] = torch.ones(B, S)
    given["weights"][1, :5] = 0
    given["weights"][0] = -1  # which teaches the other way
    assert int(next_token_loss(parameters(config()), given, config=config())[1]) == int(
        ((given["labels"] != -100) & (given["weights"] != 0)).sum()
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [({"label_smoothing": 1.0}, "label_smoothing is 1.0"), ({"z_loss": -1.0}, "z_loss is -1.0")],
)
def test_terms_are_checked(change, words):
    with pytest.raises(ValueError, match=words):
        next_token_loss(parameters(config()), batch(), config=config(), **change)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("grad", [True, False])
def test_what_does_not_count_may_have_any_weight(grad, chunk):
    """1 / length of a document that has none is inf, and 0 times that NaN."""
    params, given = parameters(config()), batch()
    weights = torch.linspace(1, 2, B * S, dtype=torch.float64).reshape(B, S)
    found = []
    for other in (0.0, torch.inf, torch.nan):
        given["weights"] = weights.where(given["labels"] != -100, other)
        leaves = tree.map(lambda p: p.detach().requires_grad_(), params)
        with torch.set_grad_enabled(grad):
            total, count = next_token_loss(leaves, given, config=config(), chunk=chunk, kernel="math")
        found.append([total.detach(), count, *(torch.autograd.grad(total, tree.leaves(leaves)) if grad else ())])
    for one in found[1:]:
        assert_close(one, found[0])


def test_labels_and_weights_of_another_shape_are_named_beside_logits_too():
    logits, labels = torch.randn(2, 3, V), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"labels must be \[2, 3\]"):
        cross_entropy(logits, labels.reshape(3, 2))
    with pytest.raises(ValueError, match=r"weights must be \[2, 3\]"):
        cross_entropy(logits, labels, weights=torch.ones(3, 2))


def test_weights_of_another_shape_are_named():
    with pytest.raises(ValueError, match=r"weights must be \[3, 10\]"):
        next_token_loss(parameters(config()), batch() | {"weights": torch.ones(3, 1)}, config=config())
