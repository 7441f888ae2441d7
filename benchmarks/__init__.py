"""Benchmarks of megatron-mtp against alternatives. Each prints one JSON object as its last line.

harness.py      a benchmark's command: flags, interleaved sides, peak memory, goals, the report
sides.py        models in training, ours and Megatron's, that take the same steps
agreeing.py     random models whose drafts are accepted at a given rate
llama.py        a model of ours in transformers
loss_alone.py   the output layer and the loss without a model
verbs.py        verbs of megatron-mtp in forks
gpu_check.py    many measurements on a GPU; gpu/ has its parts
results/        reports whose tables docs/explanation/evidence.md shows

Every other file is a benchmark: a function from its flags to what it `Found`, which `harness.main` runs and reports.
"""
