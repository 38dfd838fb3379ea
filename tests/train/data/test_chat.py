"""Tests of chat data: the rendered text equals transformers', and every token's label is written out by hand."""

import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fnmodels import pack
from fnmodels.errors import CheckpointError, UserError
from train.data.chat import (
    Example,
    Template,
    assistant_spans,
    encode_chat,
    encode_turns,
    read_template,
    render,
    render_examples,
    render_prompt,
)
from train.data.corpus import CorpusDocument
from train.data.tokenized import encode_conversations

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]

# Written from the formats that the model cards describe.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + message['content'] + eos_token }}\n"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "zephyr": ZEPHYR}
TALKS = {
    "turns": CHAT,
    "system": [{"role": "system", "content": "Be brief."}, *CHAT[:2]],
    "silent": [CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]],
    "unanswered": CHAT[:3],
    "spaces": [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": " Hello!\n"}],
}
# (template, conversation): the pieces of the text, and whether each is a target of the loss
CHATML_HI, LLAMA3_HI = "<|im_start|>user\nHi<|im_end|>\n", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
CHATML_CUE, LLAMA3_CUE = "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"
CHATML_SUM = "<|im_start|>user\n2+2?<|im_end|>\n"
LLAMA3_SUM = "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
PUBLISHED = {
    ("chatml", "turns"): [
        (CHATML_HI + CHATML_CUE, False),
        ("Hello!<|im_end|>\n", True),
        (CHATML_SUM + CHATML_CUE, False),
        ("4<|im_end|>\n", True),
    ],
    ("chatml", "system"): [
        ("<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML_HI + CHATML_CUE, False),
        ("Hello!<|im_end|>\n", True),
    ],
    ("chatml", "silent"): [
        (CHATML_HI + CHATML_CUE, False),
        ("<|im_end|>\n", True),
        (CHATML_SUM + CHATML_CUE, False),
        ("4<|im_end|>\n", True),
    ],
    ("chatml", "unanswered"): [
        (CHATML_HI + CHATML_CUE, False),
        ("Hello!<|im_end|>\n", True),
        (CHATML_SUM, False),
    ],
    ("chatml", "spaces"): [
        ("<|im_start|>user\n Hi <|im_end|>\n" + CHATML_CUE, False),
        (" Hello!\n<|im_end|>\n", True),
    ],
    ("llama3", "turns"): [
        ("<s>" + LLAMA3_HI + LLAMA3_CUE, False),
        ("Hello!<|eot_id|>", True),
        (LLAMA3_SUM + LLAMA3_CUE, False),
        ("4<|eot_id|>", True),
    ],
    ("llama3", "system"): [
        ("<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>" + LLAMA3_HI + LLAMA3_CUE, False),
        ("Hello!<|eot_id|>", True),
    ],
    ("llama3", "silent"): [
        ("<s>" + LLAMA3_HI + LLAMA3_CUE, False),
        ("<|eot_id|>", True),
        (LLAMA3_SUM + LLAMA3_CUE, False),
        ("4<|eot_id|>", True),
    ],
    ("llama3", "unanswered"): [
        ("<s>" + LLAMA3_HI + LLAMA3_CUE, False),
        ("Hello!<|eot_id|>", True),
        (LLAMA3_SUM, False),
    ],
    ("llama3", "spaces"): [("<s>" + LLAMA3_HI + LLAMA3_CUE, False), ("Hello!<|eot_id|>", True)],  # it trims
    ("mistral", "turns"): [
        ("<s>[INST] Hi [/INST]", False),
        ("Hello!</s>", True),
        ("[INST] 2+2? [/INST]", False),
        ("4</s>", True),
    ],
    ("mistral", "silent"): [
        ("<s>[INST] Hi [/INST]", False),
        ("</s>", True),
        ("[INST] 2+2? [/INST]", False),
        ("4</s>", True),
    ],
    ("mistral", "unanswered"): [
        ("<s>[INST] Hi [/INST]", False),
        ("Hello!</s>", True),
        ("[INST] 2+2? [/INST]", False),
    ],
    ("mistral", "spaces"): [("<s>[INST]  Hi  [/INST]", False), (" Hello!\n</s>", True)],
    ("zephyr", "turns"): [
        ("<|user|>\nHi</s>\n<|assistant|>\n", False),
        ("Hello!</s>\n", True),
        ("<|user|>\n2+2?</s>\n<|assistant|>\n", False),
        ("4</s>\n", True),
    ],
    ("zephyr", "system"): [
        ("<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n", False),
        ("Hello!</s>\n", True),
    ],
    ("zephyr", "silent"): [
        ("<|user|>\nHi</s>\n<|assistant|>\n", False),
        ("</s>\n", True),
        ("<|user|>\n2+2?</s>\n<|assistant|>\n", False),
        ("4</s>\n", True),
    ],
    ("zephyr", "unanswered"): [
        ("<|user|>\nHi</s>\n<|assistant|>\n", False),
        ("Hello!</s>\n", True),
        ("<|user|>\n2+2?</s>\n", False),
    ],
    ("zephyr", "spaces"): [("<|user|>\n Hi </s>\n<|assistant|>\n", False), (" Hello!\n</s>\n", True)],
}
MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def _tokenizer() -> Tokenizer:
    """A byte-level tokenizer with the templates' markers as one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(MARKS)
    return made


@pytest.mark.parametrize(("name", "talk"), PUBLISHED)
def test_the_loss_mask_of_every_token_is_as_written_out(name: str, talk: str) -> None:
    tokenizer = _tokenizer()
    example = encode_chat(tokenizer, Template(TEMPLATES[name], SPECIAL), TALKS[talk])
    expected = [(token, learnt) for text, learnt in PUBLISHED[name, talk] for token in tokenizer.encode(text).ids]
    assert example.tokens.tolist() == [token for token, _ in expected]
    assert example.loss_mask.tolist() == [learnt for _, learnt in expected]
    assert example.labels.tolist() == [token if learnt else -100 for token, learnt in expected[1:]] + [-100]


@pytest.mark.parametrize(("name", "talk"), PUBLISHED)
def test_a_conversation_that_is_cut_is_the_beginning_of_the_whole(name: str, talk: str) -> None:
    tokenizer, template = _tokenizer(), Template(TEMPLATES[name], SPECIAL)
    whole = encode_chat(tokenizer, template, TALKS[talk])
    for length in range(1, len(whole.tokens) + 2):
        if not whole.loss_mask[:length].any():
            with pytest.raises(UserError, match=f"the first {length} of {len(whole.tokens)} tokens hold nothing that"):
                encode_chat(tokenizer, template, TALKS[talk], length=length)
            continue
        part = encode_chat(tokenizer, template, TALKS[talk], length=length)
        assert part.tokens.tolist() == whole.tokens[:length].tolist()
        assert part.labels[:-1].tolist() == whole.labels[: min(length, len(whole.tokens)) - 1].tolist()
        assert part.labels[-1] == -100


def test_templates_without_a_place_for_what_is_said_refuse() -> None:
    with pytest.raises(UserError, match="Roles must alternate"):
        encode_chat(_tokenizer(), Template(MISTRAL, SPECIAL), TALKS["system"])
    with pytest.raises(UserError, match="begins with the assistant, and the chat template has no cue for it"):
        encode_chat(_tokenizer(), Template(ZEPHYR, SPECIAL), CHAT[1:])
    example = encode_chat(_tokenizer(), Template(CHATML, {}), CHAT[1:2])
    said = [token for token in example.labels.tolist() if token != -100]
    assert _tokenizer().decode(said, skip_special_tokens=False) == "Hello!<|im_end|>\n"


@pytest.mark.parametrize(("name", "talk"), PUBLISHED)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_that_of_transformers(name: str, talk: str, prompt: bool) -> None:
    source, messages = TEMPLATES[name], TALKS[talk]
    reference = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), **SPECIAL)
    theirs = reference.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=prompt)
    assert render(Template(source, SPECIAL), messages, prompt=prompt) == theirs


def test_packed_conversations_keep_what_is_learnt() -> None:
    tokenizer, template = _tokenizer(), Template(CHATML, {})
    examples = [encode_chat(tokenizer, template, messages) for messages in (CHAT[:2], CHAT, CHAT[2:])]
    packed = pack([e.tokens for e in examples], 160, split=False, weights=[e.loss_mask.float() for e in examples])
    learnt = packed.labels[(packed.labels != -100) & (packed.weights > 0)]
    assert sorted(learnt.tolist()) == sorted(t for e in examples for t in e.labels.tolist() if t != -100)


def test_a_token_across_the_seam_is_not_learnt() -> None:
    tokenizer = _tokenizer()
    tokenizer.add_tokens(["t\nHel"])
    example = encode_chat(tokenizer, Template(CHATML, {}), CHAT[:2])
    said = [token for token in example.labels.tolist() if token != -100]
    assert tokenizer.decode(said, skip_special_tokens=False) == "lo!<|im_end|>\n"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    forgetful = Template(
        "{% for m in messages %}{% set kept = loop.last or m['role'] == 'user' %}"
        "{{ '[' + m['role'] + ']' + (m['content'] if kept else m['content'] | upper) }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}",
        {},
    )
    with pytest.raises(UserError, match="renders turn 2 of 4 differently"):
        assistant_spans(forgetful, CHAT)


def test_a_cue_that_opens_the_reasoning_is_context() -> None:
    """As DeepSeek R1's template: the cue opens the reasoning, and turns are rendered without theirs."""
    template = Template(
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'].split('</think>')[-1] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}",
        {},
    )
    ((text, spans),) = render_examples(template, CHAT)
    assert [text[start:stop] for start, stop in spans] == ["Hello!</s>", "4</s>"]
    with pytest.raises(UserError, match=r"leaves out the reasoning of turn 2 of 2: 'So\.' has no place"):
        render_examples(template, [CHAT[0], {"role": "assistant", "content": "<think>So.</think>Hello!"}])


def test_a_turn_that_does_not_begin_with_its_cue_is_refused() -> None:
    template = Template(
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>Well, ' }}{% endif %}",
        {},
    )
    with pytest.raises(UserError, match=r"does not begin turn 2 of 2 with its cue .* ends with '.*<assistant>Well, '"):
        render_examples(template, CHAT[:2])


THOUGHTS = (  # Qwen 3's way: the last answer is rendered with its thoughts, even if it has none, earlier ones without
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _text(example: Example, *, targets_only: bool) -> str:
    tokens = example.tokens[example.loss_mask] if targets_only else example.tokens
    return _tokenizer().decode(tokens.tolist(), skip_special_tokens=False)


def test_turns_that_are_rendered_differently_later_are_examples_of_their_own() -> None:
    template, tokenizer = Template(THOUGHTS, {}), _tokenizer()
    with pytest.raises(UserError, match="renders turn 2 of 4 differently"):
        encode_chat(tokenizer, template, CHAT)
    first, second = encode_turns(tokenizer, template, CHAT)
    hi, cue = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
    think = "<think>\n\n</think>\n\n"
    assert _text(first, targets_only=False) == hi + cue + think + "Hello!<|im_end|>\n"
    assert _text(first, targets_only=True) == think + "Hello!<|im_end|>\n"
    again = hi + cue + "Hello!<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n" + cue
    assert _text(second, targets_only=False) == again + think + "4<|im_end|>\n"
    assert _text(second, targets_only=True) == think + "4<|im_end|>\n"
    (only,) = encode_turns(tokenizer, template, CHAT, length=len(first.tokens))
    assert only.tokens.tolist() == first.tokens.tolist()
    with pytest.raises(UserError, match="the first 3 of"):
        encode_turns(tokenizer, template, CHAT, length=3)
    (whole,) = encode_turns(tokenizer, Template(CHATML, {}), CHAT)
    assert whole.loss_mask.tolist() == encode_chat(tokenizer, Template(CHATML, {}), CHAT).loss_mask.tolist()


def test_marks_of_the_assistants_part_leave_no_trace() -> None:
    marked = CHATML.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'", 1)
    marked = marked.replace("{% endfor %}", "{% endgeneration %}{% endfor %}")
    reference = PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
    theirs = reference.apply_chat_template(CHAT, chat_template=marked, tokenize=False)
    assert render(Template(marked, {}), CHAT) == theirs == render(Template(CHATML, {}), CHAT)


MARKED = {
    "without the cue": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}",
    "thoughts of the last turn": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{% if loop.last %}{{ '<think>\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("name", MARKED)
def test_a_template_that_marks_what_the_assistant_says_is_taken_at_its_word(name: str) -> None:
    source, tokenizer = MARKED[name], _tokenizer()
    reference = PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
    theirs = reference.apply_chat_template(
        CHAT, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    (example,) = encode_turns(tokenizer, Template(source, {}), CHAT)
    assert example.tokens.tolist() == theirs["input_ids"]
    assert example.loss_mask.int().tolist() == theirs["assistant_masks"] and sum(theirs["assistant_masks"]) > 0
    last = "<think>\n4<|im_end|>" if "thoughts" in name else "4<|im_end|>"
    assert _text(example, targets_only=True) == "Hello!<|im_end|>" + last


def test_marks_within_marks_are_refused() -> None:
    inside = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    with pytest.raises(UserError, match="the chat template nests"):
        render(Template(inside, {}), CHAT)


# One line per variable or function that published templates use (GLM-4.5, Llama 3.1, Mistral, Qwen 2.5).
ASKED = {
    "letters as they are": "{{ messages | tojson(ensure_ascii=False) }}",
    "escaped letters": "{{ messages | tojson(ensure_ascii=True) }}",
    "separators": "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "indented": "{{ messages | tojson(indent=2) }}",
    "no tools": "{% if tools is not none %}{{ tools | length }}{% endif %}{{ messages[0]['content'] }}",
    "tools": "{% for tool in tools %}{{ tool | tojson }}{% endfor %}",
    "documents": "{% if documents is none %}none{% endif %}",
    "one more turn": "{% set messages = [{'role': 'system'}] + messages %}{{ messages | length }}",
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("tools", [None, [{"name": "add", "parameters": {"a": None}}]])
def test_what_templates_ask_for_is_there_as_in_transformers(name: str, tools: Any) -> None:
    messages = [{"role": "user", "content": "ü < 漢"}, CHAT[1]]
    reference = PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
    try:
        theirs = reference.apply_chat_template(messages, chat_template=ASKED[name], tools=tools, tokenize=False)
    except TypeError:  # a loop over no tools
        with pytest.raises(UserError, match="cannot render"):
            render(Template(ASKED[name], {}), messages, tools=tools)
    else:
        assert render(Template(ASKED[name], {}), tuple(messages), tools=tools) == theirs


def test_the_day_is_todays_or_the_one_that_is_given() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    reference = PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
    theirs = {reference.apply_chat_template(CHAT, chat_template=source, tokenize=False) for _ in range(2)}
    assert render(Template(source, {}), CHAT) in theirs | {
        reference.apply_chat_template(CHAT, chat_template=source, tokenize=False)
    }
    assert render(Template(source, {}, day="2024-07-26"), CHAT) == "26 Jul 2024"


@pytest.mark.parametrize("moved", [False, True], ids=["offsets whole", "offsets past spaces"])
def test_spaces_at_a_seam_belong_to_the_side_that_writes_them(moved: bool) -> None:
    tokenizer = _tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=moved)
    template = Template(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' <|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        {},
    )
    example = encode_chat(tokenizer, template, CHAT)
    assert _text(example, targets_only=True) == "Hello! <|im_end|>4 <|im_end|>"
    assert str(tokenizer.post_processor) == str(processors.ByteLevel(trim_offsets=moved))


def test_the_template_alone_writes_the_beginning_of_a_text() -> None:
    tokenizer, template = _tokenizer(), Template(LLAMA3, SPECIAL)
    plain = encode_chat(tokenizer, template, CHAT)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    assert tokenizer.encode("a").ids[0] == begin
    assert encode_chat(tokenizer, template, CHAT).tokens.tolist() == plain.tokens.tolist()
    assert plain.tokens.tolist().count(begin) == 1


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{{ {}.popitem() }}", "{{ none + 'a' }}"])
def test_whatever_a_template_does_is_a_sentence(source: str) -> None:
    with pytest.raises(UserError, match="the chat template cannot render"):
        render(Template(source, {}), CHAT)


def test_mistakes_are_sentences() -> None:
    with pytest.raises(UserError, match="no turn of the assistant; its roles are user"):
        encode_chat(_tokenizer(), Template(CHATML, {}), CHAT[:1])
    with pytest.raises(UserError, match="Roles must alternate"):
        render(Template(MISTRAL, SPECIAL), [CHAT[0], CHAT[0]])
    with pytest.raises(UserError, match="cannot render"):
        render(Template("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}), CHAT)
    with pytest.raises(UserError, match="cannot render"):
        render(Template("{% for", {}), CHAT)


def test_templates_are_found_in_a_folder(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="no chat template"):
        read_template(tmp_path)
    values = {
        "chat_template": [{"name": "default", "template": "A"}],
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    assert read_template(tmp_path) == Template("A", SPECIAL)
    (tmp_path / "chat_template.jinja").write_text("B")
    assert read_template(tmp_path).source == "B"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<old>", "sep_token": "<sep>"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values | {"add_bos_token": True, "pad_token": None}))
    assert read_template(tmp_path).special == SPECIAL | {"sep_token": "<sep>"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        read_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("B")
    for content, message in (
        ("[1]", r"tokenizer_config\.json holds no JSON object"),
        ("{", r"config\.json is not valid"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises((UserError, CheckpointError), match=message):
            read_template(tmp_path)


TRL = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
CALLED: dict[str, Any] = {"name": "Tname", "arguments": {"Tkey": "Tvalue"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]}
# Each word is to be trained as often as the assistant's turns have it; those that begin with C are context.
TOLD: dict[str, list[dict[str, Any]]] = {
    "turns": [
        {"role": "user", "content": "Uone"},
        {"role": "assistant", "content": "Aone"},
        {"role": "user", "content": "Utwo"},
        {"role": "assistant", "content": "Atwo"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Uone"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Aone"}, {"type": "text", "text": "Amore"}]},
    ],
    "reasoning": [
        {"role": "user", "content": "Uone"},
        {"role": "assistant", "reasoning_content": "Rone", "content": "Aone"},
        {"role": "user", "content": "Utwo"},
        {"role": "assistant", "reasoning_content": "Rtwo", "content": "Atwo"},
    ],
    "thoughts": [
        {"role": "user", "content": "Uone"},
        {"role": "assistant", "content": "<think>\nRone\n</think>\n\nAone"},
    ],
    "call": [
        {"role": "user", "content": "Uone"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "Tname", "arguments": {"Tkey": "Tvalue"}}}],
        },
    ],
    "null": [
        {"role": "user", "content": "Uone"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "Tname", "arguments": {"Tkey": "Tvalue"}}}],
        },
    ],
}
TOLD |= {
    "legacy call": [TOLD["call"][0], {"role": "assistant", "content": "", "function_call": CALLED}],
    "another key": [TOLD["call"][0], {"role": "assistant", "content": "Aone", "thought": "Rone"}],
    "said twice": [
        {"role": "user", "content": "Uone"},
        {"role": "assistant", "content": "It is Rone indeed", "reasoning_content": "Rone"},
    ],
    "called twice": [{"role": "user", "content": "Uone"}, {**CALL, "content": "I use Tname with Tkey Tvalue"}],
    "system": [{"role": "system", "content": "Csystem"}, *TOLD["turns"]],
    "developer": [{"role": "developer", "content": "Cdeveloper"}, *TOLD["turns"]],
    "result": [
        {"role": "user", "content": "Uone"},
        {**CALL, "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALLED}]},
        {"role": "tool", "name": "Tname", "tool_call_id": "abcdefghi", "content": "Cresult"},
        {"role": "assistant", "content": "Aone"},
    ],
    "picture": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Uone"}]}, TOLD["turns"][1]],
    "user's null": [TOLD["turns"][0], {"role": "assistant", "content": "Aone"}, {"role": "user", "content": None}],
}
TOLD["tools"] = TOLD["system"]
TOLD["user's null"].append({"role": "assistant", "content": "Atwo"})
SAID = re.compile("[ART](?:one|two|more|name|key|value)")
CONTEXT = re.compile("C(?:system|developer|result|tool|parameter)")
ENDS = re.compile(r"(</s>|<[^</][^<]*>)\s*$")


# How many of the 72 templates render each conversation in full.
IN_FULL = {
    "turns": 66,
    "parts": 32,
    "reasoning": 18,
    "thoughts": 62,
    "call": 45,
    "null": 39,
    "legacy call": 0,
    "another key": 0,
    "said twice": 26,
    "called twice": 41,
    "system": 64,
    "developer": 30,
    "result": 45,
    "picture": 26,
    "user's null": 28,
    "tools": 46,
}
REFUSED = (
    r"leaves out (the|part)|cannot render (?!.*(?:second|memory|ended by))|as a list|writes None|does not begin turn|"
    r"without the token that ends it, .* <\|tool_response> stands behind"  # diffusion_gemma_training, of calls
)
PARAMETERS = {"type": "object", "properties": {"Cparameter": {"type": "string", "description": "Its value."}}}
TOOL = {"name": "Ctool", "description": "A tool.", "parameters": PARAMETERS}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}  # of the conversation of this name


@functools.cache
def rendered(path: Path) -> dict[str, Any]:
    """{conversation: its examples, or why the template refuses it}, all at once: compiling takes longest."""
    found: dict[str, Any] = {}
    for talk, messages in TOLD.items():
        try:
            template = Template(path.read_text(), SPECIAL, "2026-01-01")
            found[talk] = render_examples(template, messages, tools=TOOLS.get(talk))
        except UserError as error:
            found[talk] = str(error)
    return found


@pytest.mark.parametrize("talk", TOLD)
def test_what_a_turn_says_is_trained_with_its_stop_token_or_refused(talk: str) -> None:
    """By every template that trl has: all that is said, nothing of the user, no None; and with all of the context."""
    said = Counter(SAID.findall(json.dumps([m for m in TOLD[talk] if m["role"] == "assistant"])))
    context = set(CONTEXT.findall(json.dumps([TOLD[talk], TOOLS.get(talk)])))
    reasons: dict[str, str] = {}
    for path in TRL:
        examples = rendered(path)[talk]
        if isinstance(examples, str):
            reasons[path.stem] = examples
            continue
        targets = ["".join(text[start:stop] for start, stop in spans) for text, spans in examples]
        trained = Counter(SAID.findall(" ".join(targets)))
        assert set(trained) == set(said) and trained >= said, path.stem  # a tool's name may stand in the header, too
        assert set(CONTEXT.findall(examples[-1][0])) == context, path.stem
        assert not any("None" in text for text, _ in examples), path.stem
        for text, spans in examples:
            assert all(ENDS.search(text[start:stop]) for start, stop in spans), path.stem
            # The text ends with a turn of the assistant: its stop is not behind the target.
            assert not re.search("<[^/]", text[spans[-1][1] :]), path.stem
        assert not any(re.search("None|U(one|two)", target) for target in targets), path.stem
    assert not (others := {name: why for name, why in reasons.items() if not re.search(REFUSED, why)}), others
    assert len(TRL) - len(reasons) == IN_FULL[talk], reasons


_CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments }}<call|>{% endfor %}"
# {name: (a turn, words of the refusal)}; its content and its calls are in a block of marks, `END` is behind it
ENDINGS: dict[str, tuple[str, str]] = {
    "text": ("{% generation %}{{ m.content }}{% endgeneration %}<end>\n", "<end> stands behind its {% generation %}"),
    "line": ("{% generation %}{{ m.content }}\n{% endgeneration %}<end>\n", "<end> stands behind"),
    "call": (f"{{% generation %}}{{{{ m.content }}}}{_CALLS}{{% endgeneration %}}<end>", "<end> stands behind"),
    "none": ("{% generation %}{{ m.content }}{% endgeneration %}", "there is none within"),
    "parts": (
        "{% generation %}<a>{% endgeneration %}-{% generation %}{{ m.content }}{% endgeneration %}<end>",
        "behind",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_marks_that_leave_out_the_stop_token_are_refused(name: str) -> None:
    turn, words = ENDINGS[name]
    cue = "{% if add_generation_prompt %}<assistant>{% endif %}"

    def template(turn: str) -> Template:
        user = "{% if m.role != 'assistant' %}<user>{{ m.content }}<end>{% else %}<assistant>"
        return Template(f"{{% for m in messages %}}{user}{turn}{{% endif %}}{{% endfor %}}{cue}", SPECIAL)

    said: dict[str, Any] = CALL if name == "call" else {"role": "assistant", "content": "Aone"}
    asked = {"role": "user", "content": "Uone"}
    talks = [[asked, said], [asked, said, asked, {"role": "assistant", "content": "Atwo"}]]
    for talk in talks:
        with pytest.raises(UserError, match=f"turn 2 of {len(talk)} without the token that ends it, .*{words}"):
            render_examples(template(turn), talk)
    if name in ("text", "none"):  # a turn that is context may end as it does
        last = turn.removesuffix("<end>\n").replace("{% end", "{{ '<end>' if loop.last }}{% end")
        assert render_examples(template(last), [asked, {**said, "weight": 0}, *talks[1][2:]])
    within = turn.replace("{% endgeneration %}<end>", "<end>{% endgeneration %}").replace("none", "")
    within = within.replace("{% endgeneration %}", "<end>{% endgeneration %}") if name == "none" else within
    ((text, spans),) = render_examples(template(within), talks[0])
    assert text[slice(*spans[-1])].rstrip().endswith("<end>")


def test_a_stop_token_that_looks_like_a_word_is_seen_behind_the_marks() -> None:
    """As EXAONE's [|endofturn|] and others that no pattern knows."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}EOS"
        "{% else %}<user>{{ m.content }}<end><assistant>{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"EOS stands behind its \{% generation %\} block"):
        render_examples(Template(source, {"eos_token": "EOS"}), CHAT[:2])


def test_marked_turns_that_run_together_are_refused() -> None:
    """As a template does that goes on where one turn of the assistant follows another."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% if loop.last %}<end>"
    )
    source += "{% endif %}{% endgeneration %}{% else %}<user>{{ m.content }}<end><assistant>{% endif %}{% endfor %}"
    talk = [CHAT[0], CHAT[1], {"role": "assistant", "content": "Bye"}]
    with pytest.raises(UserError, match="marks 1 spans for 2 turns of the assistant: where one follows another"):
        render_examples(Template(source, {}), talk)
    assert render_examples(Template(source, {}), talk[:2])[0][0].endswith("Hello!<end>")


@pytest.mark.parametrize(
    ("source", "message", "words"),
    [
        ("{{ m['role'] }}{{ m['content'] | trim }}", {"content": "So"}, "no token says that it has ended"),
        ("<{{ m['role'] }}>{{ m['content'] }}</s>", {"content": None}, "writes None for turn 2 of 2"),
        ("<{{ m['role'] }}>{{ m['content'] }}</s>", {"content": [{"type": "text", "text": "So"}]}, "as a list"),
        *[
            (
                f"<{{{{ m['role'] }}}}>{{{{ m['content'] | {filters} }}}}</s>",
                {"content": [{"type": "text", "text": "Sö"}]},
                "as a list",
            )
            for filters in (
                "tojson",
                "tojson(separators=(',', ':'))",
                "tojson(indent=2)",
                "tojson(ensure_ascii=True, sort_keys=True)",
                "map('string') | join(' ')",
            )
        ],
        (
            "<{{ m['role'] }}>{{ m['content'] | map(attribute='text', default='') | join }}</s>",
            {"content": [{"type": "text", "text": "So"}, {"type": "image", "url": "x"}]},
            "leaves out part 2 of turn 2 of 2, of type 'image'",
        ),
        (
            "<{{ m['role'] }}>{{ m['content'] }}{% for c in m['tool_calls'] %}{{ c.function.name }}{% endfor %}</s>",
            {"content": "So", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": [1, 27]}'}}]},
            "leaves out the tool call of turn 2 of 2: '27' has no place",
        ),
        ("{% generation %}{{ m['content'][:1] }}</s>{% endgeneration %}", {"content": "So"}, "leaves out the text"),
    ],
)
def test_what_a_template_leaves_out_is_named(source: str, message: dict[str, Any], words: str) -> None:
    whole = "{% for m in messages %}" + source + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    whole = whole.replace("<assistant>", "assistant") if source.startswith("{{ m['role']") else whole
    user: Any = {"role": "user", "content": [{"type": "text", "text": "Hi"}] if "map(" in source else "Hi"}
    with pytest.raises(UserError, match=words):
        render_examples(Template(whole, {}), [user, {"role": "assistant", **message}])


def test_a_prompt_that_leaves_out_a_message_is_refused() -> None:
    silent = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render_prompt(Template(silent, {}), messages[1:]) == "<user>Hi</s><assistant>"
    with pytest.raises(UserError, match="leaves out the tool of the conversation"):
        render_prompt(Template(CHATML, {}), CHAT[:3], **TOOLS)
    with pytest.raises(UserError, match=r"leaves out the text of turn 1 of 2: 'Be brief\.' has no place"):
        render_prompt(Template(silent, {}), messages)
    assert render_prompt(Template(CHATML, {}), CHAT[:3]) == render(Template(CHATML, {}), CHAT[:3], prompt=True)


CALLS = "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"
ALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"content": {"answer": "secret"}}, "content of turn 2 of 2 is .* a text, a list of parts, or null"),
        ({"content": 5}, "content of turn 2 of 2 is 5"),
        ({}, "turn 2 of 2 has no content"),
        ({"content": [5]}, "part 1 of turn 2 of 2 is 5"),
        ({"content": "", "tool_calls": {"name": "add"}}, "'tool_calls' of turn 2 of 2 is .* must be a list"),
        ({"content": "", "tool_calls": [{"function": None}]}, "a tool call of turn 2 of 2 is .*'function': None"),
        ({"content": "So", "tool_plan": "First"}, "leaves out the 'tool_plan' of turn 2 of 2: 'First'"),
        ({"content": "So", "audio": {"data": "abc"}}, "leaves out the 'audio' of turn 2 of 2: 'abc'"),
        ({"content": "So", "thinking_blocks": [{"thinking": "Why"}]}, "leaves out the 'thinking_blocks' of turn 2"),
        ({"content": "So", "partial": True}, "leaves out 'partial' of turn 2 of 2: True"),
        ({"content": "So", "name": "Ann"}, "name of turn 2 of 2: 'Ann' .* remove 'name' from the turns"),
        ({"content": "So", "weight": 0.5}, "'weight' of a turn is 0.5: it must be 1"),
        ({"content": "So", "weight": 0}, "no turn of the assistant to train on"),
    ],
)
def test_what_no_template_can_read_is_refused(turn: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        render_examples(Template(ALL, {}), [CHAT[0], {"role": "assistant", **turn}])


def test_bookkeeping_and_empty_keys_are_no_part_of_what_is_said() -> None:
    extra = {"id": "x", "refusal": None, "tool_calls": [], "audio": None, "metadata": {"from": "y"}, "weight": 1}
    turn = {"role": "assistant", "content": "Hello", **extra}
    assert render_examples(Template(ALL, {}), [CHAT[0], turn]) == render_examples(
        Template(ALL, {}), [CHAT[0], {"role": "assistant", "content": "Hello"}]
    )


@pytest.mark.parametrize(
    ("turn", "source", "words"),
    [
        (
            {"role": "user", "content": "a"},
            "{% if m.role != 'user' %}{{ m.content }}{% endif %}",
            "text of turn 1 of 2: 'a'",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "s"}]},
            "{{ m.content if m.content is string }}",
            "text of turn 1",
        ),
        (
            {"role": "tool", "content": {"e": 4}},
            "{{ m.content if m.role != 'tool' else '4' }}",
            "result of turn 1 of 2: 'e'",
        ),
        (
            {"content": "", "tool_calls": [{"function": {"name": "max", "arguments": '{"x": "a"}'}}]},
            CALLS,
            "call of turn 2 of 2: 'x'",
        ),
        (
            {"content": "", "tool_calls": [{"function": {"name": "max1", "arguments": {"x": 1}}}]},
            CALLS,
            "call of turn 2 of 2: 'x'",
        ),
    ],
)
def test_a_short_text_in_another_is_no_proof(turn: dict[str, Any], source: str, words: str) -> None:
    """The letter stands in the rendered text, but the template has not written it."""
    whole = ALL.replace("{{ m.content }}", source)
    talk = [turn, CHAT[1]] if turn.get("role") else [CHAT[0], {"role": "assistant", **turn}]
    with pytest.raises(UserError, match=words):
        render_examples(Template(whole, {}), talk)
    parts = isinstance(turn["content"], list)  # which are refused as JSON
    form = "(m.content if m.content is string else m.content[0].text)" if parts else "m | tojson"
    written = ALL.replace("{{ m.content }}", f"{{{{ {form} }}}}")
    assert render_examples(Template(written, {}), talk)[0][1]


