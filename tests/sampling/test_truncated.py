"""Laws of truncated Poisson sampling."""

import numpy as np
import pytest
from scipy import stats

import jaxdp
from jaxdp import Secret
from jaxdp import accounting as acc
from jaxdp.sampling import TruncatedPoisson, by_name
from tests.laws import LEVEL, is_binomial

N, Q, CAP, DRAWS = 40, 0.3, 14, 6_000


def chosen(rule, key):
    return rule.choose(np.random.Generator(np.random.Philox(key=[1, key])), N)


def test_size_is_a_truncated_binomial_and_the_part_kept_uniform():
    draws = [chosen(TruncatedPoisson(Q, CAP), key) for key in range(DRAWS)]
    sizes = np.array([len(draw) for draw in draws])
    assert sizes.max() == CAP
    for size in (8, 12):
        assert is_binomial(np.sum(sizes == size), DRAWS, stats.binom(N, Q).pmf(size))
    assert is_binomial(np.sum(sizes == CAP), DRAWS, stats.binom(N, Q).sf(CAP - 1))
    full = np.bincount(np.concatenate([d for d in draws if len(d) == CAP]), minlength=N)
    both = sum(3 in d and 17 in d for d in draws if len(d) == CAP)
    assert all(is_binomial(count, np.sum(sizes == CAP), CAP / N) for count in full)
    pair = CAP * (CAP - 1) / (N * (N - 1))
    assert is_binomial(both, np.sum(sizes == CAP), pair)
    first = np.bincount([d[0] for d in draws if len(d)], minlength=N)
    assert stats.chisquare(first).pvalue > LEVEL


@pytest.mark.parametrize(("rows", "passes"), [(None, 1), (16, 1), (6, 3)])
def test_every_draw_has_one_shape(rows, passes):
    mechanism = jaxdp.dp_sgd(1.0, 1.0, 12, N, sampling=TruncatedPoisson(Q, CAP))
    source = mechanism.sampler(N, secret=Secret.from_seed(1), physical_batch_size=rows)
    draws = [source.draw() for _ in range(100)]
    assert {draw.mask.shape for draw in draws} == {(passes, rows or CAP)}
    assert len({int(draw.mask.sum()) for draw in draws}) > 3
    assert max(int(draw.mask.sum()) for draw in draws) == CAP


def test_the_event_says_what_is_done():
    event = TruncatedPoisson(Q, CAP).event(acc.Gaussian(2.0), N)
    assert event == acc.TruncatedPoisson(acc.Gaussian(2.0), Q, CAP, N)
    made = by_name("truncated_poisson", 256, 1_437)
    assert made == TruncatedPoisson(256 / 1_437, 384)
    assert by_name("truncated_poisson", 8, 20).cap == 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TruncatedPoisson(0.0, 3), "sampling_prob must be above 0"),
        (lambda: TruncatedPoisson(0.5, 0), "cap must be a whole number of at least 1"),
        (lambda: TruncatedPoisson(0.5, 3).check(9, 10), "number of records .9. under truncated"),
        (
            lambda: jaxdp.dp_sgd(1.0, 1.0, 10, 100, sampling=TruncatedPoisson(0.1, 2_000)),
            "cap must be at most 1044, got 2000",
        ),
        (
            lambda: jaxdp.dp_sgd(1.0, 1.0, 30, 100, sampling=TruncatedPoisson(0.1, 20)),
            r"batch_size must be sampling_prob \* dataset_size = 10",
        ),
        (lambda: by_name("poisson", 5, 50, cap=3), "cap must be None but for truncated_poisson"),
        (lambda: by_name("shuffle", 5, 50, 2), "participations must be 1 but for allocation"),
        (lambda: by_name("cyclic", 5, 50), "sampling must be one of poisson, fixed_size"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
