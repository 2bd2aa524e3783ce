"""What a release is divided by: two mistakes are found above their claim, jaxdp is not."""

from benchmarks.true_batch_audit import Case, row


def test_a_secret_divisor_is_found_above_the_claim_and_the_declared_one_is_not():
    found = row(Case(4, 500, noise=8.0, runs=800), seed=7)
    assert found["audited"]["drawn"] > 5 * found["claimed"]
    assert found["audited"]["there"] > 5 * found["claimed"]
    assert found["audited"]["declared"] < found["claimed"]
