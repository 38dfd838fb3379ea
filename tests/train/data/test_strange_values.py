"""Values of strangers' files in the readers of train: depth, size and type are a sentence, in no time."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fnmodels.errors import CheckpointError, UserError
from train.commands.prompt_rows import read_prompts
from train.data.examples import read_examples
from train.data.records import read_dataset, read_records
from train.data.sources import absolute_paths, parse_sources
from train.eval.pretrained import end_ids, generation_defaults
from train.job.metrics_log import read_rows
from train.job.run_folder import read_json
from train.job.settings import read_toml

DEEP = {
    "beyond the interpreter": "[" * 100_000,
    "closed, beyond the interpreter": "[" * 100_000 + "]" * 100_000,
    "that parses": "[" * 500 + "]" * 500,
    "of objects": '{"a":' * 400 + "1" + "}" * 400,
}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", DEEP)
def test_lines_that_nest_too_deeply_are_a_sentence_to_every_reader(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line in (DEEP[name], f'{{"text": "a", "label": {DEEP[name]}}}', f'{{"messages": [{DEEP[name]}]}}'):
        file.write_text(line + "\n")
        (record,) = read_records(file)
        assert record.fault and len(record.fault) < 200
        for reader in (lambda: read_examples(file, "labels"), lambda: read_prompts(file)):
            with pytest.raises(UserError, match=r"line 1") as error:
                reader()
            assert len(str(error.value)) < 500
        assert read_rows(file) == [] and read_json(file) is None


def test_rows_that_nest_too_deeply_are_faults() -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    (record,) = read_dataset([{"messages": [{"role": "user", "content": value}]}])
    assert record.fault == "it is nested too deeply"


def test_tools_that_nest_as_schemas_do_are_read(tmp_path: Path) -> None:
    schema: Any = {"type": "string"}
    for _ in range(20):
        schema = {"type": "object", "properties": {"a": schema}}
    row = {"messages": [{"role": "assistant", "content": "a"}], "tools": [schema]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (record,) = read_records(tmp_path / "a.jsonl")
    assert not record.fault and record.tools == (schema,)


TOML = {
    "lists": "steps = " + "[" * 40_000,
    "lists that parse": "steps = " + "[" * 200 + "]" * 200,
    "tables": "steps" + ".a" * 5_000 + " = 1",
    "inline tables": "steps = " + "{a = " * 300 + "1" + "}" * 300,
    "headers": "[" + "a." * 5_000 + "a]",
    "a number of any length": "steps = " + "9" * 40_000,
    "a number of many digits": "steps = " + "9" * 4000,
    "an exponent": "learning_rate = 1e99999999",
    "megabytes": "#" * 2_000_000,
    "a date": "steps = 2020-01-01",
    "a weight with an exponent": 'data = "x:1e99999999"',
    "a weight with a point and an exponent": 'data = "x:1.5e99999999"',
    "a small weight with an exponent": 'data = "x:1e-99999999"',
    "a weight of many digits": f'data = "x:{"9" * 40_000}"',
    "a weight of many places": f'data = "x:0.{"9" * 40_000}"',
    "a fraction of many digits": f'data = "x:1/{"9" * 40_000}"',
    "many weights": f'data = "{",".join(["x:1e99999999"] * 1000)}"',
    "a budget of many digits": f'remat = "budget:{"9" * 40_000}"',
    "a rank of many digits": f'lora = "r={"9" * 40_000}"',
    "a control code": 'prompt = "\x1b[2J"',
}


@pytest.mark.parametrize("name", TOML)
def test_read_toml_of_a_strange_value_is_a_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(TOML[name])
    with pytest.raises((UserError, CheckpointError)) as error:
        read_toml(tmp_path / "settings.toml")
    assert str(error.value).isprintable() and len(str(error.value)) < 600


@pytest.mark.parametrize("weight", ["3", "0.5", ".25", "2.", "1e3", "5e-1", "1/3", "0.123456789", "0.123456789e-9"])
def test_parse_sources_of_a_usual_weight_keeps_it(weight: str, tmp_path: Path) -> None:
    ((path, value),) = parse_sources(f"x:{weight}")
    assert path == Path("x")
    again = parse_sources(absolute_paths(f"x:{weight}", tmp_path))  # as a run records it
    assert again == [(tmp_path.resolve() / "x", value)]


WRONG: dict[str, list[Any]] = {
    "eos_token_id": ["a", 1.5, True, [[1]], [1, "2"], {}, -2, 10**30, [10**30]],
    "max_new_tokens": ["a", 1.5, True, [], 0, -1, 10**30],
    "temperature": ["hot", True, [], {}, -1, "1e999", 10**400],
    "top_k": ["a", 2.5, True, [], -1, 10**30],
    "top_p": ["a", True, [0.5], 0, 2, -1],
    "min_p": ["a", True, {}, 2, -1],
    "repetition_penalty": ["a", True, [], 0, -1],
    "do_sample": ["yes", 1, []],
}


def settings_of(folder: Path) -> None:
    generation_defaults(folder)
    end_ids(folder)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_generation_config_of_a_wrong_value_is_a_sentence(name: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True} | {name: value}))
    with pytest.raises((UserError, CheckpointError), match=re.escape(str(file))) as error:
        settings_of(tmp_path)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["[]", "1", '"a"', "[" * 100_000, "{", "\xff", '{"a": 1, "a": 2}', "Infinity"])
@pytest.mark.parametrize("read", [generation_defaults, end_ids])
def test_generation_config_that_is_no_object_is_a_sentence(
    text: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")
    with pytest.raises((UserError, CheckpointError), match=r"generation_config\.json"):
        read(tmp_path)


def test_generation_config_of_infinities_is_a_sentence(tmp_path: Path) -> None:
    for name in ("temperature", "top_p", "repetition_penalty"):
        for value in ("Infinity", "NaN", "1e999"):
            (tmp_path / "generation_config.json").write_text(f'{{"do_sample": true, "{name}": {value}}}')
            with pytest.raises((UserError, CheckpointError), match=name):
                generation_defaults(tmp_path)


def test_end_ids_of_minus_one_are_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 2]}')
    assert end_ids(tmp_path) == (2,)
