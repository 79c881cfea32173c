from bisect import bisect_right
from typing import Annotated

from msgspec import Meta

from deciders.held import held_tokens
from fleet import plugin
from fleet.fleet import Fleet
from fleet.plugin import Decider, Verdict
from fleet.request import Request

EXPECTED_OUTPUT = 400
"""Tokens of a reply where nothing is known about it."""

TABLE = (
    # below 0.5 new tokens per reply token; 0.5 to 2; above. Per row: up to 16, up to 64, more decodes.
    ((False, False, False), (False, False, True), (False, True, True)),  # history below 2k tokens
    ((False, False, False), (False, True, True), (True, True, True)),  # 2k to 16k
    ((False, False, True), (False, True, True), (True, True, True)),  # longer: attention makes appends dear
)


class LookupTablePdDecider(Decider, type="lookup-table-pd-decider"):
    """Look the decision up in a table that somebody measured.

    Use it where you have benchmarked your own pools. Three numbers choose the cell: tokens of history that the decode
    endpoint holds, missing tokens per expected reply token, and how many requests decode there. A value equal to an edge
    belongs to the bin above it. The default table follows the cost model of an 8B model on one H100 with 5 ms of slack.
    Reads: the match of `prefixMatchInfoProducerName`, the books.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        context_tokens: Annotated[tuple[int, ...], Meta(description="Edges of the history's bins.")] = (2048, 16384)
        input_output_ratio: Annotated[tuple[float, ...], Meta(description="Edges of the ratio's bins.")] = (0.5, 2.0)
        decoding_requests: Annotated[tuple[int, ...], Meta(description="Edges of the load's bins.")] = (16, 64)
        disaggregate: Annotated[
            tuple[tuple[tuple[bool, ...], ...], ...],
            Meta(description="table[context][ratio][load]: whether to prefill elsewhere; one more bin than edges."),
        ] = TABLE
        expected_output_tokens: Annotated[int, Meta(gt=0, description="Reply length where the request says none.")] = (
            EXPECTED_OUTPUT
        )
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None

        def __post_init__(self) -> None:
            edges = {
                "contextTokens": self.context_tokens,
                "inputOutputRatio": self.input_output_ratio,
                "decodingRequests": self.decoding_requests,
            }
            for name, values in edges.items():
                if list(values) != sorted(set(values)):
                    raise ValueError(f"{name}: edges must rise, got {list(values)}")
            wanted = [len(values) + 1 for values in edges.values()]
            sizes = {(len(self.disaggregate), len(rows), len(cells)) for rows in self.disaggregate for cells in rows}
            if sizes != {tuple(wanted)}:
                raise ValueError(
                    f"disaggregate: expected {wanted[0]} x {wanted[1]} x {wanted[2]} cells (one more than edges of "
                    f"contextTokens, inputOutputRatio, decodingRequests)"
                )

    parameters: Parameters

    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        limits, prompt = self.parameters, request.prompt_tokens
        if not prompt:
            return Verdict(False, "no-tokens")
        held = held_tokens(request, decode, limits.prefix_match_info_producer_name) or 0.0
        ratio = (prompt - held) / request.reply_tokens(limits.expected_output_tokens)
        load = float(fleet.decoding[decode]) if decode >= 0 else 0.0
        cell = limits.disaggregate[bisect_right(limits.context_tokens, held)][
            bisect_right(limits.input_output_ratio, ratio)
        ][bisect_right(limits.decoding_requests, load)]
        numbers = {"context_tokens": held, "input_output_ratio": ratio, "decoding_requests": load}
        return Verdict(cell, "table-disaggregate" if cell else "table-stay", numbers)
