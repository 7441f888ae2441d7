"""Everything that depends on Megatron's own code. For a new release of Megatron, start here.

runtime.py       prepare(): make Megatron runnable on this machine
machine.py       what this machine has: a CUDA device, kernel libraries that are usable
cpu.py           substitutes that let Megatron run without CUDA
layer_config.py  configuration of a drafter's dense layers, on any trunk
layer_settings.py  settings that have no effect on a dense layer's forward pass
parser.py        its parser: missing flags, flags for a machine without CUDA, TE or Apex
parsing.py       a command line read by it, outside of a run
model_arguments.py  arguments that describe a model
flags.py         flags and values that Megatron accepts but this package does not support
refusals.py      Megatron's messages for runs that cannot start, and our replacements
patterns.py      layer patterns of hybrid models
patches/         bugs of the published megatron-core that are fixed here
checkpoint/      Megatron's distributed checkpoints: names, iterations, tensors, integrity
"""
