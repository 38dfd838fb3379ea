"""Times encoders: embedding texts, a step of fine-tuning, and ViT-B/16, beside the programs that are used for them.

    python benchmarks/encoders.py                    a MiniLM-L6-sized BERT (22.7M) and ViT-B/16, minutes
    python benchmarks/encoders.py --parts embed      one of embed, bf16, tune, vit
    python benchmarks/encoders.py --quick            tiny models and one round, to check that everything runs

Texts have 5 to 200 tokens. embed: packed rows and weights of `params.packed` beside sentence-transformers, which sorts
texts by length and pads; both include the tokenizer. bf16: the same with bf16 weights on both sides, and the cosine of
the vectors with those of fp32. tune: a step of sequence classification (forward, backward, AdamW), packed beside
transformers on padded rows. vit: images per second, forward and a step of classification. All have the same weights and
keep the memory that they free (`train.keep_freed_memory`), and the results
must agree. A package that is not installed is left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)
from turns import take_turns

import fnmodels
import params as P
import train
from fnmodels import tree

MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TARGETS = {"embed": 1.5, "bf16": 1.5, "tune": 2.0, "vit forward": 1.1, "vit step": 1.1}

PARTS = ("embed", "bf16", "tune", "vit")

Contenders = dict[str, Callable[[], torch.Tensor]]


def texts_of(count: int, words: int, longest: int) -> list[str]:
    """Texts of 5 to `longest` tokens with the two special ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, longest - 1, (count,), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in torch.randint(words, (n,), generator=generator).tolist()) for n in lengths]


