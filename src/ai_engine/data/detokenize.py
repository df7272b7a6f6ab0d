"""Bytes of tokens to text, incrementally. Owns UTF-8; knows nothing of tokens or stops.

A character split over tokens is held back until it is whole. Invalid bytes become U+FFFD as the Unicode Standard
recommends (section 3.9, "substitution of maximal subparts"; also the WHATWG decoder): one for each longest prefix of
a valid sequence, at once when the next byte shows that it cannot be completed. The text does not depend on how the
bytes were split.
"""

from __future__ import annotations

import codecs


class Utf8Stream:
    """The standard library's incremental decoder, but for one thing: it holds back the start of an encoded surrogate
    (ED A0..BF), which can never become valid."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The text that ``data`` completes."""
        text = self._decoder.decode(data)
        held = self._decoder.getstate()[0]
        if len(held) > 1 and held[0] == 0xED and held[1] >= 0xA0:
            text += self._decoder.decode(b"", True)
        return text

    def finish(self) -> str:
        """One U+FFFD if the stream ended inside a character, else nothing. The stream is then as new."""
        tail = self._decoder.decode(b"", True)
        self._decoder.reset()
        return tail

    @property
    def pending(self) -> int:
        """Bytes held back."""
        return len(self._decoder.getstate()[0])
