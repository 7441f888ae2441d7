"""The process that runs a job of layout_jobs.py, policy_jobs.py or export_jobs.py; see there.

Only this small file is imported again by the processes that Megatron spawns to save a checkpoint.
"""

if __name__ == "__main__":
    import sys

    import export_jobs  # noqa: F401  # these add their jobs
    import policy_jobs  # noqa: F401
    from layout_jobs import main

    main(*sys.argv[1:])
