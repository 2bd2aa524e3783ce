"""Private texts as token records, and what a model says of them: losses, answers, new texts.

A file of texts is JSON Lines: ``{"text": "Review: ...", "answer": " positive", "user": "ann"}``;
``answer`` and ``user`` may be missing. reviews.py writes some.
"""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import llama
import numpy as np

from jaxdp import sampling

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>")  # of Llama and its kind


def read(file, tokenizer, length, needs=(), text="text", answer="answer"):
    """A list of records: the token ids, the places [first, after the last] of the answer, the user.

    Args:
        file: JSON Lines.
        tokenizer: public, not made from these texts.
        length: of the longest record, a public constant; a text is cut, an answer is not.
        needs: keys that no line may lack, beside the text's.
        text: the key of the text.
        answer: the key of the answer.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    records, silent = [], []
    for number, line in enumerate(Path(file).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}: "  # and nothing of what it says, which is private
        try:
            given = json.loads(line)
            json.dumps(given, ensure_ascii=False).encode()  # no half of a character
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}expected one JSON object a line, in UTF-8") from error
        given = given if isinstance(given, dict) else {}
        if lacking := [key for key in (text, *needs) if given.get(key) in (None, "")]:
            raise ValueError(
                f"{where}expected an object with {lacking}, which are not there or empty"
            )
        asked, said = given[text], given.get(answer) or ""
        if not isinstance(asked, str) or not isinstance(said, str):
            raise ValueError(f"{where}{text!r} and {answer!r} must be strings")
        # Both together: a tokenizer may put a mark where a string begins.
        found = tokenizer.encode(asked + said)
        starts = [start >= len(asked) for start, _ in found.offsets]
        at = starts.index(True) if True in starts else len(starts)
        ids, said_ids = found.ids[:at], found.ids[at:]
        if len(said_ids) >= length or (said and not said_ids):
            raise ValueError(
                f"{where}{answer!r} must have 1 to {length - 1} tokens, one less than a record, "
                f"got {len(said_ids)}"
            )
        silent += [] if said else [number]
        ids = ids[: length - len(said_ids)]
        span = np.array([len(ids), len(ids) + len(said_ids)], np.int32)
        # Where there is room, the token that ends a text: so the model learns to stop.
        tokens = (ids + said_ids + end_of(tokenizer))[:length]
        records.append({"tokens": tokens, "answer": span, "user": f"{given.get('user')}"})
    if not records:
        raise ValueError(f"{file} must hold texts, one a line, got none")
    if 0 < len(silent) < len(records):
        raise ValueError(
            f"{file}: all lines must have {answer!r}, or none, got line {silent[0]} without"
        )
    return records


def end_of(tokenizer):
    """A list with the id of the token that ends a text, empty where none is known."""
    return [i for i in map(tokenizer.token_to_id, ENDS) if i is not None][:1]


def source(records, length, texts_per_user=0, rooms=None):
    """Records for ``jaxdp.Run``: all at one length, or in a few public ones; or by user.

    Args:
        records: of ``read``.
        length: of the longest.
        texts_per_user: where a user, with at most so many texts, is the privacy unit.
        rooms: of ``rooms``, for several lengths. A user's texts have one.
    """
    given = [{key: record[key] for key in ("tokens", "answer")} for record in records]
    if rooms and texts_per_user:
        raise ValueError("rooms and texts_per_user: expected one of the two, got both")
    if rooms:
        return sampling.bucketed_text(given, rooms, field="tokens")
    padded = sampling.padded_text(given, length, field="tokens")
    rows = [padded[i] for i in range(len(padded))]
    arrays = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    if texts_per_user:
        return sampling.users(arrays, [record["user"] for record in records], texts_per_user)
    return arrays


def rooms(public, lengths, batch):
    """From each length to how many texts of a step have room there, by the share in public texts.

    It is what is expected and 6 standard deviations more. If private texts are longer than public
    ones, some steps take longer, and who sees their time learns it: ``sampling.bucketed_text``.
    """
    lengths = sorted(lengths)
    bucket = np.searchsorted(lengths[:-1], [len(record["tokens"]) for record in public])
    expected = batch * np.bincount(bucket, minlength=len(lengths)) / len(public)
    most = (math.ceil(mean + 6 * math.sqrt(mean)) for mean in expected)
    return {length: max(1, room) for length, room in zip(lengths, most, strict=True)}


def answered(record):
    """For each token but the first whether it is of the answer, bool [T - 1]."""
    place = jnp.arange(1, len(record["tokens"]))
    return (record["answer"][0] <= place) & (place < record["answer"][1])


def loss_of(config):
    """The loss of one record: mean cross-entropy of the text, and beside it that of the answer."""

    def loss(params, record):
        each, said = llama.losses(params, record["tokens"], config), answered(record)
        parts = said, record["tokens_mask"][1:] & ~said
        return sum(jnp.sum(each, where=m) / jnp.maximum(jnp.sum(m), 1) for m in parts)

    return loss


class Judge:
    """Perplexity of a model on held-out texts, which are public, and how often it answers right."""

    def __init__(self, config, tokenizer, records, length, rows=32):
        self.records = source(records, length)
        at, after = self.records["answer"].T
        self.has_answer = at < after
        last = self.records["tokens"].shape[1] - 1
        self.right = self.records["tokens"][np.arange(len(at)), np.minimum(at, last)]
        # A model answers with that of all first tokens that it holds likeliest.
        answers = {tuple(r["tokens"][slice(*r["answer"])]) for r in records} - {()}
        self.first = np.array(sorted({answer[0] for answer in answers}), np.int32)
        if len(self.first) < len(answers):
            raise ValueError(
                "answers of held-out texts must begin with different tokens, got "
                f"{sorted(map(tokenizer.decode, answers))[:9]}: what is no choice of a few belongs "
                "to the text"
            )

        def one(params, record):
            x = llama.hidden(params, record["tokens"][:-1], config)
            scores = llama.linear(llama.head(params), x[record["answer"][0] - 1][None])[0]
            each = llama.losses(params, record["tokens"], config)
            mask = record["tokens_mask"][1:] & (jnp.arange(1, len(each) + 1) < record["answer"][0])
            best = jnp.argmax(scores[self.first]) if len(self.first) else 0
            return best, jnp.sum(each, where=mask), jnp.sum(mask)

        self._all = jax.jit(
            lambda params, records: jax.lax.map(
                functools.partial(one, params), records, batch_size=rows
            )
        )

    def __call__(self, params):
        """{"accuracy": ..., "perplexity": ...}; this of texts, without answers and ends."""
        best, losses, counts = jax.device_get(self._all(params, self.records))
        found = {}
        if self.has_answer.any():
            said = self.first[best] == self.right
            found["accuracy"] = float(np.mean(said, where=self.has_answer))
        return found | {"perplexity": float(np.exp(losses.sum() / counts.sum()))}


def written(params, config, tokenizer, prompt, key, tokens=48, temperature=0.7):
    """A text that the model writes on from a prompt; post-processing, so free."""
    ids, end = tokenizer.encode(prompt).ids, end_of(tokenizer)
    padded = np.zeros(len(ids) + tokens, np.int32)
    for place in range(len(ids), len(padded)):
        padded[:place] = ids
        key, draw = jax.random.split(key)
        scores = next_scores(params, padded, place - 1, config)
        ids.append(int(jax.random.categorical(draw, scores / temperature)))
        if ids[-1:] == end:
            break
    return tokenizer.decode(ids)


@functools.partial(jax.jit, static_argnames="config")
def next_scores(params, tokens, place, config):
    """Logits of the token behind a place."""
    x = jax.lax.dynamic_slice_in_dim(llama.hidden(params, tokens, config), place, 1)
    return llama.linear(llama.head(params), x)[0]
