"""Refusals: calls that must end in an error, in its words; a failure names every row that does not."""

import re
import reprlib


def refused(words, call, *args, error=ValueError, **options):
    """``call(*args, **options)`` ends in ``error`` (one, or a tuple), in words or a pattern of them."""
    given = f": {reprlib.repr(args)} {reprlib.repr(options)}" if args or options else ""
    all_refused([(words, lambda: call(*args, **options), f"{words}{given}")], error)


def all_refused(rows, error=ValueError):
    """Every call of the rows (words, call[, name]) ends in ``error``, as for ``refused``."""
    wrong = []
    for words, call, *name in rows:
        row = name[0] if name else words
        try:
            call()
        except error as found:
            said = str(found)
            if words not in said and not re.search(words, said):
                wrong.append(f"{row}: {said}")
        except Exception as other:
            other.add_note(f"row: {row}")
            raise
        else:
            wrong.append(f"{row}: not refused")
    assert not wrong, "\n".join(wrong)
