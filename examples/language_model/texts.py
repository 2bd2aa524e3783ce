"""Private texts as token records, and what a model says of them: losses, answers, new texts.

A file of texts is JSON Lines: ``{"text": "Review: ...", "answer": " positive", "user": "ann"}``;
``answer`` and ``user`` may be missing. `python texts.py vaderSentiment-3.3.2.tar.gz folder` writes
sentences of reviews in this form (`pip download --no-deps --no-binary :all: vaderSentiment==3.3.2`).
"""

import io
import json
import random
import sys
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import llama
import numpy as np

from jaxdp import sampling


def read(file, tokenizer, length):
    """A list of records: token ids, where the answer begins, the user.

    Args:
        file: JSON Lines.
        tokenizer: public, not made from these texts.
        length: of the longest record, a public constant; a text is cut, an answer is not.
    """
    records = []
    for line in Path(file).read_text("utf-8").splitlines():
        given = json.loads(line)
        answer = tokenizer.encode(given.get("answer", "")).ids
        text = tokenizer.encode(given["text"]).ids[: length - len(answer)]
        user = given.get("user", "")
        records.append({"tokens": text + answer, "answer": np.int32(len(text)), "user": user})
    return records


def source(records, length, buckets=None, texts_per_user=None):
    """Records for ``jaxdp.Run``: all at one length, or in a few public ones; or by user.

    Args:
        records: of ``read``.
        length: of the longest.
        buckets: from a length to how many records of a step have room there; public.
        texts_per_user: where a user, with at most so many texts, is the privacy unit.
    """
    given = [{key: record[key] for key in ("tokens", "answer")} for record in records]
    if texts_per_user:
        users = np.array([record["user"] for record in records])
        return sampling.users(
            arrays(sampling.padded_text(given, length, field="tokens")), users, texts_per_user
        )
    if buckets:
        return sampling.bucketed_text(given, buckets, field="tokens")
    return arrays(sampling.padded_text(given, length, field="tokens"))


def arrays(padded):
    """All records of ``padded_text`` at once: a dict of arrays [N, ...]."""
    rows = [padded[i] for i in range(len(padded))]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def loss_of(config):
    """The loss of one record: mean cross-entropy of the text, and beside it that of the answer."""

    def loss(params, record):
        each = llama.losses(params, record["tokens"], config)
        mask, place = record["tokens_mask"][1:], jnp.arange(1, len(each) + 1)
        parts = (mask & (place < record["answer"]), mask & (place >= record["answer"]))
        return sum(jnp.sum(each, where=m) / jnp.maximum(jnp.sum(m), 1) for m in parts)

    return loss


class Judge:
    """Perplexity and accuracy of a model on held-out texts, which are public."""

    def __init__(self, config, tokenizer, records, length, rows=32):
        answers = sorted({tuple(r["tokens"][r["answer"] :]) for r in records} - {()})
        self.first = np.array([answer[0] for answer in answers])  # tokens that tell them apart
        if len(set(self.first)) < len(answers):
            raise ValueError("answers must begin with different tokens")
        self.rows, self.records = rows, arrays(
            sampling.padded_text(
                [{k: r[k] for k in ("tokens", "answer")} for r in records], length, field="tokens"
            )
        )
        right = [r["tokens"][r["answer"]] if len(r["tokens"]) > r["answer"] else -1 for r in records]
        self.right = np.array(right)

        def one(params, record):
            x = llama.hidden(params, record["tokens"][:-1], config)
            scores = llama.linear(llama.head(params), x[record["answer"] - 1][None])[0]
            each = llama.losses(params, record["tokens"], config)
            mask = record["tokens_mask"][1:] & (jnp.arange(1, len(each) + 1) < record["answer"])
            return scores[self.first], jnp.sum(each, where=mask), jnp.sum(mask)

        self._all = jax.jit(jax.vmap(one, (None, 0)))

    def __call__(self, params):
        """{"accuracy": ..., "perplexity": ...}; of the texts, answers left out."""
        found = []
        for i in range(0, len(self.right) // self.rows * self.rows, self.rows):
            part = {key: array[i : i + self.rows] for key, array in self.records.items()}
            found.append(jax.device_get(self._all(params, part)))
        scores, losses, counts = (np.concatenate(part) for part in zip(*found, strict=True))
        said = self.first[np.argmax(scores, -1)] if len(self.first) else np.zeros(len(scores))
        return {
            "accuracy": float(np.mean(said == self.right[: len(said)])),
            "perplexity": float(np.exp(losses.sum() / counts.sum())),
        }


def written(params, config, tokenizer, prompt, key, length=48, temperature=0.7):
    """A text that the model writes on from a prompt; post-processing, so free."""
    ids = tokenizer.encode(prompt).ids
    next_logits = _next_logits(config)
    for place in range(len(ids), length):
        padded = np.zeros(length, np.int32)
        padded[:place] = ids
        key, draw = jax.random.split(key)
        scores = next_logits(params, padded, place - 1)
        ids.append(int(jax.random.categorical(draw, scores / temperature)))
    return tokenizer.decode(ids)


_KEPT: dict = {}


def _next_logits(config):
    def scores(params, tokens, place):
        x = jax.lax.dynamic_slice_in_dim(llama.hidden(params, tokens, config), place, 1)
        return llama.linear(llama.head(params), x)[0]

    return _KEPT.setdefault(config, jax.jit(scores))


def reviews(archive, folder, seed=0):
    """Writes reviews.jsonl and held_out.jsonl, and by_user.jsonl, from vaderSentiment's archive.

    Sentences of film reviews with the mean rating of fifteen people and more, of which those that
    lean clearly, by 1 of 4, to a side are kept; and sentences of 309 customers (Hutto and Gilbert
    2014, "VADER"). They are open, and play texts that people gave in confidence.
    """
    outer = tarfile.open(archive)
    inner = next(m for m in outer.getmembers() if m.name.endswith("hutto_ICWSM_2014.tar.gz"))
    files = tarfile.open(fileobj=io.BytesIO(outer.extractfile(inner).read()))

    def rows(kind):
        for member in files.getmembers():
            if member.name.endswith(f"/{kind}Snippets_GroundTruth.txt"):
                for line in files.extractfile(member).read().decode("utf-8", "replace").splitlines():
                    name, rating, text = line.split("\t")
                    if abs(float(rating)) >= 1:
                        answer = " positive" if float(rating) > 0 else " negative"
                        text = f"Review: {text.strip()}\nSentiment:"
                        yield {"text": text, "answer": answer, "user": name.split("_")[0]}

    films = list(rows("movieReview"))
    random.Random(seed).shuffle(films)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (
        ("held_out", films[:1_024]),
        ("reviews", films[1_024:]),
        ("by_user", list(rows("amazonReview"))),
    ):
        lines = (json.dumps(record) + "\n" for record in part)
        (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    reviews(*sys.argv[1:])
