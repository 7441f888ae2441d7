"""Weight updates of a running engine: no request is lost, and none mixes tokens, keys or values of two versions."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from drafter_folders import make_drafter, make_trunk, spoiled
from drafting_single import trained_forward
from hf_models import VOCABULARY, make, read
from judged_models import QUIET
from parrot import Running, running
from tiers import tiered
from torch import Tensor

from megatron_mtp.checkpoint.convert.drafters import plan_attaching_drafter
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.live import export_hf_weights
from megatron_mtp.checkpoint.convert.live_drafter import load_drafter_weights
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.checkpoint.model import load_model
from megatron_mtp.decoding.engine import Engine, generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.decoding.method import config_from
from megatron_mtp.decoding.requests import Request, Update
from megatron_mtp.decoding.runner import Runner
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.decoding.scheduler import EngineSettings
from megatron_mtp.decoding.update_weights import update_weights
from megatron_mtp.server.codec import Codec
from megatron_mtp.server.update_weights import update_weights as update_server

pytestmark = pytest.mark.usefixtures("megatron")

KINDS = tiered(["mimo", "glm4_moe", "deepseek_v3", "qwen3_next"], ["mimo"])
"""Dense, experts, latent attention with experts, and recurrent layers with experts."""
DTYPES = {"qwen3_next": torch.float64}
"""Exceptions to float32: states carried row by row round differently from whole sequences."""
DRAFTING = config_from({"method": "mtp", "num_speculative_tokens": 1})


class Versions:
    """Two models of one kind: Hugging Face folders, and checkpoints."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.dtype = DTYPES.get(kind, torch.float32)
        self.folders = [make(folder / f"hf{seed}", kind, 1, seed=seed) for seed in (7, 8)]
        self.checkpoints = [folder / f"mcore{number}" for number in (0, 1)]
        for source, target in zip(self.folders, self.checkpoints, strict=True):
            hf_to_mcore(source, target, Options(quiet=True, workers=1))
        self._alone: dict[int, list[tuple[list[int], list[float]]]] = {}

    def runner(self, version: int) -> Runner:
        return load_runner(self.checkpoints[version], VOCABULARY, self.dtype)

    def alone(self, version: int) -> list[tuple[list[int], list[float]]]:
        """Return one version's results for `requests`, computed once."""
        if version not in self._alone:
            self._alone[version] = made_by(self.runner(version), requests())
        return self._alone[version]

    def weights(self, version: int) -> Iterator[tuple[str, Tensor]]:
        yield from read(self.folders[version]).items()


@pytest.fixture(scope="module", params=KINDS)
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(request.param, tmp_path_factory.mktemp(request.param))


def requests() -> list[Request]:
    """Return sixteen running and four waiting requests, greedy and sampled, some with a common prefix."""
    torch.manual_seed(0)
    shared = torch.randint(3, VOCABULARY, (33,)).tolist()
    return [
        Request(
            [*shared[: 33 * (number % 2)], 3 + number, 5, 7],
            10 + number,
            Sampling(float(number % 3 == 0)),
            seed=number,
            speculative=DRAFTING,
            logprobs=0,
        )
        for number in range(20)
    ]


def engine_of(runner: Runner) -> Engine:
    return Engine(runner, EngineSettings(running=16, blocks=256, block_size=16))


def grown(updates: list[Update]) -> dict[int, tuple[int, list[int], list[float], bool]]:
    """Return by request: version, its tokens and log-probabilities, and whether it has ended once."""
    found: dict[int, tuple[int, list[int], list[float], bool]] = {}
    for update in updates:
        version, tokens, logprobs, ended = found.get(update.request, (0, [], [], False))
        assert not ended
        if update.policy_version != version:
            tokens, logprobs = [], []
        logprobs = logprobs + [one.logprob for one in update.logprobs]
        found[update.request] = update.policy_version, tokens + update.tokens, logprobs, update.finish is not None
    return found


