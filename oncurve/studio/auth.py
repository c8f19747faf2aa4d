"""Who may ask: this machine's own pages and nobody else's.

- Bound to a loopback address, the Host must name it: a site that points its own name at 127.0.0.1 (DNS rebinding) is refused.
- Bound to anything else, every request needs the token: once in the URL, from then on in a cookie that no other site can send.
- A request that another site's page makes is refused, whatever it asks for; following a link to the studio is not such a one.
- Every answer carries a Content-Security-Policy under which only the studio's own files run and nothing leaves the machine.
"""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oncurve.local_http import refusal

COOKIE = "oncurve_token"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class StudioGuard:
    """Stands before the application. ``token`` is set wherever the server can be reached from other machines."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(scope) or self._entrance(scope)
        await (answer or self.app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        refused = refusal(scope["method"], Headers(scope=scope), local_only=self.token is None)
        return None if refused is None else PlainTextResponse(refused[1], refused[0])

    def _entrance(self, scope: Scope) -> Response | None:
        """With a token: it is taken from the URL once and kept in a cookie; without either there is no way in."""
        if self.token is None:
            return None
        headers = Headers(scope=scope)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["method"] == "GET" and scope["path"] == "/" and self._is_token(given):
            entered = RedirectResponse("/", 303)
            entered.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return entered
        if self._is_token(cookie_parser(headers.get("cookie", "")).get(COOKIE, "")):
            return None
        return PlainTextResponse("Open the address that `oncurve studio` printed: it carries the token.", 401)

    def _is_token(self, given: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(given.encode(), self.token.encode())
