"""Prompt files: what is read, and what is refused by line and key."""

from __future__ import annotations

import json

import pytest

from treedec.benchmarks import prompts
from treedec.benchmarks.prompts import Prompt, read_prompts

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def line(name, category="qa", turns=("one two", "and then?"), **more):
    return json.dumps({"question_id": name, "category": category, "turns": list(turns), **more}, ensure_ascii=False)


def test_prompts_come_in_order_with_all_their_turns(prompt_file):
    path = prompt_file(line(81, turns=["naïve\u2028one"], reference=3), "", line("b", "code"))
    assert read_prompts(path) == [
        Prompt("81", "qa", ("naïve\u2028one",)),
        Prompt("b", "code", ("one two", "and then?")),
    ]


def test_categories_and_a_limit_for_each(prompt_file):
    path = prompt_file(*(line(f"{name}{i}", name) for i in range(3) for name in ("qa", "code", "chat")))
    assert [prompt.id for prompt in read_prompts(path, limit=2)] == ["qa0", "code0", "chat0", "qa1", "code1", "chat1"]
    assert [prompt.id for prompt in read_prompts(path, ["chat", "qa"], 1)] == ["qa0", "chat0"]


def test_the_eight_categories_of_mt_bench_are_one(prompt_file):
    path = prompt_file(*(line(name, name) for name in ("qa", *MT_BENCH)))
    assert [prompt.id for prompt in read_prompts(path, ["mt_bench"])] == list(MT_BENCH)
    assert {prompt.category for prompt in read_prompts(path)} == {"qa", "mt_bench"}


def test_a_file_with_some_of_them_keeps_its_own(prompt_file):
    path = prompt_file(line(1, "math"), line(2, "coding"))
    assert [prompt.category for prompt in read_prompts(path)] == ["math", "coding"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"category": "qa", "turns": ["a"]}', "line 2: the key 'question_id' is missing"),
        ('{"question_id": 1, "turns": ["a"]}', "line 2: the key 'category' is missing"),
        ('{"question_id": 1, "category": "qa"}', "line 2: the key 'turns' is missing"),
        (line(1, turns=[]), "line 2: turns must be a list of at least one text"),
        ('{"question_id": 1, "category": "qa", "turns": "a"}', "line 2: turns must be a list"),
        (line(1, turns=["a", 5]), r"line 2: turns\[1\] must be a text"),
        (line(1, turns=[" "]), r"line 2: turns\[0\] must be a text that is not empty"),
        (line(None), "line 2: question_id must be a number or a text"),
        (line(True), "line 2: question_id must be a number or a text"),
        (line(1, category=3), "line 2: category must be a text"),
        (line("7"), "line 2: question_id '7' appears twice, first in line 1"),
    ],
)
def test_what_is_broken_is_named(prompt_file, broken, said):
    path = prompt_file(line(7), broken)
    with pytest.raises(ValueError, match=said) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


@pytest.mark.parametrize("lines", [(), ("",), (" ", "")])
def test_an_empty_file_is_named(prompt_file, lines):
    path = prompt_file(*lines)
    with pytest.raises(ValueError, match="empty") as error:
        read_prompts(path)
    assert str(path) in str(error.value)


def test_an_unknown_category_is_named_with_those_there_are(prompt_file):
    with pytest.raises(ValueError, match=r"no category 'rag'; it has qa, code"):
        read_prompts(prompt_file(line(1), line(2, "code")), ["qa", "rag"])


def test_the_bundled_prompts_are_the_default(prompt_file, monkeypatch):
    path = prompt_file(line(1))
    monkeypatch.setattr(prompts, "BUNDLED", path)
    assert read_prompts() == read_prompts(path)
