"""What is known of the losses' Triton kernels without a GPU: registers, spills, occupancy, and a roofline.

cards.py      what a multiprocessor holds, by compute capability, and how fast a card of it is; occupancy
compiled.py   the kernels of every loss, compiled for a card that is not here, by the calls that launch them
roofline.py   milliseconds of a loss by its products and the bytes that it moves, from one record of an H200
tables.py     the figures as tables
command.py    megatron-mtp doctor --kernels
"""

from megatron_mtp.cli.verbs import Verb

EXAMINATION = Verb(
    "compile the losses' kernels for six GPUs: registers, spills, occupancy, expected time",
    "megatron_mtp.extensions.kernels.command",
)
