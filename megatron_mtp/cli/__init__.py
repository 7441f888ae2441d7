"""Commands of `megatron-mtp COMMAND ...`: a table of all, and a file for each.

main.py        megatron-mtp: looks up a command and runs it
verbs.py       VERBS, the table
convert.py     Hugging Face folders and Megatron checkpoints
convert_plans.py      the conversion plan for each subcommand
convert_text.py       acceptance on the text of --text
train.py       pretraining with Megatron's training loop
live_drafts.py        decoding with drafts at the evaluations of a run
generate.py    text generation with a checkpoint
terminal.py    prompts of the command line, text on a terminal, flags of commands that run a model
cost.py        timing of generations, compared with plain decoding; acceptance, speed, energy
sample.py      a corpus of self-generated data
checkpoint_texts.py   sampling from a checkpoint
served_texts.py       sampling from an OpenAI-compatible server
serve.py       OpenAI-compatible HTTP server
evaluate.py    loss and acceptance of a checkpoint on a text
check.py       measured acceptance, local or from a server, against the recorded values
audit.py       contents of a checkpoint, and differences between two
attach.py      MTP layers for a Hugging Face model, step by step
attach_settings.py    settings of attach, and flags for other commands among them
attach_checks.py      checks before the first step
attach_recipe.py      the settings of a recipe as flags
attach_record.py      settings that a RUN folder was started with
attach_steps.py       the steps: output, whether it still has to run, its command
attach_training.py    arguments of all trainings and evaluations
attach_probe.py       the budget for evaluations, and the probe of learning rates and losses
attach_guard.py       the regression check: layers that draft worse than before are not exported
recipes.py     recipes by name
preprocess.py  text to .bin and .idx
doctor.py      check the environment for missing or slow components
"""
