"""Two kinds of English that come with Python and its packages, and tokens made from the public one.

Public: Python's manual and the docstrings of its standard library. Private: paragraphs of other
packages' docstrings, which play notes that people gave in confidence, one each.
"""

import importlib.util
import os
import random
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from jaxdp.sampling import padded_text

PACKAGES = ("numpy", "scipy", "sklearn", "matplotlib", "jax")
SKIPPED = {"site-packages", "dist-packages", "tests", "test"}
LENGTH = 32  # of every record, a public constant
SIZE, RARE = 1_024, 256  # the vocabulary, and how many of it no text uses; GPT-2 has many such


def docstrings(folder):
    for file in sorted(folder.rglob("*.py")):
        if not SKIPPED & {*file.relative_to(folder).parts}:
            yield from re.findall('"""(.*?)"""', file.read_text("utf-8", "ignore"), re.DOTALL)


def paragraphs(texts):
    """Prose of 30 to 400 characters, each paragraph once."""
    parts = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    return {
        p for p in parts if re.fullmatch(r"[A-Z][ -~]{28,398}\.", p) and not re.search(">>>|--", p)
    }


def collected():
    """Lists of texts (public, private); the private ones in random order."""
    public = paragraphs([*topics.values(), *docstrings(Path(os.__file__).parent)])
    homes = (Path(importlib.util.find_spec(name).origin).parent for name in PACKAGES)
    private = sorted(paragraphs(text for home in homes for text in docstrings(home)) - public)
    random.Random(0).shuffle(private)
    return sorted(public), private


class Tokenizer:
    """A text becomes its longest known pieces, from left to right.

    It knows characters, frequent words and frequent pieces of words, of public text alone: made
    from private text it would be a release of its own.

    Attributes:
        tokens: SIZE strings; the last RARE are in no text.
    """

    def __init__(self, public):
        words = Counter(word for text in public for word in re.findall(" ?[A-Za-z]+", text))
        pieces: Counter = Counter()
        for word, count in words.items():
            for n in (2, 3, 4):
                pieces.update({word[i : i + n]: count for i in range(len(word) - n + 1)})
        known = ["\n", *map(chr, range(32, 127)), *(word for word, _ in words.most_common(400))]
        known = list(dict.fromkeys([*known, *(piece for piece, _ in pieces.most_common(SIZE))]))
        self.tokens = known[: SIZE - RARE] + [f"<{i}>" for i in range(RARE)]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        longest_first = sorted(self.tokens[:-RARE], key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def __call__(self, text):
        return [self._ids[token] for token in self._pattern.findall(text)]

    def records(self, texts):
        """Arrays [N, LENGTH]: token ids, and which of them are there.

        All have one length, short or long; a line break begins and ends a text. So no shape, and
        no time, tells how long a drawn text is, and what padding holds the loss does not read.
        """
        padded = padded_text([self(f"\n{text}\n") for text in texts], max_length=LENGTH)
        rows = [padded[i] for i in range(len(padded))]
        return {key: np.stack([row[key] for row in rows]) for key in ("tokens", "mask")}
