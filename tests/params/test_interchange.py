"""Trees to and from jax: bit for bit, sharing memory, on trees that flax and equinox make. Skipped without jax."""

import sys

import pytest
import torch

import params as P
from fnmodels import llama, tree

CONFIG = llama.Config(31, 16, 24, 2, 4, 2)


@pytest.fixture
def jax():
    module = pytest.importorskip("jax")
    module.config.update("jax_enable_x64", True)
    yield module
    module.config.update("jax_enable_x64", False)


def same(one, other):
    flat, others = tree.flatten(one), tree.flatten(other)
    assert flat.keys() == others.keys()  # jax sorts the keys of dicts
    for path, leaf in flat.items():
        assert leaf.dtype == others[path].dtype and torch.equal(leaf, others[path]), path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_there_and_back_is_the_same_tree(jax, dtype):
    params = P.init(CONFIG, 0, dtype=dtype)
    arrays = P.to_jax(params)
    assert jax.tree.structure(arrays) == jax.tree.structure(jax.tree.map(lambda _: 0, params))
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(arrays))
    same(P.from_jax(arrays), params)
    shared = P.from_jax(arrays)["norm"]
    assert shared.data_ptr() == params["norm"].data_ptr()


def test_other_dtypes_and_forms_of_tensors(jax):
    params = {
        "bias": torch.arange(6).view(2, 3).T,  # not contiguous
        "mask": torch.tensor([True, False]),
        "trained": torch.ones(2, requires_grad=True),
        "scalar": torch.tensor(3.5),
    }
    same(P.from_jax(P.to_jax(params)), tree.map(torch.Tensor.detach, params))


def test_a_product_in_jax_is_that_of_the_tensors(jax):
    params = P.init(CONFIG, 0, dtype=torch.float64)
    made = jax.jit(lambda p: jax.tree.map(lambda leaf: leaf @ leaf.T if leaf.ndim == 2 else 2 * leaf, p))(
        P.to_jax(params)
    )
    wanted = tree.map(lambda leaf: leaf @ leaf.T if leaf.ndim == 2 else 2 * leaf, params)
    for path, leaf in tree.flatten(P.from_jax(made)).items():
        torch.testing.assert_close(leaf, tree.flatten(wanted)[path], rtol=1e-12, atol=1e-12)


def test_trees_of_flax(jax):
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(linen.LayerNorm()(linen.Dense(5)(x)))

    made = Net().init(jax.random.key(0), jax.numpy.ones((1, 4)))
    ours = P.from_jax(made)
    first, norm, last = (ours["params"][name] for name in ("Dense_1", "LayerNorm_0", "Dense_0"))
    assert first["kernel"].shape == (4, 5)
    x = torch.randn(2, 4, dtype=first["kernel"].dtype)
    h = x @ first["kernel"] + first["bias"]
    h = torch.nn.functional.layer_norm(h, (5,), norm["scale"], norm["bias"], eps=1e-6)
    wanted = h @ last["kernel"] + last["bias"]
    found = Net().apply(P.to_jax(ours), jax.numpy.asarray(x.numpy()))
    torch.testing.assert_close(P.from_jax({"y": found})["y"], wanted, rtol=1e-5, atol=1e-5)


def test_modules_of_equinox(jax):
    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(4, 3, width_size=5, depth=2, key=jax.random.key(0))
    ours = P.from_jax(equinox.filter(module, equinox.is_array))
    assert {"layers.0.weight", "layers.0.bias"} <= tree.flatten(ours).keys() and len(ours["layers"]) == 3
    x = torch.randn(4, dtype=ours["layers"][0]["weight"].dtype)
    h = (
        ours["layers"][2]["weight"]
        @ torch.relu(
            ours["layers"][1]["weight"] @ torch.relu(ours["layers"][0]["weight"] @ x + ours["layers"][0]["bias"])
            + ours["layers"][1]["bias"]
        )
        + ours["layers"][2]["bias"]
    )
    found = P.from_jax({"y": module(jax.numpy.asarray(x.numpy()))})["y"]
    torch.testing.assert_close(found, h, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="tensors are made of jax arrays"):
        P.from_jax(module)


def test_what_jax_would_change_is_refused(jax):
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(ValueError, match=r"Leaf 'layers.0.w' is float64 and jax makes it float32: call"):
        P.to_jax({"layers": [{"w": torch.ones(2, dtype=torch.float64)}]})
    with pytest.raises(ValueError, match="Leaf 'w' is a int"):
        P.to_jax({"w": 3})
    with pytest.raises(ValueError, match="has a dot in a name"):
        P.from_jax({"a.b": jax.numpy.ones(2)})


def test_entries_without_arrays_keep_their_places_in_lists(jax):
    one, two = jax.numpy.ones(1), 2 * jax.numpy.ones(1)
    for given in ([one, None, two], [None, one], [one, None], [one, {}, two], (one, [None, ()], two)):
        ours = P.from_jax({"a": given, "without": None, "empty": {"none": [None]}})
        assert list(ours) == ["a"] and isinstance(ours["a"], list) and len(ours["a"]) == len(given)
        for entry, array in zip(ours["a"], given, strict=True):
            assert entry == {} if not isinstance(array, jax.Array) else entry.item() == array.item()
        again = P.from_jax(P.to_jax(ours))  # whose structure is that of the arrays
        assert [type(entry) for entry in again["a"]] == [type(entry) for entry in ours["a"]]
    assert P.from_jax({}) == {} and P.from_jax({"a": [None]}) == {}


def test_layers_without_arrays_keep_the_places_of_the_others(jax):
    equinox = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0))
    layers = [
        equinox.nn.Linear(2, 3, key=keys[0]),
        equinox.nn.Lambda(jax.nn.relu),
        equinox.nn.Linear(3, 1, key=keys[1]),
    ]
    ours = P.from_jax(equinox.filter(equinox.nn.Sequential(layers), equinox.is_array))["layers"]
    assert isinstance(ours, list) and ours[1] == {} and ours[2]["weight"].shape == (1, 3)


def test_keys_of_random_numbers_are_no_parameters(jax):
    with pytest.raises(ValueError, match=r"Leaf 'layers.0.rng' is a PRNG key, and keys are not parameters: leave it"):
        P.from_jax({"layers": [{"rng": jax.random.key(0)}]})
    with pytest.raises(ValueError, match=r"The pytree is one array, which has no name: pass a dict"):
        P.from_jax(jax.numpy.ones(2))
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    net = Net(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Leaf 'drop.*' is a PRNG key.*nnx\.state\(model, nnx\.Param\)"):
        P.from_jax(nnx.state(net))
    assert tree.flatten(P.from_jax(nnx.state(net, nnx.Param)))["linear.kernel.value"].shape == (2, 3)


def test_without_jax_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    for call in (P.to_jax, P.from_jax):
        with pytest.raises(ImportError, match="which is not installed: pip install jax"):
            call({"w": torch.ones(1)})
