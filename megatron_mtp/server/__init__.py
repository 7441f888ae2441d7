"""OpenAI-compatible HTTP server in front of an engine that runs many requests at once.

request_defaults.py  default values of other engines' fields, which are accepted
protocol.py          request bodies, validated, and errors
detokenizer.py       tokens of an output to text, character by character, up to a stop string
codec.py             a thread-safe tokenizer: prompts, chats, stop strings, single tokens
answers.py           engine updates to a response or its events
metrics.py           metrics for Prometheus
ranks.py             the steps of rank 0 on other ranks
async_engine.py      the thread that owns the engine, and its interface for HTTP handlers
update_weights.py    new weights while serving
connections.py       slow clients and large numbers of connections
api.py               paths, and uvicorn with graceful shutdown
"""
