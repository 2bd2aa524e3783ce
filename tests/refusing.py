"""Refusals in tables: a row is the words of an error, the call, and what names it in a failure."""

import re


def all_refused(rows, error=ValueError):
    """Every call of (words, call[, name]) ends in ``error`` with these words; all others are named."""
    wrong = []
    for words, call, *name in rows:
        try:
            call()
        except error as said:
            if not re.search(words, str(said)):
                wrong.append(f"{name or words}: {said}")
        else:
            wrong.append(f"{name or words}: not refused")
    assert not wrong, "\n".join(wrong)
