"""Flux: parity with its maths written out and with diffusers, several images in a row, files, loss and sampler."""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.errors import ConfigError, MismatchError, UnsupportedError
from fnmodels.models.common import storage
from fnmodels.models.diffusion import flux
from tests.support.cases import generic
from tests.support.oracle import assert_close
from tests.variants.flux import TINY

CONFIG = flux.Config.from_hf(TINY)
SQUARE = flux.Config.from_hf(TINY | {"out_channels": 12})  # which reads what it returns, for the loss and the sampler
SHAPES, TEXTS = ((4, 6), (8, 2), (6, 6)), (5, 2, 7)  # cells of the images; tokens of their texts
WHERE = ((0, 0), (0, 1), (1, 0))  # (row, place in the row) of each image


@functools.cache
def weights(config: Any = CONFIG) -> Any:
    names, spec = flux.hf_names(config), tree.flatten(flux.spec(config))
    assert len(set(names.values())) == len(names) == len(spec)
    return tree.unflatten({path: generic(path, torch.empty(leaf.shape)) for path, leaf in spec.items()})


def state(params: Any = None, config: Any = CONFIG) -> dict[str, Tensor]:
    """{name on disk: tensor}."""
    slices: dict[str, list[Any]] = {}
    for path, leaf in tree.flatten(params or weights(config)).items():
        stored = flux.hf_names(config)[path]
        slices.setdefault(storage.disk_name(stored), []).append((stored, leaf))
    return {name: storage.join(own) for name, own in slices.items()}


@functools.cache
def batch() -> dict[str, Tensor]:
    """Two images in the first row and one in the second, each row with padding among texts and images."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    tokens, positions, owners = fnmodels.diffusion.latent_rows([draw(3, *shape) for shape in SHAPES], length=12)
    text, sources = draw(2, 8, 10), torch.tensor([[1] * 5 + [2] * 2 + [0], [1] * 7 + [0]])
    # small: diffusers has the angles of time and guidance in fp32
    conditions = {"time": torch.tensor([[0.011, 0.007], [0.013, 0.003]]), "pooled": draw(2, 2, 9)}
    conditions["guidance"] = torch.tensor([[0.02, 0.005], [0.01, 0.03]])
    given = {"latents": tokens, "positions": positions, "segment_ids": owners, "text_segment_ids": sources}
    return given | {"text": text} | conditions


def prepared(given: dict[str, Tensor] | None = None, config: Any = CONFIG) -> Any:
    given = given or batch()
    places = {name: given[name] for name in ("positions", "segment_ids", "text_segment_ids")}
    conditions = {name: given[name] for name in config.conditions}
    return fnmodels.diffusion.prepare_denoising(config, given["latents"], given["text"], conditions, **places)


def alone(number: int, given: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What the reference reads of one image: without batch or row."""
    given, (row, place) = given or batch(), WHERE[number]
    own, words = (given[name][row] == place + 1 for name in ("segment_ids", "text_segment_ids"))
    found = {name: given[name][row, own] for name in ("latents", "positions")} | {"text": given["text"][row, words]}
    return found | {name: given[name][row, place] for name in ("time", "guidance", "pooled")}


