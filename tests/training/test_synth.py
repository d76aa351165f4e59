"""Conversations a target writes with itself: what is supervised (A22) and sampled, and which files are continued."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from letters import BEGIN, END, LETTERS, OTHER, QUIET, TEMPLATE, letters, tiny_model

from treedec.training.synth import SynthConfig, Synthesizer, TurnTemplate, synthesize
from treedec.training.synth_file import Written

SMALL = SynthConfig(tokens=3 * 4 * 64, length=64, rows=4, answer_tokens=7, answer_temperatures=(0.0, 0.9), seed=3)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return letters()


@pytest.fixture(scope="module")
def conversations(model, tokenizer):
    writer = Synthesizer(model, tokenizer, SMALL)
    return [sample for index in range(3) for sample in writer.batch(index)]


@pytest.fixture(scope="module")
def written(model, tokenizer, tmp_path_factory):
    """The bytes of a whole file."""
    path = tmp_path_factory.mktemp("written") / "data.jsonl"
    assert synthesize(model, tokenizer, path, SMALL, console=QUIET) == Written(SMALL.tokens, 12)
    return path.read_bytes()


def test_the_template_is_cut_around_what_the_model_writes(tokenizer):
    user, assistant = tokenizer.encode("u")[0], tokenizer.encode("a")[0]
    assert TurnTemplate.of(tokenizer) == TurnTemplate((BEGIN, user), (END, BEGIN, assistant), (END, BEGIN, user))


def test_responses_are_exactly_the_tokens_of_the_assistant(conversations, tokenizer):
    """The messages, rendered, give the text again, and the places of their contents in it the spans."""
    for sample in conversations:
        ids, messages = sample["input_ids"], sample["messages"]
        assert len(ids) == SMALL.length
        rendered, spans = [], []
        for message in messages:
            rendered += tokenizer.encode(f"<s>{message['role'][0]}")
            start = len(rendered)
            rendered += tokenizer.encode(f"{message['content']}</s>")
            if message["role"] == "assistant":
                spans.append([start, min(len(rendered), len(ids))])
        assert rendered == tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
        # The length may be reached within a turn, or within the tokens that begin one.
        begun = tokenizer.encode("<s>a" if len(messages) % 2 else "<s>u")
        assert ids == (rendered + begun)[: len(ids)]
        assert sample["responses"] == spans
        assert [message["role"] for message in messages] == (["user", "assistant"] * len(messages))[: len(messages)]
        for (start, end), message in zip(spans, messages[1::2], strict=True):
            assert tokenizer.decode(ids[start:end], skip_special_tokens=True) == message["content"]
    assert max(len(sample["responses"]) for sample in conversations) >= 2


def test_turns_are_not_empty_and_hold_no_special_token(conversations, tokenizer):
    assert OTHER not in tokenizer.all_special_ids, "the case must have a special token that is not among them"
    ended = 0
    for sample in conversations:
        assert max(sample["input_ids"]) < len(tokenizer)
        assert all(message["content"] and set(message["content"]) <= set(LETTERS) for message in sample["messages"])
        assert OTHER not in sample["input_ids"]
        for start, end in sample["responses"]:
            *inside, last = sample["input_ids"][start:end]
            assert not {BEGIN, END, OTHER} & set(inside) and last not in (BEGIN, OTHER)
            ended += last == END
    assert ended


def test_without_the_ban_there_would_be_special_tokens(model, tokenizer):
    """The control of the test above."""
    writer = Synthesizer(model, tokenizer, SMALL)
    writer.banned = []
    tokens = {token for sample in writer.batch(0) for token in sample["input_ids"]}
    assert OTHER in tokens and max(tokens) >= len(tokenizer)


def test_answers_are_cut_and_ended(conversations):
    lengths = []
    for sample in conversations:
        for start, end in sample["responses"]:
            lengths.append(end - start)
            if end < len(sample["input_ids"]):
                assert sample["input_ids"][end - 1] == END
    assert max(lengths) == SMALL.answer_tokens + 1 > min(lengths)


def test_an_answer_at_temperature_zero_is_the_models_own(model, tokenizer, conversations):
    banned = [BEGIN, OTHER, *range(len(tokenizer), model.config.vocab_size)]
    compared = 0
    for sample in conversations[::2]:  # answers at temperature 0 in turn with others at 0.9
        for start, end in sample["responses"]:
            answer = sample["input_ids"][start:end][: SMALL.answer_tokens]
            expected = model.generate(
                torch.tensor([sample["input_ids"][:start]]), attention_mask=torch.ones(1, start, dtype=torch.long),
                do_sample=False, max_new_tokens=len(answer), suppress_tokens=banned, begin_suppress_tokens=[END],
            )  # fmt: skip
            assert expected[0, start:].tolist() == answer
            compared += 1
    assert compared >= 6


def test_an_answer_above_temperature_zero_is_sampled(model, tokenizer, conversations):
    greedy = Synthesizer(model, tokenizer, replace(SMALL, answer_temperatures=(0.0,))).batch(0)
    assert greedy[1]["input_ids"] != conversations[1]["input_ids"]


def test_an_opening_of_one_token(model):
    template = (
        "{% for m in messages %}{{ '<s>' if m.role == 'user' else '<x>' }}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<x>{% endif %}"
    )
    tokenizer = letters(template)
    assert TurnTemplate.of(tokenizer) == TurnTemplate((BEGIN,), (END, OTHER), (END, BEGIN))
    for sample in Synthesizer(model, tokenizer, SMALL).batch(0):
        rendered = tokenizer.encode(tokenizer.apply_chat_template(sample["messages"], tokenize=False))
        assert sample["input_ids"][: len(rendered)] == rendered[: SMALL.length] and len(rendered) >= SMALL.length - 1


REFUSED = {
    "none": (None, "no chat template"),
    "drops contents": ("{% for m in messages %}<s>u</s>{% endfor %}", "'treedec-question' is missing"),
    "drops answers": (
        "{% for m in messages %}<s>{{ m.content if m.role == 'user' }}</s>{% endfor %}",
        "'treedec-answer' is missing",
    ),
    "no end": ("<s>{% for m in messages %}{{ m.content }}{% endfor %}", "no token after a turn"),
    "question ends in text": (
        "{% for m in messages %}<s>u{{ m.content }}{{ 'b' if m.role == 'user' else '</s>' }}{% endfor %}",
        "ends a question with 'b'.*not a special token.*text",
    ),
    "answer ends in text": (
        "{% for m in messages %}<s>u{{ m.content }}{{ 'b' if m.role != 'user' else '</s>' }}{% endfor %}",
        "ends an answer with 'b'.*not a special token.*text",
    ),
    "empty opening": ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", "no token before the first turn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_used_is_refused(model, name):
    template, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Synthesizer(model, letters(template), SMALL)


def test_every_line_says_what_it_was_made_with(written, conversations):
    lines = [json.loads(line) for line in written.splitlines()]
    origins = {line.pop("origin") for line in lines}
    assert [line.pop("batch") for line in lines] == [[k, place, 4] for k in range(3) for place in range(4)]
    assert lines == conversations and len(origins) == 1
    assert len(int(origins.pop(), 16).to_bytes(8)) == 8


def test_the_origin_is_what_decides_the_conversations(model, tokenizer):
    origin = Synthesizer(model, tokenizer, SMALL).origin
    assert Synthesizer(model, tokenizer, replace(SMALL, tokens=1)).origin == origin
    assert Synthesizer(model, tokenizer, replace(SMALL, answer_temperatures=(0, 0.9))).origin == origin
    others = [Synthesizer(model, tokenizer, replace(SMALL, **change)).origin for change in CHANGES.values()]
    others.append(Synthesizer(tiny_model(seed=1), tokenizer, SMALL).origin)
    others.append(Synthesizer(model, letters(TEMPLATE.replace("<s>{{", "<s>b{{")), SMALL).origin)
    assert len({origin, *others}) == 1 + len(others)


CHANGES = {
    "length": {"length": 63},
    "rows": {"rows": 2},
    "answer_tokens": {"answer_tokens": 8},
    "question_tokens": {"question_tokens": 8},
    "turns": {"turns": 2},
    "opened": {"opened": 0.5},
    "openings": {"openings": ("a",)},
    "question_temperature": {"question_temperature": 0.5},
    "answer_temperatures": {"answer_temperatures": (0.9, 0.0)},
    "seed": {"seed": 4},
}


def _without_origin(whole):
    samples = [json.loads(line) for line in whole.splitlines()]
    return "".join(json.dumps({k: v for k, v in one.items() if k != "origin"}) + "\n" for one in samples).encode()


def _fifth_line(line):
    def change(whole):
        lines = whole.splitlines(keepends=True)
        return b"".join([*lines[:4], line(lines[4]), *lines[5:]])

    return change


# What the file holds instead, and what is said of it.
FOREIGN = {
    "written by an older version": (_without_origin, "line 1: written with other settings"),
    "a line of something else": (
        _fifth_line(lambda line: line.replace(b'{"origin": "', b'{"origin": "0')),
        "line 5: written with other settings",
    ),
    "a line that is no conversation": (_fifth_line(lambda _: b'{"title": "thesis"}\n'), "line 5: not a conversation"),
    "a line that is not JSON": (_fifth_line(lambda _: b"years of work\n"), "line 5: not a conversation"),
    "an empty line": (lambda whole: whole + b"\n", "line 13: not a conversation"),
    "text": (lambda _: b"years of\nwork\n", "line 1: not a conversation"),
    "one line of text": (lambda _: b"years of work", "line 1: not the beginning of a conversation"),
    "text behind conversations": (lambda whole: whole + b"my notes", "line 13: not the beginning of a conversation"),
    "a torn line of something else": (
        lambda whole: whole[:60].replace(b'{"origin": "', b'{"origin": "0'),
        "line 1: not the beginning of a conversation",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_with_anything_else_in_it_is_left_as_it_is(model, tokenizer, tmp_path, written, name):
    change, message = FOREIGN[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(change(written))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"data\.jsonl, {message}.*another"):
        synthesize(model, tokenizer, path, replace(SMALL, tokens=10_000), console=QUIET)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", [*CHANGES, "target"])
def test_a_file_of_other_settings_or_another_target_is_left_as_it_is(model, tokenizer, tmp_path, written, name):
    path = tmp_path / "data.jsonl"
    for whole in (written, written[:-5], written[:60]):
        path.write_bytes(whole)
        target = tiny_model(seed=1) if name == "target" else model
        with pytest.raises(ValueError, match=r"data\.jsonl, line 1"):
            synthesize(target, tokenizer, path, replace(SMALL, **CHANGES.get(name, {})), console=QUIET)
        assert path.read_bytes() == whole


def _places(whole):
    """Byte counts at which a kill may have cut the file, by name."""
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    return {
        "nothing": 0, "one byte": 1, "within the first origin": 20, "within the first line": 100, "a line": ends[1],
        "a batch": ends[4], "within a batch": ends[5], "within a line": ends[6] + 100, "the last byte": ends[-1] - 1,
        "everything": ends[-1],
    }  # fmt: skip


@pytest.mark.parametrize("place", _places(b"\n" * 12))
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(model, tokenizer, tmp_path, written, place):
    path = tmp_path / "data.jsonl"
    path.write_bytes(written[: _places(written)[place]])
    assert synthesize(model, tokenizer, path, SMALL, console=QUIET) == Written(SMALL.tokens, 12)
    assert path.read_bytes() == written


def test_more_tokens_continue_the_file_and_fewer_keep_it(model, tokenizer, tmp_path, written):
    path = tmp_path / "data.jsonl"
    synthesize(model, tokenizer, path, replace(SMALL, tokens=1), console=QUIET)
    assert written.startswith(path.read_bytes()) and path.read_bytes().count(b"\n") == SMALL.rows
    synthesize(model, tokenizer, path, SMALL, console=QUIET)
    assert synthesize(model, tokenizer, path, replace(SMALL, tokens=1), console=QUIET).tokens == SMALL.tokens
    assert path.read_bytes() == written


WORDS = ("abc", "gfedcb", "u")


@pytest.mark.parametrize(("opened", "least", "most"), [(0.0, 0, 0), (0.5, 20, 44), (1.0, 64, 64)])
def test_a_share_of_the_questions_begins_with_given_words(model, tokenizer, opened, least, most):
    config = replace(SMALL, length=24, rows=64, openings=WORDS, opened=opened)
    writer = Synthesizer(model, tokenizer, config)
    words = writer._first_words(torch.Generator().manual_seed(1))
    assert least <= sum(bool(given) for given in words) <= most
    assert {tokenizer.decode(given) for given in words if given} == (set(WORDS) if opened else set())
    untold = replace(config, opened=0.0)
    assert (writer.batch(0) == Synthesizer(model, tokenizer, untold).batch(0)) == (opened == 0)


def test_given_words_are_how_the_question_begins(model, tokenizer):
    config = replace(SMALL, rows=64, openings=WORDS[1:2], opened=1.0)
    samples = Synthesizer(model, tokenizer, config).batch(0)
    assert all(sample["messages"][0]["content"].startswith(WORDS[1]) for sample in samples)
    assert len({sample["messages"][0]["content"] for sample in samples}) > 32, "the rest is the model's"
    begun = tokenizer.encode("<s>u" + WORDS[1])
    assert all(sample["input_ids"][: len(begun)] == begun for sample in samples)
    later = [message["content"] for sample in samples for message in sample["messages"][2::2]]
    assert later and not all(question.startswith(WORDS[1]) for question in later)


def test_other_seeds_and_batches_give_other_words(model, tokenizer):
    def words(seed, index):
        config = replace(SMALL, length=8, rows=32, openings=tuple(LETTERS), opened=1.0, seed=seed)
        return [sample["messages"][0]["content"][0] for sample in Synthesizer(model, tokenizer, config).batch(index)]

    assert words(1, 0) == words(1, 0)
    assert words(1, 0) != words(1, 1) != words(2, 1)


@pytest.mark.parametrize("question_tokens", [1, 3, 5])
def test_questions_are_cut_and_ended(model, tokenizer, question_tokens):
    config = replace(SMALL, question_tokens=question_tokens, openings=("abcd",), opened=0.5)
    lengths = []
    for sample in Synthesizer(model, tokenizer, config).batch(0):
        for message in sample["messages"][::2]:
            lengths.append(len(message["content"]))
        first = sample["messages"][0]["content"]
        assert sample["input_ids"][2 + len(first)] == END
    assert max(lengths) == question_tokens


@pytest.mark.parametrize("turns", [1, 2])
def test_conversations_end_after_some_answers_and_others_take_their_place(model, tokenizer, turns):
    config = replace(SMALL, turns=turns, question_tokens=9)
    samples = Synthesizer(model, tokenizer, config).batch(0)
    assert len(samples) == config.conversations > config.rows
    ended = [sample for sample in samples if len(sample["input_ids"]) < config.length]
    assert ended
    for sample in ended:
        assert [message["role"] for message in sample["messages"]] == ["user", "assistant"] * turns
        rendered = tokenizer.apply_chat_template(sample["messages"], tokenize=False)
        assert sample["input_ids"] == tokenizer.encode(rendered)
        assert len(sample["responses"]) == turns and sample["responses"][-1][1] == len(sample["input_ids"])


def test_no_question_is_written_twice(model, tokenizer, tmp_path):
    config = replace(SMALL, tokens=1400, length=24, rows=16, openings=("A", "a", "b"), opened=1.0, question_tokens=3)
    path = tmp_path / "data.jsonl"
    report = synthesize(model, tokenizer, path, config, console=QUIET)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    questions = [sample["messages"][0]["content"] for sample in samples]
    assert len(set(questions)) == len(questions) == report.conversations
    writer, batches = Synthesizer(model, tokenizer, config), samples[-1]["batch"][0] + 1
    everything = [sample["messages"][0]["content"] for index in range(batches) for sample in writer.batch(index)]
    assert list(dict.fromkeys(everything)) == questions
    assert report.duplicates == len(everything) - len(questions) > 10
    last = samples[-1]["batch"][2]
    assert report.tokens == sum(len(sample["input_ids"]) for sample in samples)
    assert report.tokens - 24 * last < config.tokens <= report.tokens, "goes on until there are enough, and no further"

    whole = path.read_bytes()
    for cut in (0, len(whole) // 3, len(whole) * 4 // 5, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert synthesize(model, tokenizer, path, config, console=QUIET) == report
        assert path.read_bytes() == whole


def test_a_model_that_repeats_itself_only_is_told_of(model, tokenizer, tmp_path):
    config = replace(SMALL, tokens=100_000, length=8, opened=0.0, question_temperature=0.0)
    path = tmp_path / "data.jsonl"
    with pytest.raises(ValueError, match=r"the last 80 questions have all been asked before.*content with 8 tokens"):
        synthesize(model, tokenizer, path, config, console=QUIET)
    assert len(path.read_text().splitlines()) == 1
