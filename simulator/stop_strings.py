"""Stop strings in a growing text: what may be shown already, and where it ends."""

from collections.abc import Sequence


class StopStrings:
    """Feed it text as it is generated. Text that could be the beginning of a stop string is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._text = ""
        self._shown = 0
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """The text that may be shown now; nothing more comes once `found` is set."""
        if self.found is not None:
            return ""
        search_from = max(0, len(self._text) - self._hold)
        self._text += text
        hits = [(at, stop) for stop in self._stops if (at := self._text.find(stop, search_from)) >= 0]
        if hits:
            at, self.found = min(hits)
            return self._show(at)
        return self._show(len(self._text) - self._hold)

    def rest(self) -> str:
        """What was held back, at the end of a reply without a stop string."""
        return "" if self.found is not None else self._show(len(self._text))

    def _show(self, until: int) -> str:
        if until <= self._shown:
            return ""
        shown, self._shown = self._text[self._shown : until], until
        return shown
