"""The run: the order of decodes, failures, defects, comparison with `hf`, resuming, and the cost curve."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from kit import VOCAB, fresh_model, prompts
from test_bench_methods import slightly_different
from transformers import AutoTokenizer

import treedec
from treedec.benchmarks import bench as bench_module
from treedec.benchmarks import methods, runner
from treedec.benchmarks.bench import BenchConfig, bench, summary
from treedec.benchmarks.counting import BenchmarkDefect
from treedec.benchmarks.methods import Engine, conditions_of, parse_methods
from treedec.benchmarks.prompts import Prompt
from treedec.benchmarks.results import Failure, read_result
from treedec.benchmarks.runner import Journal, Measured, Run, cost_curve, units_of
from treedec.costs import Clock, CostCurve
from treedec.stats import DecodingStats

NEW = 12
TEXTS = ("w3 w1 w4 w1 w5 w3 w1", "w9 w2", "w9 w2 w9 w2 w9", "w6 w5 w3")
PROMPTS = [Prompt(str(place), "qa", (text,)) for place, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def model():
    return fresh_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def run_of(model, tokenizer):
    def make(
        *names, asked=PROMPTS, temperatures=(0.0,), batches=(1,), rules=("coupled",), clock=None, own=None, **more
    ):
        engine = Engine(own or model, tokenizer, max_new_tokens=NEW, draft_model=slightly_different(model), clock=clock)
        conditions = conditions_of(parse_methods(names, "mine"), temperatures, rules, batches)
        return Run(engine, conditions, units_of(asked, batches), **more)

    return make


def rows_of(run):
    measured = [part for _, _, part in run.measure({})]
    return [row for part in measured for row in part.rows], [failure for part in measured for failure in part.failures]


def replaced(run, index, change):
    """Let a condition of a run decode otherwise: `change(decoded, batch)`."""
    before = run._decoders[index]
    run._decoders[index] = lambda batch: change(before(batch), batch)


class TestOrder:
    def test_methods_take_turns_in_going_first(self, run_of):
        run = run_of("hf", "ar", "ngram", rounds=2)
        rows, _ = rows_of(run)
        assert [(row.round, row.prompts, row.condition) for row in rows] == [
            (turn, (str(place),), (place + turn + (step if place + turn < 3 else -step)) % 3)
            for turn in (0, 1)
            for place in range(4)
            for step in range(3)
        ]

    def test_a_unit_fills_a_batch_of_every_size(self, run_of):
        rows, _ = rows_of(run_of("hf", "ngram", batches=(1, 2)))
        assert [(row.prompts, row.condition) for row in rows[:6]] == [
            (("0",), 0), (("1",), 0), (("0",), 1), (("1",), 1), (("0", "1"), 2), (("0", "1"), 3),
        ]  # fmt: skip
        assert all(row.matches for row in rows)

    def test_categories_are_not_mixed(self):
        mixed = [Prompt(str(i), "ab"[i % 2], ("w1",)) for i in range(8)]
        assert [[prompt.id for prompt in unit.prompts] for unit in units_of(mixed, [2])] == [
            ["0", "2"], ["1", "3"], ["4", "6"], ["5", "7"],
        ]  # fmt: skip

    def test_categories_take_turns_while_they_last(self):
        mixed = [
            Prompt(f"{category}{i}", category, ("w1",))
            for category, count in (("a", 3), ("b", 1), ("c", 2))
            for i in range(count)
        ]
        assert [unit.prompts[0].id for unit in units_of(mixed, [1])] == ["a0", "b0", "c0", "a1", "c1", "a2"]

    def test_within_each_category_every_condition_goes_first(self, run_of):
        mixed = [Prompt(str(i), "ab"[i % 2], ("w1",)) for i in range(4)]
        rows, _ = rows_of(run_of("hf", "ar", asked=mixed))
        assert [(row.category, row.condition) for row in rows[::2]] == [("a", 0), ("b", 1), ("a", 1), ("b", 0)]

    def test_prompts_that_fill_no_batch_are_refused(self):
        with pytest.raises(
            ValueError, match="category 'qa' has 4 prompts, which do not fill batches of 3: give --limit 3"
        ):
            units_of(PROMPTS, [3])
        with pytest.raises(ValueError, match="fill batches of 10: give smaller"):
            units_of(PROMPTS, [2, 5])


class TestFigures:
    def test_lossless_methods_match(self, run_of):
        run = run_of("hf", "ar", "ngram", "vanilla", "hf-assisted", temperatures=(0.0, 1.0))
        rows, failures = rows_of(run)
        assert not failures
        for row in rows:
            condition = run.conditions[row.condition]
            assert row.new_tokens == NEW and row.first_difference is None and row.logit_gap is None
            assert row.matches or (condition.method == "hf-assisted" and condition.temperature)
            plain = condition.method in ("hf", "ar")
            assert row.accepted_lengths == {1: NEW - 1} if plain else sum(row.accepted_lengths.values()) == row.passes
            ours = not condition.method.startswith("hf")
            first = row.new_tokens - row.decoded_tokens
            assert first == 1 or (first > 1 and condition.method == "hf-assisted")
            assert (row.draft_seconds is not None) == (row.acceptance_by_place is not None) == ours
            assert (row.nodes is not None) == ours
            if condition.method == "ar":
                assert row.nodes == row.passes
            elif ours:  # the root of every pass, and the candidates, of which some may not have been reached
                assert row.nodes >= row.passes + sum(reached for reached, _ in row.acceptance_by_place.values())

    def test_without_hf_there_is_nothing_to_match(self, run_of):
        rows, _ = rows_of(run_of("ar", "ngram"))
        assert {row.matches for row in rows} == {None}

    def test_other_tokens_are_found_and_their_gap_told(self, run_of, model):
        def other(decoded, batch):
            tokens = list(decoded.rows[0])
            tokens[4] = (tokens[4] + 1) % VOCAB
            return replace(decoded, rows=[tokens])

        run = run_of("hf", "ar")
        replaced(run, 1, other)
        rows, _ = rows_of(run)
        for row in (row for row in rows if row.condition == 1):
            assert (row.matches, row.first_difference) == (False, 4)
            assert row.logit_gap > 0
        hf = {row.prompts: row for row in rows if row.condition == 0}
        assert all(row.digest != hf[row.prompts].digest for row in rows if row.condition == 1)

    def test_seeds_make_runs_equal_and_rounds_and_prompts_different(self, run_of):
        asked = [Prompt(name, "qa", (TEXTS[0],)) for name in "ab"]
        run = run_of("ngram", "hf", asked=asked, temperatures=(1.0,), rounds=2, seed=3)
        rows, again = rows_of(run)[0], rows_of(run)[0]
        assert [row.digest for row in rows] == [row.digest for row in again]
        digests = {(row.round, row.prompts): row.digest for row in rows}
        assert len(set(digests.values())) == len(digests) == 4
        assert all(row.matches for row in rows)  # whatever decodes a prompt in a round does it by the same seed

    def test_a_method_slower_by_a_tenth_shows(self, run_of, tokenizer, monkeypatch):
        """On a clock that a pass of the model advances by a second, and one drafter by a tenth more."""
        model, now = fresh_model(dtype=torch.float32), [0.0]
        model.register_forward_pre_hook(lambda *_: now.__setitem__(0, now[0] + 1.0))

        class Slow(treedec.drafter.NoDrafts):
            def start(self, target, batch, capacity):
                session = super().start(target, batch, capacity)
                propose = session.propose

                def slow(state):
                    now[0] += 0.1
                    return propose(state)

                session.propose = slow
                return session

        known = treedec.load_drafter

        def load(name, *args, **more):
            return Slow() if name == "ngram" else known(name, *args, **more)

        monkeypatch.setattr(treedec, "load_drafter", load)
        run = run_of("hf", "ar", "ngram", own=model, clock=Clock(model.device, lambda: now[0]))
        run.warm_up()
        rows, _ = rows_of(run)
        seconds = {row.condition: row.decode_seconds for row in rows}
        assert seconds[0] == seconds[1] == NEW - 1
        assert seconds[2] == pytest.approx(1.1 * (NEW - 1))
        assert {row.prefill_seconds for row in rows} == {1.0}


class TestFailures:
    def test_a_failing_prompt_is_told_and_left_out_of_later_rounds(self, run_of):
        def fails(decoded, batch):
            if batch.ids.shape[1] == 2:
                raise RuntimeError("boom\nand more")
            return decoded

        run = run_of("hf", "ar", rounds=2)
        replaced(run, 1, fails)
        run.warm_up()
        rows, failures = rows_of(run)
        assert failures == [Failure(1, ("1",), "RuntimeError: boom")]
        assert [(row.round, row.condition) for row in rows if row.prompts == ("1",)] == [(0, 0)]
        assert len(rows) == 2 * 2 * 3 + 1

    def test_a_method_that_works_for_no_prompt_is_refused(self, run_of):
        def fails(decoded, batch):
            raise RuntimeError("boom")

        run = run_of("hf", "ar")
        replaced(run, 1, fails)
        with pytest.raises(ValueError, match="ar fails on the first and the last prompts: RuntimeError: boom"):
            run.warm_up()

    def test_ctrl_c_is_no_failure(self, run_of):
        def stops(decoded, batch):
            raise KeyboardInterrupt

        run = run_of("hf", "ar")
        replaced(run, 1, stops)
        with pytest.raises(KeyboardInterrupt):
            rows_of(run)


class TestDefects:
    """Controls that must fail."""

    def test_a_method_that_goes_on_behind_the_length(self, run_of):
        run = run_of("hf", "ar")
        replaced(run, 1, lambda decoded, batch: replace(decoded, rows=[decoded.rows[0] + [1]]))
        with pytest.raises(BenchmarkDefect, match=r"ar, prompt 0: 13 new tokens, where at most 12 were asked for"):
            rows_of(run)

    def test_a_method_that_goes_on_behind_the_end(self, run_of, tokenizer):
        model = fresh_model(dtype=torch.float32)
        model.generation_config.eos_token_id = rows_first_tokens(model, tokenizer)[3]
        run = run_of("hf", "ar", own=model)
        rows, _ = rows_of(run)
        assert rows[0].new_tokens < NEW
        replaced(run, 1, lambda decoded, batch: replace(decoded, rows=[decoded.rows[0] + [1]]))
        with pytest.raises(BenchmarkDefect, match="ar, prompt 0: tokens behind the one that ends the text"):
            rows_of(run)

    def test_a_method_that_counts_a_token_twice(self, run_of, monkeypatch):
        class Twice(DecodingStats):
            def count(self, block):
                super().count(block)
                self.new_tokens += 1 if block.prefill else 0

        run = run_of("hf", "ar")
        rows_of(run)
        monkeypatch.setattr(methods, "DecodingStats", Twice)
        with pytest.raises(BenchmarkDefect, match="ar, prompt 0: counts 13 new tokens itself, and returned 12"):
            rows_of(run)

    def test_warming_up_finds_them_too(self, run_of):
        run = run_of("hf", "ar")
        replaced(run, 1, lambda decoded, batch: replace(decoded, rows=[decoded.rows[0][:-1]]))
        with pytest.raises(BenchmarkDefect, match="stops after 11 new tokens"):
            run.warm_up()


def rows_first_tokens(model, tokenizer):
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()


class TestCosts:
    def test_they_are_measured_behind_as_much_text_as_asked_for(self, monkeypatch):
        asked = []

        def measured(target, text, nodes, repeats, clock):
            asked.append((text[0].tolist(), nodes, repeats))
            return CostCurve((1, 2), (0.5, 0.75))

        monkeypatch.setattr(runner, "measure_costs", measured)
        model, text = fresh_model(dtype=torch.float32), prompts()[0].tolist()
        for context in (5, 12, 31):
            costs = cost_curve(treedec.Target(model), Clock(model.device), prompts(), context, (1, 2), repeats=3)
            assert costs == {"nodes": [1, 2], "seconds": [0.5, 0.75], "context": context, "compiled": False}
            assert asked.pop() == ((text * 3)[:context], (1, 2), 3)

    def test_the_context_is_what_the_model_has(self):
        model = fresh_model(dtype=torch.float32, max_position_embeddings=100)
        assert cost_curve(treedec.Target(model), Clock(model.device), prompts(), 192, repeats=1)["context"] == 36


class TestJournal:
    @pytest.fixture
    def measured(self, run_of):
        return [part for _, _, part in run_of("hf", "ngram").measure({})]

    def journal(self, tmp_path, **identity):
        return Journal(tmp_path / "j.jsonl", {"seed": 0, "list": (1, 2)} | identity)

    def test_what_is_written_is_read(self, tmp_path, measured):
        journal = self.journal(tmp_path)
        assert journal.open() == {}
        for place, part in enumerate(measured):
            journal.append(0, place, part)
        journal.append(1, 0, Measured((), (Failure(0, ("0",), "boom"),)))
        again = self.journal(tmp_path).open()
        assert again == {(0, place): part for place, part in enumerate(measured)} | {
            (1, 0): Measured((), (Failure(0, ("0",), "boom"),))
        }

    def test_a_line_cut_short_is_dropped(self, tmp_path, measured):
        journal = self.journal(tmp_path)
        journal.open()
        journal.append(0, 0, measured[0])
        whole = journal.path.read_bytes()
        journal.append(0, 1, measured[1])
        for end in range(len(whole) + 1, len(journal.path.read_bytes()), 97):
            journal.path.write_bytes(
                journal.path.read_bytes()[:end] if end < len(whole) else whole + b'{"round": 0, "un'
            )
            assert list(self.journal(tmp_path).open()) == [(0, 0)]
            assert journal.path.read_bytes() == whole

    def test_a_broken_line_is_named(self, tmp_path, measured):
        journal = self.journal(tmp_path)
        journal.open()
        journal.append(0, 0, measured[0])
        lines = journal.path.read_text().splitlines()
        data = json.loads(lines[1])
        del data["rows"][0]["digest"]
        journal.path.write_text(f"{lines[0]}\n{json.dumps(data)}\n")
        with pytest.raises(ValueError, match=r"j\.jsonl, line 2 is broken .*'digest' is missing in rows\[0\]"):
            self.journal(tmp_path).open()

    def test_another_run_is_refused_by_what_differs(self, tmp_path, measured):
        journal = self.journal(tmp_path)
        journal.open()
        journal.append(0, 0, measured[0])
        with pytest.raises(ValueError, match=r"j\.jsonl holds a run that is another in seed"):
            self.journal(tmp_path, seed=1).open()
        with pytest.raises(ValueError, match="another in more"):
            self.journal(tmp_path, more=1).open()
        assert len(self.journal(tmp_path).open()) == 1
        assert self.journal(tmp_path, seed=1).open(overwrite=True) == {}
        with pytest.raises(ValueError, match="another in seed"):
            self.journal(tmp_path).open()

    def test_a_file_that_is_none_is_refused(self, tmp_path):
        (tmp_path / "j.jsonl").write_text("hello\n")
        with pytest.raises(ValueError, match="no journal"):
            self.journal(tmp_path).open()


class TestBench:
    @pytest.fixture
    def config(self, tmp_path, prompt_file):
        asked = (
            {"question_id": prompt.id, "category": prompt.category, "turns": list(prompt.turns)} for prompt in PROMPTS
        )
        path = prompt_file(*map(json.dumps, asked))
        return BenchConfig(
            tmp_path / "out" / "r.json",
            "mine",
            ("hf", "ngram"),
            prompts=path,
            max_new_tokens=NEW,
            costs=False,
            rounds=2,
        )

    @pytest.fixture
    def load(self, model, tokenizer):
        return lambda: (model, tokenizer)

    def stopped_after(self, monkeypatch, count):
        """Ctrl-C at the decode after so many, those for warming up included."""
        decode, calls = Run._decode, [0]

        def counted(self, *arguments):
            calls[0] += 1
            if calls[0] > count:
                raise KeyboardInterrupt
            return decode(self, *arguments)

        monkeypatch.setattr(Run, "_decode", counted)

    def test_a_result_is_written_and_read(self, config, load):
        result = bench(config, load)
        assert read_result(config.out) == result
        assert list(config.out.parent.iterdir()) == [config.out]
        assert len(result.rows) == 2 * 2 * 4 and result.complete_rows() == result.rows and result.costs is None
        assert result.target["name"] == "mine" and result.target["dtype"] == "float32"
        assert result.settings["prompts"]["count"] == 4 and result.settings["prompts"]["file"] == "prompts.jsonl"
        figures = summary(result)
        assert list(figures) == ["hf", "ngram"] and figures["ngram"]["exact_match"] == 1.0
        assert figures["hf"]["mean_accepted_length"] == 1.0 and figures["hf"]["new_tokens"] == 2 * 4 * NEW

    def test_an_interrupted_run_goes_on_behind_the_last_whole_prompt(self, config, load, monkeypatch):
        with monkeypatch.context() as patch:
            self.stopped_after(patch, 4 + 2 * 2 + 1)  # two prompts, and one of two methods of the third
            with pytest.raises(KeyboardInterrupt):
                bench(config, load)
        kept = config.journal.read_text().splitlines()
        assert len(kept) == 1 + 2 and not config.out.exists()
        decoded = []
        monkeypatch.setattr(
            Run,
            "_measure",
            lambda self, turn, place, unit, then=Run._measure: (
                decoded.append((turn, place)) or then(self, turn, place, unit)
            ),
        )
        result = bench(config, load)
        assert decoded == [(0, 2), (0, 3), *((1, place) for place in range(4))]
        before = [row for line in kept[1:] for row in json.loads(line)["rows"]]
        assert [row.decode_seconds for row in result.rows[:4]] == [row["decode_seconds"] for row in before]
        assert result.complete_rows() == result.rows and len(result.rows) == 16
        assert not config.journal.exists()

    def test_out_of_minutes_it_writes_what_there_is_and_goes_on(self, config, load):
        whole = bench(replace(config, out=config.out.with_name("whole.json")), load)
        assert not whole.unfinished
        for call in range(1, 8):  # of no minutes, and therefore of one prompt
            result = bench(replace(config, minutes=0.0, command=f"call {call}"), load)
            assert result == read_result(config.out) and result.command == f"call {call}"
            assert result.unfinished and config.journal.exists()
            # Of the second round nothing is told until it is whole.
            assert [row.prompts for row in result.rows] == [row.prompts for row in whole.rows[: 2 * min(call, 4)]]
            assert result.complete_rows() == result.rows and result.unreached == max(0, 4 - call)
        result = bench(replace(config, minutes=0.0), load)
        assert not result.unfinished and not config.journal.exists()
        assert [(row.round, row.digest) for row in result.rows] == [(row.round, row.digest) for row in whole.rows]
        with pytest.raises(ValueError, match="is there already"):
            bench(config, load)

    def test_an_unfinished_result_without_its_journal_is_kept(self, config, load):
        bench(replace(config, minutes=0.0), load)
        written = config.out.read_bytes()
        with pytest.raises(ValueError, match="another in settings"):
            bench(replace(config, seed=1), load)
        config.journal.unlink()
        with pytest.raises(ValueError, match="is there already"):
            bench(config, load)
        assert config.out.read_bytes() == written
        config.journal.write_text("")
        config.out.write_text("my notes")
        with pytest.raises(ValueError, match="is there already"):
            bench(config, load)
        assert config.out.read_text() == "my notes"

    def test_another_command_does_not_go_on(self, config, load, monkeypatch):
        with monkeypatch.context() as patch:
            self.stopped_after(patch, 4 + 2)
            with pytest.raises(KeyboardInterrupt):
                bench(config, load)
        other = replace(config, seed=1)
        with pytest.raises(ValueError, match="another in settings"):
            bench(other, load)
        assert bench(replace(other, overwrite=True), load).settings["seed"] == 1

    @pytest.mark.parametrize(("what", "where"), [("sources_digest", "versions"), ("weights_digest", "settings")])
    def test_other_code_and_other_weights_are_another_run(self, config, load, model, monkeypatch, what, where):
        config = replace(config, methods=("ar", "vanilla"), draft_model=config.prompts.parent)
        monkeypatch.setattr(bench_module, "load_draft_model", lambda *_: slightly_different(model))
        known = bench(replace(config, minutes=0.0), load)
        assert set(known.settings["weights"]) == {"vanilla", "draft model"}
        original = getattr(bench_module, what)
        monkeypatch.setattr(bench_module, what, lambda *part: original(*part) + "?" * any(part or "x"))
        with pytest.raises(ValueError, match=f"another in {where}"):
            bench(config, load)

    def test_how_large_logits_are_is_measured(self, config, load, model, tokenizer):
        ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
        largest = model(ids).logits[0].amax(-1).abs().median()
        scale = bench_module.target_facts("mine", model, ids)["logits"]
        assert scale <= float(largest) < 2 * scale

    def test_prompts_that_changed_are_another_run(self, config, load, monkeypatch):
        with monkeypatch.context() as patch:
            self.stopped_after(patch, 4 + 2)
            with pytest.raises(KeyboardInterrupt):
                bench(config, load)
        config.prompts.write_text(config.prompts.read_text().replace("w6", "w7"))
        with pytest.raises(ValueError, match="another in settings"):
            bench(config, load)

    def test_a_result_is_not_replaced_unasked(self, config, load):
        bench(config, load)
        first = config.out.read_bytes()
        with pytest.raises(ValueError, match="is there already"):
            bench(config, load)
        assert config.out.read_bytes() == first
        bench(replace(config, overwrite=True), load)
        assert config.out.read_bytes() != first  # other times

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"methods": ("guess",)}, "unknown method 'guess'"),
            ({"methods": ("hf", "vanilla")}, "'vanilla' needs --draft-model"),
            ({"methods": ("hf-assisted@3",)}, "'hf-assisted@3' needs --draft-model"),
            ({"draft_model": "FOLDER"}, "none of the methods needs it"),
            ({"methods": ("vanilla",), "draft_model": "FOLDER/nowhere"}, "no folder"),
            ({"categories": ("rag",)}, "no category 'rag'"),
            ({"batch_sizes": (3,)}, "do not fill batches of 3"),
            ({"out": "FOLDER"}, "is a folder"),
        ],
    )
    def test_mistakes_are_found_before_anything_is_loaded(self, config, tmp_path, change, said):
        paths = {
            key: tmp_path / value.replace("FOLDER", ".") for key, value in change.items() if isinstance(value, str)
        }
        with pytest.raises((ValueError, OSError), match=said):
            bench(replace(config, **{**change, **paths}), lambda: pytest.fail("the model was loaded"))

    def test_costs_are_measured_when_asked_for(self, config, load, monkeypatch):
        seen = []
        monkeypatch.setattr(
            bench_module, "cost_curve", lambda target, clock, text, context: seen.append((text.shape, context)) or {
                "nodes": [1], "seconds": [0.5], "context": 4, "compiled": False,
            },
        )  # fmt: skip
        result = bench(replace(config, costs=True, rounds=1), load)
        assert result.costs["seconds"] == [0.5] and seen == [((1, 7), 4 + NEW // 2)]
        assert read_result(config.out) == result
