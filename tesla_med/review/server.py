"""The page's server: bound to this machine, for those who hold its token."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tesla_med.errors import ConfigError, OutputError, TeslaMedError
from tesla_med.review.content import Content
from tesla_med.runs.decisions import CHOICES

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
STATIC = {
    "review.js": "text/javascript",
    "review.css": "text/css",
    "niivue.umd.js": "text/javascript",
    "niivue.LICENSE.txt": "text/plain",
}
LONGEST_COMMENT = 2000
FORBIDDEN = "403: this page needs the address that the command printed"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' data: blob:; font-src 'self' data:; worker-src blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def check_installed() -> None:
    """Check that the server's libraries are there.

    Raises:
        ConfigError: they are not.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError("review needs starlette and uvicorn: pip install 'tesla-med[review]'") from None


def make_app(content: Content, token: str) -> Starlette:
    """Return the application.

    Every answer asks for the token: in the address of the first page, from then on in a cookie that no other
    page gets.

    Args:
        content: what is shown, and where decisions go.
        token: without which nothing is answered but 403.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Route

    page = _Page(content, token)
    return Starlette(
        routes=[
            Route("/", page.first),
            Route("/static/{name}", page.guarded(page.static)),
            Route("/api/cases", page.guarded(page.cases)),
            Route("/api/volumes/{key:int}/{name}", page.guarded(page.volume)),
            Route("/api/decisions", page.guarded(page.decide), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )


class _Page:
    """The answers."""

    def __init__(self, content: Content, token: str) -> None:
        self.content, self.token = content, token
        self.cookie = f"tesla-med-{secrets.token_hex(4)}"

    def knows(self, given: str | None) -> bool:
        return hmac.compare_digest((given or "").encode(), self.token.encode())

    def guarded(self, function: Callable[[Request, bytes], Response]) -> Callable[[Request], Any]:
        """Return an endpoint that answers holders of the token only, and says what goes wrong as JSON."""

        async def endpoint(request: Request) -> Response:
            from starlette.concurrency import run_in_threadpool

            if not self.knows(request.cookies.get(self.cookie)):
                return _plain(FORBIDDEN, 403)
            body = await request.body() if request.method == "POST" else b""
            try:
                return await run_in_threadpool(function, request, body)
            except TeslaMedError as error:
                return _json({"error": str(error)}, 400)

        return endpoint

    async def first(self, request: Request) -> Response:
        from starlette.responses import RedirectResponse

        given = request.query_params.get("token")
        if given is not None and self.knows(given):
            answer: Response = RedirectResponse("/", 303, HEADERS)  # the token leaves the address
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return answer
        if given is not None or not self.knows(request.cookies.get(self.cookie)):
            return _plain(FORBIDDEN, 403)
        return _plain(_file("index.html"), 200, "text/html")

    def static(self, request: Request, _: bytes) -> Response:
        name = request.path_params["name"]
        return _plain(_file(name), 200, STATIC[name]) if name in STATIC else _plain("404: no such file", 404)

    def cases(self, _: Request, __: bytes) -> Response:
        return _json(self.content.listed())

    def volume(self, request: Request, _: bytes) -> Response:
        key = _key(self.content, request.path_params["key"])
        layer = request.path_params["name"].split(".")[0]
        return _plain(self.content.volume(key, layer), 200, "application/octet-stream")

    def decide(self, request: Request, body: bytes) -> Response:
        if request.headers.get("content-type") != "application/json":
            return _json({"error": "expected application/json"}, 415)
        key, choice, comment, mask = _decision(body)
        return _json(self.content.decide(_key(self.content, key), choice, comment, mask))


def _plain(content: str | bytes, code: int = 200, kind: str = "text/plain") -> Response:
    from starlette.responses import Response as Answer

    return Answer(content, code, HEADERS, kind)


def _json(content: Any, code: int = 200) -> Response:
    return _plain(json.dumps(content), code, "application/json")  # in ASCII, whatever files are called


def _file(name: str) -> bytes:
    return (files("tesla_med.review") / "static" / name).read_bytes()


def _key(content: Content, key: Any) -> int:
    if not isinstance(key, int) or not 0 <= key < len(content.entries):
        raise OutputError(f"there is no case {key!r}; there are {len(content.entries)}, from 0")
    return key


def _decision(body: bytes) -> tuple[Any, Any, str, str]:
    try:
        told = json.loads(body)
        key, choice, comment = told["key"], told["decision"], str(told.get("comment", ""))
        mask = str(told["mask_sha256"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OutputError("a decision needs key, decision, comment and mask_sha256") from None
    if choice not in CHOICES:
        raise OutputError(f"decision {choice!r} is not known. Known: {', '.join(CHOICES)}.")
    return key, choice, " ".join(comment.split())[:LONGEST_COMMENT], mask


def serve(content: Content, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted.

    Args:
        content: what is shown.
        port: on 127.0.0.1; 0 takes a free one.
        ready: called with the address, token included, before the first answer.

    Raises:
        OutputError: the port is taken.
    """
    import uvicorn

    token = secrets.token_urlsafe(24)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((HOST, port))
        except OSError as error:
            text = f"port {port} of {HOST} cannot be used ({error.strerror}); try another"
            raise OutputError(text) from None
        ready(f"http://{HOST}:{bound.getsockname()[1]}/?token={token}")
        config = uvicorn.Config(make_app(content, token), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[bound])
