"""What the server lets through: known Host names only, and answers that run nothing but their own scripts."""

from collections.abc import Collection, Sequence

from flask import Flask, Response, request

_LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})


def secure(server: Flask, script_hashes: Sequence[str], hosts: Collection[str]) -> None:
    """Refuse foreign Host headers, and send a Content-Security-Policy with each answer.

    A page elsewhere whose name is made to resolve to this machine (DNS rebinding) sends that name as Host: it is
    refused. The port does not matter, since a tunnel may change it.

    Args:
        server: the pages' server.
        script_hashes: of Dash's one inline script, as a policy names it.
        hosts: names besides this machine's own that people may use.
    """
    allowed = _LOCAL | {host.lower() for host in hosts}
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'self' {' '.join(script_hashes)}",
            # AG Grid and Plotly make style elements of their own text; markup of the store never becomes one.
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )

    @server.before_request
    def refuse_strangers() -> Response | None:
        name = _without_port(request.headers.get("Host", "")).lower()
        if name in allowed:
            return None
        known = ", ".join(sorted(allowed))
        text = f"mgrpo ui answers to {known}, not to {name!r}. Start it with --allow-host for another name.\n"
        return Response(text, status=403, content_type="text/plain; charset=utf-8")

    @server.after_request
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
