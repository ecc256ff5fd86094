"""Who may call what: keys, pages of other origins, TLS. [R14]"""

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest

from glm53d.config import Config, Server
from glm53d.errors import ConfigError
from glm53d.server.app import ROUTES, serve
from glm53d.server.auth import Access, Keys
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http import Client, client_of_fake_engine

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
CERTIFICATE = Path(__file__).parents[1] / "data" / "localhost.pem"  # of 127.0.0.1, for tests, with its key
RENEWED = CERTIFICATE.with_name("localhost_renewed.pem")


@pytest.fixture
async def client():
    async with client_of_fake_engine(api_keys=("user-1", "user-2"), admin_key="admin") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status(client: Client, path: str, headers: dict | None = None, method: str = "POST") -> int:
    return (await client.request(method, path, b"{}", headers)).status


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_every_route_but_health_needs_a_key(client, route):
    """F-H12 F-H13"""
    path = route.path.replace("{id}", "x").replace("{model}", "nano")
    wanted = {Access.OPEN: {200}, Access.USER: {401}, Access.ADMIN: {401}}[route.access]
    assert await status(client, path, method=route.method) in wanted
    assert await status(client, path, bearer("wrong"), route.method) in wanted
    assert client.engine.jobs == [] and client.engine.calls == []
    assert await status(client, path, bearer("admin"), route.method) not in (401, 403)
    assert await status(client, path, bearer("user-2"), route.method) != 401


def test_nothing_is_open_but_health_and_the_root():
    open_paths = {route.path for route in ROUTES if route.access is Access.OPEN}
    assert open_paths == {"/health", "/health_generate", "/ready", "/live", "/"}


async def test_a_path_that_does_not_exist_is_not_told_without_a_key(client):
    assert await status(client, "/nowhere") == 401
    assert await status(client, "/nowhere", bearer("user-1")) == 404
    assert await status(client, CHAT, method="DELETE") == 401


@pytest.mark.parametrize(
    "path", ["/flush_cache", "/pause_generation", "/continue_generation", "/abort_request", "/configure_logging"]
)
async def test_a_control_call_needs_the_admin_key(client, path):
    answer = await client.post(path, {}, bearer("user-1"))
    assert (answer.status, answer.error["code"]) == (403, "admin_key_required")
    assert client.engine.calls == []


async def test_without_an_admin_key_any_key_may_control():
    async with client_of_fake_engine(api_keys=("user",)) as client:
        assert await status(client, "/flush_cache") == 401
        assert await status(client, "/flush_cache", bearer("user")) == 200


async def test_with_an_admin_key_alone_only_control_is_guarded():
    async with client_of_fake_engine(admin_key="admin") as client:
        assert await status(client, "/v1/models", method="GET") == 200
        assert await status(client, "/flush_cache") == 401
        assert await status(client, "/flush_cache", bearer("admin")) == 200


async def test_health_is_open_and_tells_details_only_to_who_has_a_key(client):
    """F-H13"""
    client.engine.health = lambda: (False, {"state": "unhealthy", "reason": "rank 3 has ended"})
    answer = await client.get("/health")
    assert (answer.status, answer.json) == (503, {"state": "unhealthy"})
    assert (await client.request("GET", "/health", headers=bearer("user-1"))).json["reason"] == "rank 3 has ended"


async def test_metrics_are_open_when_the_configuration_says_so(client):
    assert await status(client, "/metrics", method="GET") == 401
    async with client_of_fake_engine(api_keys=("user",), open_metrics=True) as other:
        assert await status(other, "/metrics", method="GET") == 200


