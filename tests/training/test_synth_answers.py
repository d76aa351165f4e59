"""Answers to given prompts: the model's own, after what was given, and the same however often a run was cut off."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from letters import BEGIN, END, OTHER, QUIET, TEMPLATE, letters, tiny_model

from treedec.training import synth_answers
from treedec.training.prompts import BrokenPrompt, PromptSource
from treedec.training.synth_answers import AnswerConfig, Answerer, ChatFormat, answer_prompts
from treedec.training.synth_file import Written

SMALL = AnswerConfig(length=100, rows=3, answer_tokens=9, answer_temperatures=(0.0, 0.9), seed=3)


def _talk(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages]}


PROMPTS = [
    _talk("abc"),
    _talk("abcdefgabcdefgabcdefgabcdefgabcdefg"),
    _talk("a", "said by another", "bb", "said by another", "ccc"),
    _talk("ff", "said by another", "gabcgabcgabcgabc", system="bad"),
    {"prompt": "u"},
    *({"text": letter * count} for letter in "defg" for count in (1, 12)),
    *(_talk(first, "", second, "") for first in ("ba", "bab", "ga") for second in ("e", "decade")),
    *(_talk(letter + "ace") for letter in "abcdefg"),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return letters()


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


@pytest.fixture(scope="module")
def written(model, tokenizer, prompt_file, tmp_path_factory):
    """The bytes of a whole file; its windows hold 24 and 2 conversations."""
    path = tmp_path_factory.mktemp("written") / "data.jsonl"
    report = answer_prompts(model, tokenizer, prompt_file, path, SMALL, console=QUIET)
    assert report == Written(sum(len(sample["input_ids"]) for sample in _lines(path)), len(PROMPTS))
    return path.read_bytes()


@pytest.fixture(scope="module")
def samples(written):
    return [json.loads(line) for line in written.splitlines()]


def test_what_is_given_is_kept_and_every_answer_is_new(samples, tokenizer):
    assert len(samples) == len(PROMPTS) == 26
    assert [sample["batch"][0] for sample in samples] == [0] * 24 + [1] * 2
    for sample, prompt in zip(samples, PromptSource(PROMPTS), strict=True):
        roles = [message["role"] for message in sample["messages"]]
        assert roles.count("assistant") == len(prompt.turns) == len(sample["responses"])
        given = [message for turn in prompt.turns for message in turn]
        assert [message for message in sample["messages"] if message["role"] != "assistant"] == given
        assert "said by another" not in json.dumps(sample)
        rendered = tokenizer.apply_chat_template(sample["messages"], tokenize=False)
        assert sample["input_ids"] == tokenizer.encode(rendered)
        answers = [message["content"] for message in sample["messages"] if message["role"] == "assistant"]
        for (start, end), text in zip(sample["responses"], answers, strict=True):
            assert sample["input_ids"][end - 1] == END and end - start <= SMALL.answer_tokens + 1
            assert tokenizer.decode(sample["input_ids"][start : end - 1]) == text != ""
    lengths = {end - start for sample in samples for start, end in sample["responses"]}
    assert max(lengths) == SMALL.answer_tokens + 1 > min(lengths)


def test_an_answer_at_temperature_zero_is_the_models_own(model, tokenizer, samples):
    """Rows that were replaced, read many tokens at once or waited for others included."""
    banned = [BEGIN, OTHER, *range(len(tokenizer), model.config.vocab_size)]
    compared = 0
    for sample in samples[::2]:
        for start, end in sample["responses"]:
            answer = sample["input_ids"][start:end][: SMALL.answer_tokens]
            expected = model.generate(
                torch.tensor([sample["input_ids"][:start]]), attention_mask=torch.ones(1, start, dtype=torch.long),
                do_sample=False, max_new_tokens=len(answer), suppress_tokens=banned, begin_suppress_tokens=[END],
            )  # fmt: skip
            assert expected[0, start:].tolist() == answer
            compared += 1
    assert compared > 13


def test_answers_are_drawn_at_the_temperature_of_the_conversation(model, tokenizer, samples):
    greedy = Answerer(model, tokenizer, replace(SMALL, answer_temperatures=(0.0,)))
    window = [(prompt, greedy.chat.script(prompt, None)) for prompt in PromptSource(PROMPTS[:24])]
    same = [
        one["input_ids"] == other["input_ids"] for one, other in zip(greedy.batch(0, window), samples, strict=False)
    ]
    assert all(same[::2]) and sum(same[1::2]) < 4


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.95, 0.99, 1])
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(model, tokenizer, tmp_path, prompt_file, written, share):
    path = tmp_path / "data.jsonl"
    path.write_bytes(written[: int(share * len(written))])
    answer_prompts(model, tokenizer, prompt_file, path, SMALL, console=QUIET)
    assert path.read_bytes() == written


def test_enough_tokens_end_it_and_more_continue_it(model, tokenizer, tmp_path, prompt_file, written):
    path = tmp_path / "data.jsonl"
    report = answer_prompts(model, tokenizer, prompt_file, path, replace(SMALL, tokens=1), console=QUIET)
    assert report.conversations == 24
    assert answer_prompts(model, tokenizer, prompt_file, path, SMALL, console=QUIET).conversations == 26
    assert path.read_bytes() == written


@pytest.mark.parametrize(
    "change",
    [{"length": 99}, {"rows": 4}, {"answer_tokens": 8}, {"turns": 1}, {"answer_temperatures": (0.0,)}, {"seed": 4},
     "target", "template", "prompts"],
)  # fmt: skip
def test_a_file_of_anything_else_is_left_as_it_is(model, tokenizer, tmp_path, prompt_file, written, change):
    path = tmp_path / "data.jsonl"
    path.write_bytes(written)
    source = prompt_file
    if change == "prompts":
        source = tmp_path / "prompts.jsonl"
        source.write_text(prompt_file.read_text() + '{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl, line 1: written with other settings"):
        answer_prompts(
            tiny_model(seed=1) if change == "target" else model,
            letters(TEMPLATE + " ") if change == "template" else tokenizer,
            source,
            path,
            replace(SMALL, **change) if isinstance(change, dict) else SMALL,
            console=QUIET,
        )
    assert path.read_bytes() == written


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _answered(model, tokenizer, tmp_path, rows, **change):
    path = tmp_path / "data.jsonl"
    report = answer_prompts(model, tokenizer, rows, path, replace(SMALL, **change), console=QUIET)
    return report, _lines(path)


def test_the_same_prompt_is_answered_once(model, tokenizer, tmp_path):
    rows = ["abc", "ABC?", _talk("abc"), _talk("abc", "", "a"), "abcd", "abc"]
    report, samples = _answered(model, tokenizer, tmp_path, [row for row in rows if row != "ABC?"])
    assert (report.conversations, report.duplicates) == (3, 2)
    assert [sample["messages"][0]["content"] for sample in samples] == ["abc", "abc", "abcd"]


def test_so_many_turns_and_no_more(model, tokenizer, tmp_path):
    _, samples = _answered(model, tokenizer, tmp_path, PROMPTS, turns=1)
    assert all(len(sample["responses"]) == 1 for sample in samples)
    assert [message["role"] for message in samples[3]["messages"]] == ["system", "user", "assistant"]


def test_conversations_end_where_they_no_longer_fit(model, tokenizer, tmp_path):
    rows = ["a" * 16, "a" * 15, "b" * 3, _talk("c" * 8, "", "d" * 8), _talk("c", "", "d")]
    report, samples = _answered(model, tokenizer, tmp_path, rows, length=21, answer_tokens=15)
    assert (report.conversations, report.too_long) == (4, 1)
    full, cut, one, _ = samples
    assert len(full["input_ids"]) == 21 and full["responses"] == [[20, 21]]
    assert len(cut["input_ids"]) <= 21 and len(one["responses"]) == 1 and len(one["messages"]) == 2
    for sample in samples:
        assert max(end for _, end in sample["responses"]) == len(sample["input_ids"])


BAD = ["a", {"prompt": ""}, "b", {"messages": [{"role": "tool", "content": "a"}]}]


def test_a_broken_prompt_stops_it_or_is_skipped(model, tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": row} if isinstance(row, str) else row) for row in BAD) + "\nnot JSON"
    )
    with pytest.raises(BrokenPrompt, match=r"prompts\.jsonl, line 2: a message of the user has no text, .*--skip-bad"):
        _answered(model, tokenizer, tmp_path, path)
    report, samples = _answered(model, tokenizer, tmp_path, path, skip_bad=True)
    assert (report.conversations, report.broken) == (2, 3)
    assert [sample["messages"][0]["content"] for sample in samples] == ["a", "b"]


def test_what_was_answered_before_a_broken_prompt_is_kept(model, tokenizer, tmp_path, written, prompt_file):
    path, broken = tmp_path / "data.jsonl", tmp_path / "broken.jsonl"
    lines = prompt_file.read_text().splitlines()
    broken.write_text("\n".join([*lines[:24], "{", *lines[24:]]))
    with pytest.raises(BrokenPrompt, match="line 25: not JSON"):
        answer_prompts(model, tokenizer, broken, path, SMALL, console=QUIET)
    assert len(path.read_text().splitlines()) == 24
    report = answer_prompts(model, tokenizer, broken, path, replace(SMALL, skip_bad=True), console=QUIET)
    assert (report.conversations, report.broken) == (26, 1)
    kept = [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]
    assert kept == [json.loads(line)["input_ids"] for line in written.splitlines()]


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE


def test_a_prompt_that_the_template_does_not_take_is_broken(model, tmp_path):
    rows = [_talk("a"), _talk("a", system="b")]
    with pytest.raises(BrokenPrompt, match=r"^row 2: the chat template does not take it: no system here"):
        _answered(model, letters(NO_SYSTEM), tmp_path, rows)
    report, _ = _answered(model, letters(NO_SYSTEM), tmp_path, rows, skip_bad=True)
    assert (report.conversations, report.broken) == (1, 1)


@pytest.mark.parametrize("rows", [[], [""], ["a" * 100]])
def test_no_prompt_at_all_is_said(model, tokenizer, tmp_path, rows):
    with pytest.raises(ValueError, match="no prompt to answer"):
        _answered(model, tokenizer, tmp_path, rows)


# Template, what it ends answers with, and what follows after the first answer.
FORMATS = {
    "special token": (TEMPLATE, END, {END}, "<s>ub</s><s>a"),
    "another special token": (TEMPLATE.replace("</s>", "<x>"), OTHER, {OTHER, END}, "<s>ub<x><s>a"),
    "text": (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}g{% endfor %}{% if add_generation_prompt %}a{% endif %}",
        END, {END}, "gubga",
    ),
    "a prompt that is no prefix": (
        TEMPLATE.replace("%}<s>a{% endif", "%}<s>ae{% endif"), END, {END}, "<s>ub</s><s>ae",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_what_surrounds_answers_is_the_templates(model, name):
    template, end, ends, following = FORMATS[name]
    tokenizer = letters(template)
    chat = ChatFormat(model, tokenizer)
    assert (chat.end, chat.ends) == (end, ends)
    (prompt,) = PromptSource([_talk("c", "", "b")])
    first, second = chat.script(prompt, None)
    asked = tokenizer.apply_chat_template(_talk("c")["messages"], tokenize=False, add_generation_prompt=True)
    assert first == tokenizer.encode(asked, add_special_tokens=False)
    assert second == tokenizer.encode(following)


def test_without_a_template_prompts_are_texts_to_continue(model, tmp_path):
    tokenizer = letters(None)
    report, samples = _answered(model, tokenizer, tmp_path, ["abc", _talk("de")])
    assert report.conversations == 2
    for sample, text in zip(samples, ("abc", "de"), strict=True):
        begun = tokenizer.encode(text)
        assert sample["input_ids"][: len(begun)] == begun and sample["responses"][0][0] == len(begun)
    with pytest.raises(BrokenPrompt, match="row 1: the chat template does not take it: the tokenizer has none"):
        _answered(model, tokenizer, tmp_path / "more", [_talk("a", "", "b")])


def test_a_model_that_cannot_end_is_refused():
    model, tokenizer = tiny_model(), letters(None)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names a token that ends answers"):
        Answerer(model, tokenizer, SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tokens": 0}, "tokens must be"), ({"turns": 0}, "turns must be"), ({"answer_temperatures": ()}, "temperatures"),
     ({"answer_temperatures": (-1.0,)}, "temperatures"), ({"length": 129}, "context of 128")],
)  # fmt: skip
def test_settings_are_checked(model, tokenizer, change, message):
    with pytest.raises(ValueError, match=message):
        Answerer(model, tokenizer, replace(SMALL, **change))


def test_windows_are_what_is_appended(model, tokenizer, tmp_path, prompt_file, monkeypatch):
    batch = Answerer.batch

    def interrupted(self, index, window):
        assert len(window) == synth_answers._WINDOW * SMALL.rows
        if index == 1:
            raise KeyboardInterrupt
        return batch(self, index, window)

    rows = [{"prompt": first + second + third} for first in "abcd" for second in "abcd" for third in "abcd"]
    monkeypatch.setattr(Answerer, "batch", interrupted)
    path = tmp_path / "data.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(model, tokenizer, rows, path, SMALL, console=QUIET)
    assert len(path.read_text().splitlines()) == 24
