"""Run a job of layout_jobs.py, policy_jobs.py or export_jobs.py; see there.

Processes that Megatron spawns to save a checkpoint import only this small file again.
"""

if __name__ == "__main__":
    import sys

    import export_jobs  # noqa: F401  # registers jobs
    import policy_jobs  # noqa: F401
    from layout_jobs import main

    main(*sys.argv[1:])
