"""Draft with one model on each rank and with a model split over both ranks, through a checkpoint; run under torchrun.

python -m torch.distributed.run --nproc-per-node 2 drafting_ranks_worker.py FOLDER KIND ...
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    from megatron_mtp.megatron.runtime import prepare

    prepare()

    import torch
    from drafting_single import method_of, model_of, prompts_of
    from hybrid_single import drafting_hybrid
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_mtp.decoding.engine import generate
    from megatron_mtp.decoding.requests import Update
    from megatron_mtp.decoding.runner import Runner

    METHODS = (None, {"method": "mtp"}, {"method": "mtp_tree"})
    CHAINS = (None, {"method": "mtp"}, {"method": "mtp_eagle", "num_speculative_tokens": 3})
    HYBRID = "M*EG/MG*/MG*"

    def texts_and_drafts(kind: str, ranks: int, folder: Path) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Return outputs and drafts of every method on this many tensor-parallel ranks. A single rank saves its
        weights.
        """
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(ranks)
        model_parallel_cuda_manual_seed(0)
        make, methods = (drafting_hybrid, CHAINS) if kind == HYBRID else (model_of, METHODS)
        if (method := method_of(kind)) != "mtp":
            fewer = {"method": method, "num_speculative_tokens": 2}
            methods = None, {"method": method}, {"method": "eagle3_tree"} if method == "eagle3" else fewer
        model = make(kind, tensor_model_parallel_size=ranks)
        sharded = {"model": model.sharded_state_dict()}
        if ranks == 1:
            folder.mkdir(exist_ok=True)
            dist_checkpointing.save(sharded, str(folder))
        else:
            model.load_state_dict(dist_checkpointing.load(sharded, str(folder))["model"])
        runner = Runner(model)
        assert kind not in ("gqa", "moe") or runner.backend.all_short
        seen: list[Update] = []
        texts = [generate(runner, prompts_of(2), 10, speculative=one, emit=seen.append).token_ids for one in methods]
        return texts, [update.draft.tokens_BN.tolist() for update in seen if update.draft is not None]

    torch.distributed.init_process_group("gloo")
    same = {}
    for kind in sys.argv[2:]:
        folder = Path(sys.argv[1]) / kind.replace("/", "_")
        (alone, drafts), (cut, drafts_of_two) = (texts_and_drafts(kind, ranks, folder) for ranks in (1, 2))
        same[kind] = [one == alone[0] for one in (*alone, *cut)] + [drafts == drafts_of_two]
    if torch.distributed.get_rank() == 0:
        print(json.dumps(same))
