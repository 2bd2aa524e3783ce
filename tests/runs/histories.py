"""Runs whose steps cost nothing, killed anywhere, in a folder where anything may lie at a start.

Each step writes down a version of itself in the parameters, so that what becomes visible tells
which versions it was made from, and in which stream each was charged.
"""

import contextlib
import dataclasses
import json
import shutil
import types
from collections import Counter

import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.ledger.file import Chain, LedgerFile
from jaxdp.ledger.seeds import Secret
from jaxdp.runs import RunDirectory
from jaxdp.runs import run as module
from jaxdp.runs.checkpoints import Checkpoints
from jaxdp.runs.directory import name_of, number_of
from jaxdp.runs.files import seal
from jaxdp.runs.run import Parts, Prepared
from jaxdp.sampling import as_source
from jaxdp.schedules import NoiseSchedule
from jaxdp.training.trainer import TrainState
from tests.mechanisms import mf_of, sgd_of
from tests.runs.small import Killed

STEPS, N = 12, 60
POISSON = sgd_of(2.0, 1.0, 20, N)
EPOCHS = sgd_of(2.0, 1.0, 20, N, "allocation")  # of three steps
LEVELS = sgd_of(NoiseSchedule(((2.0, 6), (3.0, STEPS))), 1.0, 20, N)
IN_ORDER, CYCLIC = (
    mf_of(1.0, 1.0, 20, N, rule, steps=STEPS, strategy="banded", bands=2)
    for rule in ("fixed_order", "cyclic_poisson")
)
SOURCE = as_source(np.zeros(N, np.float32))


class Light(Checkpoints):
    """Checkpoints without orbax: a file and its seal."""

    is_saving = False
    _manager = types.SimpleNamespace(reload=lambda: None, close=lambda: None)
    world = None

    def prepare(self):
        pass

    def wait(self):
        pass

    def save(self, state, history):
        folder = self._folder / str(state.step)
        folder.mkdir()
        row = {"params": state.params.tolist(), "past": state.past.tobytes().hex()}
        (folder / "state").write_text(json.dumps({**row, "history": history}))
        seal(folder, "digests.json")
        kept = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())
        for old in kept[:-2]:
            shutil.rmtree(self._folder / str(old))
        self.world.effect(f"checkpoint {state.step}")

    def _put_aside(self, bad, then):
        super()._put_aside(bad, then)
        if bad:
            self.world.effect("aside")

    def _read(self, step, like):
        if step in self.world.unreadable:
            raise OSError("Input/output error")
        kept = json.loads((self._folder / str(step) / "state").read_text())
        past = np.frombuffer(bytes.fromhex(kept["past"]), np.uint32)
        return TrainState(np.asarray(kept["params"]), (), step, past), kept["history"]


class Steps:
    """Takes the steps of a run in place of a trainer."""

    def __init__(self, world, run, state):
        self.world, self.run = world, run
        self.issuer = run.issuer(world.mechanism, state.step)
        if world.energy:
            run.issuer(world.mechanism, state.step, "energy")

    def batches(self, steps):
        end = self.issuer.next + steps
        while self.issuer.next < end:
            yield self.issuer.take(None, end)

    def step_with_info(self, state, ticket, return_info=False):
        assert ticket.step == state.step
        name = (self.issuer.label, ticket.step)
        assert name not in self.world.tickets, "a ticket came twice"
        number = number_of(self.run.name, self.run.stream) + 1
        draw = self.issuer.generator(ticket.step, 3).bytes(8)
        self.world.tickets[name] = number, draw
        params = state.params.copy()
        params[ticket.step] = (number, len(self.world.tickets))
        past = np.frombuffer(self.run.ledger.head, np.uint32)
        info = types.SimpleNamespace(update_norm=0.0)
        return TrainState(params, (), state.step + 1, past), info, []

    def released(self, state):
        return state.params


