"""Files of conversations: what is read, and which are continued."""

from __future__ import annotations

import json

import pytest

from treedec.training.synth_file import BatchFile, read_samples

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
    read = list(read_samples(path))
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


IDS = [5, 6, 7, 8, 9]
MALFORMED = {
    "not JSON": (b"{", "not a conversation"),
    "not UTF-8": (b'{"input_ids": [1], "responses": [], "text": "\xe4"}', "not a conversation"),
    "empty": (b"", "not a conversation"),
    "a list": (b"[]", "not a conversation"),
    "a string": (b'"input_ids responses"', "not a conversation"),
    "no tokens": (b'{"responses": []}', "not a conversation.*input_ids"),
    "no responses": (b'{"input_ids": [1]}', "not a conversation.*responses"),
    "tokens are text": (_line("abc", []), "input_ids must be a list"),
    "tokens are fractions": (_line([1, 2.0], []), "input_ids must be a list"),
    "tokens are nested": (_line([IDS], []), "input_ids must be a list"),
    "tokens are truths": (_line([1, True], []), "input_ids must be a list"),
    "no tokens at all": (_line(None, []), "input_ids must be a list"),
    "one flat response": (_line(IDS, [1, 3]), r"responses must be a list of \[start, end\] pairs"),
    "responses are a dict": (_line(IDS, {}), "responses must be a list"),
    "a triple": (_line(IDS, [[1, 2, 3]]), "responses must be a list"),
    "fractions": (_line(IDS, [[1, 2.5]]), "responses must be a list"),
    "null": (_line(IDS, [[1, None]]), "responses must be a list"),
    "below zero": (_line(IDS, [[-1, 3]]), r"\[-1, 3\) does not lie within its 5 tokens"),
    "beyond the end": (_line(IDS, [[0, 2], [3, 6]]), r"\[3, 6\) does not lie within its 5 tokens"),
    "backwards": (_line(IDS, [[3, 1]]), r"\[3, 1\) does not lie within"),
    "overlapping": (_line(IDS, [[0, 3], [2, 5]]), r"\[2, 5\) begins before the one"),
    "not in order": (_line(IDS, [[3, 5], [0, 2]]), r"\[0, 2\) begins before the one"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_named(tmp_path, name):
    line, message = MALFORMED[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(_line(IDS, [[0, 2], [2, 5]]) + b"\n" + line + b"\n")
    samples = read_samples(path)
    assert next(samples)["responses"] == [[0, 2], [2, 5]]
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 2: .*{message}"):
        next(samples)
