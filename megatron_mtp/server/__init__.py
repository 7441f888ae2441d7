"""Serving: OpenAI's HTTP API in front of an engine that runs many requests at once.

protocol.py      bodies of requests, checked, and errors
detokenizer.py   text to tokens and back, characters as they come, stop strings; updates to an answer or events
async_engine.py  the thread that owns the engine, what Prometheus reads of it, and its steps on other ranks
api.py           the paths, and uvicorn, which drains
"""
