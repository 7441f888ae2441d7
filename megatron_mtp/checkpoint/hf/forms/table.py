"""All forms of quantized weights."""

from megatron_mtp.checkpoint.hf.forms import bitsandbytes, fp4, fp8, integers

FORMS = (
    fp8.BLOCKS,
    fp8.ROWS,
    fp8.TENSOR,
    fp8.MXFP8,
    fp4.NVFP4,
    fp4.NVFP4_OF_MODELOPT,
    fp4.MXFP4,
    fp4.MXFP4_OF_GPT_OSS,
    integers.PACKED,
    integers.INT8,
    fp4.MXFP4_OF_DEEPSEEK_V4,
    fp4.MXFP4_OF_QUARK,
    integers.AWQ,
    integers.GPTQ,
    bitsandbytes.INT8,
    bitsandbytes.FOUR_BITS,
)
"""Forms of quantized weights; the first one that fits counts."""
WRITTEN = {form.encoding.flag: form for form in FORMS if form.encoding is not None}
"""Forms that an export writes, by their names in `--quantize`."""
