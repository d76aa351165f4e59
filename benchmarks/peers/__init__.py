"""Other packages that decode on CPUs, compared with treedec on the same weights, prompts and token counter.

Each runs in a virtual environment of its own, which `make bench-peers` creates, as a process that answers one prompt at
a time. So a peer takes its turn in the rounds of a run like any other method, and never computes while another does.

* `names.py`: which peers there are, and where their environments lie.
* `worker.py`: the process; the one file here that runs without treedec.
* `process.py`: the other end of its pipe.
* `export.py`, `gguf.py`: the target as files that peers load.
* `pool.py`: the peers of one run, from the target to an answer.
"""
