"""Prompts in the ways that data sets write them: what is said to the assistant, and what is refused."""

from __future__ import annotations

import builtins
import json

import pytest

from treedec.training.prompts import BrokenPrompt, Prompt, PromptSource, prompt_key


def _user(text):
    return {"role": "user", "content": text}


def _assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
# A row, and what is said before each answer.
ROWS = {
    "a text": ("Hi?", [[_user("Hi?")]]),
    "prompt": ({"prompt": " Hi?\n", "id": 3}, [[_user(" Hi?\n")]]),
    "text": ({"text": "Hi?"}, [[_user("Hi?")]]),
    "instruction": ({"instruction": "Add.", "input": "", "output": "3"}, [[_user("Add.")]]),
    "instruction and input": ({"instruction": "Add.", "input": "1 2"}, [[_user("Add.\n\n1 2")]]),
    "one turn": ({"messages": [_user("Hi?"), _assistant("Hello!")]}, [[_user("Hi?")]]),
    "no answer": ({"messages": [_user("Hi?")]}, [[_user("Hi?")]]),
    "messages as a prompt": ({"prompt": [_user("Hi?")], "chosen": "a"}, [[_user("Hi?")]]),
    "system": ({"messages": [SYSTEM, _user("a"), _assistant("b"), _user("c")]}, [[SYSTEM, _user("a")], [_user("c")]]),
    "system in between": (
        {"messages": [_user("a"), _assistant("b"), SYSTEM, _user("c"), _assistant("d")]},
        [[_user("a")], [SYSTEM, _user("c")]],
    ),
    "a system's last word": ({"messages": [_user("a"), _assistant("b"), SYSTEM]}, [[_user("a")]]),
    "ShareGPT": (
        {"conversations": [{"from": one, "value": "a"} for one in ("human", "gpt", "human")]},
        [[_user("a")], [_user("a")]],
    ),
    "an answer of parts": ({"messages": [_user("a"), {"role": "assistant", "content": None}]}, [[_user("a")]]),
    "content of parts": (
        {"messages": [_user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]},
        [[_user("ab")]],
    ),
    "developer": (
        {"messages": [{"role": "developer", "content": "a"}, _user("b")]},
        [[{"role": "developer", "content": "a"}, _user("b")]],
    ),
    "null beside messages": ({"messages": [_user("a")], "prompt": None}, [[_user("a")]]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_read(name):
    row, turns = ROWS[name]
    assert list(PromptSource([row])) == [Prompt(tuple(tuple(turn) for turn in turns), "row 1")]


BROKEN = {
    "a number": (3, "a text or an object is expected, not 3"),
    "a list": ([_user("a")], "a text or an object is expected"),
    "nothing known": ({"question": "a"}, "none of 'messages', .* is there"),
    "a number as prompt": ({"prompt": 3}, "none of 'messages', .* is there"),
    "blank": ({"prompt": " \n"}, "a message of the user has no text"),
    "no messages": ({"messages": []}, "nothing to answer"),
    "system only": ({"messages": [SYSTEM]}, "nothing to answer"),
    "system before an answer": ({"messages": [SYSTEM, _assistant("a")]}, "where the user has said nothing"),
    "assistant first": ({"messages": [_assistant("a"), _user("b")]}, "speaks where nothing has been said"),
    "assistant twice": ({"messages": [_user("b"), _assistant("a"), _assistant("a")]}, "speaks where nothing"),
    "tool": ({"messages": [_user("a"), {"role": "tool", "content": "b"}]}, "the role 'tool' is none of"),
    "no role": ({"messages": [{"content": "b"}]}, "the role None is none of"),
    "a list as role": ({"messages": [{"role": ["user"], "content": "b"}]}, r"the role \['user'\] is none of"),
    "no content": ({"messages": [{"role": "user"}]}, "a message of the user has no text"),
    "a picture": ({"messages": [_user([{"type": "text", "text": "a"}, {"type": "image"}])]}, "not only text"),
    "half a character": ({"prompt": "a\ud800"}, "a message of the user holds half a character"),
    "a text as message": ({"messages": ["a"]}, "a message is expected, not 'a'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_says_what_is_wrong(name):
    row, message = BROKEN[name]
    first, broken, last = PromptSource(["a", row, "b"])
    assert isinstance(first, Prompt) and isinstance(last, Prompt) and isinstance(broken, BrokenPrompt)
    with pytest.raises(BrokenPrompt, match=f"^row 2: .*{message}"):
        raise broken


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson"])
def test_json_lines(tmp_path, suffix):
    path = tmp_path / f"prompts.{suffix}"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": \n"b"\n\xff\n' + b"[" * 100_000 + b'\n{"text": "\xc3\xa4"}')
    found = list(PromptSource(path))
    texts = {one.place: one.turns[0][0]["content"] for one in found if isinstance(one, Prompt)}
    assert texts == {f"{path}, line 1": "a", f"{path}, line 4": "b", f"{path}, line 7": "ä"}
    broken = [str(one) for one in found if isinstance(one, BrokenPrompt)]
    assert broken == [f"{path}, line {number}: not JSON" for number in (3, 5, 6)]


def test_other_files_have_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b'{"prompt": "a"}\r\n\n  \nWhat is \xc3\xa4?\n\xff\n')
    first, second, broken = PromptSource(str(path))
    assert (first.turns[0][0]["content"], second.turns[0][0]["content"]) == ('{"prompt": "a"}', "What is ä?")
    assert second.place == f"{path}, line 4" and "line 5: not UTF-8" in str(broken)


def test_a_source_may_be_read_again_and_is_known_by_its_content(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\n")
    source = PromptSource(path)
    assert list(source) == list(source)
    other = tmp_path / "moved.txt"
    other.write_text("a\nb\n")
    assert PromptSource(other).identity == source.identity
    other.write_text("a\nc\n")
    assert PromptSource(other).identity != source.identity


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def test_data_sets_are_streamed(datasets, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"messages": [_user(f"of {split}")], "extra": 1}) + "\n")
    for split in ("train", "test"):
        source = PromptSource(folder, split)
        assert list(source) == list(source)
        (prompt,) = source
        assert prompt.turns == ((_user(f"of {split}"),),) and prompt.place == f"{folder}, split '{split}', row 1"
    assert PromptSource(folder).identity != PromptSource(folder, "test").identity


def test_a_data_set_that_is_loaded_already(datasets):
    loaded = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    assert [prompt.turns[0][0]["content"] for prompt in PromptSource(loaded)] == ["a", "b"]


def test_tables_are_files(datasets, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "table.csv").write_text("prompt,more\na,1\nb,2\n")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "table.parquet")
    for name in ("list.json", "lines.json", "table.csv", "table.parquet"):
        prompts = list(PromptSource(tmp_path / name))
        assert [prompt.turns[0][0]["content"] for prompt in prompts] == ["a", "b"]
        assert prompts[1].place == f"{tmp_path / name}, row 2"


def test_a_saved_data_set_is_a_folder(datasets, tmp_path):
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "saved")
    assert [prompt.place for prompt in PromptSource(tmp_path / "saved")] == [
        f"{tmp_path / 'saved'}, split 'train', row 1"
    ]


def test_a_name_may_have_a_configuration(datasets, monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **how: asked.append((*name, how)) or [{"prompt": "a"}])
    assert len(list(PromptSource("owner/name:config", "test"))) == len(list(PromptSource("name"))) == 1
    assert asked == [
        ("owner/name", "config", {"split": "test", "streaming": True}),
        ("name", None, {"split": "train", "streaming": True}),
    ]


def test_a_data_set_that_cannot_be_read_is_named(datasets, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="empty: a folder without files"):
        list(PromptSource(empty))
    importing = builtins.__import__

    def without(name, *arguments, **more):
        if name == "datasets":
            raise ImportError(name)
        return importing(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="empty: only the `datasets` library reads this: run `pip install"):
        list(PromptSource(empty))


@pytest.mark.parametrize("name", ["/no/such/place", "no/such/place/", "a.jsonl", "a.parquet", "a/list.txt"])
def test_a_file_that_is_not_there_is_not_looked_for_elsewhere(name):
    with pytest.raises(FileNotFoundError, match="no such file or folder of prompts"):
        PromptSource(name)


def test_prompts_are_alike_whose_words_are():
    same = ["What is  a cat?", "what is a cat", " WHAT is\na cat ?!", "What is a ｃat."]
    assert len({prompt_key([_user(text)]) for text in same}) == 1
    others = [[_user("What is a cat, then?")], [_user("2 + 2")], [_user("2 - 2")], [SYSTEM, _user(same[0])],
              [_user(same[0]), _user("a")]]  # fmt: skip
    assert len({prompt_key(messages) for messages in [*others, [_user(same[0])]]}) == 6
