"""Multi-Token Prediction for GPT models trained with Megatron-Core."""

__version__ = "0.1.0"