@pytest.mark.parametrize(
    "lines",
    [
        ["Authorization: Bearer user-1"],
        ["Authorization: bearer user-2"],
        ["x-api-key: user-1"],
        ["X-Api-Key: wrong", "Authorization: Bearer user-1"],
        ["Authorization: Bearer user-1", "Authorization: Bearer user-1"],  # as sglang-router sends it
        ["Authorization: Bearer user-1, Bearer user-1"],  # and as a proxy joins that
        ["Authorization: Basic dTpw", "Authorization: Bearer user-1"],
    ],
)
async def test_a_key_is_taken_from_either_header_and_twice(client, lines):
    head = "".join(f"{line}\r\n" for line in lines)
    reader, writer = await client.open(f"GET /v1/models HTTP/1.1\r\nHost: t\r\n{head}\r\n".encode())
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "user-1", "Basic user-1", "Bearer user-1 user-1", "Bearer USER-1", "Bearer ü"]
)
async def test_what_is_no_valid_key_is_a_401_in_the_shape_of_errors(client, value):
    reader, writer = await client.open(
        f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nAuthorization: {value}\r\nContent-Length: 0\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.split()[1] == b"401" and b"WWW-Authenticate: Bearer" in head
    assert b'"code":"invalid_api_key"' in await reader.readuntil(b"}}")
    writer.close()


async def test_a_missing_key_is_told_in_the_shape_of_the_dialect(client):
    answer = await client.post("/v1/messages", HI | {"max_tokens": 1})
    assert answer.status == 401
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", "authentication_error")


async def test_keys_come_from_a_file_too(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \n")
    async with client_of_fake_engine(api_keys=("third",), api_keys_file=str(path)) as client:
        for key in ("first", "second", "third"):
            assert await status(client, "/version", bearer(key), "GET") == 200
        assert await status(client, "/version", bearer("# of the team"), "GET") == 401


@pytest.mark.parametrize(
    ("server", "match"),
    [
        ({"api_keys": ("",)}, "blanks"),
        ({"api_keys": ("a b",)}, "blanks"),
        ({"admin_key": "a,b"}, "blanks"),
        ({"api_keys_file": "missing/keys"}, "missing/keys cannot be read"),
        ({"api_keys_file": "/dev/null"}, "holds no key"),  # a file that grants nothing opens nothing
    ],
)
def test_keys_that_could_never_match_are_refused_at_start(server, match):
    with pytest.raises(ConfigError, match=match):
        Keys(Server(**server))


# ---- CORS ------------------------------------------------------------------------------------------------------------

PAGE = {"Origin": "https://page.example"}
ASKS = PAGE | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


async def test_a_browser_may_ask_and_then_send_from_a_configured_origin():
    async with client_of_fake_engine(cors_origins=("https://page.example",), api_keys=("k",)) as client:
        answer = await client.request("OPTIONS", CHAT, headers=ASKS)
        assert answer.status == 204  # without a key: a browser sends none with this question
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        for stream in (False, True):
            answer = await client.post(CHAT, HI | {"stream": stream}, PAGE | bearer("k"))
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == "https://page.example"
            assert answer.headers["Vary"] == "Origin"
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
        refused = await client.post(CHAT, HI, PAGE)
        assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "https://page.example")


async def test_a_page_of_another_origin_is_told_nothing(client):
    async with client_of_fake_engine(cors_origins=("https://other.example",)) as other:
        for one in (client, other):
            answer = await one.request("OPTIONS", CHAT, headers=ASKS)
            assert answer.status in (401, 405)
            assert "Access-Control-Allow-Origin" not in (await one.post(CHAT, HI, PAGE | bearer("user-1"))).headers


async def test_all_origins_may_be_let_in():
    async with client_of_fake_engine(cors_origins=("*",)) as client:
        assert (await client.request("OPTIONS", CHAT, headers=ASKS)).headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Origin" not in (await client.post(CHAT, HI)).headers  # no browser, no header


# ---- TLS -------------------------------------------------------------------------------------------------------------


async def test_with_a_certificate_the_port_speaks_tls_plain_and_streamed():
    async with client_of_fake_engine(tls_cert=str(CERTIFICATE)) as client:
        trust = ssl.create_default_context(cafile=str(CERTIFICATE))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
            for stream in (False, True):
                url = f"https://127.0.0.1:{client.port}{CHAT}"
                async with session.post(url, json=HI | {"stream": stream}) as answer:
                    assert answer.status == 200
                    text = await answer.text()
                    assert "世界" in text and (not stream or text.endswith("data: [DONE]\n\n"))


async def test_a_certificate_that_cannot_be_used_is_a_start_error(tmp_path):
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for path in (empty, tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match=r"server\.tls_cert"):
            async with client_of_fake_engine(tls_cert=str(path)):
                pass


def test_a_private_key_without_a_certificate_is_refused():
    from glm53d.config import validate

    with pytest.raises(ConfigError, match="tls_key"):
        validate(Config(server=Server(tls_key="key.pem")))


async def test_a_renewed_certificate_is_shown_to_who_connects_from_then_on(tmp_path):
    path = tmp_path / "cert.pem"
    path.write_bytes(CERTIFICATE.read_bytes())
    config = Config(server=Server(port=0, tls_cert=str(path)))
    site = await serve(FakeEngine(config), config)

    async def shown() -> str:
        """The certificate of a fresh connection."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return ssl.DER_cert_to_PEM_cert(shown)

    try:
        assert await shown() in CERTIFICATE.read_text()
        path.write_bytes(RENEWED.read_bytes())
        site.reload(config.server)
        assert await shown() in RENEWED.read_text()
        path.write_text(RENEWED.read_text().partition("-----BEGIN PRIVATE")[0])  # its key is not there yet
        with pytest.raises(ConfigError, match=r"server\.tls_cert"):
            site.reload(config.server)
        with pytest.raises(ConfigError, match="restart"):
            site.reload(Server(port=0))
        assert await shown() in RENEWED.read_text()
    finally:
        await site.stop()