def written_out(state: dict[str, Tensor], one: dict[str, Tensor], config: Any = CONFIG) -> Tensor:
    """The velocity [I, C] of one image; state: parameters under the names of diffusers."""

    def affine(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def waves(value: Tensor) -> Tensor:
        angles = [1000 * float(value) * 10000 ** (-i / 128) for i in range(128)]
        return torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])

    condition: Any = 0
    parts = [("timestep", waves(one["time"])), ("text", one["pooled"])]
    parts += [("guidance", waves(one["guidance"]))] if config.guidance_embeds else []
    for name, x in parts:
        inner = F.silu(affine(f"time_text_embed.{name}_embedder.linear_1", x))
        condition = condition + affine(f"time_text_embed.{name}_embedder.linear_2", inner)
    condition = F.silu(condition)

    texts, head = len(one["text"]), config.attention_head_dim
    places = torch.cat((torch.zeros(texts, 3), one["positions"].float()))

    def norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift

    def heads(x: Tensor, name: str, normed: str | None) -> Tensor:
        x = affine(name, x).reshape(len(x), -1, head)
        if normed is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state[f"{normed}.weight"]
        return x

    def turned(x: Tensor) -> Tensor:
        """The pairs (2 i, 2 i + 1) of each axis' dimensions as complex numbers, times e^(i angle)."""
        out, first = [], 0
        for axis, size in enumerate(config.axes_dims_rope):
            z = torch.view_as_complex(x[..., first : first + size].reshape(*x.shape[:2], -1, 2).contiguous())
            angles = places[:, axis, None] * 10000 ** (-torch.arange(0, size, 2) / size)
            z = z * torch.polar(torch.ones_like(angles), angles)[:, None]
            out.append(torch.view_as_real(z).flatten(-2))
            first += size
        return torch.cat(out, -1)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for h in range(config.num_attention_heads):
            scores = turned(q)[:, h] @ turned(k)[:, h].T / math.sqrt(head)
            out.append(scores.softmax(-1) @ v[:, h])
        return torch.cat(out, -1)

    image, text = affine("x_embedder", one["latents"]), affine("context_embedder", one["text"])
    for i in range(config.num_layers):
        at = f"transformer_blocks.{i}"
        a = affine(f"{at}.norm1.linear", condition).chunk(6)
        c = affine(f"{at}.norm1_context.linear", condition).chunk(6)
        read, words = norm(image, a[0], a[1]), norm(text, c[0], c[1])
        q, k = (
            torch.cat(
                (
                    heads(words, f"{at}.attn.add_{n}_proj", f"{at}.attn.norm_added_{n}"),
                    heads(read, f"{at}.attn.to_{n}", f"{at}.attn.norm_{n}"),
                )
            )
            for n in "qk"
        )
        v = torch.cat((heads(words, f"{at}.attn.add_v_proj", None), heads(read, f"{at}.attn.to_v", None)))
        found = mixed(q, k, v)
        image = image + a[2] * affine(f"{at}.attn.to_out.0", found[texts:])
        text = text + c[2] * affine(f"{at}.attn.to_add_out", found[:texts])
        inner = F.gelu(affine(f"{at}.ff.net.0.proj", norm(image, a[3], a[4])), approximate="tanh")
        image = image + a[5] * affine(f"{at}.ff.net.2", inner)
        inner = F.gelu(affine(f"{at}.ff_context.net.0.proj", norm(text, c[3], c[4])), approximate="tanh")
        text = text + c[5] * affine(f"{at}.ff_context.net.2", inner)
    x = torch.cat((text, image))
    for i in range(config.num_single_layers):
        at = f"single_transformer_blocks.{i}"
        shift, scale, gate = affine(f"{at}.norm.linear", condition).chunk(3)
        read = norm(x, shift, scale)
        q, k = (heads(read, f"{at}.attn.to_{n}", f"{at}.attn.norm_{n}") for n in "qk")
        found = mixed(q, k, heads(read, f"{at}.attn.to_v", None))
        inner = F.gelu(affine(f"{at}.proj_mlp", read), approximate="tanh")
        x = x + gate * affine(f"{at}.proj_out", torch.cat((found, inner), -1))
    scale, shift = affine("norm_out.linear", condition).chunk(2)
    return affine("proj_out", norm(x[texts:], shift, scale))


def of_image(velocity: Tensor, number: int) -> Tensor:
    row, place = WHERE[number]
    return velocity[row, batch()["segment_ids"][row] == place + 1]


def diffusers_model(config: Any = CONFIG) -> Any:
    """The model of diffusers with `weights`, all of them and no others."""
    module = pytest.importorskip("diffusers")
    model = module.FluxTransformer2DModel.from_config(config.to_hf()).eval()
    assert not any(model.load_state_dict(state(config=config), strict=True))
    return model


def by_diffusers(model: Any, one: dict[str, Tensor]) -> Tensor:
    given = {"hidden_states": one["latents"][None], "encoder_hidden_states": one["text"][None]}
    given |= {"pooled_projections": one["pooled"][None], "timestep": one["time"][None]}
    given |= {"guidance": one["guidance"][None]} if model.config.guidance_embeds else {}
    ids = {"img_ids": one["positions"].float(), "txt_ids": torch.zeros(len(one["text"]), 3)}
    out: Tensor = model(**given, **ids, return_dict=False)[0][0]
    return out


