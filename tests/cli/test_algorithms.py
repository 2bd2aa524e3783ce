import re

import pytest

from jaxdp.cli import main
from jaxdp.optimizers import registry


def test_the_rows_of_the_queue_are_listed(capsys):
    main(["reproduce", "list"])
    printed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "mnist-sa-dpsgd" in printed
    assert printed["mnist-sa-dpsgd-as-published"].endswith("98.35 % (SA-DPSGD, Table 1)")
    assert re.search(r" [0-9.]+ h  59.34 % \(SA-DPSGD, Table 1\)$", printed["cifar10-auto-s"])
    assert printed["mnist-sa-dpsgd-as-published-batch-256"].endswith("98.89 % (SA-DPSGD, Table 1)")


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_every_setting_is_offered(name, capsys):
    main(["algorithms"])
    line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[:1] == [name])
    for setting in registry.settings_of(name):
        assert setting in line


def test_an_unknown_row_is_refused_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "run", "nothing", "--out", str(tmp_path / "q")])
    assert "rows must be among those" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()
