"""One self-contained HTML page of runs: what training measured, how it was started, and what drafting drafted."""
