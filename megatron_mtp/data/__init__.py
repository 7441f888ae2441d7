"""From text to batches: tokenizer and indexed dataset, checks of what is on disk, batches shifted per depth."""
