from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from fleet import plugin
from fleet.plugin import HeaderReader

ATTRIBUTE = "agent-identity"
SESSION_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
"""What coding agents and their gateways call their session, in order of preference."""


class AgentIdentity(HeaderReader, type=ATTRIBUTE):
    """Tell agents apart by the session headers that they send anyway.

    Use it where many agents share an expected-work-queue and send no fairness id: each agent's session is then a flow of its
    own. The attribute `agent-identity` of a request is its first header among `additionalSessionHeaders`,
    `x-claude-code-session-id`, `x-session-affinity`, `session-id` and `session_id` that is not blank. A request's fairness id
    is its header `x-llm-d-inference-fairness-id`, else `agent-identity`, else `default-flow`. Session affinity can go by it
    too: `sessionIdConfig: {sources: [{attribute: agent-identity}]}`. The headers themselves go on to the engine.
    Source: llm-d-router agent-identity.
    """

    attribute: ClassVar[str] = ATTRIBUTE

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        additional_session_headers: Annotated[
            tuple[Annotated[str, Meta(min_length=1)], ...],
            Meta(description="Headers looked at before the usual ones, in any capitalisation."),
        ] = ()

    parameters: Parameters

    def __init__(self, name: str, parameters: Parameters) -> None:
        super().__init__(name, parameters)
        self._headers = (*map(str.lower, parameters.additional_session_headers), *SESSION_HEADERS)

    def read(self, headers: Mapping[str, str]) -> str | None:
        values = (headers.get(name, "").strip() for name in self._headers)
        return next(filter(None, values), None)
