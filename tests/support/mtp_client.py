"""Load an exported folder in transformers, in a separate process: greedy generation with MTP drafts.

    python mtp_client.py FOLDER TOKENS NEW [DEPTHS]

Prints JSON: the tokens with and without drafts, and the number of drafts accepted in each round. DEPTHS limits the
number of MTP layers used.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator


def main(folder: str, tokens: list[int], new: int, depths: int | None = None) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    layers = model.config.num_hidden_layers
    if depths is not None:
        model.config.num_mtp_layers = depths
    # transformers finds MTP layers by this pattern, whose default fits only the sizes of published models.
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{layers + depth}\." for depth in range(model.config.num_mtp_layers)
    ]
    accepted: list[int] = []
    update = MTPCandidateGenerator.update_candidate_strategy

    def counting(self: Any, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        accepted.append(int(num_matches))
        update(self, input_ids, scores, num_matches)

    MTPCandidateGenerator.update_candidate_strategy = counting
    prompt = torch.tensor([tokens])
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    drafted = model.generate(prompt, use_mtp=True, **settings)
    plain = model.generate(prompt, **settings)
    return {"with": drafted[0].tolist(), "without": plain[0].tolist(), "accepted": accepted}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:]))))
