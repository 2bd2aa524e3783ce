"""Writes texts to try the programs on: sentences of reviews from vaderSentiment's archive.

`pip download --no-deps --no-binary :all: vaderSentiment==3.3.2`, then `python
examples/language_model/reviews.py vaderSentiment-3.3.2.tar.gz texts`, a folder for

- reviews.jsonl, held_out.jsonl: of films, with the mean rating of some fifteen people (Hutto and
  Gilbert 2014, "VADER"); which of four words says how they found it is to be answered;
- by_user.jsonl, held_out_by_user.jsonl: the same of 309 customers;
- pairs.jsonl, held_out_pairs.jsonl: the reviews of films, and which of two answers people prefer.

They are open, and play texts that people gave in confidence.
"""

import bisect
import io
import json
import random
import sys
import tarfile
from pathlib import Path

ANSWERS = (" terrible", " bad", " good", " great")
BETWEEN = (-1.75, 0, 1.75)  # mean ratings from -4 to 4 that part them


def rows(files, kind, asked):
    """Records of a kind, each text once."""
    found = {}
    for member in files.getmembers():
        if member.name.endswith(f"/{kind}Snippets_GroundTruth.txt"):
            for line in files.extractfile(member).read().decode("utf-8", "replace").splitlines():
                name, rating, text = line.split("\t")
                answer = ANSWERS[bisect.bisect(BETWEEN, float(rating))]
                text = f"Review: {text.strip()}\n{asked} is"
                found[text] = {"text": text, "answer": answer, "user": name.split("_")[0]}
    return [*found.values()]


def pair(record):
    """The right answer, and its opposite."""
    other = ANSWERS[-1 - ANSWERS.index(record["answer"])]
    return {"prompt": record["text"], "chosen": record["answer"], "rejected": other}


def main(archive, folder):
    with tarfile.open(archive) as outer:
        name = next(n for n in outer.getnames() if n.endswith("hutto_ICWSM_2014.tar.gz"))
        inner = io.BytesIO(outer.extractfile(name).read())
    with tarfile.open(fileobj=inner) as files:
        films = rows(files, "movieReview", "The film")
        customers = rows(files, "amazonReview", "The product")
    random.Random(0).shuffle(films)
    pairs = [pair(record) for record in films]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, records in (
        ("held_out", films[:1_024]),
        ("reviews", films[1_024:]),
        ("by_user", [record for record in customers if int(record["user"]) > 60]),
        ("held_out_by_user", [record for record in customers if int(record["user"]) <= 60]),
        ("held_out_pairs", pairs[:1_024]),
        ("pairs", pairs[1_024:]),
    ):
        lines = (json.dumps(record) + "\n" for record in records)
        Path(folder, f"{name}.jsonl").write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
