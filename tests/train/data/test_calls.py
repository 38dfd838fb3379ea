"""Arguments of tool calls as an object and as JSON in a text: templates read both alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import trl

from fnmodels.errors import UserError
from train.data.chat import Template, render, render_examples

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"city": "Paris", "days": 3, "with": {"rain": [True, None]}, "said": 'a "word" é'}
PLAIN = json.dumps(ARGUMENTS, ensure_ascii=False)


def calling(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "a", "function": function}]}
    return [{"role": "user", "content": "Weather?"}, answer]


def outcome(template: Template, messages: list[dict[str, Any]]) -> Any:
    try:
        return render_examples(template, messages)
    except UserError as error:
        return str(error)


def test_every_published_template_reads_both_forms_alike() -> None:
    read = 0
    for path in TEMPLATES:
        template = Template(path.read_text(), SPECIAL)
        of_object, of_text = (outcome(template, calling(form)) for form in (ARGUMENTS, PLAIN))
        assert of_text == of_object, path.stem
        if not isinstance(of_object, str):
            read += 1
            written = "".join(text[start:stop] for text, spans in of_object for start, stop in spans)
            assert r"\"city" not in written and '{{"' not in written and "{'city'" not in written, path.stem
    assert read > 35


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}%s{% endfor %}</s>"
)
TURNS += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WAYS = {
    "an object": "{{ call.function.arguments | tojson }}",
    "a text, joined by ~": "{{ '' ~ call.function.arguments }}",
    "a text, joined by +": "{{ '' + call.function.arguments }}",
    "a text, written": "{{ call.function.arguments }}",
    "names and values": "{% for k, v in call.function.arguments.items() %}{{ k }}{{ v | tojson }}{% endfor %}",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("said", ["Weather?", str(ARGUMENTS)])
def test_a_template_gets_the_form_that_it_reads(way: str, said: str) -> None:
    """Also where a turn says what Python would write for the arguments."""
    template = Template(TURNS.replace("%s", WAYS[way]), {})
    pairs = "".join(f"{name}{json.dumps(value, ensure_ascii=False)}" for name, value in ARGUMENTS.items())
    for form in (ARGUMENTS, PLAIN, json.dumps(ARGUMENTS, indent=2)):
        messages = calling(form)
        messages[0]["content"] = said
        given = form if isinstance(form, str) and way.startswith("a text") else PLAIN
        want = pairs if way == "names and values" else given
        assert render(template, messages) == f"<user>{said}</s><assistant>{want}</s>"


def test_what_is_no_object_stays_as_it_is() -> None:
    template = Template(TURNS.replace("%s", "{{ call.function.arguments }}"), {})
    for text in ("2 + 2", '"a"', "[1]", ""):
        assert render(template, calling(text)) == f"<user>Weather?</s><assistant>{text}</s>"
    assert render(template, calling({})) == "<user>Weather?</s><assistant>{}</s>"


def test_an_error_of_a_template_is_that_of_objects() -> None:
    template = Template("{{ raise_exception(messages[1].tool_calls[0].function.arguments is mapping) }}", {})
    with pytest.raises(UserError, match="True"):
        render(template, calling(json.dumps(ARGUMENTS)))
