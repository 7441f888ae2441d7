"""Serving: OpenAI's HTTP API in front of an engine that runs many requests at once.

request_defaults.py  defaults of other engines' fields, which may be sent
protocol.py          bodies of requests, checked, and errors
detokenizer.py       tokens of an output to text, characters as they come, up to a stop string
codec.py             the tokenizer for several threads: prompts, chats, stop strings, single tokens
answers.py           updates to an answer or events
async_engine.py      the thread that owns the engine, what Prometheus reads of it, and its steps on other ranks
update_weights.py    new weights while it serves
api.py               the paths, and uvicorn, which drains
"""
