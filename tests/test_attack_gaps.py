"""Attacks on printed gaps, on sums one by one, and on what tuning checks first."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxdp
from benchmarks.printed_gaps import GAPS
from jaxdp import accounting as acc
from jaxdp.papers import figures, raw_gradient
from jaxdp.papers.adadp import _RawClipping
from jaxdp.papers.raw_gradient import RawGradient
from jaxdp.papers.tables import printed
from jaxdp.runs.tuning import tune

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("most", [10**9, 0])
def test_rows_that_devices_share_are_summed_one_by_one_as_together(most, monkeypatch):
    monkeypatch.setattr(raw_gradient, "_TOGETHER", most)
    grad_fn = RawGradient(lambda w, x: w @ x, lambda raw: lambda g: (g, g), lambda p: 1.0, None, 4)

    def summed(params, batch, mask):
        found, _ = grad_fn(params, batch, mask, raw=0.0)
        return jax.lax.psum(found.value, "data")

    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = (P(), P("data"), P("data"))
    shared = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P()))
    rows = 4 * mesh.size
    x = jnp.ones((rows, 3))
    np.testing.assert_allclose(shared(jnp.zeros(3), x, jnp.ones(rows, bool)), rows * np.ones(3))


def test_the_experiment_of_the_lots_mean_says_what_it_clips():
    row, changed = GAPS["adadp-of-mean"]
    assert "examples clipped at 600 β √E′" in changed
    given = row.given
    clipping = _RawClipping(given["l2_clip_norm"], given["settings"]["beta"], 1e-6, True)
    moment = jnp.array([1.0, 4.0])  # E′, of roots 1 and 2
    parts, _ = clipping.contribution(moment)(jnp.array([5e3, -1e4]))
    found = parts * clipping.sides(moment)
    np.testing.assert_allclose(found, 600 * 1.2 * jnp.array([1.0, -2.0]), rtol=1e-5)


def test_no_query_is_nearer_to_lemma_1s_cosines_than_the_page_says():
    (why,) = (why for what, *_, why in printed.ADADP if what == "Lemma 1's cosines")
    told = re.search(r"the nearest found, \(([\d.]+), ([\d.]+)\), is off by ([\d.]+);", why)
    # By quadrature (0.1, 9.07) is off by 0.0386, the least there is near by.
    for query in ((0.1, 9.07), (float(told[1]), float(told[2]))):
        off = [abs(figures.cosine(s, query=query) - c) for s, c in figures.LEMMA_1.items()]
        assert max(off) == pytest.approx(float(told[3]), abs=0.002)


def test_adadps_curves_are_those_of_the_results():
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "benchmarks/results/printed_gaps.json").read_text("utf-8"))
    curves = {line["name"]: dict(line["curve"]) for line in results if "curve" in line}
    rows = {
        "adadp-no-root-m": r"\*\*σ_i = .*\*\*",
        "adadp-of-mean": "so, and E′ and noise of the lot.*E′",
        "adadp-of-lot": "to the text, E′ of the lot's .*read",
    }
    for name, start in rows.items():
        cells = re.search(rf"^\| {start} \|(.*)\|$", page, re.M)[1].split("|")
        told = [float(cell) for cell in cells]
        assert told == pytest.approx(
            [100 * curves[name][100 * at] for at in range(1, 6)], abs=0.051
        )


def test_a_wrong_relation_is_refused_before_anything_is_called(tmp_path):
    called = []

    def make(candidate):
        called.append("make")
        mechanism = jaxdp.dp_sgd(
            noise_multiplier=2.0, l2_clip_norm=1.0, batch_size=20, dataset_size=60
        )
        return mechanism, optax.sgd(candidate["rate"])

    def score(params):
        called.append("score")
        return 0.5

    data = np.zeros((60, 2), np.float32), np.zeros(60, np.float32)
    with pytest.raises(ValueError, match="Relation"):
        tune(
            tmp_path / "search",
            lambda w, x, y: (jnp.vdot(x, w) - y) ** 2,
            make,
            data,
            params=np.zeros(2, np.float32),
            space={"rate": [0.1]},
            tries=acc.Geometric(0.3),
            delta=1e-5,
            steps=2,
            score=score,
            relation="none such",
        )
    assert not called
