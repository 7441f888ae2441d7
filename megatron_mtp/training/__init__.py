"""One run on Megatron's training loop: its forward step, metrics and arguments. The loop is Megatron's.

run.py               one run: arguments, model configuration, Megatron's pretrain(), whose loop is observed: steps,
                     evaluations, checkpoints
flags.py             flags of the MTP layers, for any parser of Megatron's flags, and flags from a YAML file (--config)
arguments.py         Megatron's parser with our flags and those of this machine, and the order of all checks
needed.py            flags that a run needs
recipe.py            flags that others train by (--recipe), from the YAML files of recipes/
settings.py          arguments that follow from others
checks.py            flags that are refused: ours, those that Megatron takes in silence, those that crash it
startup.py           how a run ends that cannot start: one sentence, and the traceback in a log file
loading.py           whether what --load names can be loaded; the draft vocabulary that it or the flags give
datasets.py          Megatron's data sets, by Megatron's flags, also of answers; chats made into one, and packed
forward_step.py      the forward step for Megatron's schedules: batch, model, loss function
reading_stages.py    which pipeline stages read batches, and what of them
row_keys.py          the rows of a microbatch, by digests of their content
state_cache.py       states of a frozen trunk in the place of its layers (--mtp-state-cache)
state_store.py       these on a disk: rows by digest, in shards
parameter_group.py   a learning rate, gradient norm and clip of the MTP layers' own
metrics.py           table, TensorBoard, W&B and metrics.jsonl of loss, acceptance by depth and costs of a step
best_state.py        the best state of a run, kept beside its iterations, and an end where it no longer grows
disk.py              room for checkpoints on the disk of --save
contexts.py          counts of acceptance by the length of the context
documents.py         counts of acceptance by document, gathered over ranks, and put by source
run_files.py         metrics.jsonl, continued by a resumed run, run.json: how the run was started, and documents.json
short_log.py         what a run prints: ours on the terminal, Megatron's in a log file
megatron_lm.py       two lines for a training script that is not ours
"""