def embed(
    folder: Path, sizes: dict[str, Any], count: int, longest: int, dtype: torch.dtype = torch.float32
) -> tuple[Contenders, int]:
    """Embedding texts: {name: a run that returns [N, D]}, and the number of texts."""
    torch.manual_seed(0)
    vocabulary = [*SPECIAL, *(f"w{i}" for i in range(30522 - len(SPECIAL)))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertModel(BertConfig(**sizes)).save_pretrained(folder)
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    config, params = P.load_pretrained(folder, head="none", copy=True)
    embedder = fnmodels.Embedder(("mean",), (), normalize=True, max_length=256)
    P.save_embedder(folder, config, params, embedder)
    params = tree.map(lambda leaf: leaf.to(dtype), exact := params)
    texts = texts_of(count, 30000, longest)

    def ours(params: Any) -> torch.Tensor:
        ids = tokenizer(texts)["input_ids"]
        return fnmodels.embed_documents(params, ids, config=config, embedder=embedder)

    found: Contenders = {"fnmodels": functools.partial(ours, P.packed(params))}  # bf16 weights stay as they are
    if dtype is not torch.float32:
        cosines = (ours(params).float() * ours(exact)).sum(1)
        print(f"\ncosines of {dtype} vectors with those of fp32: at least {cosines.min():.5f}")
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
        found["sentence-transformers"] = lambda: model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    return found, count


def tune(folder: Path, sizes: dict[str, Any], count: int, longest: int) -> tuple[Contenders, int]:
    """A step of classification into 3 classes: {name: a step that returns the loss before it}, and its texts."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    net = BertForSequenceClassification(BertConfig(**sizes, **rates, num_labels=3, attn_implementation="sdpa")).train()
    net.save_pretrained(folder)
    config, params = P.load_pretrained(folder, copy=True)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, longest + 1, (count,), generator=generator).tolist()
    documents = [torch.randint(5, 30522, (n,), generator=generator) for n in lengths]
    labels = torch.randint(3, (count,), generator=generator)
    optimizer = train.adamw(1e-5, weight_decay=0.0)
    step = train.make_step(functools.partial(train.classification_loss, config=config), optimizer)
    state = [train.init_state(params, optimizer)]

    def ours() -> torch.Tensor:
        batch = train.document_batch(documents, sum(lengths), labels=labels.tolist())  # one row without padding
        state[0], metrics = step(state[0], batch)
        return torch.as_tensor(metrics["loss"])

    fused = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

    def theirs() -> torch.Tensor:
        tokens = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in documents], batch_first=True)
        loss = net(input_ids=tokens, attention_mask=mask, labels=labels).loss
        fused.zero_grad()
        loss.backward()
        fused.step()
        return loss.detach()

    return {"fnmodels": ours, "transformers": theirs}, count


def vit(folder: Path, sizes: dict[str, Any], count: int, *, steps: bool) -> tuple[Contenders, int]:
    """ViT on images of one size: {name: logits, or with `steps` the loss before a step}, and the number of images."""
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    net = ViTForImageClassification(ViTConfig(**sizes, **rates, num_labels=10, attn_implementation="sdpa")).eval()
    net.save_pretrained(folder)
    config, params = P.load_pretrained(folder, copy=True)
    images, labels = torch.rand(count, 3, net.config.image_size, net.config.image_size), torch.arange(count) % 10
    nets: dict[str, Any] = {"transformers": net}
    if importlib.util.find_spec("timm"):
        import timm

        nets["timm"] = timm.create_model("vit_base_patch16_224", num_classes=10) if not sizes else None
    optimizer = train.adamw(1e-5, weight_decay=0.0)
    step = train.make_step(functools.partial(train.classification_loss, config=config), optimizer)
    state = [train.init_state(params, optimizer)]

    def ours(params: Any = params) -> torch.Tensor:
        tokens, positions, segment_ids = fnmodels.inputs.patch_rows(list(images), config)
        if steps:
            given = {"tokens": tokens, "positions": positions, "segment_ids": segment_ids}
            state[0], metrics = step(state[0], {**given, "labels": labels[:, None].expand(segment_ids.shape)})
            return torch.as_tensor(metrics["loss"])
        with torch.no_grad():
            prepared = fnmodels.prepare(config, tokens, positions=positions, segment_ids=segment_ids)
            return fnmodels.forward(params, *prepared, config=config, layout=fnmodels.layout(prepared[1]))

    def runs(model: Any) -> Callable[[], torch.Tensor]:
        fused = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

        def run() -> torch.Tensor:
            with torch.set_grad_enabled(steps):
                logits = model(images)
                logits = getattr(logits, "logits", logits)
                if not steps:
                    return logits
                loss = F.cross_entropy(logits, labels)
            fused.zero_grad()
            loss.backward()
            fused.step()
            return loss.detach()

        return run

    own: Contenders = {"fnmodels": ours}
    if not steps:
        own["fnmodels, P.packed"] = functools.partial(ours, P.packed(params))
    return own | {name: runs(model) for name, model in nets.items() if model is not None}, count


def report(part: str, contenders: Contenders, count: int, rounds: int) -> None:
    first: dict[str, torch.Tensor] = {}

    def kept(name: str) -> torch.Tensor:
        result = contenders[name]()
        first.setdefault(name, result)
        return result

    taken = take_turns({name: functools.partial(kept, name) for name in contenders}, rounds)
    for name, result in first.items():
        if name != "timm":  # whose weights are its own
            bound = 1e-4 if result.dtype is torch.float32 else 2e-2
            torch.testing.assert_close(first["fnmodels"], result, rtol=bound, atol=bound, msg=f"{part}: {name} differs")
    print(f"\n{part}: {count} a run (target {TARGETS[part]} x the others)")
    print("| who | a second | x as fast is fnmodels | by CPU time | peak MiB |")
    print("|---|---|---|---|---|")
    ours = taken["fnmodels"]
    for name, one in taken.items():
        ratios = f"{one.wall / ours.wall:.2f} | {one.cpu / ours.cpu:.2f}"
        print(f"| {name} | {count / one.wall:,.1f} | {ratios} | {one.peak / 2**20:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    train.keep_freed_memory()  # for all contenders, which are in this process
    torch.set_num_threads(args.threads)
    texts, rounds, longest, sizes, picture = args.texts, args.rounds, 200, MINI, dict[str, Any]()
    if args.quick:
        texts, rounds, longest, sizes, picture = 12, 1, 20, SMALL, SMALL | {"image_size": 32}
    makers = {
        "embed": functools.partial(embed, sizes=sizes, count=texts, longest=longest),
        "bf16": functools.partial(embed, sizes=sizes, count=texts, longest=longest, dtype=torch.bfloat16),
        "tune": functools.partial(tune, sizes=sizes, count=8 if args.quick else 32, longest=longest),
        "vit forward": functools.partial(vit, sizes=picture, count=2 if args.quick else 8, steps=False),
        "vit step": functools.partial(vit, sizes=picture, count=2 if args.quick else 8, steps=True),
    }
    print(json.dumps({"threads": args.threads, "rounds": rounds}))
    for part, make in makers.items():
        if part.split()[0] in args.parts:
            with tempfile.TemporaryDirectory() as folder:
                report(part, *make(Path(folder)), rounds)


if __name__ == "__main__":
    main()
