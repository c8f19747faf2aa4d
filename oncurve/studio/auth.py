"""Access control: only the studio's own pages may make requests.

- On a loopback address, the Host header must name it: a site that points its own name at 127.0.0.1 (DNS rebinding) is refused.
- On any other address, every request needs the token: once in the URL, then in a cookie that no other site can send.
- Requests made by another site's page are refused. Following a link to the studio is not such a request.
- Every response has a Content-Security-Policy that runs only the studio's own files and lets nothing leave the machine.
"""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oncurve.local_http import rejection_reason

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
    )
)
NO_FRAMES = "frame-ancestors 'none'"
LOCAL_FRAMES = "frame-ancestors http://127.0.0.1:* http://localhost:*"
"""Whose pages may show the studio in a frame: nobody's, or those of a notebook server on this machine."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class StudioGuard:
    """Middleware that checks each request. ``token`` is set if other users or machines can reach the server; ``embedded`` lets
    a notebook on this machine show the studio in a frame."""

    def __init__(self, app: ASGIApp, token: str | None = None, *, embedded: bool = False) -> None:
        self.app, self.token = app, token
        self.headers = {**HEADERS, "content-security-policy": f"{POLICY}; {LOCAL_FRAMES if embedded else NO_FRAMES}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        response = self._refusal(scope) or self._check_token(scope)
        await (response or self.app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        refused = rejection_reason(scope["method"], Headers(scope=scope), local_only=self.token is None)
        return None if refused is None else PlainTextResponse(refused[1], refused[0])

    def _check_token(self, scope: Scope) -> Response | None:
        """Accepts the token from the URL once and moves it to a cookie; refuses a request that has neither."""
        if self.token is None:
            return None
        headers = Headers(scope=scope)
        in_url = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["method"] == "GET" and scope["path"] == "/" and self._is_token(in_url):
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(COOKIE, in_url, httponly=True, samesite="strict")
            return redirect
        if self._is_token(cookie_parser(headers.get("cookie", "")).get(COOKIE, "")):
            return None
        return PlainTextResponse("Open the address that `oncurve studio` printed: it contains the token.", 401)

    def _is_token(self, text: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(text.encode(), self.token.encode())
