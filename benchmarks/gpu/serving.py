"""A server on this device: concurrent requests with drafts emit the same tokens as plain decoding."""

import json
import re
import time
import urllib.request

from benchmarks.gpu.part import Command, Setting
from benchmarks.gpu.training import TRAINED, saved
from benchmarks.harness import Found, Goal, Table

PROMPTS = [[1, 2, 3], [9, 8], [*range(40, 60)], [7]]
TOKENS = 32
VERB = ("-m", "megatron_mtp")


def serve(setting: Setting) -> Found:
    """Compare token ids of `serve --speculative-config` with those of `generate`, in float32."""
    checkpoint = saved(setting, f"{TRAINED} --mtp-num-layers 2", 2 if setting.quick else 40)
    prompts = [f"--prompt-ids={','.join(map(str, prompt))}" for prompt in PROMPTS]
    generate = [*VERB, "generate", "--load", checkpoint, *prompts, "--max-new-tokens", str(TOKENS), "--json"]
    plain = json.loads(setting.run("generate", generate).splitlines()[-1])["token_ids"]
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
    served = [*VERB, "serve", "--load", checkpoint, "--port", "0", "--speculative-config", drafts]
    server = setting.start("serve", served)
    try:
        began = time.monotonic()
        texts = asked(address(server, setting))
        seconds = round(time.monotonic() - began, 3)
    finally:
        server.process.kill()
    other = sum(one != two for one, two in zip(texts, plain, strict=True))
    return Found(
        {"texts": len(plain), "other texts": other},
        [Goal("serve: texts that differ from plain decoding", other, 0)],
        [Table("A server that drafts", ("texts", "s of the first request"), [(len(texts), seconds)])],
    )


def address(server: Command, setting: Setting) -> str:
    """Return the server's address when it prints it. Raise RuntimeError if it exits first."""
    while not (found := re.search(r"is served at (\S+)", server.log.read_text(errors="replace"))):
        if server.process.poll() is not None:
            server.printed(0, well=())
        if setting.left <= 1.0:
            server.printed(0)
        time.sleep(0.05)
    return found[1]


def asked(url: str) -> list[list[int]]:
    """Return the tokens of all prompts, from one request."""
    body = {"prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [choice["token_ids"] for choice in json.loads(answer.read())["choices"]]
