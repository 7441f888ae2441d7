"""Load an exported `glm4_moe` folder in llama.cpp, in its own environment: greedy generation with MTP drafts.

    .venv-llama/bin/python llama_cpp_client.py exported model.gguf '[[3, 4, 5, 6]]' 100 '[1, 2]'

Arguments: FOLDER, the GGUF file to write, prompts, new tokens, and the numbers of drafts per round to try. Prints a
line of JSON for each: llama.cpp's own counts, summed over the prompts, and the new tokens. Prompts are ids; the tokens
in the file have artificial texts, so that ids can be read from the response.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file

ARCHITECTURE = gguf.MODEL_ARCH.GLM4_MOE
VOCABULARIES = ("embed_tokens.weight", "head.weight")
"""Tensors with one row per token; they get one more, for an end token that is never chosen."""
TOKEN = re.compile(r"t(\d+);")
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def write(folder: Path, file: str) -> None:
    """Convert the folder to GGUF in float32."""
    config = json.loads((folder / "config.json").read_text())
    blocks = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    write_sizes(writer, config, blocks)
    write_vocabulary(writer, config["vocab_size"] + 1)
    names = gguf.get_tensor_name_map(ARCHITECTURE, blocks)
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(str(folder / "model.safetensors")).items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
            continue
        if name.endswith(VOCABULARIES):
            tensor = np.pad(tensor, ((0, 1), (0, 0)))
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.astype(np.float32))
    for name, parts in experts.items():
        stacked = np.stack([parts[expert].astype(np.float32) for expert in range(len(parts))])
        writer.add_tensor(names.get_name(f"{name}.weight", try_suffixes=(".weight",)), stacked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer: Any, config: dict[str, Any], blocks: int) -> None:
    """Write the model's sizes from `config.json`."""
    writer.add_block_count(blocks)
    writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def write_vocabulary(writer: Any, size: int) -> None:
    """Write tokens whose texts are their ids; the last one is the end token."""
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token};" for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["a b"])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(size - 1)


def served(file: str, prompts: list[list[int]], new: int, drafts: int) -> dict[str, Any]:
    """Return how many drafts were made and accepted for all prompts, and the new tokens of each."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = file, 256, 1, False
    params.cpuparams.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    draft, single = params.speculative.draft, xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_k = params.cache_type_v = draft.cache_type_k = draft.cache_type_v = single
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
    draft.n_max, draft.n_min, draft.p_min = drafts, 0, 0.0
    server = xllamacpp.Server(params)
    asked = {"n_predict": new, "temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}
    answers = [server.handle_completions({"prompt": prompt, **asked}) for prompt in prompts]
    counts = {"proposed": "draft_n", "accepted": "draft_n_accepted"}
    sums = {name: sum(answer["timings"][key] for answer in answers) for name, key in counts.items()}
    return sums | {"tokens": [[int(one) for one in TOKEN.findall(text_of(answer))] for answer in answers]}


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of a response in OpenAI's format."""
    return str(answer["choices"][0]["text"])


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
    for count in json.loads(sys.argv[5]):
        made = served(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), count)
        print(json.dumps({"drafts": count, **made}), flush=True)
