"""`train.integrations.trl.CausalLM` in TRL's GRPOTrainer: steps equal those of transformers' model on the same answers.

trl comes with the dev extra.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from tests.support.cases import generic_params, off
from train.integrations.trl import CausalLM

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "gemma2": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "tie_word_embeddings": True,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 8,
    },
}
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(10)), *(f"w{i}" for i in range(82))]


def checkpoint(name: str, folder: Path) -> PreTrainedTokenizerFast:
    """A model with random weights and a tokenizer of 96 words."""
    config = fnmodels.family_for(MODELS[name]["model_type"]).Config.from_hf(SIZES | MODELS[name])
    P.save_pretrained(folder, config, generic_params(config))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}))
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(word.isdigit() for word in text.split()) / max(1, len(text.split())) for text in completions]


def trained(model: Any, tokenizer: Any, folder: Path, steps: int, **changes: Any) -> list[dict[str, float]]:
    """What GRPOTrainer logs in its steps: 2 prompts of different lengths, 4 answers to each, KL to a reference."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    settings |= {"learning_rate": 3e-3, "max_steps": steps, "beta": 0.05, "temperature": 0.9, "logging_steps": 1}
    settings |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False, "adam_epsilon": 1e-3}
    args = GRPOConfig(str(folder), lr_scheduler_type="constant", disable_tqdm=True, **settings | changes)
    prompts = Dataset.from_list([{"prompt": "w1 w2 3 w4 w5"}, {"prompt": "w6 w7"}])
    trainer = GRPOTrainer(model, reward_funcs=digits, args=args, processing_class=tokenizer, train_dataset=prompts)
    trainer.train()
    return [row for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("gemma2", {"gradient_checkpointing": False})])
def test_steps_are_those_of_the_model_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = checkpoint(name, tmp_path)
    config, params = P.load_pretrained(tmp_path, copy=True)
    ours = CausalLM(config, params, AutoConfig.from_pretrained(tmp_path), GenerationConfig(), kernel="math")
    answers: list[Tensor] = []
    draw = ours.generate

    def noted(*args: Any, **more: Any) -> Tensor:
        answers.append(draw(*args, **more))
        return answers[-1]

    ours.generate = noted  # type: ignore[method-assign]
    found = trained(ours, tokenizer, tmp_path / "ours", 2, **changes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    # transformers gives the embedding of the padding token no gradient, also where that token was drawn.
    theirs.get_input_embeddings().padding_idx = None
    given = iter(answers)
    theirs.generate = lambda *_, **__: next(given)
    wanted = trained(theirs, tokenizer, tmp_path / "theirs", 2, **changes)
    assert len(answers) == len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        assert one["reward"] == other["reward"]
        for key in ("loss", "grad_norm", "kl", "entropy"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=5e-6), key
    moved = off(P.load_pretrained(tmp_path, copy=True)[1], ours.params())
    theirs.save_pretrained(tmp_path / "after")
    assert moved > 3e-3
    assert off(P.load_pretrained(tmp_path / "after", copy=True)[1], ours.params()) < 1e-4 * moved


def test_answers_are_those_of_transformers(tmp_path: Path) -> None:
    """Greedy, with a repetition penalty and a prompt that is padded."""
    checkpoint("llama", tmp_path)
    config, params = P.load_pretrained(tmp_path, copy=True)
    ours = CausalLM(config, params, AutoConfig.from_pretrained(tmp_path), GenerationConfig())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": [2, 40]}
    given = GenerationConfig(**how, repetition_penalty=1.3)
    mask = (tokens != 0).long()
    assert torch.equal(
        ours.generate(tokens, mask, generation_config=given),
        theirs.generate(input_ids=tokens, attention_mask=mask, generation_config=given),
    )
    plain = ours(tokens, mask).logits[1]
    torch.testing.assert_close(plain, theirs(input_ids=tokens, attention_mask=mask).logits[1], atol=1e-5, rtol=1e-5)


def test_answers_are_drawn_with_the_edits_and_layers_that_are_trained(tmp_path: Path) -> None:
    """Greedy, each token the likeliest of the module's own logits for the text so far."""
    checkpoint("llama", tmp_path)
    config, params = P.load_pretrained(tmp_path, copy=True)
    given = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    tokens, layers = torch.tensor([[5, 6, 7]]), list[int]()

    def layer_fn(block: Any) -> Any:
        def run(*args: Any, **more: Any) -> Any:
            layers.append(1)
            return block(*args, **more)

        return run

    options: dict[str, Any] = {"edits": {"layers.0.output": lambda x, name: x.roll(1, -1)}, "layer_fn": layer_fn}
    edited, plain = (CausalLM(config, params, None, GenerationConfig(), **how) for how in (options, {}))
    found = edited.generate(tokens, torch.ones_like(tokens), generation_config=given)
    assert len(layers) >= 2 * 8  # layers x tokens
    assert not torch.equal(found, plain.generate(tokens, torch.ones_like(tokens), generation_config=given))
    logits = edited(found).logits
    assert torch.equal(logits[0, 2:-1].argmax(-1), found[0, 3:])


def test_another_head_is_refused() -> None:
    values = SIZES | MODELS["llama"] | {"architectures": ["LlamaForTokenClassification"], "id2label": {"0": "value"}}
    config = fnmodels.family_for("llama").Config.from_hf(values)
    with pytest.raises(ValueError, match="head is 'tokens'; TRL's trainers take a causal language model, with \"lm\""):
        CausalLM(config, P.init(config, 0), None, None)
