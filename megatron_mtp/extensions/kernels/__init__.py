"""The losses' Triton kernels analyzed without a GPU: registers, spills, occupancy, and a roofline model.

cards.py      limits and peaks of cards by compute capability; occupancy
compiled.py   the kernels of every loss, compiled for a card that is not here, with the calls that launch them
roofline.py   milliseconds of a loss from its products and memory traffic, calibrated by one record of an H200
tables.py     the results as tables
command.py    megatron-mtp doctor --kernels
"""

from megatron_mtp.cli.verbs import Verb

EXAMINATION = Verb(
    "compile the losses' kernels for six GPUs: registers, spills, occupancy, expected time",
    "megatron_mtp.extensions.kernels.command",
)
