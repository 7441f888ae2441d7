"""The process that runs the jobs of layout_jobs.py; see there.

Only this small file is imported again by the processes that Megatron spawns to save a checkpoint.
"""

if __name__ == "__main__":
    import sys

    from layout_jobs import main

    main(sys.argv[1], sys.argv[2:])
