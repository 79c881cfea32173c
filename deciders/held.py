"""What a decode endpoint already holds of a prompt, as deciders count it: unweighted leading tokens."""

import numpy as np

from fleet.request import Request


def held_tokens(request: Request, decode: int, producer: str | None) -> float | None:
    """Leading tokens of the prompt that slot `decode` holds, in full blocks; None where no producer knows.

    A negative slot (nothing picked yet) holds nothing.
    """
    match = request.match(producer)
    if match is None:
        return None
    return float(match.tokens_at(np.array([decode], np.intp))[0]) if decode >= 0 else 0.0
