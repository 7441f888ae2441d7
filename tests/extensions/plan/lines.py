"""Launch lines whose plans are tested, from published scripts and from `launch_lines.py`."""

from launch_lines import LINES

from megatron_mtp.extensions.plan.launch import Line, read


def words_of(name: str, more: str = "") -> list[str]:
    """Return a launch line of `launch_lines.py` with its MTP layers and additional flags."""
    line = LINES[name]
    depths = "" if "--hybrid-layer-pattern" in line.mended else f"--mtp-num-layers {line.depths}"
    return f"{line.mended} --vocab-size {line.vocabulary} {depths} {more}".split()


def line_of(name: str, more: str = "") -> Line:
    """Return the same, parsed."""
    return read(words_of(name, more))


QWEN3_NEXT_IN_STAGES = "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --global-batch-size 1024"
"""Layout of Megatron-Bridge's recipe (src/megatron/bridge/recipes/qwen/qwen3_next.py), batch of its H100 preset."""

LARGE = {
    "deepseek-v3-h100": ("", (1024, 2048)),
    "deepseek-v3-uneven-stages": ("", (256,)),
    "glm4.5": ("", (256, 512, 1024, 2048)),
    "qwen3-next-80b-a3b-hybrid": (QWEN3_NEXT_IN_STAGES, (256, 512, 1024)),
}
"""Published launch lines of DeepSeek-V3, GLM-4.5 and Qwen3-Next, with changed flags and numbers of GPUs."""
