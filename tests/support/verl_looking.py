"""A task with pictures for verl's `main_ppo`: a tiny Qwen2.5-VL, prompts with a picture, a tool that shows others.

`write_task` is `verl_toy.py`'s for such a model; its command lines are for this task too.
"""

import json
import random
import runpy
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
PICTURED = runpy.run_path(str(SUPPORT / "pictured.py"))
TOY = runpy.run_path(str(SUPPORT / "verl_toy.py"))
# as Qwen's models name them: the ids of PICTURED["VALUES"], and turns with a newline behind them
SPECIAL = {57: "<|vision_end|>", 58: "<|vision_start|>", 59: "<|video_pad|>", 60: "<|image_pad|>"}
SPECIAL |= {61: "<|im_start|>", 62: "<|im_end|>", 63: "\n"}
CALL = '<tool_call>{{"name":"show","arguments":{{"letter":"{}"}}}}</tool_call>'
WORDS = ["<pad>", "<unk>", "user", "assistant", "system", "tool", *map(str, range(10)), *"abcdefgh"]
WORDS += [CALL.format(letter) for letter in "abcdefgh"]
WORDS += [f"w{i}" for i in range(57 - len(WORDS))]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
TOOLS = '''
from PIL import Image

from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def show(letter: str) -> ToolResponse:
    """A picture and a digit.

    Args:
        letter: A letter.
    """
    number = ord(letter) % 10
    picture = Image.new("RGB", (8 + 8 * (number % 2), 16), (25 * number, 100, 200))
    return ToolResponse(text=str(number), image=[picture])
'''


def write_model(model: Path) -> None:
    """The model's folder: weights, and the files of its tokenizer and processor."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    PICTURED["write_reader"](model)
    words = dict(enumerate(WORDS)) | SPECIAL
    made = Tokenizer(models.WordLevel({word: number for number, word in words.items()}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL.values()])
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **names).save_pretrained(model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((model / "preprocessor_config.json").read_text())
    settings |= {"merge_size": 2, "temporal_patch_size": 2, "processor_class": "Qwen2_5_VLProcessor"}
    for name, kind in (("preprocessor", "image_processor"), ("video_preprocessor", "video_processor")):
        own = {f"{kind}_type": "Qwen2VLImageProcessor" if kind == "image_processor" else "Qwen2VLVideoProcessor"}
        (model / f"{name}_config.json").write_text(json.dumps(settings | own))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 62, "pad_token_id": 0}))


def write_task(folder: Path, model: Path) -> None:
    """The model with its tokenizer and processor; train.parquet, test.parquet, reward.py and tools.py."""
    import pandas

    write_model(model)
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for index in range(64):
        words = " ".join(draw.choices("abcdefgh", k=draw.randint(1, 3)))
        picture = PICTURED["picture"](draw.randint(1, 2), draw.randint(1, 3))
        prompt = {"role": "user", "content": f"<image> {words}" if index % 4 else words}
        row = {"data_source": "digits", "prompt": [prompt], "images": [{"bytes": picture}] if index % 4 else []}
        rows.append(row | {"reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": index}})
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:8]).to_parquet(folder / "test.parquet")
    (folder / "reward.py").write_text(TOY["REWARD"])
    (folder / "tools.py").write_text(TOOLS)