@pytest.mark.parametrize("kernel", ["math", "sdpa", "auto"])
def test_packed_images_are_as_each_alone(kernel: Any) -> None:
    given = {name: value.clone() for name, value in batch().items()}
    given["latents"][given["segment_ids"] == 0] = torch.nan
    given["text"][given["text_segment_ids"] == 0] = torch.nan
    with torch.no_grad():
        velocity = fnmodels.forward(weights(), *prepared(given), config=CONFIG, kernel=kernel)
        for number in range(len(SHAPES)):
            assert_close(of_image(velocity, number), written_out(state(), alone(number)))


def test_packed_images_have_the_bits_of_each_alone() -> None:
    with torch.no_grad():
        packed = fnmodels.forward(weights(), *prepared(), config=CONFIG, kernel="invariant")
        for number in range(len(SHAPES)):
            one = {name: value[None] for name, value in alone(number).items()}
            conditions = {name: one[name][None] for name in CONFIG.conditions}
            row = fnmodels.diffusion.prepare_denoising(
                CONFIG, one["latents"], one["text"], conditions, positions=one["positions"]
            )
            velocity = fnmodels.forward(weights(), *row, config=CONFIG, kernel="invariant")
            assert torch.equal(velocity[0], of_image(packed, number))


def test_one_image_per_row_and_no_guidance() -> None:
    """Rows without segment ids, where the modulation of a row is one vector."""
    config = flux.Config.from_hf(TINY | {"guidance_embeds": False, "out_channels": None})
    one = {name: value[None] for name, value in alone(1).items() if name != "guidance"}
    conditions = {"time": one["time"][None], "pooled": one["pooled"][None]}
    with torch.no_grad():
        batch = fnmodels.diffusion.prepare_denoising(
            config, one["latents"], one["text"], conditions, positions=one["positions"]
        )
        wanted = written_out(state(config=config), alone(1), config)
        layout = fnmodels.layout(batch[1])
        assert layout is not None and layout.plain
        for kernel in ("auto", "blocks"):
            velocity = fnmodels.forward(weights(config), *batch, config=config, kernel=kernel, layout=layout)
            assert_close(velocity[0], wanted)


def test_equal_to_diffusers() -> None:
    model = diffusers_model()
    with torch.no_grad():
        velocity = fnmodels.forward(weights(), *prepared(), config=CONFIG)
        for number in range(len(SHAPES)):
            assert_close(of_image(velocity, number), by_diffusers(model, alone(number)))


def test_every_parameter_is_read() -> None:
    run = functools.partial(fnmodels.forward, config=CONFIG, kernel="math")
    flat, wanted = tree.flatten(weights()), run(weights(), *prepared())
    for path in flat:
        changed = run(tree.unflatten(flat | {path: flat[path] * 1.05}), *prepared())
        assert (changed - wanted)[batch()["segment_ids"] > 0].abs().max() > 1e-4, path


def test_mistakes_would_be_seen() -> None:
    """Another image's condition or text, rows for columns, shift for scale: far outside of the tolerance."""
    (inputs, masks, freqs), valid = prepared(), batch()["segment_ids"] > 0
    wanted = fnmodels.forward(weights(), inputs, masks, freqs, config=CONFIG)

    def off(params: Any = None, freqs: Any = freqs, masks: Any = masks, **changed: Tensor) -> float:
        got = fnmodels.forward(params or weights(), inputs | changed, masks, freqs, config=CONFIG)
        return float((got - wanted)[valid].abs().max())

    assert off() == 0
    assert off(latent_image=torch.zeros_like(inputs["latent_image"])) > 1e-2
    assert off(text_image=torch.zeros_like(inputs["text_image"])) > 1e-2
    together = (inputs["valid"]).long()
    assert off(masks=flux.attention_masks(CONFIG, inputs["positions"], together)) > 1e-2
    assert off(freqs=flux.freqs_cis(CONFIG, inputs["positions"][..., [0, 2, 1]])) > 1e-2
    assert off(time=inputs["time"].roll(1, 0)) > 1e-2
    halves = weights()["modulation_proj"].chunk(2)
    assert off(weights() | {"modulation_proj": torch.cat(halves[::-1])}) > 1e-2