def test_a_picture_in_a_conversation_is_not_trained_on_as_a_text(tmp_path: Path) -> None:
    """The template writes a place for it, which no picture would fill."""
    template = Template(ALL.replace("m.content", "m.content | map(attribute='text', default='<image>') | join"), {})
    talk = [
        {"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat"}]},
    ]
    assert "<image>What?" in render_examples(template, talk)[0][0]
    _, skipped = encode_conversations((CorpusDocument("a", "", tuple(talk)),), _tokenizer(), template, 99)
    assert "turn 1 of 2 has a part of type 'image'" in skipped[0]


@pytest.mark.parametrize("name", [None, "", "assistant", "Assistant", "gpt"])
def test_a_name_that_says_no_more_than_the_role_is_nothing(name: str | None) -> None:
    turn = {**CHAT[1], "name": name}
    assert render_examples(Template(ALL, {}), [CHAT[0], turn]) == render_examples(Template(ALL, {}), CHAT[:2])


def test_one_thought_in_two_keys_is_said_once() -> None:
    source = ALL.replace("{{ m.content }}", "{{ m.reasoning }}{{ m.content }}")
    turn = {"role": "assistant", "content": "So", "reasoning": "Why", "reasoning_content": "Why"}
    ((text, spans),) = render_examples(Template(source, {}), [CHAT[0], turn])
    assert [text[start:stop] for start, stop in spans] == ["WhySo</s>"]


