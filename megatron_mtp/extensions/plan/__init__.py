"""Plans a training run: computes memory and time per pipeline stage, and recommends a placement of the MTP layers.

launch.py      reads model sizes and layout from a Megatron-LM launch line or a Hugging Face folder
hardware.py    GPUs: peak FLOP/s, memory and links, with sources
sizes.py       matrix products and saved activations of layers; the model of a launch line
placement.py   layers of each pipeline stage, as Megatron layout strings
memory.py      bytes per stage: weights, optimizer, activations, losses
schedule.py    order and time of 1F1B and interleaved pipeline schedules
step_time.py   seconds per stage, by part
planning.py    placements of D = 0..4 MTP layers, and the recommended one
decoding.py    speed-up of drafting with K = 1..7
report.py      the plan as text and JSON
picture.py     the plan as an HTML page, drawn with plotly
dry_run.py     output of train --dry-run: flags, layout, parameters and memory of a job
elsewhere.py   handles files, GPUs and libraries of a job that are missing on this machine
built.py       builds the model of a job without storage and counts its parameters
here.py        measures the speed of this machine
command.py     megatron-mtp plan
"""

from megatron_mtp.cli.verbs import Verb

VERB = Verb("plan memory, step time and placement of MTP layers on N GPUs", "megatron_mtp.extensions.plan.command")
