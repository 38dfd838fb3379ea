"""Times functions of fnmodels.research beside hooks on transformers: the same Llama, weights and inputs, fp32.

    python benchmarks/research.py                     26M parameters, 9 rounds
    python benchmarks/research.py --quick             a tiny model, one round, to check that everything runs
    python benchmarks/research.py --only hvp lens     these sections

    cache      a forward pass that returns the residual stream, the attention and the MLP of every layer
    grid       activation patching of 8 layers x 64 positions (target 3)
    hvp        one Hessian-vector product, and one more on a kept graph; transformers: double backward (target 1.1)
    lens       the Jacobian of the last state by every layer's, in 32 directions; transformers: a backward pass for each
               (target 1.2)
    harvest    activations of documents of 4 to 256 tokens: packed, against padded batches (target 4)
    rows       per-sample gradients; transformers: vmap of grad (target 1.15); benchmarks/per_sample.py has more

Both must first agree. They then take turns, and a ratio is the median of the rounds' ratios of processor time:
transformers' divided by ours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import llama, research, tree

FULL = llama.Config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
)
QUICK = replace(FULL, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, layer_kinds=())
Contender = Callable[[], list[Tensor]]
Pair = tuple[Contender, Contender]  # ours, transformers'


class Setting:
    """One model in both libraries, and inputs for it."""

    def __init__(self, config: Any, rows: int, length: int) -> None:
        self.config, self.params, self.names = config, P.init(config, 0), llama.hf_names(config)
        values = {name: value for name, value in config.to_hf().items() if name != "architectures"}
        settings = transformers.LlamaConfig(**values)
        settings._attn_implementation = "eager"
        self.model = transformers.LlamaForCausalLM(settings).eval()
        flat = {self.names[path]: leaf for path, leaf in tree.flatten(self.params).items()}
        self.model.load_state_dict(flat, strict=True)
        self.leaves = dict(self.model.named_parameters())
        self.generator = torch.Generator().manual_seed(0)
        self.tokens = self.draw(rows, length)
        self.labels = self.tokens.roll(-1, 1)
        self.prepared = fnmodels.prepare(config, self.tokens)

    def draw(self, *shape: int) -> Tensor:
        return torch.randint(self.config.vocab_size, shape, generator=self.generator)

    def loss(self, params: Any, batch: Any) -> Tensor:
        prepared, labels = batch
        return summed(fnmodels.forward(params, *prepared, config=self.config, kernel="math"), labels)

    def run(self, tokens: Tensor, **more: Any) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, **more).logits
        return logits

    def ordered(self, tree_: Any) -> list[Tensor]:
        """The leaves in the order of transformers' parameters."""
        flat = {self.names[path]: leaf for path, leaf in tree.flatten(tree_).items()}
        return [flat[name] for name in self.leaves]


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def cache(at: Setting) -> Pair:
    names = ("layers.*.input", "layers.*.attention", "layers.*.mlp")

    def ours() -> list[Tensor]:
        with torch.no_grad():
            _, tapped = fnmodels.forward(at.params, *at.prepared, config=at.config, taps=names)
        return list(tapped.values())

    def theirs() -> list[Tensor]:
        found: list[Tensor] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        def keep_input(module: Any, inputs: Any) -> None:
            found.append(inputs[0])

        handles = [layer.register_forward_pre_hook(keep_input) for layer in at.model.model.layers]
        for layer in at.model.model.layers:
            handles += [layer.self_attn.register_forward_hook(keep), layer.mlp.register_forward_hook(keep)]
        with torch.no_grad():
            at.run(at.tokens)
        for handle in handles:
            handle.remove()
        return found

    return lambda: sorted(ours(), key=lambda x: float(x.sum())), lambda: sorted(theirs(), key=lambda x: float(x.sum()))


