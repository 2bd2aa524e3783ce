"""Tickets: what they derive is their own, each is spent once, and each is charged before."""

import contextlib
import copy
import dataclasses
import itertools
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp import accounting as acc
from jaxdp.devices import processes
from jaxdp.ledger.tickets import Issuer, issuer_of, simulated_key
from tests.ledger.small import at_once
from tests.refusing import all_refused, refused

MECH = jaxdp.dp_sgd(1.0, 0.1, 25, 50)
VOTES = dataclasses.replace(MECH, count_noise_multiplier=10.0)


def issuer(mechanism=MECH, secret=None, step=0, ledger=None, **options):
    given = (ledger or jaxdp.Ledger(), secret or jaxdp.Secret.from_seed(1), "a")
    return Issuer(mechanism, *given, first_step=step, **options)


def randomness(ticket):
    """Everything that a ticket derives: its draw, its noise words and tag, its use for dropout."""
    use = np.asarray(jax.random.key_data(ticket.rng("examples")))
    draw = ticket.generator().integers(0, 2**63, 2).astype(np.uint64)
    key = ticket.key()
    words = [*key.words, key.tag, use, draw]
    return [np.asarray(w).tobytes() for w in words]


def test_everything_that_a_ticket_derives_is_its_own():
    others = [{}, {"secret": jaxdp.Secret.from_seed(2)}, {"step": 1}, {"step": 11}]
    others += [{"incarnation": "1"}, {"incarnation": "2"}, {"mechanism": VOTES}]
    for change in ({"noise_multiplier": 1.5}, {"rule": jaxdp.clip(0.2)}):
        others.append({"mechanism": dataclasses.replace(MECH, **change)})
    found = [word for other in others for word in randomness(issuer(**other).issue())]
    assert len(found) == 4 * len(others) + 1  # one has two parts
    assert len(set(found)) == len(found)
    words = np.concatenate([issuer(step=n).issue().key().words for n in range(8)])
    assert len(np.unique(words)) == 16  # 64 bits a key, not 32 of them twice
    assert randomness(issuer().issue()) == randomness(issuer().issue())


def test_no_two_streams_share_a_key():
    """Of one secret, one ledger or two, from the operating system or chosen."""
    found = []
    for secret in (jaxdp.Secret.new(), jaxdp.Secret.from_seed(5)):
        ledgers = [jaxdp.Ledger(), jaxdp.Ledger()]
        for ledger in ledgers:
            each = [issuer_of(MECH, ledger, secret) for _ in range(3)]
            words = [randomness(each[n].issue()) for n in (0, 1, 2, 0)]
            found.append(set(itertools.chain(*words)))
            assert len(found[-1]) == 16
    new, other, chosen, again = found
    assert not new & other
    assert not new & chosen
    assert chosen == again  # a figure can be made again


def test_a_ticket_is_spent_once_also_by_twenty_threads_each_of_which_gets_steps_of_its_own():
    ticket = issuer().issue()
    assert not ticket.spent
    ticket.key()
    assert ticket.spent
    words = "step 0 was spent by the caller's own compiled"
    for way in (ticket.key, lambda: ticket.spend("another"), ticket.check):
        refused(words, way)
    for _ in range(20):
        won = at_once(20, issuer().issue().key)
        assert (len(won), won.count(None)) == (20, 19)
    made = issuer(reserve=3)
    steps = at_once(20, lambda: [made.issue().step for _ in range(10)])
    assert sorted(itertools.chain(*steps)) == list(range(200))
    assert made.ledger.steps == 201  # in blocks of three


def test_tickets_and_issuers_are_not_copied():
    """Before: both copies of an issuer handed out the same draw and the same noise, charged once."""
    ticket, sampler = issuer().issue(), MECH.sampler(50, reserve=5)
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
    ticket = issuer(secret=jaxdp.Secret.new()).issue()
    key = ticket.key()
    assert repr(ticket) == "Ticket(step=0, spent=True)"
    assert repr(key) == "NoiseKey(<secret>, parts=('gradient',))"
    keys = [issuer(step=n).issue().key() for n in range(50)]
    words = {int(w) for key in keys for w in key.words.ravel()}
    assert not words & {int(w) for key in keys for w in key.tag}
    refused(r"part must be among .*'gradient',\), got 'votes'", key.part, "votes")
    words, multiplier = issuer(VOTES).issue().key().part("votes")
    assert (words.shape, multiplier) == ((2,), 10.0)
    # Simulated ones likewise.
    split, parts = jax.random.split(jax.random.key(0)), {"a": 1.0, "b": 2.0}
    one, two = (simulated_key(key, parts, 3) for key in split)
    assert (one.parts, one.part("b")[1], one.step) == (("a", "b"), 2.0, 3)
    found = [np.asarray(w).tobytes() for k in (one, two) for w in (*k.words, k.tag)]
    assert len(set(found)) == 6


