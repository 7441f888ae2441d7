"""The process that runs a job of layout_jobs.py or policy_jobs.py; see there.

Only this small file is imported again by the processes that Megatron spawns to save a checkpoint.
"""

if __name__ == "__main__":
    import sys

    import policy_jobs  # noqa: F401  # adds its jobs
    from layout_jobs import main

    main(*sys.argv[1:])
