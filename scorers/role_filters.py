"""Keep the endpoints that do what a profile is for, by the label `llm-d.ai/role`."""

from typing import ClassVar

from fleet.endpoint import DECODES, Role
from fleet.fleet import Fleet, Mask, Slots
from fleet.plugin import Filter
from fleet.request import Request


class _RoleFilter(Filter):
    roles: ClassVar[frozenset[Role | None]]

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        return fleet.role_mask(self.roles)[candidates]


class DecodeFilter(_RoleFilter, type="decode-filter"):
    """Keep endpoints that decode: decode, prefill-decode, both, encode-prefill-decode, and those without a role label.

    Source: llm-d-router decode-filter.
    """

    roles = DECODES


class PrefillFilter(_RoleFilter, type="prefill-filter"):
    """Keep endpoints labelled for prefill: prefill, encode-prefill, prefill-decode, both, encode-prefill-decode.

    Source: llm-d-router prefill-filter.
    """

    roles = frozenset({Role.PREFILL, Role.ENCODE_PREFILL, Role.PREFILL_DECODE, Role.BOTH, Role.ENCODE_PREFILL_DECODE})


class EncodeFilter(_RoleFilter, type="encode-filter"):
    """Keep endpoints labelled for encoding images: encode, encode-prefill, encode-prefill-decode.

    Source: llm-d-router encode-filter.
    """

    roles = frozenset({Role.ENCODE, Role.ENCODE_PREFILL, Role.ENCODE_PREFILL_DECODE})