class World:
    """A run's folder, everything that was ever in it, and everything that was ever seen of it.

    Args:
        folder: of the run.
        mechanism: of its steps.
        secret: of the run.
        energy: True charges a second part of each step.
    """

    def __init__(self, folder, mechanism=POISSON, secret=None, energy=False):
        self.directory, self.mechanism, self.energy = RunDirectory(folder), mechanism, energy
        self.directory.create()
        self.checkpoints, self.kept = (
            self.directory.checkpoints,
            folder.with_name(f"{folder.name} kept"),
        )
        self.secret = secret or Secret.new()
        self.options = {}  # of the run
        self.vault = []  # every checkpoint that was ever durable: (its step, where a copy is)
        self.states = []  # and every run.json
        self.visible = {}  # (stream, step, version): what was durable when it was seen
        self.tickets, self.effects, self.unreadable = {}, [], ()

    def start(
        self, kill=None, *, every=4, steps=STEPS, enough=None, give_up=False, told=True, slow=False
    ):
        """One start; True if it was killed.

        Args:
            kill: after so many effects, or after the first whose name begins so; None for never.
            every: steps of a block.
            steps: of the run.
            enough: as for ``Parts``.
            give_up: True sets aside what is unreadable.
            told: True evaluates each block at once.
            slow: True has a disk that takes as long as a block.
        """
        self.effects, self.kill = [], kill
        with pytest.MonkeyPatch.context() as patch:
            append, save = LedgerFile.append, RunDirectory.save_state

            def appended(file, row):
                append(file, row)
                self.effect(_name(row))

            def saved(directory, state):
                save(directory, state)
                self.effect("state")

            patch.setattr(LedgerFile, "append", appended)
            patch.setattr(RunDirectory, "save_state", saved)
            patch.setattr(Light, "world", self)
            patch.setattr(Light, "is_saving", slow)
            patch.setattr(module, "Checkpoints", Light)
            patch.setattr(jaxdp.Run, "_configuration", lambda self, secret: "of any folder")
            fresh = np.zeros((STEPS, 2), int)
            patch.setattr(module, "_first_state", lambda *args, **options: (fresh, ()))
            patch.setattr(RunDirectory, "save_history", lambda *args: None)
            # The parameters that a stage begins with, and the rows before it.
            zeros = np.zeros(2, np.float32)
            patch.setattr(module, "shown_params", lambda directory: (0, zeros))
            patch.setattr(jaxdp.Run, "_begin_with_released", lambda self, before: [])
            with contextlib.suppress(Killed):
                self._run(every, steps, enough, give_up, told)
                return False
            return True

    def _run(self, every, steps, enough, give_up, told):
        def evaluate(params):
            self.see(params)
            return {}

        def progress(step, row):
            if row is not None:
                # What it told of its cost, the file has told since.
                assert row["steps"] <= self.directory.checked_ledger().steps
                self.see(row["params"])
                # And no less than for all that was seen by then, in whatever stream.
                assert row["steps"] >= len({seen[:2] for seen in self.visible})

        def row(params):
            return {"params": params.tolist(), "steps": self.ledger.steps}

        def prepare(start, _):
            self.ledger = start.ledger
            return Prepared(SOURCE, test=row)

        run = jaxdp.Run(
            self.directory,
            lambda params, x: x * params[0],
            self.mechanism,
            optax.sgd(1.0),
            SOURCE,
            params=np.zeros(2, np.float32),
            every=every,
            progress=progress,
            evaluate=evaluate if told else None,
            secret=self.secret,
            report=False,
            set_aside_unreadable=give_up,
            **self.options,
            _parts=Parts(prepare=prepare, enough=enough, stepper=lambda *args: Steps(self, *args)),
        )
        run.fit(steps)

    def extend(self, name, mechanism):
        """Goes on in a further stage; what was seen of the one before is forgotten."""
        self.directory, self.mechanism = RunDirectory(self.directory.path, name), mechanism
        self.checkpoints, self.visible, self.vault = self.directory.checkpoints, {}, []
        self.kept = self.kept.with_name(f"{self.kept.name} {name}")

    def effect(self, name):
        """Called after each thing that is durable or visible; may be the last."""
        self.effects.append(name)
        if name.startswith("checkpoint"):
            step = int(name.split()[1])
            copy = self.kept / str(len(self.vault))
            shutil.copytree(self.checkpoints / str(step), copy)
            self.vault.append((step, copy))
        elif name == "state":
            self.states.append(self.directory.state_file.read_bytes())
        if len(self.effects) == self.kill or (
            isinstance(self.kill, str) and name.startswith(self.kill)
        ):
            raise Killed

    def see(self, params):
        """Somebody looks at parameters; what they are made from must be charged by then."""
        charged = self.charged()
        for step, (number, version) in enumerate(np.asarray(params).tolist()):
            if number:
                held = [first <= step < end for n, first, end in charged if n == number - 1]
                assert any(held), "seen and not charged"
                self.visible[number - 1, step, version] = None
        self.effect(f"seen {sum(number > 0 for number, _ in params)}")

    def lines(self):
        """The names of the ledger's lines."""
        return [_name(row) for row in self._rows() if "ledger" not in row]

    def _rows(self):
        return [json.loads(line) for line in self.directory.ledger.read_text().splitlines()]

    def as_format_2(self, past=None, **state):
        """Rewrites the folder as the version before wrote it, whose lines name no states.

        Args:
            past: a step; the state's branch begins at its checkpoint.
            state: what ``run.json`` says of streams.
        """
        kept = self.directory.load_state()
        chain, heads, rows = Chain(kept.secret.restored().stream("ledger")), {}, self._rows()
        with self.directory.ledger.open("w") as file:
            for row in rows:
                before = row.pop("chain")
                if "begun" not in row or "past" not in row:  # no stream said where it began
                    row = {**row, "ledger": 2} if "ledger" in row else row
                    row.pop("past", None)
                    chain.take(chain.after(row))
                    file.write(json.dumps({**row, "chain": chain.head.hex()}) + "\n")
                heads[before] = chain.head.hex()
        for step in self.steps():
            path = self.checkpoints / str(step) / "state"
            row = json.loads(path.read_text())
            row["past"] = heads[row["past"]]
            if step == past:
                state["branch"] = (row["past"], row["past"])
            path.write_text(json.dumps(row))
            seal(path.parent, "digests.json")
        self.directory.save_state(dataclasses.replace(kept, head=None, **state))

    def steps(self):
        """The steps of the checkpoints that lie there."""
        if not self.checkpoints.exists():
            return []
        names = [path.name for path in self.checkpoints.iterdir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def take_away(self, *steps):
        """Removes checkpoints."""
        for step in steps or self.steps():
            shutil.rmtree(self.checkpoints / str(step))

    def put(self, number):
        """Puts a checkpoint back, by its number among all that there ever were."""
        step, copy = self.vault[number]
        shutil.rmtree(self.checkpoints / str(step), ignore_errors=True)
        shutil.copytree(copy, self.checkpoints / str(step))

    def unseen(self):
        """The numbers of the checkpoints that nobody has seen anything of."""
        versions = {version for _, _, version in self.visible}
        kept = [json.loads((copy / "state").read_text())["params"] for _, copy in self.vault]
        last = [params[step - 1][1] for (step, _), params in zip(self.vault, kept, strict=True)]
        return [number for number, version in enumerate(last) if version not in versions]

    def damage(self, step):
        """Makes a checkpoint's seal tell that it is damaged."""
        (self.checkpoints / str(step) / "state").write_text("damaged")

    def set_aside(self):
        """The steps of all checkpoints that were moved out of the way."""
        found = self.directory.secret.glob("damaged-checkpoint-*")
        return sorted(int(path.name.split("-")[2]) for path in found)

    def charged(self):
        """(stream, first step, end) of what is charged, streams by number."""
        name, found = name_of(self.directory.load_state()), []
        for entry in self.directory.checked_ledger().entries:
            if not str(entry.stream).startswith(name):
                continue
            number = entry.stream.removeprefix(name).removeprefix("/") or "0"
            found.append(
                (int(number) if number.isdecimal() else number, entry.first_step, entry.end)
            )
        return found

    def check(self):
        """Asserts Lemma 3, and that blocks which are one event have one draw a stream."""
        versions = Counter((number, step) for number, step, _ in self.visible)
        assert max(versions.values(), default=0) <= 1, f"two versions of {versions.most_common(1)}"
        named = {POISSON: None, EPOCHS: lambda n, step: (n, step // 3)}.get(
            self.mechanism, lambda n, step: step // 3
        )
        if named is not None:
            pairs = {(named(n, step), draw) for (_, step), (n, draw) in self.tickets.items()}
            assert len(pairs) == len({one for one, _ in pairs}) == len({two for _, two in pairs})


def _name(row):
    if "begun" in row:
        return f"stream at {row['step']}" if "past" in row else "begun"
    if "shown" in row:
        return f"shown {row['shown']}" + ("" if row.get("past", "none") else " unread")
    if "event" in row:
        part = "energy " if row["stream"].endswith("/energy") else ""
        return f"{part}{row['first_step']}-{row['first_step'] + row['steps']}"
    return next(name for name in ("trusted", "seen", "format", "budget", "ledger") if name in row)
