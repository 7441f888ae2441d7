"""Faults of the published megatron-core that are put right, on any machine.

wheel.py          datasets without a compiler, MoE token counts, optimizer slices behind padding
unpickling.py     catalogues and objects of checkpoints are read without running code
checksums.py      checksums of what a checkpoint holds: made when it is saved, compared when it is loaded
saving.py         the helper process of saves ends with its rank; a save in progress is not called whole
torch_adam.py     a distributed optimizer that resumes without Apex and TE
frozen_stages.py  checkpoints of pipeline stages that have nothing to train
"""
