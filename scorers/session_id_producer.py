from typing import Annotated

from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet
from fleet.plugin import Producer
from fleet.request import Request


class SessionIdProducer(Producer, type="session-id-producer"):
    """Read the session a request belongs to from a header or a cookie.

    What session affinity and fairness by session go by. A request without it has no session.
    Source: llm-d-router session-id-producer.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        header_name: Annotated[str | None, Meta(description="Header with the session's id.")] = None
        cookie_name: Annotated[str | None, Meta(description="Cookie with the session's id.")] = None

        def __post_init__(self) -> None:
            if bool(self.header_name) == bool(self.cookie_name):
                raise ValueError("give exactly one of headerName and cookieName")

    parameters: Parameters

    def produce(self, request: Request, fleet: Fleet) -> None:
        if self.parameters.header_name:
            request.session_id = request.headers.get(self.parameters.header_name.lower()) or request.session_id
            return
        for cookie in request.headers.get("cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self.parameters.cookie_name and value:
                request.session_id = value
