"""The verbs of `megatron-mtp VERB ...`: a table of all, and a file for each.

main.py        megatron-mtp: looks a verb up and runs it
verbs.py       VERBS, the table
convert.py     Hugging Face folders and Megatron checkpoints
convert_plans.py      the conversion that a command asks for
convert_text.py       acceptance on the text of --text
train.py       pretraining on Megatron's loop
live_drafts.py        drafting at the evaluations of a run
generate.py    texts of a checkpoint
terminal.py    prompts of the command line, text on a terminal, flags of verbs that run a model
cost.py        prompts under one clock, compared with plain decoding; acceptance, speed, energy
sample.py      a corpus of a model's own texts
checkpoint_texts.py   these by a checkpoint
served_texts.py       these by an OpenAI-compatible server
serve.py       OpenAI's HTTP API
evaluate.py    loss and acceptance of a checkpoint on a text
check.py       drafts of a folder, here or behind a server, beside its record of acceptance
audit.py       what is in a checkpoint, and what differs between two
attach.py      MTP layers for a Hugging Face model, step by step
attach_settings.py    what it was asked for, and the flags of other verbs among that
attach_checks.py      what is refused before the first step
attach_recipe.py      the settings of a recipe as its flags
attach_record.py      what a folder RUN was begun with
attach_steps.py       the steps: what each makes, when it is left to do, the verb that does it
attach_training.py    what every training and evaluation is given
attach_probe.py       the budget beside a training, and the probe of learning rates and losses
attach_guard.py       layers that draft worse than before are not exported
recipes.py     recipes by name
preprocess.py  text to .bin and .idx
doctor.py      check the environment for missing or slow components
"""