@pytest.mark.parametrize("key", ["weight", "train"])
@pytest.mark.parametrize("source", [CHATML, MARKED["without the cue"], THOUGHTS], ids=["plain", "marked", "rewritten"])
def test_a_turn_of_weight_zero_is_context(source: str, key: str) -> None:
    talk = [CHAT[0], {**CHAT[1], key: 0}, *CHAT[2:]]
    ((text, spans),) = render_examples(Template(source, {}), talk)
    assert "Hello!" in text and [text[start:stop].rstrip()[-11:] for start, stop in spans] == ["4<|im_end|>"]
    marked = MARKED["without the cue"].replace("{% generation %}", "{% if loop.last %}{% generation %}", 1)
    marked = marked.replace("{% endgeneration %}", "{% endgeneration %}{% endif %}", 1)
    with pytest.raises(UserError, match="marks 1 spans for 2 turns"):
        render_examples(Template(marked, {}), talk)


def test_the_context_of_a_trained_turn_is_not_left_out() -> None:
    for words, source, talk in (
        ("text of turn 1 of 3", ALL.replace("in messages", "in messages if m.role != 'system'"), TALKS["system"]),
        ("writes None for turn 1 of 2", ALL, [{"role": "user", "content": None}, CHAT[1]]),
        ("has no content", ALL, [{"role": "user"}, CHAT[1]]),
        ("as a list", ALL, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]),
        ("name of turn 1 of 2", ALL, [{**CHAT[0], "name": "Ann"}, CHAT[1]]),
        (
            "text of turn 2 of 4",
            THOUGHTS.replace("m['content'] + '<", "(m['content'] if loop.last or m['role'] == 'user' else '') + '<"),
            CHAT,
        ),
    ):
        with pytest.raises(UserError, match=words):
            render_examples(Template(source, {}), talk)
    with pytest.raises(UserError, match="leaves out the tool of the conversation: 'Cparameter'"):
        render_examples(Template(ALL, {}), CHAT, **TOOLS)
    told = [{"role": "system", "content": json.dumps(TOOL)}, *CHAT]
    assert render_examples(Template(ALL, {}), told, **TOOLS)[0][1]  # the conversation itself tells of the tool
    answer = [CHAT[0], {"role": "tool", "content": {"sum": "4"}}, CHAT[1]]
    as_json = ALL.replace("m.content", "m.content if m.content is string else m.content | tojson")
    assert '{"sum": "4"}' in render_examples(Template(as_json, {}), answer)[0][0]
    with pytest.raises(UserError, match="writes the result of turn 2 of 3 as Python shows it"):
        render_examples(Template(ALL, {}), answer)