def test_rows_are_mapped_and_split() -> None:
    batch = prepared()
    run = functools.partial(fnmodels.forward, weights(), config=CONFIG, kernel="math")
    wanted = run(*batch)
    mapped = torch.vmap(lambda *one: run(*one))(*fnmodels.rows(batch))
    assert_close(mapped[:, 0], wanted)
    assert_close(torch.cat([run(*half) for half in fnmodels.split(batch, 2)]), wanted)


def test_taps_and_edits() -> None:
    """Every tap that is listed is there in the shape that is listed, and edits of them reach the velocity."""
    listed = fnmodels.tap_names(CONFIG)
    scores = {name for name in listed if name.endswith(("scores", "pattern"))}
    names = tuple(name for name in listed if name not in scores)
    assert {"layers.0.attention", "layers.1.mlp", "layers.4.mlp.neurons", "layers.2.attention.z"} < set(names)
    wanted, found = fnmodels.forward(weights(), *prepared(), config=CONFIG, taps=names)
    letters = {"B": 2, "S": 20, "T": 8, "I": 12}
    for name in names:
        shape = [letters.get(size) or int(size) for size in listed[name].strip("[]").split(", ")]
        assert list(found[name].shape) == shape, name
    for name in ("layers.1.attention", "layers.0.mlp", "layers.3.mlp.neurons", "hidden"):
        edits: Any = {name: lambda value, tap: value + value.square()}  # the norm would undo a factor
        changed = fnmodels.forward(weights(), *prepared(), config=CONFIG, edits=edits)
        assert (changed - wanted).abs().max() > 1e-3, name
    with pytest.raises(ValueError, match=r"'layers\.0\.nothing' is unknown"):
        fnmodels.forward(weights(), *prepared(), config=CONFIG, taps=("layers.0.nothing",))


@functools.cache
def training() -> dict[str, Tensor]:
    """The batch of the loss, with the noise and times of a seed."""
    return train.losses.flow_noise(batch(), torch.Generator().manual_seed(3))


