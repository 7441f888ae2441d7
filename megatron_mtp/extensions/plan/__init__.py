"""What a training run will need, and where its MTP layers belong, by arithmetic: memory and time of every stage.

launch.py      a launch line of Megatron-LM, or a Hugging Face folder, as the figures that the plan needs
hardware.py    GPUs: products, memory and links, with sources
sizes.py       layers as products and kept activations; the model of a launch line
placement.py   which layers every pipeline stage holds, as Megatron's layout strings
memory.py      bytes of every stage: weights, optimizer, activations, losses
schedule.py    1F1B and interleaved pipelines: their order and their time
step_time.py   seconds of every stage, by part
planning.py    placements of D = 0..4 beside each other, and the recommended one
decoding.py    speed-up of drafting with K = 1..7
report.py      the plan as text and as JSON
picture.py     the plan as one HTML page, drawn with plotly
dry_run.py     what train --dry-run prints: flags, layout, parameters and memory of a job
elsewhere.py   what of a job is not on this machine: files, GPUs and their libraries
built.py       the model of a job, built without storage, and its parameters
here.py        rates of this machine, measured
command.py     megatron-mtp plan
"""

from megatron_mtp.cli.verbs import Verb

VERB = Verb("plan memory, step time and placement of MTP layers on N GPUs", "megatron_mtp.extensions.plan.command")
