"""Rotary scalings as written in configs."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
"""Kimi-K2's, with fewer positions."""
