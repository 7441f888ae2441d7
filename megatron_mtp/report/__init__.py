"""One self-contained HTML page of runs: what training measured, and what drafting drafted."""
