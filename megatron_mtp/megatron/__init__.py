"""All that is about Megatron's own code: a new release of Megatron is read here first.

runtime.py       prepare(): Megatron made runnable on this machine; which libraries of kernels can be used
cpu.py           what Megatron needs to run without CUDA
layer_config.py  the configuration of a drafter's dense layers, on a trunk of any kind
layer_settings.py  settings that change nothing in a dense layer's forward
parser.py        its parser: flags that it lacks, those that a machine without CUDA, TE or Apex needs, a line read by it
model_arguments.py  arguments that describe a model
flags.py         flags and values that Megatron takes and should not
refusals.py      what Megatron says where a run cannot start, and what is told instead
patterns.py      patterns of hybrids, a symbol a layer
patches/         faults of the published megatron-core that are put right
checkpoint/      its distributed checkpoints: names, iterations, tensors, integrity
"""
