"""Experiments on printed figures that others were not told how to make, and their raw gradients."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.printed_gaps import COMPUTED, GAPS, RESULTS
from jaxdp.papers import figures, raw_gradient
from jaxdp.papers.adadp import _RawClipping
from jaxdp.papers.raw_gradient import RawGradient
from jaxdp.papers.tables import printed


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


def test_no_query_is_nearer_to_lemma_1s_cosines_than_the_row_says():
    (why,) = (why for what, *_, why in printed.ADADP if what == "Lemma 1's cosines")
    told = re.search(r"the nearest found, \(([\d.]+), ([\d.]+)\), is off by ([\d.]+);", why)
    # By quadrature (0.1, 9.07) is off by 0.0386, the least there is near by.
    for query in ((0.1, 9.07), (float(told[1]), float(told[2]))):
        off = [abs(figures.cosine(s, query=query) - c) for s, c in figures.LEMMA_1.items()]
        assert max(off) == pytest.approx(float(told[3]), abs=0.002), query


def test_a_kept_result_is_of_the_settings_that_are_written_down():
    lines = {line["name"]: line for line in json.loads(RESULTS.read_text(encoding="utf-8"))}
    assert set(lines) == {*COMPUTED, *GAPS}
    for name, (row, changed) in GAPS.items():
        line = lines[name]
        assert (line["given"], line["changed"]) == (row.given, changed), name
        assert line["curve"][-1] == [line["steps"], line["test_accuracy"]]
