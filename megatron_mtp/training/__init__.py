"""A training run on Megatron's training loop: the forward step, metrics and arguments.

run.py               one run: arguments, model configuration, and Megatron's pretrain() with hooks for steps,
                     evaluations and checkpoints
flags.py             flags of the MTP layers, for any parser of Megatron's flags
config_file.py       flags from a YAML file (--config)
arguments.py         Megatron's parser with our flags and those of this machine, and the order of all checks
needed.py            flags that a run requires
recipe.py            flags of published recipes (--recipe), from the YAML files of recipes/
settings.py          arguments that are derived from others
checks.py            rejected flags: ours, those that Megatron silently ignores, those that crash it
startup.py           startup errors: one sentence on the terminal, the traceback in a log file
loading.py           checks of the checkpoint to load; the draft vocabulary, from the checkpoint or the flags
datasets.py          Megatron's data sets, by Megatron's flags; the kinds of data
texts.py             rows of text, of responses alone, and the same rows in every run
chats.py             rows of packed chats
given_chats.py       chats of --chat, made into a data set before the first step
forward_step.py      the forward step for Megatron's schedules: batch, model, loss function
reading_stages.py    which pipeline stages read batches, and which entries
row_keys.py          the rows of a microbatch, identified by digests of their content
state_cache.py       cached states of a frozen trunk instead of running its layers (--mtp-state-cache)
state_store.py       the cache on disk: rows by digest, in shards
parameter_group.py   a separate learning rate, gradient norm and clip for the MTP layers
metrics.py           table, TensorBoard, W&B and metrics.jsonl: loss, acceptance by depth, cost of a step
best_state.py        the best checkpoint of a run, and early stopping (--mtp-patience)
disk.py              free space for checkpoints on the disk of --save
contexts.py          acceptance counts by context length
documents.py         acceptance counts by document, gathered over ranks and grouped by source
run_files.py         metrics.jsonl, continued when a run resumes; run.json, how the run was started; documents.json
read_runs.py         the same files, read for reports and comparisons
short_log.py         console output: a short log on the terminal, Megatron's output in a log file
quiet.py             sends the output of Megatron and its libraries there
megatron_lm.py       two changed lines for Megatron-LM's training script
"""
