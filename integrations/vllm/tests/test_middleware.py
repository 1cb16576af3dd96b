"""`ClearRefusals` around an application of three routes: what it replaces, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from invariant_rag.errors import InvalidChoice
from invariant_rag.models.embedded import EMBEDDED

from tests.servers import RedisServer
from vllm_invariant_rag import ClearRefusals, EntryUnusable, RequestRefused, UnsupportedServer, VLLMError
from vllm_invariant_rag.checkpoint import fingerprint
from vllm_invariant_rag.http_engine import HTTPEngine, _raise_for
from vllm_invariant_rag.middleware import FACTS_PATH
from vllm_invariant_rag.parameters import SetParameters, admit
from vllm_invariant_rag.server_facts import facts_of

FILES = Path(EMBEDDED["generator"])
INTERNAL = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}


class Config:
    """What `facts_of` reads of vLLM's configuration."""

    def __init__(self, place: Path | str, connector: str = "InvariantRAGConnector") -> None:
        self.kv_transfer_config = self.model_config = self
        name = "folder" if isinstance(place, Path) else "redis_url"
        self.kv_connector, self.kv_connector_extra_config = connector, {name: str(place)}
        self.model, self.revision, self.dtype, self.max_model_len = str(FILES), None, "torch.float32", 100


class Application:
    """Answers a fixed response; with a key, only to those that send it."""

    def __init__(self, place: Path | str, status: int = 500, answer: Any = INTERNAL, key: str | None = None) -> None:
        self.state = type("State", (), {"vllm_config": Config(place)})
        self.status, self.answer, self.key = status, answer, key
        self.bodies: list[bytes] = []
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        message = await receive()
        self.bodies.append(message.get("body", b""))
        self.paths.append(scope["path"])
        status, answer = self.status, self.answer
        if self.key is not None and (b"authorization", self.key.encode()) not in scope["headers"]:
            status, answer = 401, {"error": "no key"}
        headers = [(b"content-type", b"application/json"), (b"x-other", b"kept")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        content = json.dumps(answer).encode()
        await send({"type": "http.response.body", "body": content[:10], "more_body": True})
        await send({"type": "http.response.body", "body": content[10:]})


def call(application: Application, method: str, path: str, **more: Any) -> httpx.Response:
    wrapped = ClearRefusals(application)

    async def with_app(scope: Any, receive: Any, send: Any) -> None:
        await wrapped({**scope, "app": application}, receive, send)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(with_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return await client.request(method, path, **more)

    return asyncio.run(request())


def named(ids: list[int]) -> dict[str, Any]:
    parameters = SetParameters("rotor", "lexical", "", 3, "contents")
    model = fingerprint(FILES)
    salt = parameters.salt(model, parameters.key(model, ids))
    return {"prompt": ids, "cache_salt": salt, "kv_transfer_params": parameters.as_json()}


def test_a_plain_request_passes_unchanged(tmp_path: Path) -> None:
    application = Application(tmp_path)
    answer = call(application, "POST", "/v1/completions", json={"prompt": "text"})
    assert (answer.status_code, answer.json(), answer.headers["x-other"]) == (500, INTERNAL, "kept")
    assert json.loads(application.bodies[0]) == {"prompt": "text"}


def test_a_failed_request_is_told_why_and_others_are_not_touched(tmp_path: Path) -> None:
    body = named([1, 2, 3, 4, 5])
    missing = call(Application(tmp_path), "POST", "/v1/completions", json=body)
    assert (missing.status_code, missing.json()["error"]["type"]) == (424, "EntryUnusable")
    wrong = call(Application(tmp_path), "POST", "/v1/completions", json={**body, "cache_salt": "mine"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "RequestRefused")
    fine = call(Application(tmp_path, 200, {"choices": []}), "POST", "/v1/completions", json=body)
    assert (fine.status_code, fine.json()) == (200, {"choices": []})
    other = {"error": {"message": "engine died", "type": "Other", "code": 500}}
    assert call(Application(tmp_path, 500, other), "POST", "/v1/completions", json=body).json() == other


def test_a_request_that_is_nested_too_deeply_does_not_reach_vllm(tmp_path: Path) -> None:
    application = Application(tmp_path, 200, {"choices": []})
    for levels, status in ((50, 200), (200, 400), (100_000, 400)):
        body = b'{"prompt": "x", "kv_transfer_params": {"other": ' + b"[" * levels + b"]" * levels + b"}}"
        answer = call(application, "POST", "/v1/completions", content=body)
        assert answer.status_code == status
    assert (answer.json()["error"]["type"], len(application.bodies)) == ("RequestRefused", 1)
    call(application, "POST", "/v1/completions", content=b"[" * 200)
    assert application.bodies[1] == b"[" * 200, "what is no JSON at all is vLLM's business"


def test_a_server_without_the_connector_says_so(tmp_path: Path) -> None:
    application = Application(tmp_path, 200, {"data": []})
    application.state.vllm_config = Config(tmp_path, "OtherConnector")
    told = call(application, "GET", FACTS_PATH)
    assert (told.status_code, told.json()["error"]["type"]) == (501, "UnsupportedServer")
    with pytest.raises(UnsupportedServer, match="OtherConnector"):
        _raise_for(told.status_code, told.content)


def test_an_engine_that_died_is_not_explained_by_the_request(tmp_path: Path) -> None:
    died = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
    for body in (named([1, 2, 3]), {"prompt": "text", "model": "/models/invariant_rag"}):
        assert call(Application(tmp_path, 500, died), "POST", "/v1/completions", json=body).json() == died
    failed = call(Application(tmp_path), "POST", "/v1/completions", json={"prompt": "x", "model": "invariant_rag"})
    assert failed.json() == INTERNAL


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidChoice, match="expected an address"):
        HTTPEngine(url)


def test_a_server_that_reads_from_redis_tells_its_address_without_the_password(redis: RedisServer) -> None:
    told = call(Application(redis.url, 200, {"data": []}), "GET", FACTS_PATH).json()
    assert (told["folder"], told["redis_url"]) == (None, f"redis://127.0.0.1:{redis.port}")
    body = named([1, 2, 3, 4, 5])
    application = Application(redis.url)
    missing = call(application, "POST", "/v1/completions", json=body)
    assert (missing.status_code, missing.json()["error"]["type"]) == (424, "EntryUnusable")
    assert "never written" in missing.json()["error"]["message"]
    redis.stop()
    down = call(application, "POST", "/v1/completions", json=body)
    assert (down.status_code, down.json()["error"]["type"]) == (424, "EntryUnusable")


def test_facts_are_told_to_those_who_have_the_key_only(tmp_path: Path) -> None:
    application = Application(tmp_path, 200, {"data": []}, key="Bearer secret")
    assert call(application, "GET", FACTS_PATH).status_code == 401
    answer = call(application, "GET", FACTS_PATH, headers={"Authorization": "Bearer secret"})
    assert (answer.json()["folder"], answer.json()["model"]) == (str(tmp_path), fingerprint(FILES))
    assert application.paths == ["/v1/models", "/v1/models"]


def test_a_vllm_without_the_connector_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedServer, match="OtherConnector"):
        facts_of(Config(tmp_path, "OtherConnector"))


@pytest.mark.parametrize(
    ("status", "content", "expected"),
    [
        (400, {"error": {"type": "RequestRefused", "message": "salt"}}, RequestRefused),
        (424, {"error": {"type": "EntryUnusable", "message": "gone"}}, EntryUnusable),
        (500, INTERNAL, EntryUnusable),
        (503, {"error": {"type": "Busy", "message": "busy"}}, VLLMError),
        (502, "<html>bad gateway</html>", VLLMError),
        (401, {"error": "no key"}, VLLMError),
    ],
)
def test_errors_of_a_server_are_typed(status: int, content: Any, expected: type[Exception]) -> None:
    body = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(expected):
        _raise_for(status, body.encode())


def test_a_request_without_a_set_and_with_a_salt_of_its_own_is_plain() -> None:
    assert admit(None, "model", [1, 2, 3], None) is admit(None, "model", [1, 2, 3], "theirs") is None


def test_every_part_of_the_parameters_changes_the_key_or_the_salt() -> None:
    ids = [1, 2, 3, 4, 5]
    base = SetParameters("rotor", "lexical", "", 3, "contents")
    others = [
        SetParameters("isolated", "lexical", "", 3, "contents"),
        SetParameters("rotor", "frequency", "", 3, "contents"),
        SetParameters("rotor", "lexical", "tenant", 3, "contents"),
        SetParameters("rotor", "lexical", "", 4, "contents"),
        SetParameters("rotor", "lexical", "", 3, "others"),
    ]
    salts = {each.salt("model", each.key("model", ids)) for each in [base, *others]}
    salts |= {base.salt("model 2", base.key("model 2", ids)), base.salt("model", base.key("model", [9, *ids[1:]]))}
    assert len(salts) == 8
    assert base.key("model", ids) == base.key("model", [*ids[:3], 7, 8, 9]), "another question, the same entry"
