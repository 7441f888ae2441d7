"""Load an exported folder in vLLM, in its own environment: greedy generation with drafts.

    .venv-vllm/bin/python vllm_client.py exported '[3, 4, 5, 6]' 100 '[1, 2]' '{"method": "mtp"}' float32 \\
        [model.safetensors mtp.safetensors]

Arguments: FOLDER, prompt, new tokens, the numbers of drafts per round to try, the speculative config without them, and
the dtype of the weights. Prints a line of JSON for each: prompt with new tokens, and vLLM's own counters. Newer weights
of the model and of its draft module, one file each, are loaded into the running engine.
"""

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.reload.inplace import reload_weights


def started(folder: str, drafts: int, speculative: dict[str, Any], dtype: str) -> LLM:
    return LLM(
        folder,
        trust_remote_code=True,  # MiMo's configuration class is in its folder
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=1,
        disable_log_stats=False,
        enable_prefix_caching=False,
        compilation_config={"custom_ops": ["none"]},  # its rotary kernel for CPU does not match DeepSeek's rotation
        speculative_config={**speculative, "num_speculative_tokens": drafts},
    )


def generate(llm: LLM, tokens: list[int], new: int, drafts: int) -> dict[str, Any]:
    """Return the prompt with the new tokens, and how many drafts were proposed and accepted."""
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    [done] = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    counts = {
        "proposed": metrics["draft_tokens"].value,
        "accepted_per_position": metrics["accepted_tokens_per_pos"].values[:drafts],
    }
    return {"drafts": drafts, "tokens": [*tokens, *done.outputs[0].token_ids], **counts}


def load(worker: Any, model: str, mtp: str) -> None:
    """Load newer weights into the model and its draft module; on a CPU the original weights have been repacked."""
    runner = worker.model_runner
    for module, file in ((runner.get_model(), model), (runner.drafter.model, mtp)):
        reload_weights(runner.vllm_config, module, iter(load_file(file).items()), None, is_checkpoint_format=True)


def main(folder: str, prompt: str, new: str, drafts: str, speculative: str, dtype: str, *newer: str) -> None:
    for count in json.loads(drafts):
        llm = started(folder, count, json.loads(speculative), dtype)
        if newer:
            llm.collective_rpc(load, args=newer)
        print(json.dumps(generate(llm, json.loads(prompt), int(new), count)), flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(*sys.argv[1:])
