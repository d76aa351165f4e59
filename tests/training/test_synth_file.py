"""Files of conversations: what is read, and which are continued."""

from __future__ import annotations

import json

import pytest

from treedec.training.synth_file import BatchFile

ORIGIN = "0123456789abcdef"


def _samples(*lengths):
    return [{"messages": [], "input_ids": list(range(length)), "responses": [[0, length]]} for length in lengths]


def test_what_was_written_is_read_and_counted(tmp_path):
    path = tmp_path / "new" / "data.jsonl"
    file = BatchFile(path, ORIGIN)
    file.append(0, _samples(3, 4))
    file.append(1, [])
    file.append(2, _samples(5))
    assert (file.batches, file.conversations, file.tokens) == (3, 3, 12)
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample.pop("batch") for sample in read] == [[0, 0, 2], [0, 1, 2], [2, 0, 1]]
    assert {sample.pop("origin") for sample in read} == {ORIGIN}
    assert read == _samples(3, 4, 5)
    seen = []
    again = BatchFile(path, ORIGIN, seen.append)
    assert (again.batches, again.conversations, again.tokens, len(seen)) == (3, 3, 12, 3)


def test_an_unfinished_batch_is_cut_off_and_not_seen(tmp_path):
    path = tmp_path / "data.jsonl"
    file = BatchFile(path, ORIGIN)
    file.append(0, _samples(3))
    whole = path.read_bytes()
    file.append(1, _samples(4, 5))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    seen = []
    assert BatchFile(path, ORIGIN, seen.append).batches == 1
    assert len(seen) == 1 and path.read_bytes() == whole


MISPLACED = {
    "a line is missing": (0, 2),
    "a batch comes again": (0, 1, 2, 0, 1, 2),
    "the order is another": (3, 0, 1, 2),
    "the first line is missing": (1, 2, 3),
    "an unfinished batch before another": (0, 1, 3),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_lines_that_were_moved_or_removed_are_noticed(tmp_path, name):
    path = tmp_path / "data.jsonl"
    file = BatchFile(path, ORIGIN)
    file.append(0, _samples(3, 4, 5))
    file.append(1, _samples(6))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[k] for k in MISPLACED[name]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="does not follow the line before"):
        BatchFile(path, ORIGIN)
    assert path.read_bytes() == before


@pytest.mark.parametrize("batch", [None, 3, [], [0, 0], [0, 0, True], [0, 1, 1], [-1, 0, 1], "batch"])
def test_a_place_that_is_none_is_noticed(tmp_path, batch):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"origin": ORIGIN, "batch": batch, **_samples(3)[0]}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: its 'batch' is"):
        BatchFile(path, ORIGIN)


def _line(input_ids, responses):
    return json.dumps({"input_ids": input_ids, "responses": responses}).encode()


MALFORMED = {
    "not JSON": b"{",
    "not UTF-8": b'{"input_ids": [1], "responses": [], "text": "\xe4"}',
    "empty": b"",
    "a list": b"[]",
    "a string": b'"input_ids responses"',
    "no tokens": b'{"responses": []}',
    "no responses": b'{"input_ids": [1]}',
    "tokens are text": _line("abc", []),
    "a response beyond the end": _line([5, 6], [[0, 3]]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_named(tmp_path, name):
    path = tmp_path / "data.jsonl"
    path.write_bytes(MALFORMED[name] + b"\n")
    with pytest.raises(ValueError, match=r"data\.jsonl, line 1: not a conversation.*left as it is"):
        BatchFile(path, ORIGIN)
    assert path.read_bytes() == MALFORMED[name] + b"\n"
