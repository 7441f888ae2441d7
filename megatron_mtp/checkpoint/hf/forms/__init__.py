"""Forms of quantized weights, which the reader, the audit, the export and the docs share.

A weight X.weight is stored as several tensors, its parts. A part is called by the end of its name:

    weight, weight_scale, ...    X.weight, X.weight_scale; of stacked experts E.gate_up_proj, E.gate_up_proj_scale
    qweight, scales, SCB, ...    X.qweight, X.scales, X.SCB
    _blocks, _scales             E.gate_up_proj_blocks, E.gate_up_proj_scales

Decoding computes what the form's own library computes, bit by bit: in the type of scales of 16 bits, in float32 for
others, which gives bfloat16. Letters: O rows (outputs), I columns (inputs), G groups of columns, E experts.

form.py          what a form is: its parts and their types, the shape of its weight, decoding and encoding
scales.py        scales as numbers, and what they multiply
fp8.py           FP8 with a scale for a block, a row, a tensor or a group (MXFP8)
fp4.py           numbers of 4 bits with an exponent: NVFP4 and MXFP4
integers.py      integers: of compressed-tensors, AWQ and GPTQ
bitsandbytes.py  what bitsandbytes stores, which is described and not decoded
table.py         all of them; a new form is a row
"""
