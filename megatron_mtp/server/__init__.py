"""Serving: OpenAI's HTTP API in front of an engine that runs many texts at once.

errors.py       errors in the API's form
bodies.py       the fields of requests, checked
tokens.py       text to tokens and back, letters as they come
stops.py        stop strings
choices.py      a text of an answer while it grows
metrics.py      what Prometheus reads
service.py      the thread that owns the engine
ranks.py        the steps of rank 0 on the other ranks
answers.py      bodies to requests, updates to answers and event streams
completions.py  the form of /v1/completions
chat.py         the form of /v1/chat/completions
app.py          the paths
server.py       uvicorn, which drains
"""
