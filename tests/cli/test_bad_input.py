import pytest

from benchmarks import bad_input


@pytest.mark.parametrize(("args", "part"), bad_input.COMMANDS, ids=lambda a: " ".join(a)[:50])
def test_a_wrong_command_gets_one_line_and_status_2(args, part):
    status, out, err = bad_input.run_command(args)
    assert status == 2
    assert out == ""
    assert err.startswith("jaxdp: error: ")
    assert err.count("\n") == 1
    assert part in err


@pytest.mark.parametrize("name", list(bad_input.CALLS))
def test_a_wrong_call_says_what_was_expected(name):
    assert bad_input.CALLS[name][1] in bad_input.run_call(name)
