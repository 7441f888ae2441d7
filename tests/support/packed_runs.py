"""Arguments of a run on packed rows, set where the code that reads batches asks Megatron for them."""

from argparse import Namespace

import pytest

from megatron_mtp.training import forward_step, reading_stages


def set_packed_run(monkeypatch: pytest.MonkeyPatch, rows: int, length: int, depths: int) -> None:
    """Set one pipeline stage, with this many rows of chats of this length per microbatch."""
    args = Namespace(
        reads_chats=True,
        dataloader_inter_document_masking=False,
        create_attention_mask_in_dataloader=False,
        micro_batch_size=rows,
        eval_micro_batch_size=rows,
        seq_length=length,
        pipeline_model_parallel_size=1,
        pipeline_model_parallel_layout=None,
        mtp_num_layers=depths,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    for module in (forward_step, reading_stages):
        monkeypatch.setattr(module, "get_args", lambda: args)
    monkeypatch.setattr(reading_stages, "is_first_or_last_pipeline_stage", lambda _: True)