def grid(at: Setting) -> Pair:
    clean, corrupt = at.tokens[:1], at.draw(1, at.tokens.shape[1])

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3].sum() - logits[:, -1, 5].sum()

    batches = fnmodels.prepare(at.config, clean), fnmodels.prepare(at.config, corrupt)

    def ours() -> list[Tensor]:
        return [research.patch_grid(at.params, *batches, metric, config=at.config, read=(-1,))]

    @torch.no_grad()
    def theirs() -> list[Tensor]:
        states = at.model(input_ids=clean, use_cache=False, output_hidden_states=True).hidden_states
        kept: list[Tensor] = []
        layers = at.model.model.layers
        handles = [layer.register_forward_hook(lambda module, inputs, output: kept.append(output)) for layer in layers]
        at.run(clean)
        for handle in handles:
            handle.remove()
        assert len(states) == len(kept) + 1
        cells = [cell(layer, kept[index], position) for index, layer in enumerate(layers) for position in range(length)]
        return [torch.stack(cells).view(len(layers), length)]

    length = clean.shape[1]

    def cell(layer: Any, value: Tensor, position: int) -> Tensor:
        def patch(module: Any, inputs: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[:, position] = value[:, position]
            return output

        handle = layer.register_forward_hook(patch)
        found = metric(at.run(corrupt))
        handle.remove()
        return found

    return ours, theirs


def hvp(at: Setting) -> Pair:
    direction = tree.map(torch.randn_like, at.params)
    vectors = at.ordered(direction)
    batch = (at.prepared, at.labels)

    def theirs() -> list[Tensor]:
        leaves = list(at.leaves.values())
        gradients = torch.autograd.grad(summed(at.run(at.tokens), at.labels), leaves, create_graph=True)
        return list(torch.autograd.grad(gradients, leaves, vectors))

    return lambda: at.ordered(research.hvp(at.loss, at.params, batch)(direction)), theirs


def kept(at: Setting) -> Pair:
    direction = tree.map(torch.randn_like, at.params)
    vectors, leaves = at.ordered(direction), list(at.leaves.values())
    operator = research.hvp(at.loss, at.params, (at.prepared, at.labels))
    gradients = torch.autograd.grad(summed(at.run(at.tokens), at.labels), leaves, create_graph=True)
    return (
        lambda: at.ordered(operator(direction)),
        lambda: list(torch.autograd.grad(gradients, leaves, vectors, retain_graph=True)),
    )


def lens(at: Setting) -> Pair:
    directions = torch.randn(32, at.config.hidden_size, generator=at.generator)

    def theirs() -> list[Tensor]:
        states: list[Tensor] = []

        def begin(module: Any, inputs: Any, output: Tensor) -> Tensor:
            states.append(output.detach().requires_grad_())
            return states[0]

        handles = [at.model.model.embed_tokens.register_forward_hook(begin)]
        for layer in at.model.model.layers:
            handles.append(layer.register_forward_hook(lambda module, inputs, output: states.append(output)))
        at.run(at.tokens)
        for handle in handles:
            handle.remove()
        rows = []
        for direction in directions:
            cotangent = direction.expand_as(states[-1])
            found = torch.autograd.grad(states[-1], states, cotangent, retain_graph=True)
            rows.append(torch.stack([gradient.sum((0, 1)) for gradient in found]))
        return [torch.stack(rows, 1) / at.tokens.numel()]

    def ours() -> list[Tensor]:
        return [research.jacobian_lens(at.params, at.prepared, config=at.config, directions=directions)]

    for leaf in at.leaves.values():  # neither needs gradients of parameters
        leaf.requires_grad_(False)
    return ours, theirs


def harvest(at: Setting, longest: int) -> Pair:
    """Lengths as of web pages: most are short, a few are long."""
    lengths = [max(4, int(longest * 2.0 ** (-6 * i / 31))) for i in range(32)]
    order = torch.randperm(32, generator=at.generator).tolist()
    documents = [at.draw(lengths[i]) for i in order]
    total, name = sum(lengths), f"layers.{at.config.num_hidden_layers // 2}.output"
    packed = fnmodels.pack(documents, longest, method="first_fit")

    def ours() -> list[Tensor]:
        inputs = fnmodels.prepare(at.config, packed.tokens, positions=packed.positions, segment_ids=packed.segment_ids)
        layout = fnmodels.layout(inputs[1])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "activations")
            found = research.harvest(at.params, [inputs], path, name, config=at.config, rows=total, layout=layout)
            return [found.sum(0)]

    @torch.no_grad()
    def theirs() -> list[Tensor]:
        found: list[Tensor] = []
        layer = at.model.model.layers[at.config.num_hidden_layers // 2]
        handle = layer.register_forward_hook(lambda module, inputs, output: found.append(output))
        rows = []
        for start in range(0, len(documents), 8):
            part = documents[start : start + 8]
            tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            valid = torch.arange(tokens.shape[1]) < torch.tensor([len(one) for one in part])[:, None]
            at.run(tokens, attention_mask=valid.long())
            rows.append(found.pop()[valid])
        handle.remove()
        with tempfile.TemporaryDirectory() as folder:
            size = (total, at.config.hidden_size)
            out = torch.from_file(str(Path(folder, "activations")), shared=True, size=size[0] * size[1]).view(size)
            out.copy_(torch.cat(rows))
            return [out.sum(0)]

    return ours, theirs


def rows(at: Setting) -> Pair:
    batch = (at.prepared, at.labels)
    detached = {name: leaf.detach() for name, leaf in at.leaves.items()}

    def loss(named: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        call = torch.func.functional_call(at.model, named, (), {"input_ids": tokens[None], "use_cache": False})
        return summed(call.logits, labels)

    def theirs() -> list[Tensor]:
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(detached, at.tokens, at.labels)
        return [gradients[name] for name in at.leaves]

    return lambda: at.ordered(fnmodels.per_sample_gradients(at.loss, at.params, batch)[0]), theirs


def check(name: str, pair: Pair) -> None:
    for got, want in zip(pair[0](), pair[1](), strict=True):
        error = float((got - want).abs().max() / want.abs().max())
        if not error < 1e-3:
            raise SystemExit(f"{name}: the results differ by {error:.2g} of the largest entry.")


def ratio(pair: Pair, rounds: int) -> tuple[float, float, float]:
    """(median seconds of ours, of transformers', median of the ratios)."""
    times = []
    for _ in range(rounds):
        each = []
        for run in pair:
            begin = time.process_time()
            run()
            each.append(time.process_time() - begin)
        times.append(each)
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    return ours, theirs, statistics.median(b / a for a, b in times)


SECTIONS: dict[str, tuple[float | None, int, int, Callable[[Setting], Pair]]] = {
    # target, rows and tokens of the batch, contenders
    "cache": (None, 2, 128, cache),
    "grid": (3.0, 1, 64, grid),
    "hvp": (1.1, 2, 64, hvp),
    "kept": (None, 2, 64, kept),
    "lens": (1.2, 1, 64, lens),
    "harvest": (4.0, 1, 256, lambda at: harvest(at, at.tokens.shape[1])),
    "rows": (1.15, 4, 64, rows),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="fnmodels.research beside hooks on transformers.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="There is a performance drop")
    base, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    print(f"{P.count(base) / 1e6:.1f}M parameters, {options.threads} threads, {rounds} rounds, processor time")
    print("| section | fnmodels, s | transformers, s | ratio | target |\n|---|---|---|---|---|")
    for name in options.only:
        target, count, length, contenders = SECTIONS[name]
        if name == "grid" and not options.quick:
            config = replace(base, num_hidden_layers=8, layer_kinds=())
        else:
            config = base
        pair = contenders(Setting(config, count, length // 8 if options.quick else length))
        check(name, pair)
        ours, theirs, best = ratio(pair, min(rounds, 1) if name == "grid" else rounds)
        print(f"| {name} | {ours:.4f} | {theirs:.4f} | {best:.2f} | {target or ''} |", flush=True)


if __name__ == "__main__":
    main()
