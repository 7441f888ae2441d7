"""`megatron-mtp bench-serve`: how fast a server of OpenAI's API answers many clients.

flags.py     the flags
workload.py  what is asked: bodies from a file, or synthetic ones
client.py    asks, at random times or by so many clients, and notes when what arrives
drafts.py    acceptance, from the server's metrics before and after
figures.py   percentiles and rates, as a dictionary and as a table
picture.py   the figures drawn
command.py   megatron-mtp bench-serve
"""
