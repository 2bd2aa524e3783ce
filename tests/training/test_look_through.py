"""Records with numbers that are not finite are refused before a first step, and never after it."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import jaxdp
from jaxdp.sampling import as_source, padded_text, source, users
from jaxdp.training import trainer as training
from jaxdp.training.trainer import look_through
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.runs import own
from tests.sampling.fakes import MapDataset, refused_without

N, AT = 37, 29  # neither the number of records nor a place may be told
FINE = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
PRIVATE = rf"\b({N}|{AT}|{N * 3})\b|1e\+?300"


def with_one(value, dtype=np.float32, of=FINE):
    found = of.astype(dtype)
    found[AT, 1] = value
    return found


class Unread(np.ndarray):
    def __getitem__(self, key):
        raise AssertionError


def mapped(folder, array):
    np.save(folder / "x.npy", array)
    return np.load(folder / "x.npy", mmap_mode="r")


def test_a_number_that_is_not_finite_is_found_wherever_arrays_lie(tmp_path, monkeypatch):
    nan, whole = with_one(np.nan), np.arange(N)
    rows = {
        r"leaf \['x'\]": {"y": whole, "x": nan},
        r"leaf \[1\]": (FINE, with_one(-np.inf)),
        "the array": nan,
        "NaN or infinity in the array": with_one(1e300, np.float64),  # float32 holds infinity
        "finite numbers": with_one(np.inf, np.float16),
        "Mend what wrote it": with_one(np.nan, ml_dtypes.bfloat16),
        "missing_values=True": jnp.asarray(nan),
        "Nothing was charged": nan + 0j,
        "not to be published": nan[:, ::-1],
        "fill it": mapped(tmp_path, nan),
        "where the loss": users({"x": nan, "y": whole}, whole % 5, 3),
    }
    for together in (2**20, 1):
        monkeypatch.setattr(source, "TOGETHER", together)
        for words, data in rows.items():
            refused_without(PRIVATE, words, look_through, as_source(data))
    # A device is asked by a compiled program.
    on = [
        bool(source._on_device(jnp.asarray([1.0, value]), wrong))
        for value in (jnp.nan, jnp.inf, 1.0)
        for wrong in ("NaN or infinity", "infinity", "NaN")
    ]
    assert on == [True, False, True, True, True, False, False, False, False]
    # What is wrong as it is read is found as well.
    large = with_one(2**40, np.int64, whole[:, None] + [0, 0])
    refused_without(PRIVATE, "integers that fit int32", look_through, as_source(large))


def test_missing_values_may_be_missing_and_finite_records_pass():
    for data in (FINE, jnp.asarray(FINE), FINE[:0], FINE.astype(np.float64), np.arange(N)):
        look_through(as_source(data))
    for nan in (with_one(np.nan), jnp.asarray(with_one(np.nan))):
        look_through(as_source(nan), missing_values=True)
        both = {"x": nan, "y": with_one(np.inf)}
        refused(r"or NaN, got infinity in leaf \['y'\]", look_through, as_source(both), True)
    refused("missing_values must be True or False, got 1", look_through, as_source(FINE), 1)
    # Whole numbers cost nothing, and nothing that is read one by one is read.
    look_through(as_source(np.zeros((N, 2), np.uint8).view(Unread)))
    items = MapDataset(N)
    made = as_source(items)
    items.asked.clear()
    look_through(made)
    assert items.asked == []


def test_everything_is_read_once_where_that_was_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(training, "TOGETHER", 15)  # numbers: three records
    items = MapDataset(N)
    made = as_source(items)
    items.asked.clear()
    look_through(made, everything=True)
    assert items.asked == list(range(N))
    assert capsys.readouterr().err.count("looking through all records, once") == 1
    listed = [{"x": row} for row in with_one(np.nan)]
    refused_without(PRIVATE, r"leaf \['x'\]", look_through, as_source(listed), everything=True)
    ids = np.arange(N) % 5
    refused("leaf", look_through, as_source(users(listed, ids, 3)), everything=True)
    text = as_source(padded_text([[1, 2], *[[3]] * N, "no tokens"], 4))
    refused("numbers or bools", look_through, text, everything=True)
    items.asked.clear()
    look_through(as_source(items), missing_values=True, everything=True)


def loss_fn(w, x, y):
    return jnp.where(jnp.isnan(y), 0.0, x @ w - y) ** 2


LABELS = np.where(np.arange(N) % 2, FINE.sum(1), np.nan)
MECHANISM = sgd_of(1.0, 1.0, 10, N)


def trainer(source=(FINE, LABELS), mechanism=MECHANISM, **options):
    return jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), source, **options)


def taken(train, state, steps=2):
    for batch in train.batches(steps, state=state):
        state, _ = train.step(state, batch)
    return state


def test_a_trainer_looks_before_its_first_step_and_never_at_one_that_goes_on(tmp_path):
    file, words = tmp_path / "ledger.jsonl", r"source must hold finite numbers.* leaf \[1\]"
    refused(words, trainer, ledger=file)
    assert not file.exists()
    train = trainer(ledger=file, missing_values=True)
    state = taken(train, train.init(jnp.zeros(3)))
    assert np.isfinite(state.params).all()
    train.close()
    # As one that was charged before anything was looked at; but not a model that begins.
    on = trainer(ledger=file)
    taken(on, state)
    on.close()
    refused(words, trainer, ledger=file, another=True)
    refused(words, trainer, ledger=file, mechanism=sgd_of(2.0, 1.0, 10, N))
    assert len(jaxdp.Ledger(file).begun) == 2


def test_first_values_that_are_nan_are_refused_where_they_are_trained(tmp_path):
    params = {"w": jnp.zeros(3).at[1].set(jnp.nan), "b": jnp.full(2, jnp.inf)}
    loss = lambda p, x, y: (x @ p["w"] - y) ** 2 * p["b"][0]  # noqa: E731
    made = lambda **more: jaxdp.Trainer(loss, MECHANISM, SGD, (FINE, FINE[:, 0]), **more)  # noqa: E731
    train, words = made(), r"params must hold numbers .* NaN in leaf \['w'\]"
    refused(words, train.init, params)
    train.init({**params, "w": jnp.zeros(3)})
    made(trainable={"w": False, "b": True}).init(params)
    run = own.run(tmp_path / "a", params={"w": jnp.full((20, 3), jnp.nan)})
    refused(words, run.fit)
    assert not run.directory.checked_ledger().entries


SGD = optax.sgd(0.1)


def test_a_run_looks_before_its_first_start_and_never_at_one_that_goes_on(tmp_path):
    ill = own.X.copy()
    ill[AT, 1] = np.nan
    folder, words = tmp_path / "a", "source must hold finite numbers"
    refused(words, own.run(folder, (ill, own.Y)).fit)
    assert not (folder / "ledger.jsonl").exists()
    own.run(folder).fit(6)  # nothing of the first one is there
    filled = {"loss": lambda p, x, y: own.loss_fn(p, jnp.nan_to_num(x), y)}
    folder = tmp_path / "b"
    own.run(folder, (ill, own.Y), missing_values=True, **filled).fit(6)
    own.run(folder, (ill, own.Y), **filled).fit(9)  # charged before: nothing is looked at
    # Records that are read one by one are looked at where that was asked for.
    records = list(zip(ill, own.Y, strict=True))
    refused(words, own.run(tmp_path / "c", records, look_through=True).fit)
    own.run(tmp_path / "c", records).fit(3)


def test_a_search_looks_before_it_is_charged(tmp_path):
    def tuned(folder, **options):
        make = lambda found: (own.PLAIN, optax.sgd(found["rate"]))  # noqa: E731
        given = {"params": {"w": jnp.zeros((20, 3))}, "space": {"rate": [0.1]}}
        given |= {"tries": jaxdp.accounting.Geometric(0.9), "delta": 1e-3, "steps": 1}
        score = lambda params: -1.0  # noqa: E731
        ill = own.X * np.float32(np.nan)
        return jaxdp.tune(folder, own.loss_fn, make, (ill, own.Y), score=score, **given, **options)

    refused("source must hold finite numbers", tuned, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert tuned(tmp_path / "a", missing_values=True).score in (-1.0, -np.inf)
