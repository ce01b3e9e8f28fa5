"""Real English that ships with CPython: the help topics, as characters."""

from __future__ import annotations

import re

import torch

__all__ = ["Text", "load_text"]


class Text:
    """A text and its alphabet. ``tokens``: int64, shape (num_characters,)."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self._index = {character: i for i, character in enumerate(self.alphabet)}
        self.tokens = torch.tensor([self._index[character] for character in text])

    def encode(self, text: str) -> list[int]:
        """Characters outside the alphabet are left out."""
        return [self._index[character] for character in text if character in self._index]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens)


def load_text() -> Text:
    """The prose of the help topics: grammar, code blocks and tables are left out, so that a tiny model can learn it."""
    from pydoc_data.topics import topics

    paragraphs = (p for topic in topics.values() for p in topic.split("\n\n"))
    prose = (" ".join(p.split()) for p in paragraphs if re.match(r"[A-Z]", p))
    text = "\n".join(p for p in prose if len(p) > 80)
    return Text(re.sub(r"[^A-Za-z0-9 .,;:'()\n-]", "", text))