def test_a_block_is_charged_ahead_and_what_is_left_given_back(tmp_path):
    made = issuer(ledger=jaxdp.Ledger(path := tmp_path / "ledger.jsonl"), reserve=10)
    for n in range(13):
        assert made.issue().step == n == made.step - 1
        # On disk too: a crash counts at most the reserve too much.
        assert made.ledger.steps == jaxdp.Ledger(path).steps == 10 * (1 + n // 10)
        made.handed_out(n)
        assert made.ahead() == ("a", n + 1) or (n + 1) % 10 == 0
    made.close()
    assert made.ledger.steps == 13
    made.close()  # nothing more
    assert made.ledger.steps == 13
    assert made.ahead() is None
    assert made.issue().step == 13
    made = issuer(reserve=10)  # no step from ``until`` on is charged ahead
    made.issue(until=4)
    assert made.ledger.steps == 4
    for _ in range(4):
        made.issue(until=4)  # beyond: what is asked for is charged
    assert made.ledger.steps == 5


def test_tickets_that_nobody_saw_are_given_back_and_issued_again_and_none_that_was_spent():
    made = issuer(reserve=4)
    tickets = [made.issue() for _ in range(6)]
    tickets[3].key()
    made.close(unused=2)
    assert made.ledger.steps == made.step == 4
    # Two tickets of one step, both spent, would be two releases for one charge.
    for kept in tickets[4:]:
        refused("given back", kept.key)
    again = made.issue()
    again.key()
    assert (again.step, made.ledger.steps) == (4, 8)
    made = issuer()
    made.issue().key()
    made.issue()
    kept = made.issue()
    refused("unused must be at most 2, .* got 3", made.close, unused=3)
    assert made.ledger.steps == 3
    refused("given back", kept.key)  # over-counted, never released
    made.close(unused=2)
    assert made.ledger.steps == 1
    sampler = MECH.sampler(50)
    sampler.draw().key()
    refused("unused must be at most 0", sampler.close, unused=1)


def test_what_cannot_be_charged_issues_nothing():
    made = issuer(ledger=jaxdp.Ledger(budget=acc.RenyiFilter(epsilon=8.0, delta=1e-5)))
    with contextlib.suppress(acc.BudgetExceededError):
        for _ in range(10_000):
            made.issue()
    assert 0 < made.step == made.ledger.steps < 10_000


FORKED = """
import os, sys
import jaxdp
mech = jaxdp.dp_sgd(1.0, 0.1, 25, 50)
for path in (None, sys.argv[1]):
    ledger = jaxdp.Ledger(path)
    sampler = mech.sampler(50, ledger=ledger, reserve=8)
    sampler.draw()  # the next ones are reserved
    drawn = sampler.draw()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for way in (drawn.key, sampler.draw, lambda: mech.sampler(50, ledger=ledger),
                    ledger.new_stream, lambda: ledger.charge(mech.event),
                    lambda: ledger.assume("a"), sampler.close):
            try:
                way()
                said.append("done")
            except ValueError as error:
                said.append("refused" if "fork" in str(error) else str(error))
        os.write(write, " ".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print(os.read(read, 10_000).decode())
    drawn.key(), sampler.draw().key()  # the parent goes on
    ledger.charge(mech.event, stream="b")
    assert ledger.steps == 9
    sampler.close()
    assert ledger.steps == 4
"""


def test_a_forked_process_draws_and_releases_nothing(tmp_path):
    path = str(tmp_path / "ledger.jsonl")
    command, env = [sys.executable, "-c", FORKED, path], {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["refused"] * 14
    assert jaxdp.Ledger(path).steps == 4


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


def test_in_several_processes_what_is_reserved_counts_and_stays(monkeypatch):
    ledger = jaxdp.Ledger()
    with monkeypatch.context() as patch:
        patch.setattr(processes, "count", lambda: 2)
        several = issuer(ledger=ledger, reserve=8)
    # As after a shutdown: another one may have handed out all of them.
    several.handed_out(several.issue().step)
    assert several.uncounted() is None
    several.close()
    assert ledger.steps == 8
