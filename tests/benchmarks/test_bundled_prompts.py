"""The prompts that come with the package: how many there are, of which kinds, and that no two are alike."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files

import pytest

# The shortest and the longest turn of each category, in characters.
BOUNDS = {
    "chat": (40, 1200),
    "code": (120, 900),
    "math": (100, 700),
    "summarization": (900, 2200),
    "translation": (350, 1000),
    "qa": (1000, 2200),
}
TWO_TURNS = {"chat": 4, "code": 4}


@pytest.fixture(scope="module")
def prompts():
    text = (files("treedec.benchmarks") / "prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_category_has_sixteen(prompts):
    assert len(prompts) == 96
    assert Counter(prompt["category"] for prompt in prompts) == dict.fromkeys(BOUNDS, 16)
    assert all(set(prompt) == {"question_id", "category", "turns"} for prompt in prompts)


def test_ids_count_within_the_category(prompts):
    assert [prompt["question_id"] for prompt in prompts] == [f"{name}-{i:02}" for name in BOUNDS for i in range(1, 17)]


def test_some_conversations_have_two_turns(prompts):
    assert all(len(prompt["turns"]) in (1, 2) for prompt in prompts)
    assert Counter(prompt["category"] for prompt in prompts if len(prompt["turns"]) == 2) == TWO_TURNS


def test_turns_are_stripped_and_neither_short_nor_long(prompts):
    for prompt in prompts:
        low, high = BOUNDS[prompt["category"]]
        for turn in prompt["turns"]:
            assert turn and turn == turn.strip(), prompt["question_id"]
            assert low <= len(turn) <= high, (prompt["question_id"], len(turn))


def test_no_text_occurs_twice(prompts):
    counts = Counter(" ".join(turn.casefold().split()) for prompt in prompts for turn in prompt["turns"])
    assert [text for text, count in counts.items() if count > 1] == []
