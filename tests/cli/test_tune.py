"""``jaxdp tune``: what it says, and what it leaves."""

import json

from jaxdp import accounting as acc
from jaxdp.cli import main
from jaxdp.cli.tune import law_of

ARGS = "tune --model logistic --steps 3 --search learning_rate=0.03:3"


def said(capsys, *args):
    main([*ARGS.split(), *map(str, args)])
    return capsys.readouterr()


def test_a_tuning_says_no_more_with_two_tries_than_with_one(tmp_path, monkeypatch, capsys):
    lines = []
    for count in (1, 2):
        monkeypatch.setattr(acc.Geometric, "sample", lambda self, rng, k=count: k)
        out = said(capsys, "--out", tmp_path / str(count), "--json")
        assert out.err == ""
        first, row = out.out.splitlines()
        found = json.loads(row)
        assert found["epsilon"] <= 3.0
        assert 0.03 <= found["candidate"]["learning_rate"] <= 3
        assert 0 < found["test_accuracy"] <= 1
        lines.append((first, sorted(found), found["epsilon"], found["noise_multiplier"]))
    assert lines[0] == lines[1]
    again = said(capsys, "--out", tmp_path / "2").out  # finished: the same result
    assert "proven epsilon 3.000" in again
    assert "test records that chose" in again


def test_laws_by_name():
    assert law_of("geometric:0.1") == acc.Geometric(0.1)
    assert law_of("logarithmic:0.1") == acc.Logarithmic(0.1)
    assert law_of("negative_binomial:0.5:0.1") == acc.NegativeBinomial(0.5, 0.1)
    assert law_of("poisson:10") == acc.PoissonTries(10.0)
