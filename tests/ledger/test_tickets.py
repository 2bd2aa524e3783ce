"""Tickets: what they derive is their own, and each is spent once."""

import copy
import dataclasses
import itertools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp.ledger.tickets import issuer_of, simulated_key
from tests.ledger.small import OF_FIFTY as MECH
from tests.ledger.small import at_once, issuer, reserved
from tests.refusing import all_refused, refused

VOTES = dataclasses.replace(MECH, count_noise_multiplier=10.0)


def drawn(made, *step_and_block):
    return made.generator(*step_and_block).integers(0, 2**63, 2).astype(np.uint64)


def randomness(made):
    """Everything that a step derives: its draw, its noise words and tag, its use for dropout."""
    ticket = made.take()
    use = np.asarray(jax.random.key_data(ticket.rng("examples")))
    draw = drawn(made, ticket.step)
    key = ticket.key()
    words = [*key.words, key.tag, use, draw]
    return [np.asarray(w).tobytes() for w in words]


def test_everything_that_a_ticket_derives_is_its_own():
    others = [{}, {"secret": jaxdp.Secret.from_seed(2)}, {"step": 1}, {"step": 11}]
    others += [{"incarnation": "1"}, {"incarnation": "2"}, {"mechanism": VOTES}]
    for change in ({"noise_multiplier": 1.5}, {"rule": jaxdp.clip(0.2)}):
        others.append({"mechanism": dataclasses.replace(MECH, **change)})
    found = [word for other in others for word in randomness(issuer(**other))]
    assert len(found) == 4 * len(others) + 1  # one has two parts
    assert len(set(found)) == len(found)
    words = np.concatenate([issuer(step=n).take().key().words for n in range(8)])
    assert len(np.unique(words)) == 16  # 64 bits a key, not 32 of them twice
    assert randomness(issuer()) == randomness(issuer())


def test_the_draw_of_a_block_is_that_of_all_its_steps_and_of_no_other_block():
    made = issuer(incarnation="1")
    others = (issuer(incarnation="2"), 7, 5), (made, 4, 5), (made, 10, 5), (made, 7, 4), (made, 7)
    found = {drawn(*one).tobytes() for one in ((made, 5, 5), (made, 7, 5), (made, 9, 5), *others)}
    assert len(found) == 1 + len(others)
    # In a run it is the same at every start.
    starts = [issuer(incarnation=name, draws="run") for name in "12"]
    assert len({drawn(start, 7, 5).tobytes() for start in starts}) == 1
    assert len({drawn(start, 7).tobytes() for start in starts}) == 2


def test_no_two_streams_share_a_key():
    """Of one secret, one ledger or two, from the operating system or chosen."""
    found = []
    for secret in (jaxdp.Secret.new(), jaxdp.Secret.from_seed(5)):
        ledgers = [jaxdp.Ledger(), jaxdp.Ledger()]
        for ledger in ledgers:
            each = [issuer_of(MECH, ledger, secret) for _ in range(3)]
            words = [randomness(each[n]) for n in (0, 1, 2, 0)]
            found.append(set(itertools.chain(*words)))
            assert len(found[-1]) == 16
    new, other, chosen, again = found
    assert not new & other
    assert not new & chosen
    assert chosen == again  # a figure can be made again


def test_two_threads_that_begin_streams_of_one_seed_have_places_of_their_own(monkeypatch):
    """Whoever counts the streams after both have begun finds one number twice."""
    both, new_stream = threading.Barrier(2), jaxdp.Ledger.new_stream
    monkeypatch.setattr(
        jaxdp.Ledger, "new_stream", lambda *of: (new_stream(*of), both.wait(timeout=60))[0]
    )
    ledger, seed = jaxdp.Ledger(), jaxdp.Secret.from_seed(5)
    one, two = at_once(2, lambda: randomness(issuer_of(MECH, ledger, seed)))
    assert not set(one) & set(two)


def test_a_ticket_is_spent_once_also_by_twenty_threads_each_of_which_gets_steps_of_its_own():
    ticket = issuer().take()
    assert not ticket.spent
    ticket.key()
    assert ticket.spent
    words = "step 0 was spent by the caller's own compiled"
    for way in (ticket.key, lambda: ticket.spend("another"), ticket.check):
        refused(words, way)
    for _ in range(20):
        won = at_once(20, issuer().take().key)
        assert (len(won), won.count(None)) == (20, 19)
    made = issuer(reserve=3)
    steps = at_once(20, lambda: [made.take().step for _ in range(10)])
    assert sorted(itertools.chain(*steps)) == list(range(200))
    assert made.ledger.steps == 200
    assert reserved(made.ledger).steps == 201  # three at a time


def test_tickets_and_issuers_are_not_copied():
    """Before: both copies of an issuer handed out the same draw and the same noise, charged once."""
    ticket, sampler = issuer().take(), MECH.sampler(50, reserve=5)
    draw = sampler.draw()
    # Copies of a list, a dict or a draw hold the very same ticket.
    deep = [[ticket], {"a": ticket}, draw]
    words = r"(its ticket\)|trainer or sampler) cannot be copied, pickled or sent"
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        for one in (ticket, sampler.issuer, *(deep if way is not copy.copy else ())):
            all_refused([(words, lambda way=way, one=one: way(one), f"{way} {one}")], TypeError)
    draw.key()
    refused("must be spent once", copy.copy(draw).key)


def test_keys_have_the_parts_that_were_charged_and_neither_repr_nor_tag_give_the_words_away():
    ticket = issuer(secret=jaxdp.Secret.new()).take()
    key = ticket.key()
    assert repr(ticket) == "Ticket(step=0, spent=True)"
    assert repr(key) == "NoiseKey(<secret>, parts=('gradient',))"
    keys = [issuer(step=n).take().key() for n in range(50)]
    words = {int(w) for key in keys for w in key.words.ravel()}
    assert not words & {int(w) for key in keys for w in key.tag}
    refused(r"part must be among .*'gradient',\), got 'votes'", key.part, "votes")
    words, multiplier = issuer(VOTES).take().key().part("votes")
    assert (words.shape, multiplier) == ((2,), 10.0)
    # Simulated ones likewise.
    split, parts = jax.random.split(jax.random.key(0)), {"a": 1.0, "b": 2.0}
    one, two = (simulated_key(key, parts, 3) for key in split)
    assert (one.parts, one.part("b")[1], one.step) == (("a", "b"), 2.0, 3)
    found = [np.asarray(w).tobytes() for k in (one, two) for w in (*k.words, k.tag)]
    assert len(set(found)) == 6


def test_no_flag_of_jax_changes_a_draw_or_a_noise():
    def released():
        """Draws, noise and the use of a key for dropout, by a program that is compiled anew."""
        sampler = MECH.sampler(50, secret=jaxdp.Secret.from_seed(7))
        params = {n: jnp.zeros(s, jnp.float32) for n, s in (("a", (31, 7)), ("b", 70_001))}
        tx, found = MECH.privatize(), []
        state = tx.init(params)
        update = jax.jit(lambda s, k: tx.update(jaxdp.Summed(params, 0.1), s, params, key=k))
        for _ in range(2):
            draw = sampler.draw()
            out, state = update(state, draw.key())
            found += [draw.indices, draw.mask, out["a"], out["b"]]
            found += [jax.random.key_data(draw.ticket.rng("x"))]
        return [np.asarray(x).tobytes() for x in found]

    with jax.threefry_partitionable(False):
        plain = released()
    with jax.threefry_partitionable(True):
        assert released() == plain
    with jax.default_prng_impl("rbg"), jax.enable_x64(True):
        assert released() == plain
