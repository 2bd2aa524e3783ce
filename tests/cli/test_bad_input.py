"""Wrong commands: one line, status 2, and nothing that is left behind."""

import numpy as np

from benchmarks import bad_input

TRAIN = "train --steps 4 --out {tmp}/run"
PLAN = "plan --epsilon 2 --delta 1e-5 --steps 30 --batch-size 20 --dataset-size 200"
TUNE = "tune --model logistic --steps 3 --search learning_rate=0.03:3 --out {tmp}/run"
EPSILON = "epsilon --noise-multiplier 2 --steps 6 --delta 1e-5"
EPOCH = "--sampling allocation --steps-per-epoch 4"
CAP = "a cap on tries or on time would be another law"
# Commands, what is added to each, and a part of the line.
# fmt: off
REFUSED = {
    TRAIN: [
        ("--recipe best --model mlp", "--model must not come with --recipe best"),
        ("--algorithm adadp --set beta", "--set must be NAME=VALUE with a number"),
        ("--algorithm adadp --set beta=1 --set beta=2", "must name beta once, got 'beta=2'"),
        ("--sampling fixed_order", "strategy must be given with sampling fixed_order"),
    ],
    EPSILON: [
        ("", "--sampling-prob must come with --sampling poisson"),
        ("--sampling shuffle", "--steps-per-epoch must come with --sampling shuffle"),
        (f"{EPOCH} --sampling-prob 0.1", "--sampling-prob must not come with"),
        (f"{EPOCH} --claims", "--claims must come with --sampling poisson"),
        ("--sampling cyclic_poisson --sampling-prob 0.1", "--bands must come with --sampling cyc"),
        ("--sampling fixed_order --bands 4", "--bands must not come with"),
        ("--sampling fixed_order", "one removed record shifts every position"),
    ],
    PLAN: [
        ("--epsilon -1", "epsilon must be a finite number above 0, got -1"),
        ("--batch-size 201", "batch_size must be at most dataset_size (200), got 201"),
        ("--batch-size 0", "batch_size must be a whole number of at least 1"),
        ("--momentum 1", "momentum must be at least 0 and below 1, got 1.0"),
        ("--delta 1", "delta must be"), ("--steps 0", "steps must be a whole number of at least 1"),
        ("--dataset-size 0", "dataset_size must be a whole number"),
    ],
    TUNE: [
        ("--max-trials 5", CAP), ("--timeout 5", CAP), ("--search batch_size=10,20", "search"),
        ("--search momentum=2,3", "momentum"), ("--algorithm sa-dpsgd", "judge no candidates"),
        ("--tries geometric", "--tries must be"), ("--tries five:5", "--tries must be"),
        ("--epsilon 3 --noise-multiplier 1", "epsilon or noise_multiplier"),
        ("--classes 3", "must come with --data"),
    ],
    "audit": [
        ("--algorithm magic", "algorithm must be one of"),
        ("nowhere", "run must be the folder of a finished run"),
        ("nowhere --algorithm dp-sgd", "algorithm must not be given with a run"),
        ("--runs 0", "runs must be a whole number"), ("--steps 0", "steps must be a whole number"),
        ("--confidence 1", "confidence must be above 0 and below 1"),
        ("--delta 0", "delta must be"),
        ("--sampling shuffle", "'shuffle' is not"), ("--sampling fixed_size", "'fixed_size' is n"),
    ],
    "reproduce run": [("nothing --out {tmp}/run", "rows must be among those")],
    f"{TRAIN} --data {{mine}} --dataset-size 90": [
        ("--classes 3 --dataset digits", "--data must not come with --dataset"),
        ("", "--classes must come with --data"),
        ("--classes 2", "y must be at least 0 and below 2"),
        ("--classes 3 --model mnist-cnn", "must be given examples (28, 28, 1), got (4, 4)"),
        ("--classes 3 --algorithm sa-dpsgd", "must come with test records, which judge its cand"),
    ],
}
# fmt: on


def test_a_wrong_command_gets_one_line_and_status_2(tmp_path):
    mine = tmp_path / "mine.npz"
    np.savez(mine, x=np.zeros((100, 4, 4), np.uint8), y=np.arange(100) % 3)
    rows = [(f"{c} {each}".split(), part) for c in REFUSED for each, part in REFUSED[c]]
    for args, part in [*bad_input.COMMANDS, *rows]:
        args = [each.replace("{mine}", str(mine)) for each in args]
        status, out, err = bad_input.run_command(args)
        assert status == 2, args
        assert out == "" or args[0] == "tune", args  # which says how it is charged
        assert err.startswith("jaxdp: error: "), (args, err)
        assert err.count("\n") == 1, (args, err)
        assert part in err, (args, err)
    # A wrong call says what was expected.
    for name, (_, words) in bad_input.CALLS.items():
        assert words in bad_input.run_call(name), name
