"""What the tests of ledgers, tickets and releases share."""

import json
import sys
import threading

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import accounting as acc
from jaxdp.ledger.tickets import Issuer
from tests.mechanisms import sgd_of

STEP = acc.PoissonSampled(acc.Gaussian(1.0), 0.01)
OTHER = acc.PoissonSampled(acc.Gaussian(2.0), 0.01)
KEY = b"k" * 32  # the same bytes every time


def charged(path=None, steps=4, **options):
    """A ledger with one charge."""
    ledger = jaxdp.Ledger(path, **options)
    ledger.charge(STEP, steps, stream="a", source="mechanism")
    return ledger


def charged_on(path, event=STEP, steps=1, **options):
    """One more charge in a file, by whoever opens it and closes it again."""
    ledger = jaxdp.Ledger(path, **options)
    ledger.charge(event, steps)
    ledger.close()


def reserved(ledger):
    """The ledger as everybody else counts it: whole, whatever was handed out."""
    return jaxdp.Ledger.from_json(ledger.to_json())


def lines(path):
    """(first, end) of every charge in a file, and ("ended", n) of every end."""
    rows = map(json.loads, path.read_text().splitlines())
    return [
        ("ended", row["ended"])
        if "ended" in row
        else (row["first_step"], row["first_step"] + row["steps"])
        for row in rows
        if "ended" in row or "event" in row
    ]


OF_FIFTY = sgd_of(1.0, 0.1, 25, 50)


def issuer(mechanism=OF_FIFTY, secret=None, step=0, ledger=None, stream="a", **options):
    """An issuer of a stream, of a seed that was chosen."""
    given = (ledger or jaxdp.Ledger(), secret or jaxdp.Secret.from_seed(1), stream)
    return Issuer(mechanism, *given, first_step=step, **options)


def at_once(count, deed):
    """What a deed did in each of several threads that begin together: its value, or None."""
    barrier, found = threading.Barrier(count), []

    def go():
        barrier.wait()
        try:
            found.append(deed())
        except ValueError:
            found.append(None)

    threads = [threading.Thread(target=go) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


N = 60
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
P = {"w": jnp.zeros(4)}


def loss_fn(params, x):
    return jnp.vdot(params["w"], x)


def mechanism():
    return sgd_of(1.0, 1.0, 20, N)


def trainer(loss=loss_fn, source=X, **options):
    return jaxdp.Trainer(loss, mechanism(), optax.sgd(1.0), source, **options)


def trained(train, steps=2, change=lambda batch: batch, params=P, **options):
    """The state after so many steps, of batches that were changed on their way."""
    state = train.init(params)
    for batch in train.batches(steps, **options):
        state, _ = train.step(state, change(batch))
    return state


def whole(grad_fn, draw):
    return grad_fn(P, X, draw)


def ended(ledger, stream, step):
    """Takes steps out, as the close of their issuer does."""
    ledger.guard.inside = sys._getframe()
    try:
        ledger._end_stream(stream, step)
    finally:
        ledger.guard.inside = None