def made_by(runner: Runner, given: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Return `generate`'s tokens and log-probabilities for the requests with one version."""
    made: dict[int, tuple[list[int], list[float]]] = {}
    for sampling in {request.sampling for request in given}:
        own = {number: request for number, request in enumerate(given) if request.sampling == sampling}
        prompts, budgets, seeds = zip(
            *((one.prompt, one.max_new_tokens, one.seed) for one in own.values()), strict=True
        )
        done = generate(runner, [*prompts], [*budgets], sampling, DRAFTING, [*seeds], logprobs=0)
        for number, tokens, listed in zip(own, done.token_ids, done.logprobs, strict=True):
            made[number] = tokens, [one.logprob for one in listed]
    return [made[number] for number in range(len(given))]


@pytest.mark.parametrize("choice", tiered(["finish", "restart"], ("restart",)))
def test_every_request_uses_one_version_of_the_weights(versions: Versions, choice: str) -> None:
    engine, given = engine_of(versions.runner(0)), requests()
    for request in given:
        engine.add(request)
    updates = [update for _ in range(6) for update in engine.step()]
    begun = {update.request for update in updates if update.tokens}
    assert len(begun) == 16
    assert engine.load.waiting == 4
    ended = {update.request for update in updates if update.finish}
    updates += update_weights(engine, versions.weights(1), choice)
    while engine.busy:
        updates += engine.step()
    found = grown(updates)
    assert all(ended for *_, ended in found.values())
    assert len(found) == 20
    kept = begun if choice == "finish" else ended
    assert {number for number, (version, *_) in found.items() if version == 0} == kept
    for version in (0, 1):
        alone = versions.alone(version)
        for number, (own, tokens, logprobs, _) in found.items():
            if own == version:
                assert tokens == alone[number][0], number
                assert logprobs == pytest.approx(alone[number][1], abs=1e-5)
    assert engine.policy_version == 1
    assert engine.load.blocks_used == 0


def test_log_probabilities_of_drafted_tokens_are_those_of_a_plain_forward(versions: Versions) -> None:
    prompts = [request.prompt for request in requests()[:6]]
    made = generate(versions.runner(0), prompts, 16, Sampling(1.0), DRAFTING, logprobs=0)
    assert made.stats.drafted
    model = load_model(versions.checkpoints[0]).to(versions.dtype)
    for prompt, tokens, listed in zip(prompts, made.token_ids, made.logprobs, strict=True):
        with torch.no_grad():
            logits_SV = trained_forward(model, prompt + tokens)[0][len(prompt) - 1 : -1, :VOCABULARY]
        plain = logits_SV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert [one.token for one in listed] == tokens
        assert [one.logprob for one in listed] == pytest.approx(plain.tolist(), abs=1e-5)


def test_a_models_own_export_updates_another(versions: Versions) -> None:
    """The two calls fit together, also with only the draft module's tensors."""
    trained, runner = load_model(versions.checkpoints[1]), versions.runner(0)
    engine = engine_of(runner)
    stream = export_hf_weights(trained, like=versions.folders[0], only_mtp=True)
    update_weights(engine, ((name, tensor) for name, tensor in stream))
    prompt = requests()[1].prompt
    old, new = versions.runner(0), versions.runner(1)
    assert generate(runner, [prompt], 8).token_ids != generate(new, [prompt], 8).token_ids
    update_weights(engine, export_hf_weights(trained, like=versions.folders[0]), version=41)
    assert engine.policy_version == 41
    assert generate(runner, [prompt], 8).token_ids == generate(new, [prompt], 8).token_ids
    assert generate(old, [prompt], 8).token_ids != generate(new, [prompt], 8).token_ids


def test_invalid_weight_updates_are_rejected(versions: Versions) -> None:
    engine = engine_of(versions.runner(0))
    with pytest.raises(ValueError, match="running is 'kill'; give finish or restart or abort"):
        update_weights(engine, [], "kill")
    with pytest.raises(ValueError, match="'lm_head' is not a tensor of this model; send"):
        update_weights(engine, [("lm_head", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="an update of the weights failed halfway"):
        engine.step()
    update_weights(engine, versions.weights(0))
    assert engine.step() == []
    name, tensor = next((name, value) for name, value in versions.weights(0) if name.endswith("gate_proj.weight"))
    with pytest.raises(ValueError, match="came without the tensors that make one weight with it"):
        update_weights(engine, [(name, tensor)])
    with pytest.raises(ValueError, match=r"has the shape \(1,\), and the model's is"):
        update_weights(engine, [(name, tensor.flatten()[:1])])


@pytest.mark.parametrize("kind", tiered(["eagle3-whole", "eagle", "dflash", "dflash2"], ["eagle3-whole"]))
def test_a_drafter_follows_its_folder(kind: str, tmp_path: Path) -> None:
    """The engine then drafts like one loaded with the new drafter; the trunk stays."""
    _, trunk = make_trunk(tmp_path)
    folder, old = make_drafter(tmp_path, kind, trunk)
    drawn = torch.Generator().manual_seed(1)
    changed = spoiled(
        folder,
        tmp_path / "changed",
        lambda tensors: tensors.update(
            {
                name: value + 0.3 * torch.randn(value.shape, generator=drawn)
                for name, value in tensors.items()
                if value.is_floating_point() and name not in ("lm_head.weight", "embed_tokens.weight")
            }
        ),
    )
    new = tmp_path / "new"
    plan_attaching_drafter(trunk, changed).write(new, QUIET)
    config = config_from({"method": kind.split("-")[0], "num_speculative_tokens": 3})
    runners = [load_runner(each, VOCABULARY, config=config) for each in (old, old, new)]
    update_weights(Engine(runners[1], speculative=config), [], drafter=read(changed).items())
    made = [generate(each, PROMPTS, 24, speculative=config) for each in runners]
    assert made[0].token_ids == made[1].token_ids == made[2].token_ids
    weights, others, wanted = (dict(each.model.named_parameters()) for each in runners)
    assert [name for name, value in wanted.items() if not torch.equal(value, others[name])] == []
    assert any(not torch.equal(value, weights[name]) for name, value in wanted.items())
    _, found, expected = (replace(one.stats, target_seconds=0, drafter_seconds=0) for one in made)
    assert found == expected
    with pytest.raises(ValueError, match=r"'fc' is not a tensor .*; send those of the drafter's folder"):
        update_weights(Engine(runners[1], speculative=config), [], drafter=[("fc", torch.zeros(1))])
    with pytest.raises(ValueError, match="the model has no drafter"):
        load_drafter_weights(load_runner(trunk, VOCABULARY).model, read(changed).items())


PROMPTS = [[3 + number, 5, 7] for number in range(6)]


def streamed(server: Running) -> Iterator[list[dict[str, Any]]]:
    """Yield the choices of each event of six streams, two of which run at a time."""
    body = {"prompt": PROMPTS, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"]


@pytest.mark.parametrize("versions", ["mimo"], indirect=True)
@pytest.mark.parametrize(("choice", "reason"), tiered([("finish", "length"), ("abort", "abort")], [("abort", "abort")]))
def test_a_server_delivers_requests_that_an_update_ends(versions: Versions, choice: str, reason: str) -> None:
    old, new = (generate(versions.runner(version), PROMPTS, 40, speculative=DRAFTING).token_ids for version in (0, 1))
    engine = Engine(versions.runner(0), EngineSettings(running=2, blocks=256, block_size=16), DRAFTING)
    with running(engine, Codec(None)) as server:
        ids: list[list[int]] = [[] for _ in PROMPTS]
        ends: dict[int, tuple[str, int]] = {}
        for number, choices in enumerate(streamed(server)):
            if number == 0:
                assert update_server(server.service, versions.weights(1), choice) == 1
            for one in choices:
                ids[one["index"]] += one["token_ids"]
                if one["finish_reason"]:
                    ends[one["index"]] = one["finish_reason"], one["policy_version"]
        updated = [place for place in range(6) if ends[place][1] == 1]
        assert len(updated) >= 2, "those that waited began with the new weights"
        assert {ends[place] for place in range(6) if place not in updated} == {(reason, 0)}
        for place in range(6):
            whole = (old, new)[ends[place][1]][place]
            assert ids[place] == (whole if ends[place][0] == "length" else whole[: len(ids[place])])
        assert server.metric(f'requests_total{{finished_reason="{reason}"}}') >= 6 - len(updated)
        with pytest.raises(ValueError, match="running is 'restart'; give finish or abort"):
            update_server(server.service, [], "restart")
        with pytest.raises(ValueError, match="'lm_head' is not a tensor of this model"):
            update_server(server.service, [("lm_head", torch.zeros(1))])
        waits = threading.Thread(target=lambda: ids.append(next(streamed(server))[0]["token_ids"]))
        waits.start()
        update_server(server.service, versions.weights(0))
        waits.join(60)
        assert ids[6], "a request waits where an update has failed, until one succeeds"
    with pytest.raises(RuntimeError, match="the engine has failed or ended; start another"):
        update_server(server.service, [])
