"""Two layers, three batches and a small Llama for tests of steps, and what these compare."""

import torch
import torch.nn.functional as F

import fnmodels
from fnmodels import llama, tree

DRAW = torch.Generator().manual_seed(0)
BATCHES = [{"x": torch.randn(12, 4, generator=DRAW), "y": torch.randn(12, 3, generator=DRAW)} for _ in range(3)]


def params(dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=draw).to(dtype)  # noqa: E731
    return {"one": {"w": make(5, 4), "b": make(5)}, "two": {"w": make(3, 5), "b": make(3)}}


def loss(params, batch):
    one, two = (tree.map(torch.Tensor.float, params[name]) for name in ("one", "two"))
    error = F.linear(F.linear(batch["x"], one["w"], one["b"]).tanh(), two["w"], two["b"]) - batch["y"]
    return error.square().sum(), torch.tensor(len(batch["x"]))


def run(step, state, batches=BATCHES):
    metrics = []
    for batch in batches:
        state, measured = step(state, batch)
        metrics.append(measured)
    return state, metrics


def same_bits(one, other):
    flat, others = tree.flatten(one), tree.flatten(other)
    return flat.keys() == others.keys() and all(torch.equal(flat[path], others[path]) for path in flat)


def assert_close(ours, theirs, atol=1e-5):
    for one, other in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=atol)


def model_batch(config, packed):
    draw = torch.Generator().manual_seed(int(packed))
    lengths = (7, 5, 12) if packed else (12, 12)
    return fnmodels.pack([torch.randint(config.vocab_size, (n,), generator=draw) for n in lengths], 12).batch()


def llama_of(**changes):
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return llama.Config(**fields | {"num_attention_heads": 4, "num_key_value_heads": 2} | changes)
