"""vLLM for CPU as the other side of vllm_serving.py, in its own environment and process.

    PYTHON studies/vllm_side.py FOLDER DTYPE TEXTS        TEXTS at once, at most

Every line of the input is a JSON list of requests, [prompt ids, new tokens] each. For each line a line of JSON goes
out: the seconds that they took together, and the tokens of every text. The first line names vLLM's version.

Run at 5f33b9e.
"""

import json
import os
import sys
import time

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import vllm
from vllm import LLM, SamplingParams


def main(folder: str, dtype: str, texts: str) -> None:
    """Answer lines until the input ends."""
    sizes = {"max_model_len": 512, "max_num_seqs": int(texts)}
    llm = LLM(folder, skip_tokenizer_init=True, dtype=dtype, enable_prefix_caching=False, **sizes)
    say({"version": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        every = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False) for _, new in asked]
        began = time.perf_counter()
        done = llm.generate(prompts, every, use_tqdm=False)
        seconds = time.perf_counter() - began
        say({"seconds": seconds, "texts": [list(one.outputs[0].token_ids) for one in done]})


def say(what: object) -> None:
    """A line for the benchmark; vLLM may print others."""
    print(f"side: {json.dumps(what)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
