"""Serving: OpenAI's HTTP API in front of an engine that runs many requests at once.

request_defaults.py  defaults of other engines' fields, which may be sent
protocol.py          bodies of requests, checked, and errors
detokenizer.py       tokens of an output to text, characters as they come, up to a stop string
codec.py             the tokenizer for several threads: prompts, chats, stop strings, single tokens
answers.py           updates to an answer or events
metrics.py           what Prometheus reads
ranks.py             the steps of rank 0 on other ranks
async_engine.py      the thread that owns the engine, and how handlers of HTTP reach it
update_weights.py    new weights while it serves
connections.py       slow and many connections
api.py               the paths, and uvicorn, which drains
"""
