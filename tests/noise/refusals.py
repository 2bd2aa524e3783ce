"""Tables of refusals: calls, and the words that each is refused in."""

import re


def assert_refused(rows, kind=ValueError):
    """Every call of the rows (call, words) raises ``kind`` in its words; a failure names the rows.

    Words are a regular expression, as for ``pytest.raises``.
    """
    wrong = []
    for call, words in rows:
        try:
            call()
        except kind as said:
            if not re.search(words, str(said)):
                wrong.append(f"{words!r}: {said}")
        else:
            wrong.append(f"{words!r}: taken")
    assert not wrong, "\n".join(wrong)
