"""Sources of records: arrays, memory maps, and random-access readers.

One index of a source is one **privacy unit**: the guarantee hides the presence of what
``source[i]`` holds, and of nothing larger. A person who is in the source twice is hidden only half
as well as the report says; ``users`` makes a source in which one index is a person.
"""

from jaxdp.sources.files import load
from jaxdp.sources.hashes import fingerprint
from jaxdp.sources.prefetching import prefetch
from jaxdp.sources.source import Source, as_source
from jaxdp.sources.text import bucketed_text, padded_text
from jaxdp.sources.users import User, users

__all__ = [
    "Source",
    "User",
    "as_source",
    "bucketed_text",
    "fingerprint",
    "load",
    "padded_text",
    "prefetch",
    "users",
]
