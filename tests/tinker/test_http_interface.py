"""The interface that the SDK calls, with our own requests. tests/tinker/test_sdk.py runs the SDK itself."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from oncurve.errors import RecipeError
from oncurve.models import lora
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.tinker import http_interface
from oncurve.tinker.http_interface import SESSION_SILENCE_S, TinkerService, key_for, make_app
from oncurve.tinker.protobuf import read_fields, write_field
from tests.models.architectures import make_model, tokenizer

IDS = [5, 9, 20, 7, 11]
JSON = {"content-type": "application/json"}


class Client:
    """What the SDK does: it sends requests, and asks for their results."""

    def __init__(self, service: TinkerService, key: str | None = None) -> None:
        self.http = TestClient(make_app(service, key), base_url="http://127.0.0.1")
        self.seq_id = 0

    def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        response = self.http.post(f"/api/v1/{path}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    def result(self, promise: dict[str, Any]) -> Any:
        response = self.http.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
        assert response.status_code == 200, response.text
        return response.content if "protobuf" in response.headers["content-type"] else response.json()

    def session(self) -> str:
        return str(self.post("create_session", tags=[], sdk_version="0.36.0")["session_id"])

    def model(self, session: str, seq_id: int = 0, **config: Any) -> str:
        body = {"session_id": session, "model_seq_id": seq_id, "base_model": "small"}
        promise = self.post("create_model", **body, lora_config={"rank": 2, "seed": 3, **config})
        return str(self.result(promise)["model_id"])

    def train(self, path: str, model: str, /, **body: Any) -> Any:
        self.seq_id += 1
        return self.result(self.post(path, model_id=model, seq_id=self.seq_id, **body))

    def forward_backward(self, model: str, loss: str = "cross_entropy", seq_id: int | None = None) -> Any:
        self.seq_id += seq_id is None
        body = training_body(model, seq_id or self.seq_id, loss)
        response = self.http.post("/api/v1/forward_backward", content=body, headers={"content-type": "application/x-protobuf"})
        assert response.status_code == 200, response.text
        return self.result(response.json())

    def loss(self, model: str) -> float:
        return float(dict(read_fields(dict(read_fields(self.forward_backward(model)))[3]))[2])  # type: ignore[arg-type]

    def step(self, model: str) -> None:
        assert "metrics" in self.train("optim_step", model, adam_params={"learning_rate": 1e-2})

    def sample(self, sampler: str, seq_id: int = 0, status: int = 200, **body: Any) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
        params = {"max_tokens": 6, "seed": 1, **body.pop("sampling_params", {})}
        body = {"prompt": prompt, "sampling_params": params, **body}
        return self.post("asample", status, sampling_session_id=sampler, seq_id=seq_id, **body)

    def tokens(self, sampler: str, seq_id: int, **body: Any) -> list[list[int]]:
        output = self.result(self.sample(sampler, seq_id, **body))
        sequences = [dict(read_fields(value)) for number, value in read_fields(output) if number == 1]  # type: ignore[arg-type]
        return [np.frombuffer(sequence[2], "<i4").tolist() for sequence in sequences]  # type: ignore[arg-type]


def tensor(values: Sequence[float], dtype: str) -> bytes:
    return write_field(1, np.asarray(values, dtype).tobytes()) + write_field(3, {"<f4": 1, "<i8": 2}[dtype])


def training_body(model: str, seq_id: int, loss: str) -> bytes:
    targets, weights = tensor([*IDS[1:], 3], "<i8"), tensor([0, 1, 1, 1, 0.5], "<f4")
    datum = write_field(1, write_field(1, write_field(1, np.asarray(IDS, "<i4").tobytes())))
    for name, value in (("target_tokens", targets), ("weights", weights)):
        datum += write_field(2, write_field(1, name) + write_field(2, value))
    return write_field(1, model) + write_field(2, seq_id) + write_field(3, datum) + write_field(4, loss)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerService]:
    running = TinkerService(Policy(make_model("qwen3"), tokenizer()), ["small"], tmp_path_factory.mktemp("tinker"), 50)
    yield running
    running.queue.close()


@pytest.fixture
def client(service: TinkerService) -> Client:
    return Client(service)


def test_training_lowers_the_loss_and_a_loaded_state_goes_on_alike(client: Client) -> None:
    session = client.session()
    model = client.model(session)
    losses = []
    for _ in range(3):
        losses.append(client.loss(model))
        client.step(model)
    assert losses[2] < losses[0]
    path = client.train("save_weights", model, path="three")["path"]
    assert path == f"tinker://{model}/weights/three"
    saved = client.loss(model)
    client.step(model)
    expected = client.loss(model)
    info = client.post("weights_info", tinker_path=path)
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("small", 2, True)
    found = {}
    for seq_id, optimizer in ((1, True), (2, False)):
        other = client.model(session, seq_id)
        assert client.train("load_weights", other, path=path, optimizer=optimizer)["model_id"] == other
        assert client.loss(other) == saved
        client.step(other)
        found[optimizer] = client.loss(other)
    assert found[True] == expected != found[False]


def test_a_request_that_is_sent_twice_is_run_once(client: Client) -> None:
    model = client.model(client.session())
    first = client.forward_backward(model, seq_id=1)
    assert client.forward_backward(model, seq_id=1) == first
    client.seq_id = 1
    once = client.train("optim_step", model, adam_params={})
    client.seq_id = 1
    assert client.train("optim_step", model, adam_params={}) == once
    assert "without a gradient" in client.train("optim_step", model, adam_params={})["error"]


def test_samplers_keep_their_weights(client: Client, service: TinkerService) -> None:
    session = client.session()
    model = client.model(session)
    base = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="small")
    snapshot = client.train("save_weights_for_sampler", model, sampling_session_seq_id=1)["sampling_session_id"]
    before = client.tokens(base["sampling_session_id"], 1, num_samples=3)
    assert len(before) == 3
    assert client.tokens(snapshot, 1, num_samples=3) == before  # a new adapter changes nothing
    for _ in range(4):
        client.loss(model)
        client.train("optim_step", model, adam_params={"learning_rate": 0.3})
    path = client.train("save_weights_for_sampler", model, path="trained")["path"]
    body = {"session_id": session, "sampling_session_seq_id": 2, "model_path": path}
    trained = client.post("create_sampling_session", **body)["sampling_session_id"]
    assert client.http.get(f"/api/v1/samplers/{trained}").json()["model_path"] == path
    assert client.tokens(snapshot, 2, num_samples=3) == before
    assert client.tokens(trained, 1, num_samples=3) != before
    newest = client.train("save_weights_for_sampler", model, sampling_session_seq_id=3)["sampling_session_id"]
    assert client.tokens(newest, 1, num_samples=3) == client.tokens(trained, 2, num_samples=3)
    for seq_id in range(4, 4 + http_interface.MAX_SNAPSHOTS):
        client.train("save_weights_for_sampler", model, sampling_session_seq_id=seq_id)
    assert "too old" in client.sample(snapshot, 9, 400)["detail"]
    assert service.samplers[newest].weights is None


def test_a_sample_request_keeps_its_weights_while_it_waits(client: Client, service: TinkerService) -> None:
    """Eight newer snapshots are taken between the request and its turn."""
    session = client.session()
    model = client.model(session)
    for _ in range(4):
        client.loss(model)
        client.train("optim_step", model, adam_params={"learning_rate": 0.3})
    oldest = client.train("save_weights_for_sampler", model, sampling_session_seq_id=0)["sampling_session_id"]
    expected = client.tokens(oldest, 1, num_samples=3)
    can_run = threading.Event()
    service.queue.submit(can_run.wait)
    for seq_id in range(1, 1 + http_interface.MAX_SNAPSHOTS):
        body = {"model_id": model, "seq_id": 100 + seq_id, "sampling_session_seq_id": seq_id}
        client.post("save_weights_for_sampler", **body)
    threading.Timer(1.0, can_run.set).start()
    assert client.tokens(oldest, 2, num_samples=3) == expected


def test_samplers_of_weights_that_are_saved_again_or_deleted(client: Client) -> None:
    session = client.session()
    model = client.model(session)

    def sampler(seq_id: int) -> str:
        path = client.train("save_weights", model, path="newest", overwrite=True)["path"]
        body = {"session_id": session, "sampling_session_seq_id": seq_id, "model_path": path}
        return str(client.post("create_sampling_session", **body)["sampling_session_id"])

    before = client.tokens(sampler(0), 1, num_samples=3)
    for _ in range(4):
        client.loss(model)
        client.train("optim_step", model, adam_params={"learning_rate": 0.3})
    newest = sampler(1)
    assert client.tokens(newest, 1, num_samples=3) != before
    assert client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/newest", headers=JSON).status_code == 204
    assert "no saved weights" in client.result(client.sample(newest, 2))["error"]


def test_a_saved_adapter_without_a_head_is_one_of_peft(client: Client, service: TinkerService) -> None:
    model = client.model(client.session(), train_unembed=False)
    client.loss(model)
    client.step(model)
    client.train("save_weights_for_sampler", model, path="plain")
    (saved,) = client.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert (saved["checkpoint_id"], saved["checkpoint_type"]) == ("sampler_weights/plain", "sampler")
    plain = make_model("qwen3")
    lora.load(plain, service.saved.folder / model.replace(":", "-") / "sampler_weights" / "plain")
    policy, ids = Policy(plain, tokenizer()), np.asarray(IDS)
    logps, _ = policy.pack_logps(build_pack([PrefixGroup(ids[:1], (ids[1:],), (0,))], policy.device))
    expected = -(logps.detach().numpy() * [0, 1, 1, 1]).sum()
    body = dict(read_fields(client.forward_backward(model)))
    record = dict(read_fields(dict(read_fields(body[2]))[2]))  # type: ignore[arg-type]
    served = np.frombuffer(dict(read_fields(record[2]))[1], "<f4")  # type: ignore[arg-type]
    np.testing.assert_allclose(-(served[:4] * [0, 1, 1, 1]).sum(), expected, rtol=1e-5)


def test_with_an_empty_list_of_stops_only_the_length_ends_a_completion(client: Client) -> None:
    base = client.post("create_sampling_session", session_id=client.session(), sampling_session_seq_id=0, base_model="small")
    params = {"max_tokens": 50, "seed": 2**63 - 1}
    plain = client.tokens(base["sampling_session_id"], 0, sampling_params=params)
    empty = client.tokens(base["sampling_session_id"], 1, sampling_params={**params, "stop": []})
    assert len(plain[0]) < 50, "it should meet the end token"
    assert len(empty[0]) == 50


def test_requests_that_the_server_cannot_do_are_refused_by_name(client: Client) -> None:
    session = client.session()
    model = client.model(session)
    base = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="small")
    sampler = base["sampling_session_id"]
    failed = client.forward_backward(model, "stable_reinforce")
    assert failed["category"] == "user"
    assert "no loss 'stable_reinforce'" in failed["error"]
    for unsupported, message in (
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {}}, "target_prompt_logprobs: not supported"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: not supported"),
    ):
        assert message in client.sample(sampler, 1, 422, **unsupported)["detail"]
    assert "at most 50" in client.sample(sampler, 1, 400, sampling_params={"max_tokens": 51})["detail"]
    wrong = {"prompt": {"chunks": [{"tokens": [10**6]}]}}
    assert "token 1000000" in client.sample(sampler, 1, 400, **wrong)["detail"]
    huge = {"prompt": {"chunks": [{"tokens": [1 << 63]}]}}
    assert "prompt.chunks.0.tokens.0" in client.sample(sampler, 1, 422, **huge)["detail"]
    for token in (-1, 10**6):
        assert "stop has a token" in client.sample(sampler, 1, 400, sampling_params={"stop": [token]})["detail"]
    infinite = {"model_id": model, "seq_id": 99, "adam_params": {"learning_rate": "inf"}}
    assert "learning_rate" in client.post("optim_step", 422, **infinite)["detail"]
    body = {"session_id": session, "model_seq_id": 9, "lora_config": {"rank": 2}}
    assert "no base model 'other'" in client.post("create_model", 400, base_model="other", **body)["detail"]
    dimuon = {**body, "base_model": "small", "optimizer_config": {"type": "dimuon", "version": 1}}
    assert "optimizer_config" in client.post("create_model", 422, **dimuon)["detail"]
    assert "no model" in client.train("optim_step", "nobody", adam_params={})["error"]
    assert "no session" in client.post("session_heartbeat", 404, session_id="gone")["detail"]
    assert "no request" in client.post("retrieve_future", 404, request_id="gone")["detail"]
    broken = client.http.post("/api/v1/forward_backward", content=b"\x08", headers={"content-type": "application/x-protobuf"})
    assert broken.status_code == 400
    assert client.http.post("/api/v1/optim_step", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_a_session_that_ends_leaves_what_it_saved(client: Client) -> None:
    session = client.session()
    model = client.model(session)
    client.train("save_weights", model, path="kept")
    response = client.http.post(f"/api/v1/sessions/{session}/finish", json={"reason": {"type": "success"}})
    assert response.status_code == 204
    assert "no model" in client.train("optim_step", model, adam_params={})["error"]
    run = client.http.get(f"/api/v1/training_runs/{model}").json()
    assert (run["base_model"], run["lora_rank"]) == ("small", 2)
    assert run["last_checkpoint"]["tinker_path"] == f"tinker://{model}/weights/kept"
    assert client.http.get("/api/v1/training_runs/..%2F..").status_code == 404


def test_a_session_without_heartbeats_is_forgotten_when_another_starts(client: Client, service: TinkerService) -> None:
    crashed, alive = client.session(), client.session()
    models = [client.model(session) for session in (crashed, alive)]
    for session in (crashed, alive):
        service.sessions[session] -= SESSION_SILENCE_S + 1
    client.post("session_heartbeat", session_id=alive)
    client.session()
    assert [session in service.sessions for session in (crashed, alive)] == [False, True]
    assert [model in service.models for model in models] == [False, True]
    assert "sent no heartbeat" in client.post("session_heartbeat", 404, session_id=crashed)["detail"]


def test_results_that_nobody_asks_for_do_not_count_as_waiting(
    client: Client, service: TinkerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_interface, "MAX_WAITING", 2)
    session = client.session()
    base = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="small")
    for seq_id in range(4):
        client.sample(base["sampling_session_id"], seq_id)
        service.queue.submit(lambda: None).result()
    can_run = threading.Event()
    service.queue.submit(can_run.wait)
    for seq_id in (4, 5):
        client.sample(base["sampling_session_id"], seq_id)
    assert "more than 2 requests wait" in client.sample(base["sampling_session_id"], 6, 429)["detail"]
    promise = client.post("create_model", session_id=session, model_seq_id=0, base_model="small", lora_config={"rank": 2})
    service.finish(session)
    can_run.set()
    service.queue.submit(lambda: None).result()
    assert not [name for name in (*service.futures.results, *service.models) if name.startswith(session)]
    assert "no request" in client.post("retrieve_future", 404, request_id=promise["request_id"])["detail"]


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".hidden", "a" * 300])
def test_names_of_saved_weights_stay_in_their_folder(client: Client, name: str) -> None:
    model = client.model(client.session())
    assert "can't be the name" in client.train("save_weights", model, path=name)["error"]


def test_saved_weights_are_not_overwritten_unless_asked_and_expire(client: Client, service: TinkerService) -> None:
    model = client.model(client.session())
    saved = client.train("save_weights", model, path="a", ttl_seconds=3600, user_metadata={"k": "v"})["path"]
    assert "exists" in client.train("save_weights", model, path="a")["error"]
    assert client.train("save_weights", model, path="a", overwrite=True, ttl_seconds=3600)["path"] == saved
    place = service.saved.folder / model.replace(":", "-") / "weights" / "a"
    description = json.loads((place / "tinker.json").read_text())
    (place / "tinker.json").write_text(json.dumps(description | {"expires": 1.0}))
    assert "expired" in client.post("weights_info", 400, tinker_path=saved)["detail"]
    assert not place.exists()


def test_partial_writes_are_not_listed(client: Client, service: TinkerService) -> None:
    model = client.model(client.session())
    client.train("save_weights", model, path="a")
    folder = service.saved.folder / model.replace(":", "-") / "weights"
    shutil.copytree(folder / "a", folder / ".writing-b")
    (saved,) = client.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert saved["checkpoint_id"] == "weights/a"


def test_a_server_with_a_key_takes_it_from_the_sdks_header(service: TinkerService, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(service, "tml-secret-key")
    assert "TINKER_API_KEY" in client.post("create_session", 401, tags=[], sdk_version="0")["detail"]
    client.http.headers["x-api-key"] = "tml-secret-key"
    assert client.session()
    key, is_new = key_for("0.0.0.0", "ONCURVE_TINKER_KEY")
    assert is_new
    assert (key or "").startswith("tml-")
    monkeypatch.setenv("ONCURVE_TINKER_KEY", "not-of-tinker")
    with pytest.raises(RecipeError, match="tml-"):
        key_for("127.0.0.1", "ONCURVE_TINKER_KEY")
