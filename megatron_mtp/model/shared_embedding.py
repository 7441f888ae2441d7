"""The input embedding, shared between the first pipeline stage and the MTP stage.

The MTP block is on the last pipeline stage. With several stages, that stage owns a *copy* of the input embedding:
initialized equal, with gradients summed over the embedding group, and written to checkpoints once. A tied output layer
uses the copy and owns no weight; an untied one owns its weight, which MTP shares with the trunk. Megatron's
`LanguageModule` does this, controlled by the attributes that `attach_embedding` sets.
"""

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.transformer_config import TransformerConfig


def attach_embedding(model: LanguageModule) -> None:
    """Give a stage without an input embedding its copy; a tied output layer then uses only the copy."""
    if model.pre_process:
        return
    model.embedding = LanguageModelEmbedding(
        config=model.config,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        position_embedding_type="none",
        tp_group=model.pg_collection.tp,
    )
    if model.post_process and model.share_embeddings_and_output_weights:
        model.output_layer.weight = None


def embedding_ranks(pipeline_ranks: list[int], config: TransformerConfig, tied: bool) -> list[int]:
    """Ranks of a pipeline that hold the word embedding: the first, the MTP stage's, and with a tied head the last."""
    ranks = {pipeline_ranks[0], *get_mtp_ranks(pipeline_ranks, config)}
    if tied:
        ranks.add(pipeline_ranks[-1])
    return sorted(ranks)


def is_embedding(model: LanguageModule) -> bool:
    """Return whether the output weight is that of this stage's embedding rather than of its output layer."""
    return model.share_embeddings_and_output_weights and bool(model.pre_process or model.mtp_process)