def test_loss_and_gradients_of_every_parameter() -> None:
    """Against the maths written out, image by image, and its derivatives."""
    given = training()
    theirs = {name: leaf.clone().requires_grad_() for name, leaf in state(config=SQUARE).items()}
    total: Any = 0
    for number in range(len(SHAPES)):
        one, noise = alone(number, given), alone(number, given | {"latents": given["noise"]})["latents"]
        path = (1 - one["time"]) * one["latents"] + one["time"] * noise
        error = written_out(theirs, one | {"latents": path}, SQUARE) - (noise - one["latents"])
        total = total + error.square().sum() / 12
    wanted = dict(zip(theirs, torch.autograd.grad(total, list(theirs.values())), strict=True))
    for kernel in ("math", "auto"):
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), weights(SQUARE))
        loss, count = train.flow_matching_loss(own, given, config=SQUARE, kernel=kernel)
        assert int(count) == sum(h * w // 4 for h, w in SHAPES)
        torch.testing.assert_close(loss, total)
        flat = tree.flatten(own)
        for path, grad in zip(flat, torch.autograd.grad(loss, list(flat.values())), strict=True):
            stored = flux.hf_names(SQUARE)[path]
            right = storage.extract(stored, wanted[storage.disk_name(stored)])
            assert right.abs().max() > 0, path
            assert (grad - right).abs().max() <= 3e-5 * max(1.0, float(right.abs().max())), path


def test_noise_is_a_function_of_the_generator() -> None:
    again = train.losses.flow_noise(batch(), torch.Generator().manual_seed(3))
    assert all(torch.equal(again[name], value) for name, value in training().items())
    other = train.losses.flow_noise(batch(), torch.Generator().manual_seed(4))
    assert not torch.equal(again["noise"], other["noise"]) and not torch.equal(again["time"], other["time"])
    many = {"latents": torch.zeros(1, 1, 1), "pooled": torch.zeros(20_000, 1, 1)}
    logits = train.losses.flow_noise(many, torch.Generator().manual_seed(0), mean=0.5, std=2.0)["time"].logit()
    assert abs(float(logits.mean()) - 0.5) < 0.05 and abs(float(logits.std()) - 2) < 0.05


def test_training_learns_two_images() -> None:
    """From fresh parameters, whose output is 0, by microbatches and with recomputation, to latents as they were."""
    values = TINY | {"out_channels": 12, "guidance_embeds": False, "num_attention_heads": 4}
    config = flux.Config.from_hf(values | {"num_layers": 1, "num_single_layers": 1})
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    images, text, pooled = [draw(3, 4, 4) for _ in range(2)], draw(2, 3, 10), draw(2, 1, 9)
    tokens, positions, owners = fnmodels.diffusion.latent_rows(images)
    data = {"latents": tokens, "positions": positions, "segment_ids": owners, "text": text, "pooled": pooled}
    data |= {"text_segment_ids": torch.ones(2, 3, dtype=torch.long)}
    optimizer = train.adamw(1e-2, spec=flux.spec(config))
    loss = functools.partial(train.flow_matching_loss, config=config)
    step = train.make_step(loss, optimizer, clip=1.0, remat="full")
    state, generator, seen = train.init_state(P.init(config, 0), optimizer), torch.Generator().manual_seed(2), []
    for _ in range(60):
        drawn = {name: value.repeat(16, *[1] * (value.ndim - 1)) for name, value in data.items()}
        state, metrics = step(state, list(fnmodels.split(train.losses.flow_noise(drawn, generator), 2)))
        seen.append(float(metrics["loss"]))
    assert 1.5 < seen[0] < 2.6 and sum(seen[-8:]) / 8 < 0.2 * seen[0]
    start = torch.randn(tokens.shape, generator=generator)
    conditions = {"pooled": pooled, "time": torch.ones(2, 1)}
    ready = fnmodels.diffusion.prepare_denoising(config, start, text, conditions, positions=positions)
    with torch.no_grad():
        found = fnmodels.diffusion.denoise(state.params, *ready, config=config, times=fnmodels.diffusion.flow_times(10))
    for made, image in zip(fnmodels.diffusion.unpacked_latents(found, positions, owners), images, strict=True):
        assert float((made - image).square().mean()) < 0.15


def test_the_sampler_takes_steps_of_euler() -> None:
    """Each packed image as alone by the maths written out."""
    times = fnmodels.diffusion.flow_times(3, tokens=1024)
    with torch.no_grad():
        found = fnmodels.diffusion.denoise(
            weights(SQUARE), *prepared(config=SQUARE), config=SQUARE, times=times, kernel="math"
        )
        for number in range(len(SHAPES)):
            one = alone(number)
            x = one["latents"]
            for now, then in itertools.pairwise(times):
                x = x + (then - now) * written_out(state(config=SQUARE), one | {"latents": x, "time": now}, SQUARE)
            got = of_image(found, number)
            assert (got - x).abs().max() <= 1e-4 * max(1.0, float(x.std()))


def test_times() -> None:
    torch.testing.assert_close(fnmodels.diffusion.flow_times(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))
    shifted = fnmodels.diffusion.flow_times(2, tokens=4096)
    torch.testing.assert_close(shifted, torch.tensor([1.0, math.exp(1.15) / (math.exp(1.15) + 1), 0.0]))
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        fnmodels.diffusion.flow_times(0)


@pytest.mark.parametrize("tokens", [None, 256, 1500, 4096])
def test_times_equal_those_of_diffusers(tokens: int | None) -> None:
    module = pytest.importorskip("diffusers")
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    values = {"num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": tokens is not None}
    scheduler = module.FlowMatchEulerDiscreteScheduler(**values)
    sigmas = torch.linspace(1, 1 / 28, 28).tolist()
    scheduler.set_timesteps(sigmas=sigmas, **({} if tokens is None else {"mu": calculate_shift(tokens)}))
    torch.testing.assert_close(fnmodels.diffusion.flow_times(28, tokens=tokens), scheduler.sigmas, atol=1e-6, rtol=0)


def test_latents_are_packed_as_in_diffusers() -> None:
    image = torch.arange(2 * 4 * 6.0).reshape(2, 4, 6)
    tokens, positions, _ = fnmodels.diffusion.latent_rows([image])
    theirs = image.view(1, 2, 2, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 6, 8)  # of its pipeline
    assert torch.equal(tokens, theirs)
    assert positions[0].tolist() == [[0, i, j] for i in range(2) for j in range(3)]
    given = batch()
    back = fnmodels.diffusion.unpacked_latents(given["latents"], given["positions"], given["segment_ids"])
    assert [tuple(one.shape) for one in back] == [(3, *shape) for shape in SHAPES]
    again = fnmodels.diffusion.latent_rows(back, length=12)[0]
    assert torch.equal(again, given["latents"])
    with pytest.raises(ValueError, match="at least one image"):
        fnmodels.diffusion.latent_rows([])
    with pytest.raises(ValueError, match=r"multiples of 2, not \[2, 3, 6\]"):
        fnmodels.diffusion.latent_rows([image[:, :3]])


def test_files(tmp_path: Path) -> None:
    """The names of diffusers, in one file and in shards, bit-equal; a faulty folder is refused."""
    P.save_pretrained(tmp_path, CONFIG, weights())
    single = tmp_path / "diffusion_pytorch_model.safetensors"
    assert single.exists() and not (tmp_path / "model.safetensors").exists()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == TINY
    P.save_pretrained(tmp_path, CONFIG, weights(), max_shard_size=60_000)
    assert not single.exists()
    assert (tmp_path / "diffusion_pytorch_model.safetensors.index.json").exists()
    config, params = P.load_pretrained(tmp_path)
    assert config == CONFIG
    found = tree.flatten(params)
    assert found.keys() == tree.flatten(weights()).keys()
    assert all(torch.equal(found[path], leaf) for path, leaf in tree.flatten(weights()).items())
    values = written | {"num_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(MismatchError, match=r"transformer_blocks\.2\.attn\.\S+: missing"):
        P.load_pretrained(tmp_path)


def test_files_of_diffusers(tmp_path: Path) -> None:
    model = diffusers_model()
    model.save_pretrained(tmp_path / "theirs")
    config, params = P.load_pretrained(tmp_path / "theirs")
    assert config == CONFIG
    found = tree.flatten(params)
    assert all(torch.equal(found[path], leaf) for path, leaf in tree.flatten(weights()).items())
    P.save_pretrained(tmp_path / "ours", config, params)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(leaf, model.state_dict()[name]) for name, leaf in again.state_dict().items())


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"patch_size": 2}, UnsupportedError, "'patch_size' is 2; only 1"),
        ({"_class_name": "FluxControlNetModel"}, UnsupportedError, "'_class_name'"),
        ({"axes_dims_rope": [2, 4, 6]}, ConfigError, "3 numbers with the sum 14"),
        ({"axes_dims_rope": [3, 5, 6]}, ConfigError, "even numbers"),
        ({"axes_dims_rope": 14}, ConfigError, "must be a list of 3 numbers"),
        ({"num_layers": 0}, ConfigError, "'num_layers' is 0"),
        ({"swiglu": True}, ConfigError, "swiglu = true"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(changed: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        flux.Config.from_hf(TINY | changed)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    given = batch()
    for changed, words in (
        ({"latents": given["latents"][..., :8]}, r"latents must be floats \[B, tokens, 12\]"),
        ({"text": given["text"][:1]}, "2 rows of latents and 1 of texts"),
        ({"positions": given["positions"][..., :2]}, r"positions must be \[2, 12, 3\]"),
        ({"time": given["time"][:, :1]}, "'guidance' must be floats"),
        ({"time": given["time"].long()}, "'time' must be floats"),
        ({"segment_ids": given["segment_ids"] * 2}, "segment_ids has an image 4, but the conditions are of 2"),
        ({"text_segment_ids": given["text_segment_ids"][:, 1:]}, r"text_segment_ids must be \[2, 8\]"),
    ):
        with pytest.raises(ValueError, match=words):
            prepared(given | changed)
    conditions = {name: given[name] for name in ("time", "pooled")}
    with pytest.raises(ValueError, match=r"conditions are \['pooled', 'time'\]; this model has \['guidance'"):
        fnmodels.diffusion.prepare_denoising(
            CONFIG, given["latents"], given["text"], conditions, positions=given["positions"]
        )
    with pytest.raises(ValueError, match=r"take fnmodels\.diffusion\.prepare_denoising"):
        fnmodels.prepare(CONFIG, given["latents"])
    with pytest.raises(ValueError, match="returns 8; this loss is for"):
        train.flow_matching_loss(weights(), training(), config=CONFIG)
    with pytest.raises(ValueError, match="has no noise and no time"):
        train.flow_matching_loss(weights(), {n: v for n, v in given.items() if n != "time"}, config=SQUARE)
    with pytest.raises(ValueError, match=r"has no 'final\.norm'"):
        fnmodels.forward(weights(), *prepared(), config=CONFIG, taps=("final.norm",))
